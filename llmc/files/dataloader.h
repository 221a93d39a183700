/* dataloader.h -- reads rows of tokens from token files (tokenfile.h), in an order that is a pure function of (seed, row).
 *
 * A row is T+1 consecutive tokens of one shard, starting at a multiple of T: T inputs and, shifted by one, T targets. A shard
 * of n tokens holds (n - 1) / T rows; the tokens left over at its end are not read. rows.h describes the rows of data with a
 * mask, and of data packed by documents; each of these rows has a trained target. Shards are the files that match a glob
 * pattern, sorted by the bytes of their paths. An epoch visits every row once, shard by shard. With `shuffle`, this is row
 * order 2:
 *
 *   The order of the shards in an epoch is a Fisher-Yates permutation:
 *     for i = n-1 ... 1:  j = philox_below(seed, RAND_SHUFFLE_SHARDS, stream = epoch, index = i, i + 1);  swap(a[i], a[j])
 *
 *   Place x of a shard of n rows is row P(x). P is a keyed permutation of 0 ... n-1, the generalized Feistel cipher with
 *   cycle-walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002):
 *     key = words 0 and 1 (high, low) of philox(seed, RAND_ORDER_ROWS, stream = shard, index = epoch)
 *     a = smallest even number with a * a >= n;  b = smallest number with a * b >= n
 *     do  l = x mod a;  r = x div a;
 *         for round = 0 ... 15: even: l = (l + philox_below(key, RAND_ORDER_ROWS, stream = round, index = r, a)) mod a
 *                               odd:  r = (r + philox_below(key, RAND_ORDER_ROWS, stream = round, index = l, b)) mod b
 *         x = a * r + l
 *     while x >= n
 *   `shard` is the shard's place in sorted order. a * b exceeds n by less than a, so in a large shard a second walk is rare.
 *   If a and b were both odd, P would always be an even permutation; 8 rounds leave a pattern in a shard of 8 rows.
 *
 * P needs no table: a shard of 10^9 rows opens, or resumes anywhere, within a millisecond, in 2 MB of memory for the process.
 * It costs 1 microsecond a row on one core of a 2-core machine, where reading a row of 1,024 tokens from the page cache costs
 * 3.
 *
 * One number holds the whole position: `row` counts the rows given out so far, over all ranks and epochs (epoch = row /
 * rows_per_epoch). Each dataloader_next() advances by num_ranks * B rows; rank r gets the B rows from row + r * B on. A
 * batch that passes the end of an epoch continues in the next epoch.
 *
 * A thread reads the next batch while the step computes. This saves time and changes nothing else: if no thread can be
 * started, batches are read on demand. The dataloader_next() that asks for a batch reports the thread's errors.
 *
 * Opening checks every shard's header. A token outside the vocabulary is found when its row is read, or by dataloader_scan(),
 * which reads everything. If a shard is gone or its size has changed, reading its row is an error. The position stays, so
 * reading works again once the file is back.
 */
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include "llmc/base/utils.h"       // first, since it asks for the functions beyond C11; defines: fail, open_input, xmalloc
#include "llmc/base/crc.h"         // defines: Crc, crc_begin, crc_add, crc_end
#include "llmc/base/rand.h"        // defines: philox_below, RAND_ORDER_ROWS, RAND_SHUFFLE_SHARDS
#include "llmc/base/text.h"        // defines: text_plural
#include "llmc/files/folder.h"     // defines: file_name
#include "llmc/files/rows.h"       // defines: RowRule, RowIndex, RowCounts, rows_open, rows_read
#include "llmc/files/tokenfile.h"  // defines: TokenReader, tokenfile_open, tokenfile_close, tokenfile_scan
#include <glob.h>
#include <pthread.h>
#include <signal.h>

typedef struct {
    char* path;
    uint64_t num_tokens;
    uint64_t num_rows;  // (num_tokens - 1) / T, or the rows of `index`; at least 1
    TokenFileHeader header;
    RowIndex index;  // if d->indexed
} DataShard;

/* Reads row `row` of a stream: inputs, targets, and the starts of the documents (rows.h). */
typedef bool (*ReadRow)(void* ctx, uint64_t row, int32_t* out /* (3, T) */, Error* e);

/* The share of a process in a stream: B rows of T tokens a batch. Each of num_ranks processes reads as many. */
typedef struct {
    int B, T;  // above 0
    int rank, num_ranks;
} BatchShare;

typedef enum { AHEAD_EMPTY, AHEAD_ASKED, AHEAD_READY } AheadState;

typedef struct DataLoader {
    // set when the loader opens; only `row` changes later
    DataShard* shards;  // (num_shards), sorted by path; then num_apart files that are left out, since they are of rule->apart
    int num_shards, num_apart;
    int B, T;             // this rank's batch: B rows of T tokens
    int rank, num_ranks;  // this process among those that share the stream
    uint64_t seed;
    bool shuffle;
    int token_bytes;                            // 2 or 4, in all shards
    int vocab_size;                             // vocabulary of the tokenizer that made the data; 0: unknown
    uint64_t fingerprint;                       // of that tokenizer; 0: unknown
    const char *vocab_from, *fingerprint_from;  // paths of the first files that give them
    bool masked;                                // the shards have a mask
    Documents documents;                        // never auto
    bool indexed;                               // rows come from the shards' indexes, not from the multiples of T alone
    RowCounts counts;                           // of all shards, if indexed
    uint64_t num_tokens;                        // of all shards
    uint64_t rows_per_epoch;                    // of all shards
    uint64_t row;                               // the next row for rank 0; see above
    ReadRow read_row;                           // where its rows come from (mix.h); NULL: from the shards
    void* read_ctx;
    int32_t* starts;  // (B, T) of the last batch, if its documents do not attend to each other; otherwise NULL

    // the reader; belongs to the thread while ahead == AHEAD_ASKED
    int64_t vocab_limit;    // ids must be below
    uint64_t order_epoch;   // the epoch `order` is for
    int* order;             // (num_shards) the shards in the epoch's order
    uint64_t* order_start;  // (num_shards + 1) rows of the epoch before each place of `order`
    TokenReader file;       // the shard opened last, file_shard
    int file_shard;         // -1: none
    int32_t* scratch;       // rows_scratch(T) bytes

    // one batch read ahead
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;  // signals a change of `ahead` or `quit`
    bool threaded;           // the thread runs
    bool thread_tried;       // an attempt to start it was made
    bool quit;
    AheadState ahead;
    uint64_t ahead_row;   // the batch's first row of this rank
    int32_t* ahead_rows;  // (B, 3, T)
    bool ahead_ok;
    Error ahead_error;
} DataLoader;

// ---------------------------------------------------------------------------------------------------------------------
// the order of rows

enum { ORDER_ROUNDS = 16 };

/* Returns which row of a shard of n rows comes at place x of an epoch: P(x) at the top of the file. */
static inline uint64_t dataloader_order_row(uint64_t x, uint64_t n, uint64_t seed, uint32_t shard, uint64_t epoch) {
    const Philox k = philox(seed, RAND_ORDER_ROWS, shard, epoch);
    const uint64_t key = (uint64_t)k.v[0] << 32 | k.v[1];
    uint64_t a = (uint64_t)sqrt((double)n);  // within one of the root, since a file holds fewer than 2^62 tokens
    while (a * a < n) { a++; }
    while ((a - 1) * (a - 1) >= n) { a--; }
    a = round_up(a, 2);
    const uint64_t b = ceil_div(n, a);
    do {
        uint64_t l = x % a, r = x / a;
        for (uint32_t round = 0; round < ORDER_ROUNDS; round += 2) {
            l = (l + philox_below(key, RAND_ORDER_ROWS, round, r, a)) % a;
            r = (r + philox_below(key, RAND_ORDER_ROWS, round + 1, l, b)) % b;
        }
        x = a * r + l;
    } while (x >= n);
    return x;
}

/* Fills a[0..n) with 0 ... n-1 in random order: the Fisher-Yates permutation at the top of the file. */
static inline void dataloader_permute(int* a, int n, uint64_t seed, RandPurpose purpose, uint32_t stream) {
    for (int i = 0; i < n; i++) { a[i] = i; }
    for (int i = n - 1; i >= 1; i--) {
        uint64_t j = philox_below(seed, purpose, stream, (uint64_t)i, (uint64_t)i + 1);
        int t = a[i];
        a[i] = a[j];
        a[j] = t;
    }
}

static void dataloader_order_epoch(DataLoader* d, uint64_t epoch) {
    if (d->shuffle) {
        dataloader_permute(d->order, d->num_shards, d->seed, RAND_SHUFFLE_SHARDS, (uint32_t)epoch);
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
    if (d->shuffle) {
        *row_in_shard = dataloader_order_row(*row_in_shard, d->shards[*shard].num_rows, d->seed, (uint32_t)*shard, epoch);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// reading

static void dataloader_close_shard(DataLoader* d) {
    tokenfile_close(&d->file);
    d->file_shard = -1;
}

/* Opens the shard unless it is open, and checks that its size has not changed since the loader was opened. */
static bool dataloader_open_shard(DataLoader* d, int shard, Error* e) {
    const DataShard* s = &d->shards[shard];
    const char* path = s->path;
    const uint64_t want = tokenfile_bytes(&s->header);
    struct stat now;
    if (d->file_shard != shard) {
        uint64_t size;
        dataloader_close_shard(d);
        const TokenReader file = {open_input(path, &size, e), path, s->header, d->vocab_limit};
        if (!file.f) { return false; }
        d->file = file;
        d->file_shard = shard;
    }
    if (fstat(fileno(d->file.f), &now) != 0) { return fail(e, "%s: cannot read its size: %s", path, strerror(errno)); }
    if ((uint64_t)now.st_size == want) { return true; }
    return fail(e, "%s: has %llu bytes, wanted %llu: the file was %s while it was in use", path,
                (unsigned long long)now.st_size, (unsigned long long)want, (uint64_t)now.st_size < want ? "cut" : "extended");
}

/* Reads row `row` of the stream. After an error the shard is closed: the next try opens it anew. */
static bool dataloader_read_row(DataLoader* d, uint64_t row, int32_t* out /* (3, T) */, Error* e) {
    int shard;
    uint64_t row_in_shard;
    dataloader_locate(d, row, &shard, &row_in_shard);
    const bool mask = d->documents == DOCUMENTS_MASK;
    const bool ok = dataloader_open_shard(d, shard, e) &&
                    rows_read(&d->shards[shard].index, &d->file, row_in_shard, (size_t)d->T, mask, out, d->scratch, e);
    if (!ok) { dataloader_close_shard(d); }
    return ok;
}

/* Returns the padding of row `row` of the stream in tokens. The reader must be idle: dataloader_wait(). */
static inline uint64_t dataloader_padding(DataLoader* d, uint64_t row) {
    int shard;
    uint64_t row_in_shard;
    if (!d->indexed) { return 0; }
    dataloader_locate(d, row, &shard, &row_in_shard);
    return rows_padding(&d->shards[shard].index, row_in_shard, (size_t)d->T);
}

static void dataloader_read_ahead(DataLoader* d) {
    d->ahead_error.msg[0] = 0;
    d->ahead_ok = true;
    for (int b = 0; b < d->B && d->ahead_ok; b++) {
        int32_t* out = d->ahead_rows + (size_t)b * 3 * (size_t)d->T;
        const uint64_t row = d->ahead_row + (uint64_t)b;
        d->ahead_ok = d->read_row ? d->read_row(d->read_ctx, row, out, &d->ahead_error)
                                  : dataloader_read_row(d, row, out, &d->ahead_error);
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
             "  hint: " TOKENFILE_FROM_TEXT,
             pattern);
    }
    globfree(&g);
    return ok;
}

/* Moves files that `apart` (or NULL) has as well to the end of the list. One file stays in any case. */
static void dataloader_set_apart(DataLoader* d, const DataLoader* apart) {
    for (int i = d->num_shards - 1; apart && i >= 0 && d->num_shards > 1; i--) {
        const DataShard s = d->shards[i];
        bool shared = false;
        for (int k = 0; k < apart->num_shards; k++) { shared |= same_file(s.path, apart->shards[k].path); }
        if (!shared) { continue; }
        const int last = d->num_shards + d->num_apart++ - 1;
        memmove(d->shards + i, d->shards + i + 1, (size_t)(last - i) * sizeof s);
        d->shards[last] = s;
        d->num_shards--;
    }
}

/* Takes over the vocabulary and the tokenizer of a file (0: unknown), unless a file before it had others. */
static bool dataloader_join(DataLoader* d, int vocab_size, uint64_t fingerprint, const char* path, Error* e) {
    if (vocab_size && d->vocab_size && vocab_size != d->vocab_size) {
        return fail(e, "%s: vocabulary is %d tokens, but in %s it is %d: wanted all alike", path, vocab_size, d->vocab_from,
                    d->vocab_size);
    }
    if (fingerprint && d->fingerprint && fingerprint != d->fingerprint) {
        return fail(e, "%s: was made with another tokenizer (fingerprint %016llx) than %s (%016llx): wanted all alike", path,
                    (unsigned long long)fingerprint, d->fingerprint_from, (unsigned long long)d->fingerprint);
    }
    if (vocab_size && !d->vocab_size) { d->vocab_size = vocab_size, d->vocab_from = path; }
    if (fingerprint && !d->fingerprint) { d->fingerprint = fingerprint, d->fingerprint_from = path; }
    return true;
}

/* Checks shard i by itself and against the shards before it. */
static bool dataloader_check_shard(DataLoader* d, int i, Error* e) {
    DataShard* s = &d->shards[i];
    TokenReader file;
    if (!tokenfile_open(&file, s->path, e)) { return false; }
    tokenfile_close(&file);
    const TokenFileHeader h = file.h;
    const char* first = d->shards[0].path;
    if (i > 0 && h.token_bytes != d->token_bytes) {
        return fail(e, "%s: has uint%d tokens, but %s has uint%d: wanted all shards alike", s->path, 8 * h.token_bytes, first,
                    8 * d->token_bytes);
    }
    if (i > 0 && h.masked != d->masked) {
        return fail(e, "%s: has %s mask, but %s has %s: wanted all shards alike", s->path, h.masked ? "a" : "no", first,
                    h.masked ? "none" : "one");
    }
    d->token_bytes = h.token_bytes;
    d->masked = h.masked;
    s->header = h;
    s->num_tokens = h.num_tokens;
    d->num_tokens += s->num_tokens;
    return dataloader_join(d, h.vocab_size, h.fingerprint, s->path, e);
}

/* Counts the rows of shard i, or makes its index. */
static bool dataloader_find_rows(DataLoader* d, int i, const RowRule* rule, Error* e) {
    DataShard* s = &d->shards[i];
    const TokenFileHeader h = s->header;
    const bool cross = d->documents == DOCUMENTS_CROSS;
    if (h.num_tokens < (cross ? (uint64_t)d->T + 1 : 2)) {
        const char* way = !d->shuffle || d->num_shards > 1 ? "leave this file out" : "take more text";
        if (h.num_tokens < 2) {
            return fail(e, "%s: holds %d token%s: there is no text in it", s->path, (int)h.num_tokens, h.num_tokens ? "" : "s");
        }
        return fail(e,
                    "%s: holds %llu tokens, wanted at least %lld, one row of --seq %d and its last target\n"
                    "  hint: use --seq %d or less, or %s",
                    s->path, (unsigned long long)h.num_tokens, (long long)d->T + 1, d->T, (int)h.num_tokens - 1, way);
    }
    s->num_rows = (h.num_tokens - 1) / (uint64_t)d->T;
    if (d->indexed) {
        TokenReader file;
        const bool ok = tokenfile_open(&file, s->path, e) && rows_open(&s->index, &file, (size_t)d->T, d->documents, rule, e);
        tokenfile_close(&file);
        if (!ok) { return false; }
        s->num_rows = s->index.counts.rows;
        rows_add_counts(&d->counts, &s->index.counts);
    }
    d->rows_per_epoch += s->num_rows;
    return true;
}

/* Decides how rows are made, once the shards are known. */
static bool dataloader_choose_rule(DataLoader* d, const char* pattern, const RowRule* rule, Error* e) {
    d->documents = documents_of(rule->documents, d->masked);
    d->indexed = d->masked || d->documents != DOCUMENTS_CROSS;
    const bool named = rule->fingerprint && d->fingerprint;
    const bool known = rule->bos >= 0 && (named ? rule->fingerprint == d->fingerprint : rule->certain || !rule->fingerprint);
    int marked = 0;  // shards that say themselves where their documents begin
    while (marked < d->num_shards && d->shards[marked].header.starts) { marked++; }
    if (d->documents == DOCUMENTS_CROSS || known || marked == d->num_shards) { return true; }
    return fail(e,
                "%s: the tokenizer that made it is not known, and so not what its documents begin with%s\n"
                "  hint: give it as --tokenizer, or read across documents with --documents cross",
                pattern, d->masked ? "; data with a mask is read by documents" : "");
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
    if (d->ahead_rows) {  // opening got as far as the mutex
        pthread_mutex_destroy(&d->mutex);
        pthread_cond_destroy(&d->changed);
    }
    for (int i = 0; i < d->num_shards + d->num_apart; i++) {
        free(d->shards[i].path);
        rows_free(&d->shards[i].index);
    }
    free(d->shards);
    free(d->order);
    free(d->order_start);
    free(d->scratch);
    free(d->ahead_rows);
    free(d->starts);
    dataloader_close_shard(d);
    memset(d, 0, sizeof *d);
}

/* Takes batches of B rows. No batch has been read yet. */
static inline void dataloader_set_batch(DataLoader* d, int B) {
    const size_t row = (size_t)d->T * sizeof(int32_t);
    d->B = B;
    d->ahead_rows = (int32_t*)xrealloc(d->ahead_rows, (size_t)B * 3 * row);
    if (d->documents != DOCUMENTS_MASK) { return; }
    free(d->starts);
    d->starts = (int32_t*)xcalloc((size_t)B, row);
}

/* Makes room for the batches that are read ahead. */
static void dataloader_open_batches(DataLoader* d, BatchShare share) {
    d->T = share.T;
    d->rank = share.rank;
    d->num_ranks = share.num_ranks;
    dataloader_set_batch(d, share.B);
    pthread_mutex_init(&d->mutex, NULL);
    pthread_cond_init(&d->changed, NULL);
}

/* Opens every file that `pattern` names (a path or a glob pattern) and checks all headers. Starts at row 0. Fails without a
 * file, and on a folder, a damaged header, or a size that contradicts the header. Shards may not differ in token width, mask,
 * vocabulary or tokenizer. Each shard needs a row, and all together a batch for all ranks. With documents the data needs a
 * BOS. Do not move the loader in memory until it is closed. */
static inline bool dataloader_open(DataLoader* d, const char* pattern, BatchShare share, uint64_t seed, bool shuffle,
                                   const RowRule* rule, Error* e) {
    memset(d, 0, sizeof *d);
    d->T = share.T;
    d->seed = seed;
    d->shuffle = shuffle;
    d->vocab_limit = (int64_t)INT32_MAX + 1;
    d->file_shard = -1;
    bool ok = dataloader_find_shards(d, pattern, e);
    if (ok) { dataloader_set_apart(d, rule->apart); }
    for (int i = 0; ok && i < d->num_shards; i++) { ok = dataloader_check_shard(d, i, e); }
    ok = ok && dataloader_choose_rule(d, pattern, rule, e);
    for (int i = 0; ok && i < d->num_shards; i++) { ok = dataloader_find_rows(d, i, rule, e); }
    const uint64_t batch = (uint64_t)share.B * (uint64_t)share.num_ranks;
    if (ok && d->rows_per_epoch < batch) {
        ok = fail(e,
                  "%s: holds %llu row%s of --seq %d in all, wanted at least %llu, one batch (--batch %d on %d rank%s)\n"
                  "  hint: use a smaller --batch or --seq, or more text",
                  pattern, (unsigned long long)d->rows_per_epoch, text_plural((int64_t)d->rows_per_epoch), d->T,
                  (unsigned long long)batch, share.B, share.num_ranks, text_plural(share.num_ranks));
    }
    if (!ok) {
        dataloader_close(d);
        return false;
    }
    if (d->vocab_size) { d->vocab_limit = d->vocab_size; }
    d->order = (int*)xmalloc((size_t)d->num_shards * sizeof *d->order);
    d->order_start = (uint64_t*)xmalloc(((size_t)d->num_shards + 1) * sizeof *d->order_start);
    d->scratch = (int32_t*)xmalloc(rows_scratch((size_t)share.T));
    dataloader_open_batches(d, share);
    dataloader_order_epoch(d, 0);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// checking all of it

/* Reads every shard whole: each id must be below the vocabulary, each checksum must be right. `progress` (or NULL) counts the
 * bytes. */
static inline bool dataloader_scan(const DataLoader* d, Progress* progress, Error* e) {
    for (int i = 0; i < d->num_shards; i++) {
        TokenReader file;
        if (!tokenfile_open(&file, d->shards[i].path, e)) { return false; }
        file.limit = d->vocab_limit;
        const bool ok = tokenfile_scan(&file, progress, e);
        tokenfile_close(&file);
        if (!ok) { return false; }
    }
    return true;
}

/* Checks the data against the model and the run's tokenizer (fingerprint 0: none). From then on, reading refuses tokens
 * outside the model's vocabulary. The tokenizer may have tokens that the model lacks. Then the data is read whole here, so that
 * such a token is refused before the first step. Call it before the first batch. */
static inline bool dataloader_check_vocab(DataLoader* d, int model_vocab, uint64_t tokenizer_fingerprint, Error* e) {
    const char* path = d->shards[0].path;
    dataloader_wait(d);
    if (d->vocab_size > model_vocab && !(d->fingerprint && d->fingerprint == tokenizer_fingerprint)) {
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
    return d->vocab_size <= model_vocab || dataloader_scan(d, NULL, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// the fingerprint

enum {
    FINGERPRINT_BLOCK = 4096,   // bytes
    FINGERPRINT_BLOCKS = 1024,  // most blocks read in all; each shard gives at least two
};

/* Adds one shard to the two checksums: name (its name without folders, size, header) and content (its sampled blocks). */
static bool dataloader_add_print(const DataLoader* d, const DataShard* s, Crc* name, Crc* content, Error* e) {
    const char* base = file_name(s->path);
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

/* Returns in *fingerprint a number that differs for other data. The high half is a CRC-32C of each shard's name without
 * folders, its size and header. The low half is a CRC-32C of each shard's first block, its last one and some spread evenly
 * between them. So moving the files changes nothing, and the cost does not grow with them. A change between the blocks shows
 * only in files that carry a checksum in their header (tokenfile.h). */
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

/* Reads this rank's next B rows into inputs x, targets y and d->starts (unless that is NULL), and advances by num_ranks * B
 * rows. On an error (a token outside the vocabulary, a file that vanished or shrank) the position stays. */
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
        const int32_t* row = d->ahead_rows + b * 3 * T;
        memcpy(x + b * T, row, T * sizeof *x);
        memcpy(y + b * T, row + T, T * sizeof *y);
        if (d->starts) { memcpy(d->starts + b * T, row + 2 * T, T * sizeof *row); }
    }
    d->row += step;
    if (d->threaded) { dataloader_ask(d, d->row + (uint64_t)d->rank * (uint64_t)d->B); }
    return true;
}

#endif
