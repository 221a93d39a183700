/* merge_queue.h -- the queue of the merges of a long piece: the lowest rank comes first, of equal ranks the leftmost place.
 *
 * Ranks below `next_rank` are on a binary heap. Higher ranks have a list each; when the heap and the run are empty, the next
 * list becomes the run, sorted by place. Then all merges of one rank follow each other in the order of the text. With one heap
 * for all ranks, a piece of 20 MB would miss the cache at each step. A merge may make a pair of lower rank: the heap takes it.
 * For pieces too short to be worth the lists, next_rank is UINT32_MAX and the heap holds all.
 */
#ifndef LLMC_MERGE_QUEUE_H
#define LLMC_MERGE_QUEUE_H

#include "llmc/base/utils.h"  // defines: xrealloc, xgrow

#define MERGE_LISTS_MAX ((size_t)1 << 29)  // most bytes of a piece with lists: a piece of n bytes makes less than 5 n entries

typedef struct {
    uint32_t place, next;  // next entry of the list; 0: none
} MergeEntry;

typedef struct {
    uint64_t* heap;  // rank << 32 | place, smallest on top
    size_t heap_count, heap_cap;

    uint32_t next_rank, num_ranks;
    uint32_t* lists;      // (num_ranks) newest entry of each rank; 0: none
    MergeEntry* entries;  // from 1 on
    size_t entry_count, entry_cap;
    uint32_t* run;  // places with rank next_rank - 1, ascending
    size_t run_at, run_count, run_cap;
} MergeQueue;

static inline void merge_queue_free(MergeQueue* q) {
    free(q->heap);
    free(q->lists);
    free(q->entries);
    free(q->run);
}

/* Empties the queue for a piece of n bytes with ranks below num_ranks. */
static inline void merge_queue_start(MergeQueue* q, size_t n, uint32_t num_ranks) {
    q->heap_count = q->entry_count = q->run_at = q->run_count = 0;
    q->next_rank = UINT32_MAX;
    q->num_ranks = num_ranks;
    if (n < num_ranks || n > MERGE_LISTS_MAX) { return; }
    q->next_rank = 0;
    q->lists = (uint32_t*)xrealloc(q->lists, num_ranks * sizeof(uint32_t));
    memset(q->lists, 0, num_ranks * sizeof(uint32_t));
}

static inline void merge_heap_push(MergeQueue* q, uint64_t x) {
    q->heap = (uint64_t*)xgrow(q->heap, q->heap_count, &q->heap_cap, sizeof(uint64_t));
    size_t i = q->heap_count++;
    for (; i > 0 && q->heap[(i - 1) / 2] > x; i = (i - 1) / 2) { q->heap[i] = q->heap[(i - 1) / 2]; }
    q->heap[i] = x;
}

static inline uint64_t merge_heap_pop(MergeQueue* q) {
    uint64_t top = q->heap[0], x = q->heap[--q->heap_count];
    size_t i = 0, n = q->heap_count;
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        child += child + 1 < n && q->heap[child + 1] < q->heap[child];
        if (q->heap[child] >= x) { break; }
        q->heap[i] = q->heap[child];
    }
    q->heap[i] = x;
    return top;
}

static inline void merge_queue_push(MergeQueue* q, uint32_t rank, uint32_t place) {
    if (rank < q->next_rank) {
        merge_heap_push(q, (uint64_t)rank << 32 | place);
        return;
    }
    q->entries = (MergeEntry*)xgrow(q->entries, q->entry_count + 1, &q->entry_cap, sizeof(MergeEntry));
    MergeEntry entry = {place, q->lists[rank]};
    q->entries[++q->entry_count] = entry;
    q->lists[rank] = (uint32_t)q->entry_count;
}

static inline int compare_places(const void* a, const void* b) {
    const uint32_t x = *(const uint32_t*)a, y = *(const uint32_t*)b;
    return (x > y) - (x < y);
}

/* Makes the next list that is not empty the run; false if there is none. */
static inline bool merge_queue_next_run(MergeQueue* q) {
    q->run_at = q->run_count = 0;
    while (q->next_rank < q->num_ranks && q->run_count == 0) {
        bool sorted = true;
        for (uint32_t i = q->lists[q->next_rank++]; i; i = q->entries[i].next) {
            q->run = (uint32_t*)xgrow(q->run, q->run_count, &q->run_cap, sizeof(uint32_t));
            const uint32_t place = q->entries[i].place;
            sorted = sorted && (q->run_count == 0 || q->run[q->run_count - 1] <= place);
            q->run[q->run_count++] = place;
        }
        if (!sorted) { qsort(q->run, q->run_count, sizeof *q->run, compare_places); }
    }
    return q->run_count > 0;
}

/* Takes the first entry and returns rank << 32 | place; UINT64_MAX if the queue is empty. */
static inline uint64_t merge_queue_pop(MergeQueue* q) {
    if (q->heap_count == 0 && q->run_at == q->run_count && !merge_queue_next_run(q)) { return UINT64_MAX; }
    if (q->run_at == q->run_count) { return merge_heap_pop(q); }
    const uint64_t next = (uint64_t)(q->next_rank - 1) << 32 | q->run[q->run_at];
    if (q->heap_count > 0 && q->heap[0] < next) { return merge_heap_pop(q); }
    q->run_at++;
    return next;
}

#endif
