/* dataloader.h -- reads rows of tokens from token files (tokenfile.h), in an order that is a pure function of (seed, row).
 *
 * A row is T+1 consecutive tokens of one shard, starting at a multiple of T: T inputs and, shifted by one, T targets.
 * A shard of n tokens holds (n - 1) / T rows; the tokens left over at its end are not read. Shards are the files that match
 * a glob pattern, sorted by the bytes of their paths. An epoch visits every row once, shard by shard. With `shuffle`, the
 * order of the shards and the order of the rows in a shard are Fisher-Yates permutations:
 *
 *   for i = n-1 ... 1:  j = philox_below(seed, purpose, stream, index, i + 1);  swap(a[i], a[j])
 *
 *   order of the shards in an epoch:  purpose RAND_SHUFFLE_SHARDS, stream = epoch, index = i
 *   order of the rows in a shard:     purpose RAND_SHUFFLE_ROWS, stream = shard (its place in sorted order),
 *                                     index = epoch << 32 | i
 *
 * One number holds the whole position: `row` counts the rows given out so far, over all ranks and epochs (epoch = row /
 * rows_per_epoch). Each dataloader_next() advances by num_ranks * B rows; rank r gets the B rows from row + r * B on. A
 * batch that passes the end of an epoch continues in the next epoch.
 *
 * A thread reads the next batch while the step computes. This saves time and changes nothing else: if no thread can be
 * started, batches are read on demand. The dataloader_next() that asks for a batch reports the thread's errors.
 *
 * Opening checks every shard's header. A token outside the vocabulary is found when its row is read. Documents in one row
 * attend to each other: the loader does not know where a document ends.
 */
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include "llmc/base/utils.h"       // first, since it asks for the functions beyond C11; defines: fail, open_input, xmalloc
#include "llmc/base/crc.h"         // defines: Crc, crc_begin, crc_add, crc_end
#include "llmc/base/rand.h"        // defines: philox_below, RAND_SHUFFLE_ROWS, RAND_SHUFFLE_SHARDS
#include "llmc/files/tokenfile.h"  // defines: TokenFileHeader, tokenfile_open
#include <glob.h>
#include <pthread.h>
#include <signal.h>

typedef struct {
    char* path;
    uint64_t num_tokens;
    uint64_t num_rows;  // (num_tokens - 1) / T, at least 1, below 2^32
} DataShard;

typedef enum { AHEAD_EMPTY, AHEAD_ASKED, AHEAD_READY } AheadState;

typedef struct {
    // set when the loader opens; only `row` changes later
    DataShard* shards;  // (num_shards), sorted by path
    int num_shards;
    int B, T;             // this rank's batch: B rows of T tokens
    int rank, num_ranks;  // this process among those that share the stream
    uint64_t seed;
    bool shuffle;
    int token_bytes;          // 2 or 4, in all shards
    int vocab_size;           // of the tokenizer that made the data; 0: unknown
    uint64_t fingerprint;     // of that tokenizer; 0: unknown
    uint64_t num_tokens;      // of all shards
    uint64_t rows_per_epoch;  // of all shards
    uint64_t row;             // the next row for rank 0; see above

    // the reader; belongs to the thread while ahead == AHEAD_ASKED
    int64_t vocab_limit;    // ids must be below
    uint64_t order_epoch;   // the epoch `order` is for
    int* order;             // (num_shards) the shards in the epoch's order
    uint64_t* order_start;  // (num_shards + 1) rows of the epoch before each place of `order`
    int place;              // place in `order` that row_order belongs to; -1: none
    uint32_t* row_order;    // (largest num_rows) that shard's rows in order; NULL without shuffle
    FILE* file;             // the shard opened last, file_shard
    int file_shard;         // -1: none
    unsigned char* raw;     // (T+1) tokens as stored in the file

    // one batch read ahead
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;  // signals a change of `ahead` or `quit`
    bool threaded;           // the thread runs
    bool thread_tried;       // an attempt to start it was made
    bool quit;
    AheadState ahead;
    uint64_t ahead_row;   // the batch's first row of this rank
    int32_t* ahead_rows;  // (B, T+1)
    bool ahead_ok;
    Error ahead_error;
} DataLoader;

// ---------------------------------------------------------------------------------------------------------------------
// the order of rows

/* Fills a[0..n) with an epoch's order of a shard's rows; see the top of the file. */
static inline void dataloader_permute_rows(uint32_t* a, uint64_t n, uint64_t seed, uint32_t shard, uint64_t epoch) {
    for (uint64_t i = 0; i < n; i++) { a[i] = (uint32_t)i; }
    for (uint64_t i = n - 1; i >= 1; i--) {
        uint64_t j = philox_below(seed, RAND_SHUFFLE_ROWS, shard, epoch << 32 | i, i + 1);
        uint32_t t = a[i];
        a[i] = a[j];
        a[j] = t;
    }
}

/* Fills a[0..n) with an epoch's order of the shards. */
static inline void dataloader_permute_shards(int* a, int n, uint64_t seed, uint64_t epoch) {
    for (int i = 0; i < n; i++) { a[i] = i; }
    for (int i = n - 1; i >= 1; i--) {
        uint64_t j = philox_below(seed, RAND_SHUFFLE_SHARDS, (uint32_t)epoch, (uint64_t)i, (uint64_t)i + 1);
        int t = a[i];
        a[i] = a[j];
        a[j] = t;
    }
}

static void dataloader_order_epoch(DataLoader* d, uint64_t epoch) {
    if (d->shuffle) {
        dataloader_permute_shards(d->order, d->num_shards, d->seed, epoch);
    } else {
        for (int i = 0; i < d->num_shards; i++) { d->order[i] = i; }
    }
    uint64_t start = 0;
    for (int i = 0; i < d->num_shards; i++) {
        d->order_start[i] = start;
        start += d->shards[d->order[i]].num_rows;
    }
    d->order_start[d->num_shards] = start;
    d->order_epoch = epoch;
    d->place = -1;
}

/* Finds row `row` of the stream: its shard and its row in that shard. */
static inline void dataloader_locate(DataLoader* d, uint64_t row, int* shard, uint64_t* row_in_shard) {
    uint64_t epoch = row / d->rows_per_epoch, in_epoch = row % d->rows_per_epoch;
    if (epoch != d->order_epoch) { dataloader_order_epoch(d, epoch); }
    int lo = 0, hi = d->num_shards;  // order_start[lo] <= in_epoch < order_start[hi]
    while (hi - lo > 1) {
        int mid = lo + (hi - lo) / 2;
        if (d->order_start[mid] <= in_epoch) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    *shard = d->order[lo];
    *row_in_shard = in_epoch - d->order_start[lo];
    if (!d->shuffle) { return; }
    if (d->place != lo) {
        dataloader_permute_rows(d->row_order, d->shards[*shard].num_rows, d->seed, (uint32_t)*shard, epoch);
        d->place = lo;
    }
    *row_in_shard = d->row_order[*row_in_shard];
}

// ---------------------------------------------------------------------------------------------------------------------
// reading

static bool dataloader_read_bytes(DataLoader* d, int shard, uint64_t offset, size_t bytes, Error* e) {
    const char* path = d->shards[shard].path;
    if (d->file_shard != shard) {
        uint64_t size = 0;
        if (d->file) { fclose(d->file); }
        d->file_shard = -1;
        d->file = open_input(path, &size, e);
        if (!d->file) { return false; }
        d->file_shard = shard;
    }
    for (size_t got = 0; got < bytes;) {
        ssize_t n = pread(fileno(d->file), d->raw + got, bytes - got, (off_t)(offset + got));
        if (n < 0 && errno == EINTR) { continue; }
        if (n < 0) {
            return fail(e, "%s: reading %zu bytes at byte %llu failed: %s", path, bytes, (unsigned long long)offset,
                        strerror(errno));
        }
        if (n == 0) {
            return fail(e, "%s: ends at byte %llu, wanted %zu bytes from byte %llu on: the file was cut while it was in use",
                        path, (unsigned long long)(offset + got), bytes, (unsigned long long)offset);
        }
        got += (size_t)n;
    }
    return true;
}

/* Reads the T+1 tokens of row `row` of the stream. */
static bool dataloader_read_row(DataLoader* d, uint64_t row, int32_t* tokens /* (T+1) */, Error* e) {
    int shard;
    uint64_t row_in_shard;
    dataloader_locate(d, row, &shard, &row_in_shard);
    uint64_t first = row_in_shard * (uint64_t)d->T;
    size_t n = (size_t)d->T + 1, width = (size_t)d->token_bytes;
    if (!dataloader_read_bytes(d, shard, TOKENFILE_HEADER_BYTES + first * width, n * width, e)) { return false; }
    for (size_t i = 0; i < n; i++) {
        uint32_t id;
        if (width == 2) {
            uint16_t narrow;
            memcpy(&narrow, d->raw + 2 * i, 2);
            id = narrow;
        } else {
            memcpy(&id, d->raw + 4 * i, 4);
        }
        if ((int64_t)id >= d->vocab_limit) {
            return fail(e, "%s: token %llu is id %u, wanted below %lld, the size of the vocabulary", d->shards[shard].path,
                        (unsigned long long)(first + i), id, (long long)d->vocab_limit);
        }
        tokens[i] = (int32_t)id;
    }
    return true;
}

static void dataloader_read_ahead(DataLoader* d) {
    d->ahead_error.msg[0] = 0;
    d->ahead_ok = true;
    for (int b = 0; b < d->B && d->ahead_ok; b++) {
        int32_t* tokens = d->ahead_rows + (size_t)b * ((size_t)d->T + 1);
        d->ahead_ok = dataloader_read_row(d, d->ahead_row + (uint64_t)b, tokens, &d->ahead_error);
    }
}

static void* dataloader_thread(void* arg) {
    DataLoader* d = (DataLoader*)arg;
    pthread_mutex_lock(&d->mutex);
    while (!d->quit) {
        if (d->ahead != AHEAD_ASKED) {
            pthread_cond_wait(&d->changed, &d->mutex);
            continue;
        }
        pthread_mutex_unlock(&d->mutex);
        dataloader_read_ahead(d);
        pthread_mutex_lock(&d->mutex);
        d->ahead = AHEAD_READY;
        pthread_cond_broadcast(&d->changed);
    }
    pthread_mutex_unlock(&d->mutex);
    return NULL;
}

static void dataloader_start_thread(DataLoader* d) {
    d->thread_tried = true;
    sigset_t all, old;  // the thread blocks all signals: the training thread handles SIGINT and SIGTERM
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    d->threaded = pthread_create(&d->thread, NULL, dataloader_thread, d) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/* Waits for the thread. Afterwards the reader belongs to the caller until it asks for another batch. */
static void dataloader_wait(DataLoader* d) {
    if (!d->threaded) { return; }
    pthread_mutex_lock(&d->mutex);
    while (d->ahead == AHEAD_ASKED) { pthread_cond_wait(&d->changed, &d->mutex); }
    pthread_mutex_unlock(&d->mutex);
}

// ---------------------------------------------------------------------------------------------------------------------
// opening

static int dataloader_compare_paths(const void* a, const void* b) {
    return strcmp(((const DataShard*)a)->path, ((const DataShard*)b)->path);
}

static bool dataloader_find_shards(DataLoader* d, const char* pattern, Error* e) {
    if (is_directory(pattern)) {
        return fail(e, "%s: is a folder, wanted a token file\n  hint: name its files by a pattern, such as '%s/*_train.bin'",
                    pattern, pattern);
    }
    glob_t g;
    memset(&g, 0, sizeof g);
    // take a path that exists literally, even if it has brackets
    int rc = file_exists(pattern) ? GLOB_NOMATCH : glob(pattern, GLOB_NOSORT, NULL, &g);
    if (rc != 0 && rc != GLOB_NOMATCH) {
        globfree(&g);
        return fail(e, "%s: looking for files failed: %s", pattern, rc == GLOB_NOSPACE ? "out of memory" : strerror(errno));
    }
    size_t n = rc == 0 ? g.gl_pathc : file_exists(pattern) ? 1 : 0;
    bool ok = n > 0 && n <= INT32_MAX;
    if (ok) {
        d->shards = (DataShard*)xcalloc(n, sizeof *d->shards);
        for (size_t i = 0; i < n; i++) { d->shards[i].path = xstrdup(rc == 0 ? g.gl_pathv[i] : pattern); }
        d->num_shards = (int)n;
        qsort(d->shards, n, sizeof *d->shards, dataloader_compare_paths);
    } else {
        fail(e,
             "%s: no such token file, and no file matches this as a pattern\n"
             "  hint: make one from text with ./tokenize --tokenizer DIR -o OUT.bin FILE",
             pattern);
    }
    globfree(&g);
    return ok;
}

/* Checks shard i by itself and against the shards before it. *vocab_from and *print_from are the first shards that give a
 * vocabulary size and a fingerprint; -1: none yet. */
static bool dataloader_check_shard(DataLoader* d, int i, int* vocab_from, int* print_from, Error* e) {
    DataShard* s = &d->shards[i];
    TokenFileHeader h;
    FILE* f = tokenfile_open(&h, s->path, e);
    if (!f) { return false; }
    fclose(f);
    const char* first = d->shards[0].path;
    if (i > 0 && h.token_bytes != d->token_bytes) {
        return fail(e, "%s: has uint%d tokens, but %s has uint%d: wanted all shards alike", s->path, 8 * h.token_bytes, first,
                    8 * d->token_bytes);
    }
    d->token_bytes = h.token_bytes;
    if (h.vocab_size && *vocab_from >= 0 && h.vocab_size != d->vocab_size) {
        return fail(e, "%s: vocabulary is %d tokens, but in %s it is %d: wanted all shards alike", s->path, h.vocab_size,
                    d->shards[*vocab_from].path, d->vocab_size);
    }
    if (h.vocab_size && *vocab_from < 0) {
        d->vocab_size = h.vocab_size;
        *vocab_from = i;
    }
    if (h.fingerprint && *print_from >= 0 && h.fingerprint != d->fingerprint) {
        return fail(e, "%s: was made with another tokenizer (fingerprint %016llx) than %s (%016llx): wanted all shards alike",
                    s->path, (unsigned long long)h.fingerprint, d->shards[*print_from].path,
                    (unsigned long long)d->fingerprint);
    }
    if (h.fingerprint && *print_from < 0) {
        d->fingerprint = h.fingerprint;
        *print_from = i;
    }
    if (h.num_tokens < (uint64_t)d->T + 1) {
        return fail(e, "%s: holds %llu tokens, wanted at least %lld, one row of --seq %d and its last target\n  hint: %s",
                    s->path, (unsigned long long)h.num_tokens, (long long)d->T + 1, d->T,
                    h.num_tokens >= 2 ? "use a smaller --seq or more text" : "the file has no text in it");
    }
    s->num_tokens = h.num_tokens;
    s->num_rows = (h.num_tokens - 1) / (uint64_t)d->T;
    if (s->num_rows >> 32) {
        return fail(e, "%s: holds %llu rows of --seq %d, wanted below 2^32\n  hint: use a larger --seq or smaller shards",
                    s->path, (unsigned long long)s->num_rows, d->T);
    }
    d->num_tokens += s->num_tokens;
    d->rows_per_epoch += s->num_rows;
    return true;
}

/* Stops the thread and frees everything. May be called after a failed open, and twice. */
static inline void dataloader_close(DataLoader* d) {
    if (d->threaded) {
        pthread_mutex_lock(&d->mutex);
        d->quit = true;
        pthread_cond_broadcast(&d->changed);
        pthread_mutex_unlock(&d->mutex);
        pthread_join(d->thread, NULL);
    }
    if (d->ahead_rows) {  // dataloader_open() got as far as the mutex
        pthread_mutex_destroy(&d->mutex);
        pthread_cond_destroy(&d->changed);
    }
    for (int i = 0; i < d->num_shards; i++) { free(d->shards[i].path); }
    free(d->shards);
    free(d->order);
    free(d->order_start);
    free(d->row_order);
    free(d->raw);
    free(d->ahead_rows);
    if (d->file) { fclose(d->file); }
    memset(d, 0, sizeof *d);
}

/* Opens every file that `pattern` names (a path or a glob pattern) and checks all headers. B, T > 0, 0 <= rank < num_ranks.
 * Starts at row 0. Fails on: no file, a folder, a damaged header, a size that contradicts the header, shards that differ in
 * token width, vocabulary or tokenizer, a shard of less than one row, fewer rows in all than one batch of all ranks. Do not
 * move the loader in memory until it is closed. */
static inline bool dataloader_open(DataLoader* d, const char* pattern, int B, int T, int rank, int num_ranks, uint64_t seed,
                                   bool shuffle, Error* e) {
    memset(d, 0, sizeof *d);
    d->B = B;
    d->T = T;
    d->rank = rank;
    d->num_ranks = num_ranks;
    d->seed = seed;
    d->shuffle = shuffle;
    d->vocab_limit = (int64_t)INT32_MAX + 1;
    d->file_shard = -1;
    bool ok = dataloader_find_shards(d, pattern, e);
    uint64_t most_rows = 0;
    for (int i = 0, vocab_from = -1, print_from = -1; ok && i < d->num_shards; i++) {
        ok = dataloader_check_shard(d, i, &vocab_from, &print_from, e);
        if (ok && d->shards[i].num_rows > most_rows) { most_rows = d->shards[i].num_rows; }
    }
    uint64_t batch = (uint64_t)B * (uint64_t)num_ranks;
    if (ok && d->rows_per_epoch < batch) {
        ok = fail(e,
                  "%s: holds %llu rows of --seq %d in all, wanted at least %llu, one batch (--batch %d on %d rank%s)\n"
                  "  hint: use a smaller --batch or --seq, or more text",
                  pattern, (unsigned long long)d->rows_per_epoch, T, (unsigned long long)batch, B, num_ranks,
                  num_ranks == 1 ? "" : "s");
    }
    if (!ok) {
        dataloader_close(d);
        return false;
    }
    if (d->vocab_size) { d->vocab_limit = d->vocab_size; }
    d->order = (int*)xmalloc((size_t)d->num_shards * sizeof *d->order);
    d->order_start = (uint64_t*)xmalloc(((size_t)d->num_shards + 1) * sizeof *d->order_start);
    if (shuffle) { d->row_order = (uint32_t*)xmalloc((size_t)most_rows * sizeof *d->row_order); }
    d->raw = (unsigned char*)xmalloc(((size_t)T + 1) * (size_t)d->token_bytes);
    d->ahead_rows = (int32_t*)xmalloc((size_t)B * ((size_t)T + 1) * sizeof *d->ahead_rows);
    pthread_mutex_init(&d->mutex, NULL);
    pthread_cond_init(&d->changed, NULL);
    dataloader_order_epoch(d, 0);
    return true;
}

/* Checks the data against the model and the run's tokenizer (fingerprint 0: none). From then on, reading refuses tokens
 * outside the model's vocabulary. Call it before the first batch. */
static inline bool dataloader_check_vocab(DataLoader* d, int model_vocab, uint64_t tokenizer_fingerprint, Error* e) {
    const char* path = d->shards[0].path;
    dataloader_wait(d);
    if (d->vocab_size > model_vocab) {
        return fail(e,
                    "%s: vocabulary is %d tokens, but the model has only %d\n"
                    "  hint: tokenize the text again with the model's tokenizer: ./tokenize --tokenizer DIR -o OUT.bin FILE",
                    path, d->vocab_size, model_vocab);
    }
    if (d->fingerprint && tokenizer_fingerprint && d->fingerprint != tokenizer_fingerprint) {
        return fail(e,
                    "%s: was made with another tokenizer (fingerprint %016llx) than this run's (%016llx)\n"
                    "  hint: give the tokenizer that made it as --tokenizer DIR, or tokenize the text again",
                    path, (unsigned long long)d->fingerprint, (unsigned long long)tokenizer_fingerprint);
    }
    if (!d->vocab_size || model_vocab < d->vocab_size) { d->vocab_limit = model_vocab; }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the fingerprint

enum {
    FINGERPRINT_BLOCK = 4096,   // bytes
    FINGERPRINT_BLOCKS = 1024,  // most blocks read in all, but two of each shard
};

/* Adds one shard to the two checksums: name (its name without folders, size, header) and content (its sampled blocks). */
static bool dataloader_add_print(const DataLoader* d, const DataShard* s, Crc* name, Crc* content, Error* e) {
    const char* slash = strrchr(s->path, '/');
    const char* base = slash ? slash + 1 : s->path;
    unsigned char block[FINGERPRINT_BLOCK];
    uint64_t size = 0;
    FILE* f = open_input(s->path, &size, e);
    if (!f) { return false; }
    bool ok = read_at(fileno(f), 0, block, TOKENFILE_HEADER_BYTES, s->path, "the header", e);
    crc_add(name, base, strlen(base) + 1);
    crc_add(name, &size, sizeof size);
    if (ok) { crc_add(name, block, TOKENFILE_HEADER_BYTES); }

    const uint64_t blocks = ceil_div(size, FINGERPRINT_BLOCK);
    const uint64_t share = size_max(FINGERPRINT_BLOCKS / (size_t)d->num_shards, 2), count = size_min(blocks, share);
    for (uint64_t k = 0; ok && k < count; k++) {
        const uint64_t place = count > 1 ? k * (blocks - 1) / (count - 1) : 0, at = place * FINGERPRINT_BLOCK;
        const size_t bytes = size_min(size - at, FINGERPRINT_BLOCK);
        ok = read_at(fileno(f), at, block, bytes, s->path, "a block", e);
        if (ok) { crc_add(content, block, bytes); }
    }
    fclose(f);
    return ok;
}

/* Returns in *fingerprint what tells this data from other data: in the high half a CRC-32C of each shard's name without
 * folders, its size and header; in the low half one of its first block, its last and some spread evenly between them. So
 * moving the files changes nothing, and the cost does not grow with them. A change between the blocks shows only in files
 * that carry a checksum in their header (tokenfile.h). */
static inline bool dataloader_fingerprint(const DataLoader* d, uint64_t* fingerprint, Error* e) {
    Crc name, content;
    crc_begin(&name);
    crc_begin(&content);
    for (int i = 0; i < d->num_shards; i++) {
        if (!dataloader_add_print(d, &d->shards[i], &name, &content, e)) { return false; }
    }
    *fingerprint = (uint64_t)crc_end(&name) << 32 | crc_end(&content);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the stream

/* Makes the next batch start at `row` of the stream. A run resumed there sees the same tokens as one that never stopped. */
static inline void dataloader_seek(DataLoader* d, uint64_t row) { d->row = row; }

static void dataloader_ask(DataLoader* d, uint64_t first) {
    d->ahead_row = first;
    if (!d->threaded) {
        dataloader_read_ahead(d);
        d->ahead = AHEAD_READY;
        return;
    }
    pthread_mutex_lock(&d->mutex);
    d->ahead = AHEAD_ASKED;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mutex);
}

/* Reads this rank's next B rows into inputs x and targets y, and advances by num_ranks * B rows. On an error (a token
 * outside the vocabulary, a file that vanished or shrank) the position stays. */
static inline bool dataloader_next(DataLoader* d, int32_t* x /* (B, T) */, int32_t* y /* (B, T) */, Error* e) {
    uint64_t first = d->row + (uint64_t)d->rank * (uint64_t)d->B, step = (uint64_t)d->num_ranks * (uint64_t)d->B;
    size_t T = (size_t)d->T;
    if (!d->thread_tried) { dataloader_start_thread(d); }
    dataloader_wait(d);
    if (d->ahead != AHEAD_READY || d->ahead_row != first || !d->ahead_ok) {
        dataloader_ask(d, first);
        dataloader_wait(d);
    }
    if (!d->ahead_ok) { return fail(e, "%s", d->ahead_error.msg); }
    for (size_t b = 0; b < (size_t)d->B; b++) {
        const int32_t* tokens = d->ahead_rows + b * (T + 1);
        memcpy(x + b * T, tokens, T * sizeof *x);
        memcpy(y + b * T, tokens + 1, T * sizeof *y);
    }
    d->row += step;
    if (d->threaded) { dataloader_ask(d, d->row + (uint64_t)d->rank * (uint64_t)d->B); }
    return true;
}

#endif
