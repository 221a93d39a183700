/* rows.h -- which tokens of a token file make up a row of T tokens, for data with documents or a mask. dataloader.h asks for
 * row r; a plain file read across its documents needs none of this.
 *
 * A document begins where the file marks a start, or, without marks, at a BOS token; and at the first token of the file. A
 * piece is what a row takes of a document: the whole document, or of a document longer than T its tokens 0 ... T-1, T ... 2T-1
 * and so on. The target of a token is the file's next token, even if that is the BOS of the next document, which says "end". It
 * is -1 if the mask says that it is not trained, or if there is no next token. A piece without a trained target is dropped.
 *
 * A mask marks answers. Of a document with a mask one piece is taken: the first one, so that an answer has its question. If it
 * has no trained target, but the document's first answer ends within 2T tokens, the piece is the T tokens that end with this
 * answer instead. If the answer has more than T/2 tokens, the piece begins T/2 tokens before it. The rest is left out. With
 * `cross`, the targets of a row before the first start of a document are -1, if the starts are known.
 *
 *   cross   rows begin at the multiples of T, whatever the documents; the row is its only piece
 *   pack    pieces are packed into rows; what is left of a row is padding: token 0, target -1
 *   mask    as pack, and attention stays inside a piece: starts[t] is the row's index of the first token of t's piece.
 *           The padding counts as a piece
 *
 * Packing is best fit in a bounded window. Rows that have room are open: at most ROWS_WINDOW of them, or one if the data has no
 * mask. Each piece, in the file's order, goes into the open row with the least room that is enough; among equals, into the
 * oldest. If no row has enough, a new one is opened. If too many would then be open, the row with the least room is closed
 * first. A full row is closed at once. At the end of the file the other rows are closed, the oldest first. Row 0 is the
 * row that was closed first.
 *
 * The index has 8 bytes a piece, and a number for every 64th row. It is made when the loader opens, in one pass over the file's
 * tokens, or over its marks of starts.
 */
#ifndef LLMC_ROWS_H
#define LLMC_ROWS_H

#include "llmc/base/utils.h"       // defines: fail, read_at, xmalloc, xgrow, size_min, now_seconds
#include "llmc/files/tokenfile.h"  // defines: TokenReader, tokenfile_read, tokenfile_read_ids, tokenfile_bit

typedef enum { DOCUMENTS_AUTO, DOCUMENTS_CROSS, DOCUMENTS_PACK, DOCUMENTS_MASK } Documents;
static const char* const documents_names[] = {"auto", "cross", "pack", "mask"};

/* Returns how data is read, with a mask or without: `d` itself, or what `auto` stands for in that case. */
static inline Documents documents_of(Documents d, bool masked) {
    return d != DOCUMENTS_AUTO ? d : masked ? DOCUMENTS_MASK : DOCUMENTS_CROSS;
}

/* How rows are made. */
typedef struct {
    Documents documents;             // see documents_of()
    int32_t bos;                     // what documents begin with; -1: unknown
    uint64_t fingerprint;            // fingerprint of the tokenizer that has this BOS; 0: unknown
    bool certain;                    // data that does not name its tokenizer counts as made with this one
    Progress* progress;              // counts the bytes that are read to find documents; NULL: nobody does
    const struct DataLoader* apart;  // validation data, whose files are not trained on as well; NULL: none
} RowRule;

/* Numbers of what the rows hold. */
typedef struct {
    uint64_t rows, documents;
    uint64_t trained;  // targets
    uint64_t padding;  // tokens
    uint64_t answers;  // runs of tokens that the mask trains
    uint64_t cut;      // answers that a row's end cuts off; their rest is left out
    uint64_t lost;     // answers that have no row with the start of their document
    uint64_t late;     // lost answers that are trained all the same
    uint64_t longest;  // tokens of the longest document of which something is left out; 0: there is none
    uint64_t bytes;    // of the index
    double seconds;    // time that it took to make the index
} RowCounts;

enum {
    ROWS_TEXT = 160,  // bytes
    ROWS_WINDOW = 256,
    ROWS_STEP = 64,
    PIECE_LENGTH_BITS = 24,  // T <= 2^24, as --seq says
    PIECE_START_BITS = 39,
};

typedef struct {
    uint64_t* pieces;  // (num_pieces) pieces, row by row: start << 25 | (length - 1) << 1 | whether it begins its row
    uint64_t* steps;   // (ceil(rows / ROWS_STEP)) the first piece of each ROWS_STEP-th row
    size_t num_pieces;
    bool cross;  // a row is a piece and the tokens before it that fill the row
    RowCounts counts;
} RowIndex;

static inline uint64_t piece_start(uint64_t piece) { return piece >> (PIECE_LENGTH_BITS + 1); }
static inline size_t piece_length(uint64_t piece) { return (piece >> 1 & ((1u << PIECE_LENGTH_BITS) - 1)) + 1; }

static inline void rows_free(RowIndex* r) {
    free(r->pieces);
    free(r->steps);
    memset(r, 0, sizeof *r);
}

/* Adds the counts of one file to the counts of all. */
static inline void rows_add_counts(RowCounts* all, const RowCounts* c) {
    all->rows += c->rows;
    all->documents += c->documents;
    all->trained += c->trained;
    all->padding += c->padding;
    all->answers += c->answers;
    all->cut += c->cut;
    all->lost += c->lost;
    all->late += c->late;
    if (c->longest > all->longest) { all->longest = c->longest; }
    all->bytes += c->bytes;
    all->seconds += c->seconds;
}

/* Writes how many answers have lost the start of their conversation, and how to keep it. */
static inline const char* rows_lost_text(const RowCounts* c, char out[ROWS_TEXT]) {
    const int n = snprintf(out, ROWS_TEXT,
                           "%llu of %llu answers have lost the start of their conversation: ", (unsigned long long)c->lost,
                           (unsigned long long)c->answers);
    if (c->longest > 0) {
        snprintf(out + n, ROWS_TEXT - (size_t)n, "--seq %llu holds all", (unsigned long long)c->longest);
    } else {
        snprintf(out + n, ROWS_TEXT - (size_t)n, "--documents mask keeps conversations whole");
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// making the index

typedef struct {
    size_t room;  // tokens
    uint64_t* pieces;
    size_t count, cap;
} OpenRow;

enum {
    MASK_BLOCK = 1 << 16,    // bytes
    STARTS_BLOCK = 1 << 18,  // tokens
};

typedef struct {
    RowIndex* index;
    size_t cap;  // of index->pieces
    size_t T;
    const TokenReader* file;
    unsigned char* block;  // (MASK_BLOCK) of the mask
    uint64_t block_at;     // number of its first byte in the mask
    bool in_answer;        // the token counted last is trained
    int32_t bos;           // without marks of starts
    unsigned char* raw;    // tokens raw_at ... raw_end - 1 as the file stores them, or their marks
    uint64_t raw_at, raw_end;
    Progress* progress;         // of the tokens that are read
    OpenRow open[ROWS_WINDOW];  // the oldest first
    int num_open, window;
} RowMaker;

/* Ends the open row i: appends its pieces to the index. */
static void rows_close(RowMaker* m, int i) {
    RowIndex* x = m->index;
    const OpenRow row = m->open[i];
    if (x->counts.rows % ROWS_STEP == 0) {
        const size_t n = x->counts.rows / ROWS_STEP;
        if ((n & (n - 1)) == 0) { x->steps = (uint64_t*)xrealloc(x->steps, (n ? 2 * n : 1) * sizeof *x->steps); }
        x->steps[n] = x->num_pieces;
    }
    for (size_t k = 0; k < row.count; k++) {
        x->pieces = (uint64_t*)xgrow(x->pieces, x->num_pieces, &m->cap, sizeof *x->pieces);
        x->pieces[x->num_pieces++] = row.pieces[k] | (k == 0);
    }
    x->counts.rows++;
    x->counts.padding += row.room;
    m->num_open--;
    memmove(m->open + i, m->open + i + 1, (size_t)(m->num_open - i) * sizeof row);
    m->open[m->num_open] = row;  // keeps its memory
}

/* Returns the open row with the least room that is enough for `length` tokens, the oldest of several; -1: none. */
static int rows_best(const RowMaker* m, size_t length) {
    int best = -1;
    for (int i = 0; i < m->num_open; i++) {
        if (m->open[i].room >= length && (best < 0 || m->open[i].room < m->open[best].room)) { best = i; }
    }
    return best;
}

static void rows_place(RowMaker* m, uint64_t start, size_t length) {
    int i = rows_best(m, length);
    if (i < 0) {
        if (m->num_open == m->window) { rows_close(m, rows_best(m, 0)); }
        i = m->num_open++;
        m->open[i].room = m->T;
        m->open[i].count = 0;
    }
    OpenRow* row = &m->open[i];
    row->pieces = (uint64_t*)xgrow(row->pieces, row->count, &row->cap, sizeof *row->pieces);
    row->pieces[row->count++] = (start << PIECE_LENGTH_BITS | (length - 1)) << 1;
    row->room -= m->index->cross ? row->room : length;
    if (row->room == 0) { rows_close(m, i); }
}

/* Counts the trained tokens in [from, to), and the answers that begin there. */
static bool rows_count_trained(RowMaker* m, uint64_t from, uint64_t to, uint64_t* count, uint64_t* answers, Error* e) {
    const TokenFileHeader* h = &m->file->h;
    const uint64_t mask = tokenfile_mask_at(h), end = tokenfile_starts_at(h) - mask;
    *answers = 0;
    *count = h->masked || from >= to ? 0 : to - from;
    while (h->masked && from < to) {
        const uint64_t byte = from / 8;
        if (byte - m->block_at >= MASK_BLOCK) {
            m->block_at = byte / MASK_BLOCK * MASK_BLOCK;
            const size_t n = size_min(end - m->block_at, MASK_BLOCK);
            if (!read_at(fileno(m->file->f), mask + m->block_at, m->block, n, m->file->path, "the mask", e)) { return false; }
        }
        const unsigned skip = from % 8, n = (unsigned)size_min(8 - skip, to - from);
        const unsigned bits = m->block[byte - m->block_at] >> skip & ((1u << n) - 1);
        *count += (uint64_t)__builtin_popcount(bits);
        *answers += (uint64_t)__builtin_popcount(bits & ~(bits << 1 | m->in_answer));
        m->in_answer = bits >> (n - 1) & 1;
        from += n;
    }
    return true;
}

/* Adds a piece, if it has targets. */
static bool rows_add_piece(RowMaker* m, uint64_t start, size_t length, Error* e) {
    RowCounts* c = &m->index->counts;
    uint64_t trained, answers;
    m->in_answer = false;
    if (!rows_count_trained(m, start + 1, size_min(start + length + 1, m->file->h.num_tokens), &trained, &answers, e)) {
        return false;
    }
    c->trained += trained;
    c->answers += answers;
    if (trained > 0) { rows_place(m, start, length); }
    return true;
}

/* Counts what is left out of a document of `length` tokens: the targets [from, to), which follow the one counted last. */
static bool rows_leave_out(RowMaker* m, uint64_t from, uint64_t to, uint64_t length, Error* e) {
    RowCounts* c = &m->index->counts;
    const bool in_answer = m->in_answer;
    uint64_t first, lost, left, more;
    if (from >= to) { return true; }
    if (!rows_count_trained(m, from, from + 1, &first, &lost, e)) { return false; }
    if (!rows_count_trained(m, from + 1, to, &left, &more, e)) { return false; }
    c->cut += in_answer && first;
    c->lost += lost + more;
    c->answers += lost + more;
    if (first + left > 0 && length > c->longest) { c->longest = length; }
    return true;
}

/* Adds the piece that ends with the first answer of the document of tokens [start, end), if this answer is near enough. The
 * document's first piece trains nothing. *piece_end is where it ends; it becomes the end of the added piece. */
static bool rows_add_late(RowMaker* m, uint64_t start, uint64_t end, uint64_t* piece_end, Error* e) {
    RowCounts* c = &m->index->counts;
    const uint64_t T = m->T, most = size_min(end, start + 2 * T + 1);
    uint64_t from = 0, to, trained = 0, answers;  // the answer is [from, to)
    for (to = *piece_end + 1; to < most; to++) {
        if (!rows_count_trained(m, to, to + 1, &trained, &answers, e)) { return false; }
        if (from > 0 && trained == 0) { break; }
        if (answers > 0) { from = to; }
    }
    m->in_answer = false;
    if (from == 0 || to > start + 2 * T) { return true; }
    c->lost++;
    c->late++;
    if (end - start > c->longest) { c->longest = end - start; }
    *piece_end = size_min(to, from - T / 2 + T);
    return rows_add_piece(m, *piece_end - T, m->T, e);
}

/* Adds the pieces of the document of tokens [start, end). */
static bool rows_add_document(RowMaker* m, uint64_t start, uint64_t end, Error* e) {
    const uint64_t before = m->index->counts.trained;
    uint64_t first = start + size_min(m->T, end - start);
    bool ok = rows_add_piece(m, start, (size_t)(first - start), e);
    m->index->counts.documents++;
    if (m->file->h.masked) {
        if (ok && m->index->counts.trained == before) { ok = rows_add_late(m, start, end, &first, e); }
        return ok && rows_leave_out(m, first + 1, end, end - start, e);
    }
    for (uint64_t at = first, n; ok && at < end; at += n) {
        n = size_min(m->T, end - at);
        ok = rows_add_piece(m, at, (size_t)n, e);
    }
    return ok;
}

/* Returns the first place from i on of the id `bos` among n tokens as the file stores them, or of a 1 among n bits (width 0);
 * n: there is none. */
static uint64_t rows_find_start(const unsigned char* raw, uint64_t i, uint64_t n, size_t width, uint32_t bos) {
    uint16_t narrow;
    uint32_t wide;
    for (; width == 0 && i < n; i++) {
        if (tokenfile_bit(raw, i)) { return i; }
    }
    for (; width == 2 && i < n; i++) {
        memcpy(&narrow, raw + 2 * i, 2);
        if (narrow == bos) { return i; }
    }
    for (; width == 4 && i < n; i++) {
        memcpy(&wide, raw + 4 * i, 4);
        if (wide == bos) { return i; }
    }
    return n;
}

/* Returns in *start the first token from `from` on that begins a document; if there is none, the number of tokens. `from` never
 * falls from call to call. */
static bool rows_next_start(RowMaker* m, uint64_t from, uint64_t* start, Error* e) {
    const TokenReader* file = m->file;
    const TokenFileHeader* h = &file->h;
    const size_t width = h->starts ? 0 : (size_t)h->token_bytes;
    for (; from < h->num_tokens; from = m->raw_end) {
        if (from >= m->raw_end) {
            m->raw_at = from / 8 * 8;
            const size_t n = size_min(h->num_tokens - m->raw_at, STARTS_BLOCK);
            const uint64_t marks = tokenfile_starts_at(h) + m->raw_at / 8;
            m->raw_end = m->raw_at + n;
            if (!(width ? tokenfile_read(file, m->raw_at, n, m->raw, "the file", e)
                        : read_at(fileno(file->f), marks, m->raw, (n + 7) / 8, file->path, "the starts", e))) {
                return false;
            }
            progress_add(m->progress, n * width);
        }
        *start = m->raw_at + rows_find_start(m->raw, from - m->raw_at, m->raw_end - m->raw_at, width, (uint32_t)m->bos);
        if (*start < m->raw_end) { return true; }
    }
    *start = h->num_tokens;
    return true;
}

/* Finds the documents of the file and adds each. */
static bool rows_pack(RowMaker* m, Error* e) {
    const uint64_t end = m->file->h.num_tokens;
    uint64_t start = 0, next;
    if (!rows_next_start(m, 0, &next, e)) { return false; }
    if (next == end) {
        return fail(e,
                    "%s: holds no BOS token (id %d), so nothing says where its documents begin\n"
                    "  hint: tokenize the text again, or read across documents with --documents cross",
                    m->file->path, m->bos);
    }
    for (bool ok = true; ok && start < end; start = next) {
        ok = rows_next_start(m, start + 1, &next, e) && rows_add_document(m, start, next, e);
        if (!ok) { return false; }
    }
    return true;
}

/* Adds the rows at the multiples of T, of a file with a mask. Without a known start each row counts as one. */
static bool rows_cross(RowMaker* m, Error* e) {
    const uint64_t end = m->file->h.num_tokens, T = m->T;
    uint64_t next = end;
    bool ok = (!m->file->h.starts && m->bos < 0) || rows_next_start(m, 0, &next, e);
    const bool known = next < end;
    for (uint64_t row = 0; ok && row + T < end; row += T) {
        ok = !known || next >= row || rows_next_start(m, row, &next, e);
        const uint64_t start = known && row > 0 ? size_min(next, row + T) : row;
        ok = ok && rows_leave_out(m, row + 1, start + 1, 0, e);
        ok = ok && (start == row + T || rows_add_piece(m, start, (size_t)(row + T - start), e));
    }
    return ok;
}

/* Makes the index of the rows of an open file. `documents` is not auto. Free with rows_free(), also if it fails. */
static inline bool rows_open(RowIndex* x, const TokenReader* file, size_t T, Documents documents, const RowRule* rule,
                             Error* e) {
    const TokenFileHeader* h = &file->h;
    const double began = now_seconds();
    memset(x, 0, sizeof *x);
    if (h->num_tokens >> PIECE_START_BITS) {
        return fail(e, "%s: holds %llu tokens, wanted fewer than 2^%d for rows of documents or with a mask", file->path,
                    (unsigned long long)h->num_tokens, PIECE_START_BITS);
    }
    RowMaker* m = (RowMaker*)xcalloc(1, sizeof *m);
    m->index = x;
    m->T = T;
    m->file = file;
    m->bos = rule->bos;
    m->progress = rule->progress;
    m->raw = (unsigned char*)xmalloc(STARTS_BLOCK * (size_t)h->token_bytes);
    m->block = (unsigned char*)xmalloc(MASK_BLOCK);
    m->block_at = UINT64_MAX - MASK_BLOCK;  // none
    m->window = h->masked ? ROWS_WINDOW : 1;
    x->cross = documents == DOCUMENTS_CROSS;
    const bool ok = x->cross ? rows_cross(m, e) : rows_pack(m, e);
    while (ok && m->num_open > 0) { rows_close(m, 0); }
    for (int i = 0; i < ROWS_WINDOW; i++) { free(m->open[i].pieces); }
    free(m->block);
    free(m->raw);
    free(m);
    if (ok && x->counts.rows == 0 && x->counts.lost > 0) {
        char lost[ROWS_TEXT];
        return fail(e, "%s: holds no trained token in rows of --seq %zu: %s", file->path, T, rows_lost_text(&x->counts, lost));
    }
    if (ok && x->counts.rows == 0) {
        return fail(e, "%s: holds no trained token in rows of --seq %zu\n  hint: %s", file->path, T,
                    h->masked ? "a mask of zeros trains nothing: make the file again" : "the file has no text in it");
    }
    if (ok) { x->pieces = (uint64_t*)xrealloc(x->pieces, x->num_pieces * sizeof *x->pieces); }
    x->counts.bytes = x->num_pieces * sizeof *x->pieces + ceil_div(x->counts.rows, ROWS_STEP) * sizeof *x->steps;
    x->counts.seconds = now_seconds() - began;
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// reading

/* Returns the bytes of scratch that rows_read() needs: for T+1 ids, for them as the file stores them, and their mask. */
static inline size_t rows_scratch(size_t T) { return (T + 1) * 2 * sizeof(int32_t) + T / 8 + 2; }

/* Reads a piece of n tokens and their targets. */
static bool rows_read_piece(const TokenReader* file, uint64_t first, size_t n, int32_t* x, int32_t* y, int32_t* scratch,
                            Error* e) {
    const TokenFileHeader* h = &file->h;
    const size_t have = size_min(n + 1, h->num_tokens - first);
    const uint64_t mask_first = (first + 1) / 8, mask_end = (first + have + 7) / 8;  // bytes
    unsigned char *raw = (unsigned char*)(scratch + n + 1), *mask = raw + (n + 1) * sizeof(int32_t);
    if (!tokenfile_read_ids(file, first, have, raw, scratch, "a row", e)) { return false; }
    memcpy(x, scratch, n * sizeof *x);
    memcpy(y, scratch + 1, (have - 1) * sizeof *y);
    if (have == n) { y[n - 1] = -1; }
    if (!h->masked || have == 1) { return true; }
    const uint64_t at = tokenfile_mask_at(h) + mask_first;
    if (!read_at(fileno(file->f), at, mask, mask_end - mask_first, file->path, "a row's mask", e)) { return false; }
    for (size_t i = 0; i + 1 < have; i++) {
        if (!tokenfile_bit(mask, first + 1 + i - 8 * mask_first)) { y[i] = -1; }
    }
    return true;
}

/* Returns the first piece of row r. */
static inline size_t rows_find(const RowIndex* index, uint64_t r) {
    uint64_t k = index->steps[r / ROWS_STEP];
    for (uint64_t row = r / ROWS_STEP * ROWS_STEP; row < r; row++) {
        do { k++; } while (!(index->pieces[k] & 1));
    }
    return k;
}

/* Returns the padding of row r in tokens. */
static inline uint64_t rows_padding(const RowIndex* index, uint64_t r, size_t T) {
    uint64_t padding = index->pieces && !index->cross ? T : 0;
    for (size_t k = padding ? rows_find(index, r) : 0, first = k; padding && k < index->num_pieces; k++) {
        if (k > first && index->pieces[k] & 1) { break; }
        padding -= piece_length(index->pieces[k]);
    }
    return padding;
}

/* Reads row r: tokens, targets and the starts of the documents. Without an index (all zeros) rows begin at the multiples of T.
 * `mask`: the mode is mask, and starts are wanted; otherwise they are 0. scratch: rows_scratch(T) bytes */
static inline bool rows_read(const RowIndex* index, const TokenReader* file, uint64_t r, size_t T, bool mask,
                             int32_t* out /* (3, T) */, int32_t* scratch, Error* e) {
    int32_t *x = out, *y = out + T, *starts = out + 2 * T;
    memset(starts, 0, T * sizeof *starts);
    if (!index->pieces) { return rows_read_piece(file, r * T, T, x, y, scratch, e); }
    size_t k = rows_find(index, r), t = 0;
    do {
        const size_t length = piece_length(index->pieces[k]), n = index->cross ? T : length;
        const uint64_t first = piece_start(index->pieces[k]) + length - n;
        if (!rows_read_piece(file, first, n, x + t, y + t, scratch, e)) { return false; }
        for (size_t i = 0; i < n - length; i++) { y[t + i] = -1; }
        for (size_t i = 0; mask && i < n; i++) { starts[t + i] = (int32_t)t; }
        t += n;
        k++;
    } while (k < index->num_pieces && !(index->pieces[k] & 1));
    for (size_t i = t; i < T; i++) {
        x[i] = 0;
        y[i] = -1;
        starts[i] = mask ? (int32_t)t : 0;
    }
    return true;
}

#endif
