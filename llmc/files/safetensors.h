/* safetensors.h -- reads and writes the safetensors format (github.com/huggingface/safetensors, README "Format"):
 *
 *   8 bytes   N, the length of the header, little-endian, at most 100,000,000
 *   N bytes   JSON: {"__metadata__": {string: string}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
 *   the rest  tensors, row-major, little-endian; offsets count from here and cover it without holes or overlaps
 *
 * Opening a file checks its whole header: strict JSON, no name twice, known dtypes, shapes whose product fits and matches
 * the bytes, offsets that cover the data exactly. A number from the file sizes an allocation only after it was compared with
 * the file's size. Weights are read in pieces on demand; any thread may read.
 * model_folder.h and optimizer_state.h say what the tensors mean. The host must be little-endian.
 */
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "llmc/base/utils.h"

#include "llmc/base/crc.h"
#include "llmc/base/float16.h"
#include "llmc/files/json.h"
#include "llmc/files/output.h"

enum {
    SAFE_MAX_HEADER = 100000000,
    SAFE_MAX_DIMS = 8,
    SAFE_PIECE = 8192,  // elements converted at a time, on the stack
};

typedef enum {
    SAFE_F32,
    SAFE_BF16,
    SAFE_F16,
    SAFE_F64,
    SAFE_I64,
    SAFE_U64,
    SAFE_I32,
    SAFE_U32,
    SAFE_I16,
    SAFE_U16,
    SAFE_I8,
    SAFE_U8,
    SAFE_BOOL,
    SAFE_F8_E4M3,
    SAFE_F8_E5M2,
    NUM_SAFE_DTYPES
} SafeDtype;

// clang-format off
static const struct { const char* name; size_t bytes; } safe_dtypes[NUM_SAFE_DTYPES] = {
    {"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F64", 8}, {"I64", 8}, {"U64", 8}, {"I32", 4}, {"U32", 4},
    {"I16", 2}, {"U16", 2}, {"I8", 1}, {"U8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
};
// clang-format on

typedef struct {
    const char* name;  // NUL-terminated; owned by the open file's header, or by the caller of safewriter_open()
    SafeDtype dtype;
    int ndim;  // 0: a scalar
    size_t shape[SAFE_MAX_DIMS];
    size_t count;    // elements
    uint64_t begin;  // offset of its first byte in the file
} SafeTensor;

typedef struct {
    char* path;
    int fd;
    uint64_t size;        // bytes of the file
    uint64_t data_start;  // offset of the first tensor byte
    Json header;
    SafeTensor* tensors;  // sorted by name
    size_t count;
} SafeTensors;

/* Returns the dtype of this name, or NUM_SAFE_DTYPES. */
static inline SafeDtype safe_dtype(const char* name) {
    int i = 0;
    while (i < NUM_SAFE_DTYPES && strcmp(safe_dtypes[i].name, name) != 0) { i++; }
    return (SafeDtype)i;
}

static inline size_t safe_bytes(const SafeTensor* t) { return t->count * safe_dtypes[t->dtype].bytes; }

/* Writes the shape as "[2, 3]", for messages. */
static inline const char* safe_shape(char* out, size_t cap, const SafeTensor* t) {
    size_t used = (size_t)snprintf(out, cap, "[");
    for (int i = 0; i < t->ndim && used < cap; i++) {
        used += (size_t)snprintf(out + used, cap - used, "%s%zu", i ? ", " : "", t->shape[i]);
    }
    if (used < cap) { snprintf(out + used, cap - used, "]"); }
    return out;
}

static inline void safetensors_close(SafeTensors* st) {
    if (st->path) { close(st->fd); }
    free(st->path);
    free(st->tensors);
    json_free(&st->header);
    memset(st, 0, sizeof *st);
}

/* Reads and checks one tensor of the header. */
static inline bool safetensors_parse_tensor(SafeTensors* st, const JsonNode* n, SafeTensor* t, Error* e) {
    const uint64_t data_size = st->size - st->data_start;
    const Json* j = &st->header;
    size_t name_len = 0;
    char shown[100];
    t->name = json_key(j, n, &name_len);
    show_text(shown, sizeof shown, t->name, name_len);
    if (strlen(t->name) != name_len) { return fail(e, "%s: tensor name \"%s\" holds a NUL", st->path, shown); }
    const char* dtype = NULL;
    if (n->type != JSON_OBJECT) {
        return fail(e, "%s: tensor \"%s\" is not an object, wanted dtype, shape and data_offsets", st->path, shown);
    }
    if (json_length(n) != 3) {
        return fail(e, "%s: tensor \"%s\" has %zu fields, wanted dtype, shape and data_offsets", st->path, shown,
                    json_length(n));
    }
    if (!json_text(j, n, "dtype", &dtype, e)) { return false; }
    t->dtype = safe_dtype(dtype);
    if (t->dtype == NUM_SAFE_DTYPES) { return json_wanted(j, n, "dtype", e, "a dtype such as F32, BF16 or F16"); }

    const JsonNode* shape = json_get(j, n, "shape");
    if (!shape || shape->type != JSON_ARRAY || json_length(shape) > SAFE_MAX_DIMS) {
        return json_wanted(j, n, "shape", e, "an array of at most %d sizes", SAFE_MAX_DIMS);
    }
    uint64_t count = 1, bytes = 0;
    for (const JsonNode* d = json_first(j, shape); d; d = json_next(j, d)) {
        uint64_t size = 0;
        if (!json_node_u64(j, d, &size) || __builtin_mul_overflow(count, size, &count)) {
            return json_wanted(j, n, "shape", e, "sizes whose product fits in 64 bits");
        }
        t->shape[t->ndim++] = (size_t)size;
    }
    if (__builtin_mul_overflow(count, (uint64_t)safe_dtypes[t->dtype].bytes, &bytes)) {
        return json_wanted(j, n, "shape", e, "sizes whose product fits in 64 bits");
    }

    const JsonNode* offsets = json_get(j, n, "data_offsets");
    uint64_t range[2] = {0, 0};
    bool ok = offsets && offsets->type == JSON_ARRAY && json_length(offsets) == 2;
    if (ok) {
        const JsonNode* first = json_first(j, offsets);
        ok = json_node_u64(j, first, &range[0]) && json_node_u64(j, json_next(j, first), &range[1]);
    }
    if (!ok) { return json_wanted(j, n, "data_offsets", e, "two byte offsets"); }
    if (range[0] > range[1] || range[1] > data_size) {
        return fail(e, "%s: %s.data_offsets are [%llu, %llu], wanted a range within the %llu bytes of data: is the file cut?",
                    st->path, shown, (unsigned long long)range[0], (unsigned long long)range[1], (unsigned long long)data_size);
    }
    if (range[1] - range[0] != bytes) {
        return fail(e, "%s: %s.data_offsets span %llu bytes, wanted the %llu of its dtype and shape", st->path, shown,
                    (unsigned long long)(range[1] - range[0]), (unsigned long long)bytes);
    }
    t->count = (size_t)count;
    t->begin = st->data_start + range[0];
    return true;
}

static inline int safe_compare_place(const void* a, const void* b) {
    const SafeTensor *x = (const SafeTensor*)a, *y = (const SafeTensor*)b;
    if (x->begin != y->begin) { return x->begin < y->begin ? -1 : 1; }
    const size_t xb = safe_bytes(x), yb = safe_bytes(y);  // an empty tensor sorts before one that starts at the same byte
    return xb < yb ? -1 : xb > yb;
}

static inline int safe_compare_name(const void* a, const void* b) {
    return strcmp(((const SafeTensor*)a)->name, ((const SafeTensor*)b)->name);
}

static inline bool safetensors_parse_header(SafeTensors* st, char* text, size_t length, Error* e) {
    st->data_start = 8 + (uint64_t)length;
    if (!json_parse(&st->header, text, length, st->path, e)) { return false; }
    const Json* j = &st->header;
    const JsonNode* root = json_root(j);
    if (root->type != JSON_OBJECT) { return fail(e, "%s: the header is not a JSON object", st->path); }
    st->tensors = (SafeTensor*)calloc(json_length(root) + 1, sizeof(SafeTensor));
    if (!st->tensors) { return fail(e, "%s: out of memory for %zu tensors", st->path, json_length(root)); }
    for (const JsonNode* n = json_first(j, root); n; n = json_next(j, n)) {
        size_t key_len = 0;
        const char* key = json_key(j, n, &key_len);
        if (key_len == 12 && memcmp(key, "__metadata__", 12) == 0) {
            bool ok = n->type == JSON_OBJECT || n->type == JSON_NULL;
            for (const JsonNode* m = json_first(j, n); ok && m; m = json_next(j, m)) { ok = m->type == JSON_STRING; }
            if (!ok) { return json_wanted(j, root, "__metadata__", e, "an object of strings"); }
        } else if (!safetensors_parse_tensor(st, n, &st->tensors[st->count++], e)) {
            return false;
        }
    }
    qsort(st->tensors, st->count, sizeof(SafeTensor), safe_compare_place);
    uint64_t end = st->data_start;
    for (size_t i = 0; i < st->count; i++) {
        const SafeTensor* t = &st->tensors[i];
        if (t->begin != end) {
            char shown[100];
            return fail(e, "%s: %s.data_offsets start at byte %llu, wanted %llu: tensors %s", st->path,
                        show_text(shown, sizeof shown, t->name, strlen(t->name)),
                        (unsigned long long)(t->begin - st->data_start), (unsigned long long)(end - st->data_start),
                        t->begin < end ? "overlap" : "leave a hole");
        }
        end += safe_bytes(t);
    }
    if (end != st->size) {
        return fail(e, "%s: the tensors end at byte %llu, but the file ends at byte %llu", st->path, (unsigned long long)end,
                    (unsigned long long)st->size);
    }
    qsort(st->tensors, st->count, sizeof(SafeTensor), safe_compare_name);
    return true;
}

/* Opens a file and checks its whole header. Close with safetensors_close(), also after a failure or if *st is all zero. */
static inline bool safetensors_open(SafeTensors* st, const char* path, Error* e) {
    memset(st, 0, sizeof *st);
    const int fd = open_to_read(path, "a safetensors file", &st->size, e);
    if (fd < 0) { return false; }
    st->fd = fd;
    st->path = xstrdup(path);
    const uint64_t file_size = st->size;
    char head[32];
    const size_t have = file_size < sizeof head ? (size_t)file_size : sizeof head;
    if (!read_at(fd, 0, head, have, path, "the first bytes", e)) { return false; }
    const char* kind = file_looks_like(head, have);
    if (kind && strcmp(kind, "a safetensors file") != 0) { return fail(e, "%s: is %s, wanted a safetensors file", path, kind); }
    if (file_size < 8) { return fail(e, "%s: is %zu bytes long, wanted a safetensors file", path, have); }
    uint64_t length;
    memcpy(&length, head, 8);
    if (length > SAFE_MAX_HEADER || length > file_size - 8) {
        return fail(e, "%s: the header's length is %llu, wanted at most %llu: the file is cut short or not safetensors", path,
                    (unsigned long long)length,
                    (unsigned long long)(file_size - 8 < SAFE_MAX_HEADER ? file_size - 8 : (uint64_t)SAFE_MAX_HEADER));
    }
    if (length < 2 || head[8] != '{') { return fail(e, "%s: the header does not start with '{'", path); }
    char* text = (char*)malloc((size_t)length + 1);
    if (!text) { return fail(e, "%s: out of memory for its header of %llu bytes", path, (unsigned long long)length); }
    if (!read_at(fd, 8, text, (size_t)length, path, "the header", e)) {
        free(text);
        return false;
    }
    text[length] = 0;
    return safetensors_parse_header(st, text, (size_t)length, e);
}

/* Returns the tensor of this name, or NULL. */
static inline const SafeTensor* safetensors_find(const SafeTensors* st, const char* name) {
    SafeTensor key;
    memset(&key, 0, sizeof key);
    key.name = name;
    if (st->count == 0) { return NULL; }
    return (const SafeTensor*)bsearch(&key, st->tensors, st->count, sizeof key, safe_compare_name);
}

/* Returns a value of __metadata__, or NULL. */
static inline const char* safetensors_metadata(const SafeTensors* st, const char* key) {
    return json_string(&st->header, json_get(&st->header, json_get(&st->header, json_root(&st->header), "__metadata__"), key),
                       NULL);
}

/* Reads elements [first, first + n) as stored in the file; dst holds n * element bytes. */
static inline bool safetensors_read_raw(const SafeTensors* st, const SafeTensor* t, size_t first, size_t n, void* dst,
                                        Error* e) {
    const size_t size = safe_dtypes[t->dtype].bytes;
    if (first > t->count || n > t->count - first) {
        return fail(e, "%s: %s has %zu elements, wanted %zu from %zu on", st->path, t->name, t->count, n, first);
    }
    return read_at(st->fd, t->begin + first * size, dst, n * size, st->path, t->name, e);
}

/* Reads elements [first, first + n) of an F32, BF16 or F16 tensor as floats, exactly. Adds the file's bytes to `sum` (or
 * NULL). */
static inline bool safetensors_read_sum(const SafeTensors* st, const SafeTensor* t, size_t first, size_t n, float* dst,
                                        Crc* sum, Error* e) {
    if (t->dtype == SAFE_F32) {
        const bool ok = safetensors_read_raw(st, t, first, n, dst, e);
        if (ok && sum) { crc_add(sum, dst, n * sizeof(float)); }
        return ok;
    }
    if (t->dtype != SAFE_BF16 && t->dtype != SAFE_F16) {
        return fail(e, "%s: %s.dtype is %s, wanted F32, BF16 or F16", st->path, t->name, safe_dtypes[t->dtype].name);
    }
    uint16_t piece[SAFE_PIECE];
    while (n > 0) {
        const size_t m = size_min(n, SAFE_PIECE);
        if (!safetensors_read_raw(st, t, first, m, piece, e)) { return false; }
        if (sum) { crc_add(sum, piece, m * sizeof *piece); }
        if (t->dtype == SAFE_BF16) {
            for (size_t i = 0; i < m; i++) { dst[i] = f32_from_bf16(piece[i]); }
        } else {
            for (size_t i = 0; i < m; i++) { dst[i] = f32_from_f16(piece[i]); }
        }
        first += m;
        dst += m;
        n -= m;
    }
    return true;
}

static inline bool safetensors_read_f32(const SafeTensors* st, const SafeTensor* t, size_t first, size_t n, float* dst,
                                        Error* e) {
    return safetensors_read_sum(st, t, first, n, dst, NULL, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// writing

typedef struct {
    char path[PATH_CAP];
    FILE* f;
    uint64_t written, total;  // bytes
    Crc crc;                  // of the bytes written
} SafeWriter;

static inline bool safewriter_bytes(SafeWriter* w, const void* data, size_t bytes, Error* e) {
    LLMC_FAULT_POINT("write");
    errno = 0;
    if (fwrite(data, 1, bytes, w->f) != bytes) {
        return fail(e, "%s: writing failed after %llu of its %llu bytes: %s", w->path, (unsigned long long)w->written,
                    (unsigned long long)w->total, strerror(errno));
    }
    crc_add(&w->crc, data, bytes);
    w->written += bytes;
    return true;
}

/* Closes and removes the unfinished file. Harmless after safewriter_finish(). */
static inline void safewriter_abort(SafeWriter* w) {
    if (!w->f) { return; }
    fclose(w->f);
    w->f = NULL;
    unlink(w->path);
}

/* Makes a file for `count` tensors (uses name, dtype, ndim and shape) and writes its header. Write their data next, in this
 * order. Removes the file if anything fails. */
static inline bool safewriter_open(SafeWriter* w, const char* path, const SafeTensor* tensors, size_t count, Error* e) {
    memset(w, 0, sizeof *w);
    crc_begin(&w->crc);
    if (strlen(path) >= sizeof w->path) { return fail(e, "%.200s...: the path is too long", path); }
    strcpy(w->path, path);
    char* text = NULL;
    size_t length = 0;
    FILE* header = open_memstream(&text, &length);
    if (!header) { return fail(e, "%s: out of memory for its header", path); }
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", header);
    uint64_t offset = 0;
    for (size_t i = 0; i < count; i++) {
        const SafeTensor* t = &tensors[i];
        uint64_t bytes = safe_dtypes[t->dtype].bytes;
        fputc(',', header);
        json_write_string(header, t->name, strlen(t->name));
        fprintf(header, ":{\"dtype\":\"%s\",\"shape\":[", safe_dtypes[t->dtype].name);
        for (int d = 0; d < t->ndim; d++) {
            fprintf(header, "%s%zu", d ? "," : "", t->shape[d]);
            bytes *= t->shape[d];
        }
        fprintf(header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)offset, (unsigned long long)(offset + bytes));
        offset += bytes;
    }
    fputc('}', header);
    fflush(header);
    while (length % 8 != 0) {  // the data starts at a multiple of 8
        fputc(' ', header);
        fflush(header);
    }
    const bool whole = fclose(header) == 0 && text;
    const uint64_t prefix = length;
    w->total = 8 + prefix + offset;
    bool ok = whole || fail(e, "%s: out of memory for its header", path);
    w->f = ok ? create_output(path, e) : NULL;
    ok = w->f && safewriter_bytes(w, &prefix, 8, e) && safewriter_bytes(w, text, length, e);
    free(text);
    if (!ok) { safewriter_abort(w); }
    return ok;
}

/* Writes the next n elements, rounded to dtype F32, BF16 or F16. */
static inline bool safewriter_f32(SafeWriter* w, SafeDtype dtype, const float* src, size_t n, Error* e) {
    if (dtype == SAFE_F32) { return safewriter_bytes(w, src, n * sizeof(float), e); }
    uint16_t piece[SAFE_PIECE];
    while (n > 0) {
        const size_t m = size_min(n, SAFE_PIECE);
        if (dtype == SAFE_BF16) {
            for (size_t i = 0; i < m; i++) { piece[i] = bf16_from_f32(src[i]); }
        } else {
            for (size_t i = 0; i < m; i++) { piece[i] = f16_from_f32(src[i]); }
        }
        if (!safewriter_bytes(w, piece, m * sizeof *piece, e)) { return false; }
        src += m;
        n -= m;
    }
    return true;
}

/* Flushes the file to disk and closes it. Fails unless all declared bytes were written. */
static inline bool safewriter_finish(SafeWriter* w, Error* e) {
    FILE* f = w->f;
    w->f = NULL;
    bool ok = close_output(f, w->path, e);
    ok = ok && (w->written == w->total || fail(e, "%s: received %llu of its %llu bytes", w->path,
                                               (unsigned long long)w->written, (unsigned long long)w->total));
    if (!ok) { unlink(w->path); }
    return ok;
}

#endif
