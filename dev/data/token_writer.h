/* token_writer.h -- writes a token file (tokenfile.h), and moves its end to another file for validation.
 *
 * A file is written as PATH.tmp and locked. When it is complete, all of it is read back, and then it gets its name. A mask is
 * kept in memory until then, a bit a token, because it follows the tokens in the file. So are the starts of conversations. They
 * are written only where no BOS marks them.
 */
#ifndef DATA_TOKEN_WRITER_H
#define DATA_TOKEN_WRITER_H

#include "dev/data/answers.h"      // defines: TOKEN_IS_TRAINED, TOKEN_STARTS
#include "llmc/base/crc.h"         // defines: Crc, crc_begin, crc_add, crc_end, crc_shift
#include "llmc/files/folder.h"     // defines: folder_of
#include "llmc/files/output.h"     // defines: create_temporary, rename_output, close_output, sync_directory
#include "llmc/files/tokenfile.h"  // defines: tokenfile_header, tokenfile_scan
#include "llmc/text/tokenizer.h"   // defines: Tokenizer

#include <signal.h>

enum { CONVERT_TOKENS = 1 << 12 };  // tokens converted or copied at a time

typedef struct {
    FILE* f;
    int lock;  // a second descriptor of the file, which keeps it locked until it has its name
    char path[PATH_CAP], tmp[PATH_CAP];
    volatile sig_atomic_t unfinished;    // tmp exists
    volatile sig_atomic_t making, late;  // tmp is being made; a signal that came meanwhile, which the handler left to us
    int token_bytes;
    uint64_t count;
    Crc crc;  // of the tokens as stored
    bool masked;
    uint8_t *mask, *starts;  // if `masked`: (mask_cap) one bit for each token; bits after the last token are 0
    uint64_t mask_cap;       // bytes
    uint64_t trained;        // tokens whose bit in the mask is 1
    bool marked;             // the starts are written
    uint64_t template_hash;  // see TokenFileHeader
} TokenFile;

/* Makes the temporary file. A signal in between waits: it could not know whether the file is ours to remove. */
static inline bool token_file_open(TokenFile* w, Error* e) {
    w->making = 1;
    w->f = create_temporary(w->tmp, e);
    w->unfinished = w->f != NULL;
    w->making = 0;
    if (w->late) { raise(w->late); }
    return w->f != NULL;
}

/* Begins an output: makes its temporary file and locks it until token_file_publish(). */
static inline bool token_file_begin(TokenFile* w, const char* path, Error* e) {
    if (snprintf(w->tmp, sizeof w->tmp, "%s.tmp", path) >= PATH_CAP) {
        return fail(e, "%.100s...: the path is too long", path);
    }
    snprintf(w->path, sizeof w->path, "%s", path);
    if (!is_replaceable(path, e) || !token_file_open(w, e)) { return false; }
    w->lock = dup(fileno(w->f));
    return true;
}

/* Begins a token file. */
static inline bool token_file_create(TokenFile* w, const char* path, int token_bytes, bool masked, Error* e) {
    static const char header[TOKENFILE_HEADER_BYTES] = {0};
    if (!token_file_begin(w, path, e)) { return false; }
    w->token_bytes = token_bytes;
    w->masked = masked;
    crc_begin(&w->crc);
    return fwrite(header, 1, sizeof header, w->f) == sizeof header ||
           fail(e, "%s: writing failed: %s", w->tmp, strerror(errno));
}

static inline bool token_file_add(TokenFile* w, const int32_t* ids, size_t n, Error* e) {
    uint16_t small[CONVERT_TOKENS];
    bool ok = true;
    if (w->token_bytes == 4) {
        ok = fwrite(ids, 4, n, w->f) == n;
        crc_add(&w->crc, ids, ok ? 4 * n : 0);
    } else {
        for (size_t i = 0, m; ok && i < n; i += m) {
            m = size_min(n - i, CONVERT_TOKENS);
            for (size_t k = 0; k < m; k++) { small[k] = (uint16_t)ids[i + k]; }
            ok = fwrite(small, 2, m, w->f) == m;
            crc_add(&w->crc, small, 2 * m);
        }
    }
    w->count += n;
    return ok || fail(e, "%s: writing failed: %s", w->tmp, strerror(errno));
}

static inline uint8_t* token_file_bits(uint8_t* bits, uint64_t have, uint64_t want) {
    bits = (uint8_t*)xrealloc(bits, want);
    memset(bits + have, 0, want - have);
    return bits;
}

/* Sets the bits of the last n tokens by their marks, TOKEN_IS_TRAINED and TOKEN_STARTS. */
static inline void token_file_mask(TokenFile* w, const uint8_t* marks /* (n) */, size_t n) {
    const uint64_t bytes = w->count / 8 + 1;
    if (bytes > w->mask_cap) {
        w->mask = token_file_bits(w->mask, w->mask_cap, bytes * 2);
        w->starts = token_file_bits(w->starts, w->mask_cap, bytes * 2);
        w->mask_cap = bytes * 2;
    }
    for (size_t i = 0; i < n; i++) {
        const uint64_t at = w->count - n + i;
        const bool trained = marks[i] & TOKEN_IS_TRAINED, starts = marks[i] & TOKEN_STARTS;
        w->mask[at / 8] |= (uint8_t)(trained << at % 8);
        w->starts[at / 8] |= (uint8_t)(starts << at % 8);
        w->trained += trained;
    }
}

/* Asks for the starts to be written, unless they are the tokens `separator` among the last n tokens. */
static inline void token_file_check_starts(TokenFile* w, const int32_t* ids, const uint8_t* marks, size_t n, int separator) {
    for (size_t i = 0; i < n && !w->marked; i++) { w->marked = (ids[i] == separator) != ((marks[i] & TOKEN_STARTS) != 0); }
}

/* Writes mask and header, flushes the file, and reads it back to check every id and the checksum. */
static inline bool token_file_finish(TokenFile* w, const Tokenizer* t, Error* e) {
    int32_t words[TOKENFILE_WORDS];
    TokenFileHeader h = {w->token_bytes, t->vocab_size,    w->count, t->fingerprint, true, 0,
                         w->masked,      w->template_hash, w->marked};
    const uint64_t mask_at = tokenfile_mask_at(&h), bytes = tokenfile_starts_at(&h) - mask_at, starts = h.starts ? bytes : 0;
    bool ok = fseeko(w->f, (off_t)mask_at, SEEK_SET) == 0 && (bytes == 0 || fwrite(w->mask, 1, bytes, w->f) == bytes) &&
              (starts == 0 || fwrite(w->starts, 1, starts, w->f) == starts);
    crc_add(&w->crc, w->mask, bytes);
    crc_add(&w->crc, w->starts, starts);
    h.crc = crc_end(&w->crc);
    tokenfile_header(words, &h);
    ok = ok && fseeko(w->f, 0, SEEK_SET) == 0 && fwrite(words, sizeof words, 1, w->f) == 1 && fflush(w->f) == 0;
    if (!ok) { return fail(e, "%s: writing failed: %s", w->tmp, strerror(errno)); }
    const TokenReader written = {w->f, w->tmp, h, t->vocab_size};
    if (!tokenfile_scan(&written, NULL, e)) { return false; }
    ok = close_output(w->f, w->tmp, e);
    w->f = NULL;
    free(w->mask);
    free(w->starts);
    w->mask = w->starts = NULL;
    return ok;
}

/* Gives the finished file its name. */
static inline bool token_file_publish(TokenFile* w, Error* e) {
    if (!rename_output(w->tmp, w->path, e)) { return false; }
    w->unfinished = 0;
    close(w->lock);
    return true;
}

/* Gives both finished files their names. An old validation file is removed first: if the process died in between, the old file
 * would lie beside a training file that may hold its text. */
static inline bool token_files_publish(TokenFile* train, TokenFile* val, Error* e) {
    char folder[PATH_CAP];
    folder_of(train->path, folder);
    if (val->unfinished && unlink(val->path) != 0 && errno != ENOENT) {
        return fail(e, "%s: cannot remove the old file: %s", val->path, strerror(errno));
    }
    return sync_directory(folder, e) && token_file_publish(train, e) && (!val->unfinished || token_file_publish(val, e)) &&
           sync_directory(folder, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// splitting a file

/* Reads n tokens from token `at` on. */
static inline bool token_file_read(TokenFile* w, int32_t* ids, uint64_t at, size_t n, Error* e) {
    if (fseeko(w->f, (off_t)(TOKENFILE_HEADER_BYTES + at * (uint64_t)w->token_bytes), SEEK_SET) != 0 ||
        !read_exact(w->f, ids, n * (size_t)w->token_bytes, w->tmp, "the tokens", e)) {
        return fail(e, "%s: reading back failed: %s", w->tmp, strerror(errno));
    }
    if (w->token_bytes == 2) {
        const uint16_t* small = (const uint16_t*)ids;
        for (size_t i = n; i-- > 0;) { ids[i] = small[i]; }  // from the end: overwrites only values already read
    }
    return true;
}

/* Finds the token where validation starts: the document border nearest to the wanted place. If no border lies within half the
 * validation size, it is the wanted place itself. With a mask it is always a border, since conversations are not cut. */
static inline bool find_cut(TokenFile* w, double fraction, int separator, uint64_t* cut, Error* e) {
    if (w->count < 2) {
        return fail(e, "--val-fraction: the text has %llu tokens, wanted at least 2 to split", (unsigned long long)w->count);
    }
    uint64_t val = (uint64_t)((double)w->count * fraction + 0.5);
    val = val < 1 ? 1 : val > w->count - 1 ? w->count - 1 : val;
    const uint64_t target = w->count - val, near = val / 2;
    const uint64_t from = w->masked ? 1 : target - size_min(near, target - 1), to = w->masked ? w->count : target + near;
    uint64_t nearest = UINT64_MAX;
    int32_t ids[CONVERT_TOKENS];
    *cut = target;
    for (uint64_t at = from; (separator >= 0 || w->masked) && at < to; at += CONVERT_TOKENS) {
        const size_t n = size_min(to - at, CONVERT_TOKENS);
        if (!w->masked && !token_file_read(w, ids, at, n, e)) { return false; }
        for (size_t i = 0; i < n; i++) {
            const uint64_t place = at + i, distance = place > target ? place - target : target - place;
            const bool starts = w->masked ? tokenfile_bit(w->starts, place) : ids[i] == separator;
            if (!starts || distance >= nearest) { continue; }
            nearest = distance;
            *cut = place;
        }
    }
    if (w->masked && nearest == UINT64_MAX) {
        return fail(e, "--val-fraction: there is one conversation, wanted at least two");
    }
    return true;
}

/* Reads back the first `count` tokens and computes their checksum. */
static inline bool crc_of_first(TokenFile* w, uint64_t count, Error* e) {
    unsigned char raw[1 << 14];
    const uint64_t bytes = count * (uint64_t)w->token_bytes;
    crc_begin(&w->crc);
    for (uint64_t at = 0, n; at < bytes; at += n) {
        n = size_min(bytes - at, sizeof raw);
        if (!read_at(fileno(w->f), TOKENFILE_HEADER_BYTES + at, raw, n, w->tmp, "the tokens", e)) { return false; }
        crc_add(&w->crc, raw, n);
    }
    return true;
}

/* Moves the mask and the starts from token `cut` on to the validation file. */
static inline void split_mask(TokenFile* train, TokenFile* val, uint64_t cut) {
    const uint64_t moved = val->count;
    val->count = 0;
    for (uint64_t at = cut; at < cut + moved; at++) {
        const bool trained = tokenfile_bit(train->mask, at), starts = tokenfile_bit(train->starts, at);
        const uint8_t marks = (uint8_t)(trained * TOKEN_IS_TRAINED + starts * TOKEN_STARTS), bit = (uint8_t)(1 << at % 8);
        val->count++;
        token_file_mask(val, &marks, 1);
        train->mask[at / 8] &= (uint8_t)~bit;
        train->starts[at / 8] &= (uint8_t)~bit;
        train->trained -= trained;
    }
    val->marked = train->marked;
}

/* Moves the tokens from `cut` on to the validation file. The checksums of both parts must combine to the whole's. */
static inline bool split_off(TokenFile* train, TokenFile* val, uint64_t cut, Error* e) {
    int32_t ids[CONVERT_TOKENS];
    const uint32_t whole = crc_end(&train->crc);
    for (uint64_t at = cut; at < train->count; at += CONVERT_TOKENS) {
        const size_t n = size_min(train->count - at, CONVERT_TOKENS);
        if (!token_file_read(train, ids, at, n, e) || !token_file_add(val, ids, n, e)) { return false; }
    }
    if (!crc_of_first(train, cut, e)) { return false; }
    const uint32_t parts = crc_shift(crc_end(&train->crc), val->count * (uint64_t)val->token_bytes) ^ crc_end(&val->crc);
    if (parts != whole) { return fail(e, "%s: reads back as other tokens than were written", train->tmp); }
    if (train->masked) { split_mask(train, val, cut); }
    train->count = cut;
    const off_t end = (off_t)(TOKENFILE_HEADER_BYTES + cut * (uint64_t)train->token_bytes);
    return (fflush(train->f) == 0 && ftruncate(fileno(train->f), end) == 0) ||
           fail(e, "%s: writing failed: %s", train->tmp, strerror(errno));
}

#endif
