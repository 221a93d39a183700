/* train_bpe.h -- trains a tokenizer on the pieces of texts, and writes it as tokenizer.json.
 *
 * Threads count pieces in tables of their own, which they add to the table of all (bpe.h), so the memory does not grow
 * with the threads or the text. Their order changes no count, and so no id. One thread learns the merges (bpe.h).
 */
#ifndef DATA_TRAIN_BPE_H
#define DATA_TRAIN_BPE_H

#include "dev/data/token_writer.h"      // defines: TokenFile, token_files_publish
#include "dev/data/tokenize_flags.h"    // defines: Args
#include "llmc/base/text.h"             // defines: text_count, print_names
#include "llmc/base/threads.h"          // defines: max_threads, thread_number
#include "llmc/base/progress.h"         // defines: Progress, progress_begin, progress_add, progress_end
#include "dev/data/bpe.h"               // defines: Bpe, bpe_begin, bpe_next, bpe_tokenizer, bpe_free
#include "llmc/text/tokenizer_write.h"  // defines: write_tokenizer_json

enum { THREAD_PIECES = 1 << 15 };  // distinct pieces that a thread counts before it adds them to all

typedef struct Counting {
    PieceCounts all;
    PieceCounts* own;  // (threads) what each thread has counted, and not added to `all` yet
    size_t threads;
} Counting;

static inline Counting* counting_begin(Counting* c) {
    c->threads = max_threads();
    c->own = (PieceCounts*)xcalloc(c->threads, sizeof(PieceCounts));
    piece_counts_init(&c->all, hash_seed());
    for (size_t i = 0; i < c->threads; i++) { piece_counts_init(&c->own[i], c->all.seed); }
    return c;
}

/* Counts the pieces of a text, in the calling thread's table. */
static inline void counting_add(Counting* c, const char* text, size_t len) {
    PieceCounts* own = &c->own[thread_number()];
    piece_counts_text(own, text, len);
    if (own->used < THREAD_PIECES) { return; }
#pragma omp critical
    piece_counts_fold(&c->all, own);
}

/* Adds all tables to c->all, and frees the others. */
static inline void counting_end(Counting* c) {
    for (size_t i = 0; i < c->threads; i++) {
        piece_counts_fold(&c->all, &c->own[i]);
        piece_counts_free(&c->own[i]);
    }
    free(c->own);
}

/* Learns a tokenizer from the pieces, which it frees, and writes it to `out`, which token_file_begin() began; `start` is
 * when the job began. */
static inline bool write_trained(TokenFile out[2], const Args* a, PieceCounts* pieces, double start, Error* e) {
    Bpe bpe;
    Tokenizer t;
    char text[2][32];
    if (pieces->used == 0) {
        return fail(e, "%s: holds no text%s", a->files[0], a->num_files > 1 ? ", nor do the others" : "");
    }
    text_count(pieces->used, text[0], sizeof text[0]);
    bpe_begin(&bpe, pieces, a->train_bpe - a->num_specials);
    Progress progress = progress_begin(stdout, "merge", bpe.most - bpe.num_tokens, "tokens");
    while (bpe_next(&bpe)) { progress_add(&progress, 1); }
    progress_end(&progress);
    bpe_tokenizer(&t, &bpe, a->num_specials);
    bpe_free(&bpe);
    write_tokenizer_json(out->f, &t);
    const bool ok = close_output(out->f, out->tmp, e) && token_files_publish(out, out + 1, e);
    if (ok) {
        print_names(stdout, "%s: %s tokens (%" PRIu64 " special) from %s distinct pieces, %.1f s\n", out->path,
                    text_count((uint64_t)t.vocab_size, text[1], sizeof text[1]), a->num_specials, text[0],
                    now_seconds() - start);
    }
    if (ok && (uint64_t)t.vocab_size < a->train_bpe) {
        printf("  the text has no more pairs to merge: %s tokens fewer than asked for\n",
               text_count(a->train_bpe - (uint64_t)t.vocab_size, text[1], sizeof text[1]));
    }
    tokenizer_free(&t);
    return ok;
}

#endif
