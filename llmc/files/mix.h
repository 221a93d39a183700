/* mix.h -- training data from several sources: --train 'web*.bin:0.7,code.bin:0.3' takes 70 % of all rows from the files that
 * match web*.bin. The source of a row is a pure function of (seed, row).
 *
 *   mix     = part {"," part}        part = pattern [":" weight]        weight: a number above 0; only their ratios count
 *
 * A part that names existing files is taken literally. So if a file "a:0.5" exists, it is not a file "a" with a weight. A comma
 * in a file's name, or in a pattern that matches files, does not end a part. A single part needs no weight, and dataloader.h
 * reads it. If there are several parts, each one needs a weight.
 *
 * A block is MIX_BLOCK rows of the stream. Source s gives the same number of rows to each block, its share: its weight's part
 * of MIX_BLOCK, rounded down, and one more for the largest remainders until the shares add up. If two remainders differ by less
 * than 1e-6, the first counts as larger: so 0.6, 0.3, 0.1 and 6, 3, 1 give the same shares in spite of rounding.
 *
 * The order in block k is a Fisher-Yates permutation `order` of 0 ... MIX_BLOCK-1, made like the permutation of shards in
 * dataloader.h, from the draws (seed, RAND_MIX, stream = k). Row i of the block has the first source s with order[i] <
 * share of source 0 + ... + share of source s.
 *
 * Each source gives its rows in its own order, epoch after epoch, as if it were alone; a small one begins its next epoch while
 * a large one is in its first. The row that source s gives at row n of the stream is its row
 *
 *   position = k * its share + (rows of s in block k before row n)
 *
 * so the table of one block finds any row, and a checkpoint saves only the number of rows. An epoch of the mix has as many rows
 * as the epochs of all sources together.
 *
 * The mix is a stream of dataloader.h, with its ranks, its batches and its thread; only the rows come from elsewhere.
 */
#ifndef LLMC_MIX_H
#define LLMC_MIX_H

#include "llmc/base/sources.h"  // defines: MIX_MOST
#include "llmc/base/utils.h"
#include "llmc/base/crc.h"          // defines: Crc, crc_begin, crc_add, crc_end
#include "llmc/base/rand.h"         // defines: RAND_MIX
#include "llmc/files/dataloader.h"  // defines: DataLoader, dataloader_open, dataloader_read_row, dataloader_permute
#include "llmc/files/folder.h"      // defines: folder_of
#include <glob.h>

enum {
    MIX_BLOCK = 4096,  // rows; a table is made in about 0.2 ms
};

typedef struct {
    char* pattern;
    double weight;     // 0: none is given
    int share;         // rows of a block
    DataLoader* data;  // of a single source: the stream itself
} MixSource;

typedef struct {
    uint64_t block;              // UINT64_MAX: none yet
    uint8_t source[MIX_BLOCK];   // of each row
    uint16_t before[MIX_BLOCK];  // rows of the same source before it in the block
} MixBlock;

typedef struct {
    int count;
    MixSource sources[MIX_MOST];  // (count)
    uint64_t seed;
    DataLoader* stream;  // what the training run reads

    // for several sources
    MixBlock* reader_block;  // belongs to the stream's reader, which may be a thread
    MixBlock* caller_block;  // belongs to the caller
    int32_t* batch_sources;  // (B) the source of each row of the last batch
} Mix;

// ---------------------------------------------------------------------------------------------------------------------
// the text

/* Returns whether the first n bytes of a text are a file's path or a pattern that matches one. */
static bool mix_names_files(const char* text, size_t n) {
    char* pattern = xcopy_text(text, n);
    glob_t g;
    memset(&g, 0, sizeof g);
    const bool found = file_exists(pattern) || glob(pattern, GLOB_NOSORT, NULL, &g) == 0;
    globfree(&g);
    free(pattern);
    return found;
}

/* Returns the place of the last c in the first n bytes of a text; n: there is none. */
static size_t mix_last(const char* text, size_t n, char c) {
    size_t at = n;
    while (at > 0 && text[at - 1] != c) { at--; }
    return at > 0 ? at - 1 : n;
}

/* Returns the length of the part that a text begins with. The part ends at the last comma, or the end of the text, before
 * which it names files, with a weight or without. If it never names files, it ends at the first comma. */
static size_t mix_part_length(const char* text) {
    for (size_t n = strlen(text), comma = 0;; n = comma) {
        const size_t colon = mix_last(text, n, ':');
        comma = mix_last(text, n, ',');
        const bool weighted = colon < n && !memchr(text + colon, ',', n - colon);
        if (mix_names_files(text, n) || (weighted && mix_names_files(text, colon))) { return n; }
        if (comma == n) { return strcspn(text, ","); }
    }
}

/* Reads a part of n bytes. A part without a weight after a ':' is a pattern alone. */
static bool mix_parse_source(MixSource* p, const char* text, size_t n, Error* e) {
    const size_t colon = mix_last(text, n, ':');
    char *whole = xcopy_text(text, n), *end = whole;
    const char* number = colon < n ? whole + colon + 1 : "";
    const double weight = strtod(number, &end);
    const bool is_number = *number && *end == 0;
    const bool weighted = colon < n && !mix_names_files(text, n) && (is_number || mix_names_files(text, colon));
    bool ok = n > 0 || fail(e, "--train: a part is empty, wanted PATTERN:WEIGHT between commas");
    p->pattern = xcopy_text(text, weighted ? colon : n);
    p->weight = weighted ? weight : 0;
    if (ok && *p->pattern == ' ' && !mix_names_files(p->pattern, strlen(p->pattern))) {
        ok = fail(e, "--train: \"%s\" begins with a blank, and names no file, wanted no blank behind a comma", p->pattern);
    }
    if (ok && weighted && !(is_number && weight > 0 && weight <= 1e9)) {
        ok = fail(e, "--train: the weight of %s is %s, wanted a number above 0, at most 1e9", p->pattern, number);
    }
    free(whole);
    return ok;
}

/* Frees the patterns of a text. */
static inline void mix_free_patterns(Mix* m) {
    for (int i = 0; i < MIX_MOST; i++) {
        free(m->sources[i].pattern);
        m->sources[i].pattern = NULL;
    }
    m->count = 0;
}

/* Reads the parts of `text`. Call mix_free_patterns() afterwards, also if it fails. */
static inline bool mix_parse(Mix* m, const char* text, Error* e) {
    const char* rest = text;
    memset(m, 0, sizeof *m);
    for (bool more = true; more;) {
        const size_t n = mix_part_length(rest);
        if (m->count == MIX_MOST) { return fail(e, "--train: has more than %d parts", MIX_MOST); }
        if (!mix_parse_source(&m->sources[m->count++], rest, n, e)) { return false; }
        more = rest[n] == ',';
        rest += n + more;
    }
    for (int i = 0; m->count > 1 && i < m->count; i++) {
        if (m->sources[i].weight > 0) { continue; }
        return fail(e,
                    "--train: %s has no weight, wanted one for each of the %d parts\n"
                    "  hint: a weight is a number behind a colon, as in --train 'a*.bin:0.7,b.bin:0.3'",
                    m->sources[i].pattern, m->count);
    }
    return true;
}

/* Writes the folder of the first part of `text` to `out`. */
static inline bool mix_folder(const char* text, char* out /* PATH_CAP */, Error* e) {
    Mix m;
    const bool ok = mix_parse(&m, text, e);
    if (ok) { folder_of(m.sources[0].pattern, out); }
    mix_free_patterns(&m);
    return ok;
}

/* Shares out the rows of a block by the largest remainders. */
static bool mix_share(Mix* m, Error* e) {
    double sum = 0, quota[MIX_MOST];
    int rest = MIX_BLOCK;
    for (int i = 0; i < m->count; i++) { sum += m->sources[i].weight; }
    for (int i = 0; i < m->count; i++) {
        quota[i] = m->sources[i].weight / sum * MIX_BLOCK;
        m->sources[i].share = (int)quota[i];
        rest -= m->sources[i].share;
    }
    for (; rest > 0; rest--) {
        int most = 0;
        for (int i = 1; i < m->count; i++) {
            if (quota[i] - m->sources[i].share > quota[most] - m->sources[most].share + 1e-6) { most = i; }
        }
        m->sources[most].share++;
    }
    for (int i = 0; i < m->count; i++) {
        if (m->sources[i].share > 0) { continue; }
        return fail(e, "--train: the weight of %s is %g of %g in all, too small for one row in %d", m->sources[i].pattern,
                    m->sources[i].weight, sum, MIX_BLOCK);
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the order

/* Makes the table of block `block`, unless it exists. */
static inline void mix_table(const Mix* m, MixBlock* t, uint64_t block) {
    int order[MIX_BLOCK], before[MIX_MOST] = {0};
    if (t->block == block) { return; }
    dataloader_permute(order, MIX_BLOCK, m->seed, RAND_MIX, (uint32_t)block);
    for (int i = 0; i < MIX_BLOCK; i++) {
        int s = 0;
        for (int end = m->sources[0].share; order[i] >= end; end += m->sources[s].share) { s++; }
        t->source[i] = (uint8_t)s;
        t->before[i] = (uint16_t)before[s]++;
    }
    t->block = block;
}

/* Returns the source of row `row` of the stream, and sets *position to the row's place among that source's rows. */
static inline int mix_locate(const Mix* m, MixBlock* t, uint64_t row, uint64_t* position) {
    const uint64_t block = row / MIX_BLOCK, i = row % MIX_BLOCK;
    mix_table(m, t, block);
    const int s = t->source[i];
    *position = block * (uint64_t)m->sources[s].share + t->before[i];
    return s;
}

/* Counts the padding of `count` rows of the stream from `row` on, in tokens. */
static inline uint64_t mix_padding(const Mix* m, uint64_t row, uint64_t count) {
    uint64_t padding = 0, position;
    if (!m->stream->indexed) { return 0; }
    dataloader_wait(m->stream);
    for (; count > 0; count--, row++) {
        const int s = m->count > 1 ? mix_locate(m, m->caller_block, row, &position) : 0;
        padding += dataloader_padding(m->sources[s].data, m->count > 1 ? position : row);
    }
    return padding;
}

/* Counts the rows of each source among the first `rows` of the stream. */
static inline void mix_count(const Mix* m, uint64_t rows, uint64_t* counts /* (m->count) */) {
    if (m->count == 1) {
        counts[0] = rows;
        return;
    }
    mix_table(m, m->caller_block, rows / MIX_BLOCK);
    for (int s = 0; s < m->count; s++) { counts[s] = rows / MIX_BLOCK * (uint64_t)m->sources[s].share; }
    for (uint64_t i = 0; i < rows % MIX_BLOCK; i++) { counts[m->caller_block->source[i]]++; }
}

// ---------------------------------------------------------------------------------------------------------------------
// opening

/* A ReadRow of the stream. */
static bool mix_read_row(void* mix, uint64_t row, int32_t* out, Error* e) {
    const Mix* m = (const Mix*)mix;
    uint64_t position;
    const int s = mix_locate(m, m->reader_block, row, &position);
    return dataloader_read_row(m->sources[s].data, position, out, e);
}

/* Checks a source against the sources before it, and passes its vocabulary and tokenizer on to the stream. All sources must
 * come from one tokenizer. */
static bool mix_add_source(Mix* m, const DataLoader* d, Error* e) {
    DataLoader* all = m->stream;
    if (!dataloader_join(all, d->vocab_size, d->fingerprint, d->shards[0].path, e)) { return false; }
    if (d->token_bytes > all->token_bytes) { all->token_bytes = d->token_bytes; }
    if (d->documents == DOCUMENTS_MASK) { all->documents = DOCUMENTS_MASK; }
    all->masked = all->masked || d->masked;
    all->indexed = all->indexed || d->indexed;
    all->num_tokens += d->num_tokens;
    all->rows_per_epoch += d->rows_per_epoch;
    return true;
}

/* Closes stream and sources. May be called after a failed open, and twice. */
static inline void mix_close(Mix* m) {
    if (m->stream) { dataloader_close(m->stream); }  // first, since its thread reads the sources
    for (int s = 0; s < m->count; s++) {
        if (!m->sources[s].data || m->sources[s].data == m->stream) { continue; }
        dataloader_close(m->sources[s].data);
        free(m->sources[s].data);
    }
    free(m->reader_block);
    free(m->caller_block);
    free(m->batch_sources);
    mix_free_patterns(m);
    memset(m, 0, sizeof *m);
}

static MixBlock* mix_new_table(void) {
    MixBlock* t = (MixBlock*)xmalloc(sizeof *t);
    t->block = UINT64_MAX;
    return t;
}

/* Opens several sources, and the stream over them. */
static bool mix_open_sources(Mix* m, BatchShare share, const RowRule* rule, Error* e) {
    const BatchShare alone = {1, share.T, 0, 1};
    m->reader_block = mix_new_table();
    m->caller_block = mix_new_table();
    m->batch_sources = (int32_t*)xcalloc((size_t)share.B, sizeof *m->batch_sources);
    m->stream->seed = m->seed;
    m->stream->shuffle = true;
    m->stream->read_row = mix_read_row;
    m->stream->read_ctx = m;
    for (int s = 0; s < m->count; s++) {
        MixSource* source = &m->sources[s];
        source->data = (DataLoader*)xcalloc(1, sizeof *source->data);
        if (!dataloader_open(source->data, source->pattern, alone, m->seed, true, rule, e)) { return false; }
        if (!mix_add_source(m, source->data, e)) { return false; }
    }
    dataloader_open_batches(m->stream, share);
    return true;
}

/* Opens the training data that `text` names, and `stream` over it, which gives this process its share. `rule`, by which rows
 * are made, applies to each source by itself. Fails as dataloader_open() does, and if text or weights make no mix. Do not
 * move mix and stream in memory. */
static inline bool mix_open(Mix* m, DataLoader* stream, const char* text, BatchShare share, uint64_t seed, const RowRule* rule,
                            Error* e) {
    memset(stream, 0, sizeof *stream);
    bool ok = mix_parse(m, text, e);
    m->stream = stream;
    m->seed = seed;
    if (ok && m->count == 1) {
        m->sources[0].data = stream;
        ok = dataloader_open(stream, m->sources[0].pattern, share, seed, true, rule, e);
    } else if (ok) {
        ok = mix_share(m, e) && mix_open_sources(m, share, rule, e);
    }
    if (!ok) { mix_close(m); }
    return ok;
}

/* Takes batches of B rows, before the first is read. */
static inline void mix_set_batch(Mix* m, int B) {
    dataloader_set_batch(m->stream, B);
    if (m->batch_sources) { m->batch_sources = (int32_t*)xrealloc(m->batch_sources, (size_t)B * sizeof *m->batch_sources); }
}

/* Checks every source against the model and the run's tokenizer, as dataloader_check_vocab() does. */
static inline bool mix_check_vocab(Mix* m, int model_vocab, uint64_t tokenizer_fingerprint, Error* e) {
    for (int s = 0; s < m->count; s++) {
        if (!dataloader_check_vocab(m->sources[s].data, model_vocab, tokenizer_fingerprint, e)) { return false; }
    }
    return true;
}

/* Returns whether rows.h leaves out answers, or the starts of their conversations. */
static inline bool mix_leaves_out(const Mix* m) {
    uint64_t left = 0;
    for (int s = 0; s < m->count; s++) { left += m->sources[s].data->counts.lost + m->sources[s].data->counts.cut; }
    return left > 0;
}

static inline int mix_num_files(const Mix* m) {
    int files = 0;
    for (int s = 0; s < m->count; s++) { files += m->sources[s].data->num_shards; }
    return files;
}

/* Returns in *fingerprint a number that differs for other data: dataloader_fingerprint(). With several sources it is a checksum
 * of their halves and, in the high half, of their shares. */
static inline bool mix_fingerprint(const Mix* m, uint64_t* fingerprint, Error* e) {
    if (m->count == 1) { return dataloader_fingerprint(m->stream, fingerprint, e); }
    Crc name, content;
    crc_begin(&name);
    crc_begin(&content);
    for (int s = 0; s < m->count; s++) {
        uint64_t print;
        if (!dataloader_fingerprint(m->sources[s].data, &print, e)) { return false; }
        const uint32_t words[3] = {(uint32_t)(print >> 32), (uint32_t)m->sources[s].share, (uint32_t)print};
        crc_add(&name, words, 2 * sizeof *words);
        crc_add(&content, words + 2, sizeof *words);
    }
    *fingerprint = (uint64_t)crc_end(&name) << 32 | crc_end(&content);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the stream

/* Does dataloader_next() for several sources: `batch_sources` then has the source of each row. */
static inline bool mix_next(Mix* m, int32_t* x /* (B, T) */, int32_t* y /* (B, T) */, Error* e) {
    const DataLoader* d = m->stream;
    const uint64_t first = d->row + (uint64_t)d->rank * (uint64_t)d->B;
    if (!dataloader_next(m->stream, x, y, e)) { return false; }
    for (int b = 0; b < d->B; b++) {
        uint64_t position;
        m->batch_sources[b] = mix_locate(m, m->caller_block, first + (uint64_t)b, &position);
    }
    return true;
}

#endif
