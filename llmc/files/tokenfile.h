/* tokenfile.h -- opens a token file (.bin), reads its tokens and scans it whole; fills the header of a new one.
 * dataloader.h reads rows of tokens; dev/data/tokenize.c writes them.
 *
 * The format is llm.c's: 256 little-endian int32 words, then the tokens without gaps.
 *   word 0    magic: 20240520 (uint16 tokens) or 20240801 (uint32 tokens)
 *   word 1    version: 1 with the first magic, 7 with the second; with a mask 2 and 8, which older readers refuse
 *   word 2    number of tokens; INT32_MAX if it does not fit
 *   word 3    vocabulary size of the tokenizer            } llm.c leaves these zero and its readers ignore them:
 *   word 4-5  number of tokens as a 64-bit number         } zero means absent, anything else is checked
 *   word 6-7  fingerprint of the tokenizer, 64 bits       }
 *   word 8    1: word 9 is a checksum; 0: word 9 is 0
 *   word 9    CRC-32C of all bytes behind the header (crc.h); only tokenfile_scan() reads the whole file to check it
 *   word 10-11  hash of the chat template that made the conversations, tokenfile_template_hash(); 0: unknown, or no template
 *   word 12   1: the starts of documents are marked, after the mask; 0: a document begins at each BOS
 *   the rest  zero
 * A mask follows the tokens: one bit for each, the lowest bit of a byte first, the last byte filled up with zeros. A token
 * whose bit is 1 is trained as a target: the loss counts how well it was predicted. Without a mask every token is. The starts
 * follow the mask, one bit for each token, 1 for the first of a document. They are there because some chat templates write BOS
 * before every message, and others write none. Invariant: the file is exactly 1024 + tokens * width bytes long; with a mask,
 * tokens / 8 more, rounded up, and with starts the same again.
 */
#ifndef LLMC_TOKENFILE_H
#define LLMC_TOKENFILE_H

#include "llmc/base/crc.h"        // defines: Crc, crc_begin, crc_add, crc_end
#include "llmc/base/hash.h"       // defines: siphash
#include "llmc/base/progress.h"   // defines: Progress, progress_add
#include "llmc/base/utils.h"      // defines: fail, open_input, read_exact, read_at
#include "llmc/files/filekind.h"  // defines: FileKind, text_kind_of

enum {
    TOKENFILE_WORDS = 256,
    TOKENFILE_HEADER_BYTES = 1024,
    TOKENFILE_MAGIC16 = 20240520,
    TOKENFILE_VERSION16 = 1,
    TOKENFILE_MAGIC32 = 20240801,
    TOKENFILE_VERSION32 = 7,
    TOKENFILE_MASKED = 1,  // added to the version
};

#define TOKENFILE_FROM_TEXT "make one from text with ./tokenize --tokenizer DIR -o OUT.bin FILE"

typedef struct {
    int token_bytes;       // 2 or 4
    int vocab_size;        // 0: unknown
    uint64_t num_tokens;   // in the file
    uint64_t fingerprint;  // Tokenizer.fingerprint; 0: unknown
    bool has_crc;
    uint32_t crc;  // checksum of the tokens and the mask as stored; 0 without has_crc
    bool masked;
    uint64_t template_hash;  // of the chat template; 0: unknown
    bool starts;             // with a mask: the starts of documents are marked
} TokenFileHeader;

/* Returns the hash of a chat template (Jinja), which a token file names; never 0. */
static inline uint64_t tokenfile_template_hash(const char* text) {
    const SipKey fixed = {0, 0};  // no secret: the hash lasts as long as the file
    const uint64_t hash = siphash(fixed, text, strlen(text));
    return hash ? hash : 1;
}

/* Returns the number of the mask's first byte in the file. */
static inline uint64_t tokenfile_mask_at(const TokenFileHeader* h) {
    return TOKENFILE_HEADER_BYTES + h->num_tokens * (uint64_t)h->token_bytes;
}

/* Returns the number of the first byte of the starts. */
static inline uint64_t tokenfile_starts_at(const TokenFileHeader* h) {
    return tokenfile_mask_at(h) + (h->masked ? h->num_tokens / 8 + (h->num_tokens % 8 != 0) : 0);
}

/* Returns the size of the file. */
static inline uint64_t tokenfile_bytes(const TokenFileHeader* h) {
    const uint64_t end = tokenfile_starts_at(h);
    return h->starts ? end + (end - tokenfile_mask_at(h)) : end;
}

/* Returns bit i of a mask. */
static inline bool tokenfile_bit(const unsigned char* mask, uint64_t i) { return mask[i / 8] >> i % 8 & 1; }

/* Fills the 256 words of a header. */
static inline void tokenfile_header(int32_t* words /* (256) */, const TokenFileHeader* h) {
    memset(words, 0, TOKENFILE_HEADER_BYTES);
    words[0] = h->token_bytes == 2 ? TOKENFILE_MAGIC16 : TOKENFILE_MAGIC32;
    words[1] = (h->token_bytes == 2 ? TOKENFILE_VERSION16 : TOKENFILE_VERSION32) + (h->masked ? TOKENFILE_MASKED : 0);
    words[2] = h->num_tokens > INT32_MAX ? INT32_MAX : (int32_t)h->num_tokens;
    words[3] = h->vocab_size;
    memcpy(words + 4, &h->num_tokens, 8);
    memcpy(words + 6, &h->fingerprint, 8);
    words[8] = h->has_crc;
    memcpy(words + 9, &h->crc, 4);
    memcpy(words + 10, &h->template_hash, 8);
    words[12] = h->starts;
}

/* Checks that the header's number of tokens matches the size of the file. */
static inline bool tokenfile_check_size(const TokenFileHeader* h, uint64_t file_bytes, const char* path, Error* e) {
    const uint64_t bytes = file_bytes - TOKENFILE_HEADER_BYTES, bits = 8 * (uint64_t)h->token_bytes + h->masked + h->starts;
    const uint64_t have = bytes / bits * 8 + bytes % bits * 8 / bits;
    if (h->num_tokens == have && tokenfile_bytes(h) == file_bytes) { return true; }
    return fail(e, "%s: token count is %llu of %d bytes each%s, but the file of %llu bytes holds %llu: it was cut or extended",
                path, (unsigned long long)h->num_tokens, h->token_bytes, h->masked ? " and a bit of the mask" : "",
                (unsigned long long)file_bytes, (unsigned long long)have);
}

/* Checks the 256 words of a header against each other and against the file's size, and fills *h. */
static inline bool tokenfile_check(TokenFileHeader* h, const int32_t* words, uint64_t file_bytes, const char* path, Error* e) {
    memset(h, 0, sizeof *h);
    int32_t magic = words[0], version = words[1];
    if (magic != TOKENFILE_MAGIC16 && magic != TOKENFILE_MAGIC32) {
        return fail(e,
                    "%s: magic is %d, wanted %d (uint16 tokens) or %d (uint32 tokens): this is not a token file\n"
                    "  hint: " TOKENFILE_FROM_TEXT,
                    path, magic, TOKENFILE_MAGIC16, TOKENFILE_MAGIC32);
    }
    int32_t want = magic == TOKENFILE_MAGIC16 ? TOKENFILE_VERSION16 : TOKENFILE_VERSION32;
    if (version != want && version != want + TOKENFILE_MASKED) {
        return fail(e, "%s: version is %d, wanted %d (or %d: with a mask) beside magic %d", path, version, want,
                    want + TOKENFILE_MASKED, magic);
    }
    uint64_t count64, fingerprint;
    memcpy(&count64, words + 4, 8);
    memcpy(&fingerprint, words + 6, 8);
    if (words[2] < 0) { return fail(e, "%s: token count (word 2) is %d, wanted 0 or more", path, words[2]); }
    uint64_t count = count64 ? count64 : (uint64_t)words[2];
    int32_t want2 = count > INT32_MAX ? INT32_MAX : (int32_t)count;
    if (words[2] != want2) {
        return fail(e, "%s: token count (word 2) is %d, wanted %d, since the 64-bit count (words 4-5) is %llu", path, words[2],
                    want2, (unsigned long long)count64);
    }
    if (words[3] < 0) { return fail(e, "%s: vocabulary size (word 3) is %d, wanted 0 or more", path, words[3]); }
    if (words[8] != 0 && words[8] != 1) {
        return fail(e, "%s: word 8 of the header is %d, wanted 1 (a checksum follows) or 0", path, words[8]);
    }
    if (words[12] != 0 && (words[12] != 1 || version == want)) {
        return fail(e, "%s: word 12 of the header is %d, wanted 0, or with a mask 1 (starts follow it)", path, words[12]);
    }
    for (int i = words[8] ? 13 : 9; i < TOKENFILE_WORDS; i = i == 9 ? 13 : i + 1) {
        if (words[i] != 0) { return fail(e, "%s: word %d of the header is %d, wanted 0", path, i, words[i]); }
    }
    h->token_bytes = magic == TOKENFILE_MAGIC16 ? 2 : 4;
    h->vocab_size = words[3];
    h->num_tokens = count;
    h->fingerprint = fingerprint;
    h->has_crc = words[8] == 1;
    memcpy(&h->crc, words + 9, 4);
    h->masked = version != want;
    memcpy(&h->template_hash, words + 10, 8);
    h->starts = words[12] == 1;
    return tokenfile_check_size(h, file_bytes, path, e);
}

/* Refuses a file that begins as another kind of file, and names the command that makes a token file of it. */
static inline bool tokenfile_check_kind(const char* head, size_t n, const char* path, Error* e) {
    const FileKind kind = text_kind_of(head, n);
    if (!kind.what || strstr(kind.what, "token file")) { return true; }
    if (kind.to_text) {
        return fail(e, "%s: is %s, wanted a token file\n  hint: %s %s | ./tokenize --tokenizer DIR%s -o OUT.bin -", path,
                    kind.what, kind.to_text, path, kind.to_lines ? " --field text" : "");
    }
    if (!kind.is_text) { return fail(e, "%s: is %s, wanted a token file", path, kind.what); }
    return fail(e, "%s: is %s, wanted a token file\n  hint: " TOKENFILE_FROM_TEXT, path, kind.what);
}

/* An open token file. */
typedef struct {
    FILE* f;           // NULL: none
    const char* path;  // borrowed
    TokenFileHeader h;
    int64_t limit;  // an id that is not below it is an error
} TokenReader;

static inline void tokenfile_close(TokenReader* r) {
    if (r->f) { fclose(r->f); }
    r->f = NULL;
}

/* Opens a token file, reads and checks its header. Takes any id until the caller sets the limit. */
static inline bool tokenfile_open(TokenReader* r, const char* path, Error* e) {
    uint64_t bytes = 0;
    int32_t words[TOKENFILE_WORDS];
    r->path = path;
    r->limit = (int64_t)INT32_MAX + 1;
    r->f = open_input(path, &bytes, e);
    if (!r->f) { return false; }
    const size_t head = fread(words, 1, sizeof words, r->f);
    rewind(r->f);
    const bool ok = tokenfile_check_kind((const char*)words, head, path, e) &&
                    read_exact(r->f, words, sizeof words, path, "the header", e) &&
                    tokenfile_check(&r->h, words, bytes, path, e);
    if (!ok) { tokenfile_close(r); }
    return ok;
}

/* Reads n tokens from token `first` on, as the file stores them. `what` names them in the error. */
static inline bool tokenfile_read(const TokenReader* r, uint64_t first, size_t n, void* raw, const char* what, Error* e) {
    const size_t width = (size_t)r->h.token_bytes;
    return read_at(fileno(r->f), TOKENFILE_HEADER_BYTES + first * width, raw, n * width, r->path, what, e);
}

/* Does the same, and widens the tokens. Fails on an id that is not below the limit. */
static inline bool tokenfile_read_ids(const TokenReader* r, uint64_t first, size_t n, unsigned char* raw,
                                      int32_t* ids /* (n) */, const char* what, Error* e) {
    if (!tokenfile_read(r, first, n, raw, what, e)) { return false; }
    for (size_t i = 0; i < n; i++) {
        uint32_t id;
        if (r->h.token_bytes == 2) {
            uint16_t narrow;
            memcpy(&narrow, raw + 2 * i, 2);
            id = narrow;
        } else {
            memcpy(&id, raw + 4 * i, 4);
        }
        if ((int64_t)id >= r->limit) {
            return fail(e, "%s: token %llu is id %u, wanted below %lld, the size of the vocabulary", r->path,
                        (unsigned long long)(first + i), id, (long long)r->limit);
        }
        ids[i] = (int32_t)id;
    }
    return true;
}

/* Adds the mask of an open file to the checksum, and checks that it is filled up with zeros. */
static inline bool tokenfile_scan_mask(const TokenReader* r, Crc* crc, Progress* progress, Error* e) {
    enum { MOST = 1 << 16 };  // bytes at a time
    const TokenFileHeader* h = &r->h;
    const uint64_t end = tokenfile_bytes(h);
    unsigned char* bits = (unsigned char*)xmalloc(MOST);
    bool ok = true;
    for (uint64_t at = tokenfile_mask_at(h), n; ok && at < end; at += n) {
        n = size_min(end - at, MOST);
        ok = read_at(fileno(r->f), at, bits, n, r->path, "the mask", e);
        crc_add(crc, bits, ok ? n : 0);
        if (ok && at + n == end && h->num_tokens % 8 && bits[n - 1] >> h->num_tokens % 8) {
            ok = fail(e, "%s: the bits behind the mask's last are not all 0: the file is damaged", r->path);
        }
        if (ok) { progress_add(progress, n); }
    }
    free(bits);
    return ok;
}

/* Reads all of an open file: checks that each id is below the limit, the mask's end, and the checksum, if the file has one.
 * `progress` (or NULL) counts the bytes. */
static inline bool tokenfile_scan(const TokenReader* r, Progress* progress, Error* e) {
    const TokenFileHeader* h = &r->h;
    const size_t width = (size_t)h->token_bytes, most = 1 << 18;  // tokens at a time
    unsigned char* raw = (unsigned char*)xmalloc(most * width);
    int32_t* ids = (int32_t*)xmalloc(most * sizeof *ids);
    Crc crc;
    crc_begin(&crc);
    bool ok = true;
    for (uint64_t at = 0, n; ok && at < h->num_tokens; at += n) {
        n = size_min(h->num_tokens - at, most);
        ok = tokenfile_read_ids(r, at, n, raw, ids, "the file", e);
        crc_add(&crc, raw, ok ? n * width : 0);
        if (ok) { progress_add(progress, n * width); }
    }
    free(raw);
    free(ids);
    ok = ok && (!h->masked || tokenfile_scan_mask(r, &crc, progress, e));
    if (ok && h->has_crc && crc_end(&crc) != h->crc) {
        ok = fail(e, "%s: the checksum of its %s is %08x, wanted %08x: the file is damaged\n  hint: copy or make it again",
                  r->path, h->masked ? "tokens and mask" : "tokens", crc_end(&crc), h->crc);
    }
    return ok;
}

#endif
