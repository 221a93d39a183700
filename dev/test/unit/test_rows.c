/* test_rows.c -- llmc/files/rows.h: the rows of data with documents and masks against a naive model of that file's header
 * comment. Also tests counts and every refusal. */
#include "dev/test/test.h"
#include "llmc/files/mix.h"

enum { BOS = 5, MOST = 20000, SEED = 9 };

/* The tokens of a file and its mask. */
typedef struct {
    uint64_t n;
    bool masked;
    int32_t ids[MOST];
    bool bits[MOST];
    bool marked, starts[MOST];  // the file marks the starts of its documents
} Text;

static void write_text(const char* name, const Text* t, int width) {
    const TokenFileHeader h = {width, 1000, t->n, 77, false, 0, t->masked, 0, t->marked};
    unsigned char* data = (unsigned char*)xcalloc((size_t)tokenfile_bytes(&h) + 1, 1);  // + 1: gcc 12 warns of absent marks
    for (uint64_t i = 0; i < t->n; i++) {
        memcpy(data + TOKENFILE_HEADER_BYTES + i * (uint64_t)width, &t->ids[i], (size_t)width);  // little-endian
        if (t->masked) { data[tokenfile_mask_at(&h) + i / 8] |= (unsigned char)(t->bits[i] << i % 8); }
        if (t->marked) { data[tokenfile_starts_at(&h) + i / 8] |= (unsigned char)(t->starts[i] << i % 8); }
    }
    int32_t words[TOKENFILE_WORDS];
    tokenfile_header(words, &h);
    memcpy(data, words, sizeof words);
    test_write(test_file(name), data, (size_t)tokenfile_bytes(&h));
    free(data);
}

static uint64_t draw(uint64_t* state, uint64_t n) { return philox_below(SEED, RAND_SAMPLE, 0, (*state)++, n); }

/* Makes a text of documents of up to `longest` tokens, in which answers, runs of trained tokens, follow questions. */
static Text* random_text(uint64_t n, uint64_t longest, bool masked, uint64_t seed) {
    Text* t = (Text*)xcalloc(1, sizeof *t);
    uint64_t state = seed * 1000000, left = 0;
    bool answer = false;
    t->n = n;
    t->masked = masked;
    for (uint64_t i = 0; i < n; i++) {
        if (left == 0) {
            left = 1 + draw(&state, longest);
            answer = false;
            t->ids[i] = BOS;
        } else {
            t->ids[i] = (int32_t)(10 + draw(&state, 900));
            if (draw(&state, 6) == 0) { answer = !answer; }
            t->bits[i] = answer;
        }
        left--;
    }
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------
// the naive model

enum { MOST_ROWS = MOST };
typedef struct {
    uint64_t first;
    int length, skip;
} NaivePiece;
typedef struct {
    int room, pieces, age;
    bool closed;
    NaivePiece piece[1100];
} NaiveRow;
typedef struct {
    NaiveRow* rows[MOST_ROWS];  // by age
    int opened;
    NaiveRow* order[MOST_ROWS];  // as they close
    int closed;
    uint64_t documents, trained, cut, lost, late;
} NaiveRows;

static int32_t naive_target(const Text* t, uint64_t i) {
    return i + 1 < t->n && (!t->masked || t->bits[i + 1]) ? t->ids[i + 1] : -1;
}

static void naive_close(NaiveRows* r, NaiveRow* row) {
    row->closed = true;
    r->order[r->closed++] = row;
}

static void naive_place(NaiveRows* r, NaivePiece p, int T, int window) {
    NaiveRow *best = NULL, *fullest = NULL;
    int open = 0;
    for (int i = 0; i < r->opened; i++) {
        NaiveRow* row = r->rows[i];
        if (row->closed) { continue; }
        open++;
        if (!fullest || row->room < fullest->room) { fullest = row; }
        if (row->room >= p.length && (!best || row->room < best->room)) { best = row; }
    }
    if (!best) {
        if (open == window) { naive_close(r, fullest); }
        best = r->rows[r->opened++] = (NaiveRow*)xcalloc(1, sizeof *best);
        best->room = T;
    }
    best->piece[best->pieces++] = p;
    best->room -= p.length;
    if (best->room == 0) { naive_close(r, best); }
}

static bool naive_start(const Text* t, uint64_t i) { return i == 0 || (t->marked ? t->starts[i] : t->ids[i] == BOS); }

/* Of a row across documents with a mask, `skip` targets continue a conversation of an earlier row. */
static void naive_piece(NaiveRows* r, const Text* t, uint64_t first, int length, int skip, int T) {
    const NaivePiece p = {first, length, skip};
    int trained = 0;
    for (int i = skip; i < length; i++) { trained += naive_target(t, first + (uint64_t)i) >= 0; }
    if (trained == 0) { return; }
    r->trained += (uint64_t)trained;
    naive_place(r, p, T, t->masked ? 256 : 1);
}

/* Counts the answers of which the end of a piece before token `end` leaves out a part, and those after it in the document. */
static void naive_left(NaiveRows* r, const Text* t, uint64_t end, uint64_t document_end) {
    for (uint64_t i = end + 1; i < document_end; i++) {
        r->cut += i == end + 1 && t->bits[i - 1] && t->bits[i];
        r->lost += !t->bits[i - 1] && t->bits[i];
    }
}

/* Returns where the one piece of the document [start, end) of a text with a mask begins. */
static uint64_t naive_piece_start(const Text* t, uint64_t start, uint64_t end, uint64_t T) {
    uint64_t p = start + 1, q;
    while (p < end && !t->bits[p]) { p++; }
    for (q = p; q < end && t->bits[q]; q++) {}
    if (p >= end || p <= start + T || q > start + 2 * T) { return start; }
    return q - p <= T / 2 ? q - T : p - T / 2;
}

static NaiveRows* naive_rows(const Text* t, int T, Documents documents) {
    NaiveRows* r = (NaiveRows*)xcalloc(1, sizeof *r);
    for (uint64_t i = 0; documents == DOCUMENTS_CROSS && i + (uint64_t)T < t->n; i += (uint64_t)T) {
        int skip = 0;
        while (t->masked && skip < T && !naive_start(t, i + (uint64_t)skip)) { skip++; }
        naive_piece(r, t, i, T, skip, T);
    }
    for (uint64_t i = 0, end; documents != DOCUMENTS_CROSS && i < t->n; i = end) {
        for (end = i + 1; end < t->n && !naive_start(t, end);) { end++; }
        r->documents++;
        const uint64_t only = t->masked ? naive_piece_start(t, i, end, (uint64_t)T) : i;
        r->lost += only > i;
        r->late += only > i;
        for (uint64_t k = only; k < end; k += (uint64_t)T) {
            const bool last = k + (uint64_t)T >= end;
            if (k > only && t->masked) { continue; }
            naive_piece(r, t, k, last ? (int)(end - k) : T, 0, T);
            if (t->masked && !last) { naive_left(r, t, k + (uint64_t)T, end); }
        }
    }
    for (int i = 0; i < r->opened; i++) {
        if (!r->rows[i]->closed) { naive_close(r, r->rows[i]); }
    }
    return r;
}

static void naive_free(NaiveRows* r) {
    for (int i = 0; i < r->opened; i++) { free(r->rows[i]); }
    free(r);
}

static void naive_read(const Text* t, const NaiveRow* row, int T, bool mask, int32_t* x, int32_t* y, int32_t* starts) {
    int at = 0;
    for (int k = 0; k < row->pieces; k++) {
        const int start = at;
        for (int i = 0; i < row->piece[k].length; i++, at++) {
            x[at] = t->ids[row->piece[k].first + (uint64_t)i];
            y[at] = i < row->piece[k].skip ? -1 : naive_target(t, row->piece[k].first + (uint64_t)i);
            starts[at] = mask ? start : 0;
        }
    }
    for (int start = at; at < T; at++) {
        x[at] = 0;
        y[at] = -1;
        starts[at] = mask ? start : 0;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// rows

static RowRule rule_of(Documents documents) {
    const RowRule rule = {documents, BOS, 77, true, NULL, NULL};
    return rule;
}

static uint64_t seen_late;  // answers in rows without the start of their conversation

/* Compares all rows of a file, in the order of the file and shuffled. */
static void check_rows(const Text* t, int T, Documents documents, int width) {
    NaiveRows* want = naive_rows(t, T, documents);
    const RowRule rule = rule_of(documents);
    const bool mask = documents == DOCUMENTS_MASK;
    int32_t *x = (int32_t*)xcalloc(6 * (size_t)T, sizeof *x), *y = x + T, *starts = y + T, *want_x = starts + T;
    uint64_t padding = 0;
    write_text("text.bin", t, width);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        DataLoader d;
        Error e = NO_ERROR;
        int wrong = 0, untrained = 0;
        if (!dataloader_open(&d, test_file("text.bin"), (BatchShare){1, T, 0, 1}, SEED, shuffle, &rule, &e)) {
            die("%s", e.msg);
        }
        CHECK(d.documents == documents && (d.starts != NULL) == mask, "starts are there, or not");
        CHECK(d.rows_per_epoch == (uint64_t)want->closed, "%llu rows, wanted %d", (unsigned long long)d.rows_per_epoch,
              want->closed);
        for (uint64_t row = 0; row < d.rows_per_epoch; row++) {
            const uint64_t place = shuffle ? dataloader_order_row(row, d.rows_per_epoch, SEED, 0, 0) : row;
            int trained = 0;
            CHECK(dataloader_next(&d, x, y, &e), "%s", e.msg);
            naive_read(t, want->order[place], T, mask, want_x, want_x + T, want_x + 2 * T);
            if (mask) { memcpy(starts, d.starts, (size_t)T * sizeof *starts); }
            wrong += memcmp(x, want_x, 2 * (size_t)T * sizeof *x) != 0;
            wrong += mask && memcmp(starts, want_x + 2 * T, (size_t)T * sizeof *x) != 0;
            for (int i = 0; i < T; i++) { trained += y[i] >= 0; }
            untrained += trained == 0;
            padding += shuffle ? 0 : (uint64_t)want->order[row]->room;
        }
        CHECK(wrong == 0, "%d of %d rows differ", wrong, want->closed);
        CHECK(untrained == 0, "%d rows have no trained target", untrained);
        if (d.indexed) {
            const RowCounts c = d.counts;
            const bool counted =
                documents == DOCUMENTS_CROSS || (c.cut == want->cut && c.lost == want->lost && c.late == want->late);
            CHECK(c.trained == want->trained && c.padding == padding && counted && c.documents == want->documents,
                  "counts: %llu trained, %llu padding, %llu cut, %llu lost, %llu late, %llu documents",
                  (unsigned long long)c.trained, (unsigned long long)c.padding, (unsigned long long)c.cut,
                  (unsigned long long)c.lost, (unsigned long long)c.late, (unsigned long long)c.documents);
            seen_late += c.late;
        }
        dataloader_close(&d);
    }
    free(x);
    naive_free(want);
}

TEST(rows_equal_the_model) {
    static const uint64_t lengths[] = {2, 17, 200, 900, 3007}, longest[] = {1, 9, 40, 700};
    static const int rows[] = {1, 7, 32, 101, 1024};
    for (uint64_t k = 0; k < 2 * 5 * 4 * 5; k++) {
        const bool masked = k % 2;
        const int T = rows[k / 2 % 5];
        Text* t = random_text(lengths[k / 10 % 5], longest[k / 50], masked, k);
        for (int documents = DOCUMENTS_CROSS; documents <= DOCUMENTS_MASK; documents++) {
            NaiveRows* r = naive_rows(t, T, (Documents)documents);
            if (r->closed > 0) { check_rows(t, T, (Documents)documents, k % 4 < 2 ? 2 : 4); }
            naive_free(r);
        }
        free(t);
    }
    CHECK(seen_late > 50, "%d answers lie behind the first row of their conversation", (int)seen_late);
}

/* BOS may begin every message, and other templates write none: then the file says where its documents begin. */
TEST(documents_begin_where_the_file_marks_them) {
    Text* t = random_text(MOST, 90, true, 11);
    t->marked = true;
    for (uint64_t i = 0; i < t->n; i++) {
        t->starts[i] = t->ids[i] == BOS;
        t->ids[i] = t->starts[i] ? 7 : i % 11 == 0 ? BOS : t->ids[i];
    }
    for (int width = 2; width <= 4; width += 2) { check_rows(t, 64, DOCUMENTS_MASK, width); }
    const RowRule unknown = {DOCUMENTS_AUTO, -1, 0, false, NULL, NULL};
    DataLoader d;
    Error e = NO_ERROR;
    CHECK(dataloader_open(&d, test_file("text.bin"), (BatchShare){1, 64, 0, 1}, SEED, true, &unknown, &e), "%s", e.msg);
    dataloader_close(&d);
    free(t);
}

TEST(every_trained_token_is_a_target_once) {
    for (int documents = DOCUMENTS_PACK; documents <= DOCUMENTS_MASK; documents++) {
        for (int masked = 0; masked < 2; masked++) {
            const RowRule rule = rule_of((Documents)documents);
            enum { T = 50 };
            int32_t x[T], y[T];
            int64_t want[1000] = {0}, got[1000] = {0};
            Text* t = random_text(MOST, masked ? T : 120, masked, 3);  // a mask leaves out what a row cuts off
            for (uint64_t i = 1; i < t->n; i++) { want[t->ids[i]] += !masked || t->bits[i]; }
            write_text("text.bin", t, 2);
            DataLoader d;
            Error e = NO_ERROR;
            if (!dataloader_open(&d, test_file("text.bin"), (BatchShare){1, T, 0, 1}, SEED, true, &rule, &e)) {
                die("%s", e.msg);
            }
            for (uint64_t r = 0; r < d.rows_per_epoch; r++) {
                CHECK(dataloader_next(&d, x, y, &e), "%s", e.msg);
                for (int i = 0; i < T; i++) { got[y[i] >= 0 ? y[i] : 999] += y[i] >= 0; }
            }
            CHECK(memcmp(want, got, sizeof want) == 0, "targets are missing or come twice");
            dataloader_close(&d);
            free(t);
        }
    }
}

TEST(a_mask_packs_best_and_is_read_by_documents) {
    enum { T = 128 };
    Text* t = random_text(MOST, 100, true, 5);
    const RowRule automatic = rule_of(DOCUMENTS_AUTO);
    DataLoader d;
    Error e = NO_ERROR;
    write_text("text.bin", t, 2);
    if (!dataloader_open(&d, test_file("text.bin"), (BatchShare){1, T, 0, 1}, SEED, true, &automatic, &e)) { die("%s", e.msg); }
    CHECK(d.documents == DOCUMENTS_MASK, "a file with a mask is not read by documents");
    const double padding = (double)d.counts.padding / (double)(d.rows_per_epoch * T);
    CHECK(padding < 0.05, "padding is %.1f %%: this is not best fit", 100 * padding);
    CHECK(d.counts.bytes < 8 * d.counts.documents + 8 * d.rows_per_epoch / 64 + 64, "the index takes %llu bytes",
          (unsigned long long)d.counts.bytes);
    dataloader_close(&d);
    t->masked = false;
    write_text("text.bin", t, 2);
    if (!dataloader_open(&d, test_file("text.bin"), (BatchShare){1, T, 0, 1}, SEED, true, &automatic, &e)) { die("%s", e.msg); }
    CHECK(d.documents == DOCUMENTS_CROSS && !d.indexed, "a plain file is not read as ever");
    dataloader_close(&d);
    free(t);
}

/* huggingface/trl#6668, karpathy/nanochat#590: questions longer than a row. */
TEST(an_answer_is_never_trained_without_its_question) {
    enum { T = 20, LONG = 41, DOCUMENTS = 6 };
    Text* t = (Text*)xcalloc(1, sizeof *t);
    t->masked = true;
    for (int k = 0; k < DOCUMENTS; k++) {  // every other one is a long question; one answer ends in the next row
        const int length = k % 2 ? LONG : 12, answer = k == 0 ? 7 : length - 3;
        for (int i = 0; i < length; i++, t->n++) {
            t->ids[t->n] = i == 0 ? BOS : 100 * (k + 1) + i;
            t->bits[t->n] = i >= answer;
        }
        for (int i = 0; k == 4 && i < 15; i++, t->n++) {
            t->ids[t->n] = 600 + i;
            t->bits[t->n] = true;
        }
    }
    write_text("text.bin", t, 2);
    for (int documents = DOCUMENTS_CROSS; documents <= DOCUMENTS_MASK; documents++) {
        const RowRule rule = rule_of((Documents)documents);
        int32_t x[T], y[T];
        char text[ROWS_TEXT];
        DataLoader d;
        Error e = NO_ERROR;
        if (!dataloader_open(&d, test_file("text.bin"), (BatchShare){1, T, 0, 1}, SEED, false, &rule, &e)) { die("%s", e.msg); }
        for (uint64_t r = 0; r < d.rows_per_epoch; r++) {
            CHECK(dataloader_next(&d, x, y, &e), "%s", e.msg);
            for (int i = 0, begun = -1; i < T; i++) {
                begun = x[i] == BOS ? i : begun;
                CHECK(y[i] < 0 || begun >= 0, "token %d is trained in a row without the start of its conversation", y[i]);
            }
        }
        rows_lost_text(&d.counts, text);
        if (documents != DOCUMENTS_CROSS) {
            CHECK(d.counts.cut == 1 && strcmp(text,
                                              "3 of 6 answers have lost the start of their conversation: "
                                              "--seq 41 holds all") == 0,
                  "%s; cut %llu", text, (unsigned long long)d.counts.cut);
        }
        CHECK(documents != DOCUMENTS_CROSS || strstr(text, "--documents mask"), "%s", text);
        dataloader_close(&d);
    }
    memmove(t->ids, t->ids + 12, LONG * sizeof *t->ids);  // ends with target 41, the first behind two rows
    memmove(t->bits, t->bits + 12, LONG * sizeof *t->bits);
    t->n = LONG;
    write_text("text.bin", t, 2);
    DataLoader d;
    Error e = NO_ERROR;
    const RowRule rule = rule_of(DOCUMENTS_AUTO);
    FAILS(&e, dataloader_open(&d, test_file("text.bin"), (BatchShare){1, T, 0, 1}, SEED, false, &rule, &e),
          "1 of 1 answers have lost the start of their conversation: --seq 41 holds all");
    free(t);
}

/* A row holds at least half of each conversation. The first has a short answer, the second a long one. */
TEST(a_row_may_begin_behind_the_start_of_a_conversation) {
    enum { T = 20 };
    static const struct {
        int length, answer, end, begin, trained, cut;
    } cases[] = {{30, 23, 27, 7, 4, 0},    // ends with the answer; what follows is left out
                 {40, 30, 40, 20, 10, 0},  // its answer ends at two rows, and half a row of it is taken
                 {39, 25, 39, 15, 11, 1},  // half a row of question, and the next target after it
                 {30, 21, 22, 2, 1, 0},    // its first target is the one after the first row
                 {30, 20, 24, 0, 1, 1}};   // its first target is the last one of the first row
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        for (int documents = DOCUMENTS_PACK; documents <= DOCUMENTS_MASK; documents++) {
            Text* t = (Text*)xcalloc(1, sizeof *t);
            t->masked = true;
            t->n = 7 + (uint64_t)cases[k].length;
            for (int i = 0; i < (int)t->n; i++) {  // a short conversation comes first
                t->ids[i] = i == 0 || i == 7 ? BOS : 10 + i;
                t->bits[i] = i == 6 || (i >= 7 + cases[k].answer && i < 7 + cases[k].end);
            }
            write_text("text.bin", t, 2);
            const RowRule rule = rule_of((Documents)documents);
            int32_t x[T], y[T];
            DataLoader d;
            Error e = NO_ERROR;
            if (!dataloader_open(&d, test_file("text.bin"), (BatchShare){1, T, 0, 1}, SEED, false, &rule, &e)) {
                die("%s", e.msg);
            }
            const bool late = cases[k].begin > 0;
            CHECK(d.rows_per_epoch == 2 && d.counts.lost == late && d.counts.late == late && d.counts.answers == 2 &&
                      d.counts.cut == (uint64_t)cases[k].cut &&
                      d.counts.longest == (uint64_t)(late || cases[k].cut ? cases[k].length : 0),
                  "case %zu: counts", k);
            CHECK(dataloader_next(&d, x, y, &e), "%s", e.msg);  // the full row is closed first
            int trained = 0, starts = 0;
            for (int i = 0; i < T; i++) {
                trained += y[i] >= 0;
                starts += d.starts && d.starts[i] != 0;
            }
            CHECK(x[0] == t->ids[7 + cases[k].begin] && trained == cases[k].trained && starts == 0,
                  "case %zu: begins with %d, %d trained, %d starts", k, x[0], trained, starts);
            dataloader_close(&d);
            free(t);
        }
    }
}

TEST(ranks_and_resumed_runs_share_the_rows) {
    enum { T = 64, B = 3, RANKS = 2, STEPS = 60 };
    Text* t = random_text(MOST, 90, true, 6);
    const RowRule rule = rule_of(DOCUMENTS_MASK);
    int32_t x[2][B][T], y[2][B][T];
    DataLoader all, part;
    Error e = NO_ERROR;
    write_text("text.bin", t, 4);
    for (int rank = 0; rank < RANKS; rank++) {
        if (!dataloader_open(&all, test_file("text.bin"), (BatchShare){B, T, 0, 1}, SEED, true, &rule, &e) ||
            !dataloader_open(&part, test_file("text.bin"), (BatchShare){B, T, rank, RANKS}, SEED, true, &rule, &e)) {
            die("%s", e.msg);
        }
        CHECK(all.rows_per_epoch < STEPS * B * RANKS, "the test has no second epoch");
        for (int step = 0; step < STEPS; step++) {
            if (step == 17) {  // resumed
                const uint64_t row = part.row;
                dataloader_close(&part);
                CHECK(dataloader_open(&part, test_file("text.bin"), (BatchShare){B, T, rank, RANKS}, SEED, true, &rule, &e),
                      "%s", e.msg);
                dataloader_seek(&part, row);
            }
            for (int r = 0; r < RANKS; r++) {
                CHECK(dataloader_next(&all, x[0][0], y[0][0], &e), "%s", e.msg);
                if (r != rank) { continue; }
                CHECK(dataloader_next(&part, x[1][0], y[1][0], &e), "%s", e.msg);
                CHECK(memcmp(x[0], x[1], sizeof x[0]) == 0 && memcmp(y[0], y[1], sizeof y[0]) == 0, "step %d differs", step);
                CHECK(memcmp(all.starts, part.starts, sizeof x[0]) == 0, "starts of step %d differ", step);
            }
        }
        dataloader_close(&all);
        dataloader_close(&part);
    }
    free(t);
}

TEST(a_mix_of_data_with_and_without_a_mask_knows_all_starts) {
    enum { T = 40, ROWS = 300 };
    Text *chat = random_text(MOST, 90, true, 7), *book = random_text(MOST, 90, false, 8);
    const RowRule rule = rule_of(DOCUMENTS_AUTO);
    char text[3 * PATH_CAP];
    int32_t x[T], y[T];
    Mix m;
    DataLoader stream;
    Error e = NO_ERROR;
    int rows[2] = {0, 0};
    write_text("chat.bin", chat, 2);
    write_text("book.bin", book, 2);
    snprintf(text, sizeof text, "%s:1,%s:1", test_file("chat.bin"), test_file("book.bin"));
    if (!mix_open(&m, &stream, text, (BatchShare){1, T, 0, 1}, SEED, &rule, &e)) { die("%s", e.msg); }
    CHECK(stream.starts && stream.masked && stream.indexed, "the stream has no starts");
    for (int r = 0; r < ROWS; r++) {
        CHECK(mix_next(&m, x, y, &e), "%s", e.msg);
        int with_start = 0, untrained = 0;
        for (int i = 0; i < T; i++) {
            with_start += stream.starts[i] > 0;
            untrained += y[i] < 0;
        }
        rows[m.batch_sources[0]]++;
        if (m.batch_sources[0] == 1) {
            CHECK(with_start == 0 && untrained == 0, "a row across documents has %d starts", with_start);
        }
        if (m.batch_sources[0] == 0) { CHECK(x[0] >= 0 && untrained > 0, "a row of the masked source trains all tokens"); }
    }
    CHECK(rows[0] > 0 && rows[1] > 0, "one source gave no row");
    mix_close(&m);
    dataloader_close(&stream);
    free(chat);
    free(book);
}

// ---------------------------------------------------------------------------------------------------------------------
// refusals

static void refuses(const char* pattern, const RowRule* rule, const char* part1, const char* part2) {
    DataLoader d;
    Error e = NO_ERROR;
    CHECK(!dataloader_open(&d, test_file(pattern), (BatchShare){1, 8, 0, 1}, SEED, true, rule, &e), "%s was taken", pattern);
    CHECK(strstr(e.msg, part1) && strstr(e.msg, part2), "'%s' has not '%s' and '%s'", e.msg, part1, part2);
}

TEST(what_has_no_documents_is_refused) {
    const RowRule automatic = rule_of(DOCUMENTS_AUTO), cross = rule_of(DOCUMENTS_CROSS), mask = rule_of(DOCUMENTS_MASK);
    RowRule pack = rule_of(DOCUMENTS_PACK), unknown = {DOCUMENTS_PACK, -1, 0, false, NULL, NULL}, other = pack;
    Text* t = random_text(100, 20, false, 1);
    write_text("a.bin", t, 2);
    other.fingerprint = 78;
    refuses("a.bin", &unknown, "a.bin: the tokenizer that made it is not known", "--documents cross");
    refuses("a.bin", &other, "a.bin: the tokenizer that made it is not known", "give it as --tokenizer");
    pack.bos = 4;
    refuses("a.bin", &pack, "a.bin: holds no BOS token (id 4)", "--documents cross");
    t->masked = true;
    memset(t->bits, 0, sizeof t->bits);
    write_text("b.bin", t, 2);
    unknown.documents = DOCUMENTS_AUTO;
    refuses("b.bin", &unknown, "b.bin: the tokenizer that made it is not known", "data with a mask is read by documents");
    refuses("?.bin", &automatic, "b.bin: has a mask, but", "a.bin has none: wanted all shards alike");
    refuses("b.bin", &automatic, "b.bin: holds no trained token in rows of --seq 8", "a mask of zeros");
    refuses("b.bin", &cross, "b.bin: holds no trained token in rows of --seq 8", "a mask of zeros");
    t->bits[0] = true;  // no token before it
    write_text("b.bin", t, 2);
    refuses("b.bin", &mask, "b.bin: holds no trained token", "a mask of zeros");
    t->masked = false;
    t->n = 1;
    write_text("a.bin", t, 2);
    refuses("a.bin", &mask, "a.bin: holds 1 token", "no text");
    free(t);
}

int main(void) { return test_all(); }
