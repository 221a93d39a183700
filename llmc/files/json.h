/* json.h -- reads strict JSON (RFC 8259), and the numbers NaN, Infinity and -Infinity, which Python writes; writes the two
 * values that need care, strings and floating-point numbers; changes a member of a text.
 *
 * The parser turns a text into one flat array of nodes in document order. A container is followed by its whole subtree, so
 * its first child is the next node; each node holds the index of its next sibling. Strings are decoded in place (an escape
 * is never shorter than what it stands for) and end in a NUL. They may also contain NULs, so they carry a length.
 * Numbers stay text until a field asks for an integer or a double: no seed or position loses bits in a double.
 *
 * The parser refuses, with file, line and byte column: anything outside the grammar, invalid UTF-8, lone surrogates, a byte
 * order mark, nesting above JSON_MAX_DEPTH, duplicate keys (found by hashing, so large vocabularies stay linear).
 * The text bounds the memory: a node is 24 bytes and stands for about two bytes of text or more.
 *
 * JSON cannot hold a text that is not UTF-8, as a path on Linux may be: json_write_bytes() and json_bytes() have a form for it.
 */
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include "llmc/base/hash.h"       // defines: hash_seed, hash_key, hash_place
#include "llmc/base/utils.h"      // defines: fail, read_file, size_min
#include "llmc/files/filekind.h"  // defines: file_looks_like
#include "llmc/base/text.h"       // defines: show_text

#include <math.h>

enum { JSON_MAX_DEPTH = 64 };

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct {
    uint32_t at;       // string, number: where its text starts in Json.text
    uint32_t length;   // string, number: bytes; array, object: direct children
    uint32_t key;      // member of an object: where its key starts in Json.text
    uint32_t key_len;  // bytes of the key
    uint32_t next;     // index of the next sibling; 0: none
    uint32_t type;     // JsonType
} JsonNode;

typedef struct {
    JsonNode* nodes;  // nodes[0] is the root
    size_t count;
    char* text;        // owned
    const char* path;  // borrowed, for messages: must outlive the last request for a field
} Json;

// ---------------------------------------------------------------------------------------------------------------------
// reading

typedef struct {
    Json* j;
    char* text;        // the whole text; the NUL after it stops every scan
    char* p;           // the next byte
    char* end;         // the NUL
    char* line_start;  // first byte of the current line
    size_t line;       // 1-based
    size_t cap;        // nodes allocated
    Error* e;
} JsonParser;

LLMC_PRINTF(3, 4) static bool json_fail(JsonParser* s, const char* at, const char* fmt, ...) {
    char cause[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(cause, sizeof cause, fmt, ap);
    va_end(ap);
    return fail(s->e, "%s:%zu:%zu: %s", s->j->path, s->line, (size_t)(at - s->line_start) + 1, cause);
}

/* Fails with "found X, wanted Y" at the next byte. */
static inline bool json_unexpected(JsonParser* s, const char* wanted) {
    unsigned char c = (unsigned char)*s->p;
    if (s->p == s->end) { return json_fail(s, s->p, "the text ends here, wanted %s", wanted); }
    if (c > 0x20 && c < 0x7F) { return json_fail(s, s->p, "found '%c', wanted %s", c, wanted); }
    return json_fail(s, s->p, "found byte 0x%02x, wanted %s", c, wanted);
}

static inline void json_skip_space(JsonParser* s) {
    for (;; s->p++) {
        if (*s->p == '\n') {
            s->line++;
            s->line_start = s->p + 1;
        } else if (*s->p != ' ' && *s->p != '\t' && *s->p != '\r') {
            return;
        }
    }
}

static inline bool json_new_node(JsonParser* s, JsonType type, uint32_t* index) {
    Json* j = s->j;
    if (j->count == s->cap) {
        size_t cap = s->cap ? s->cap * 2 : 64;
        JsonNode* nodes = (JsonNode*)realloc(j->nodes, cap * sizeof(JsonNode));
        if (!nodes) { return json_fail(s, s->p, "out of memory for %zu JSON nodes", cap); }
        j->nodes = nodes;
        s->cap = cap;
    }
    JsonNode* n = &j->nodes[j->count];
    memset(n, 0, sizeof *n);
    n->type = (uint32_t)type;
    *index = (uint32_t)j->count++;
    return true;
}

/* Returns the value of the four hexadecimal digits at p, or -1. */
static inline int json_hex4(const char* p) {
    int value = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) { return -1; }
        value = value * 16 + digit;
    }
    return value;
}

/* Decodes the escape at s->p (a backslash) to *out; advances both. */
static inline bool json_escape(JsonParser* s, char** out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char c = s->p[1];
    const char* found = c ? strchr(from, c) : NULL;
    if (found) {
        *(*out)++ = to[found - from];
        s->p += 2;
        return true;
    }
    if (c != 'u') { return json_fail(s, s->p, "JSON has no such escape"); }
    int code = json_hex4(s->p + 2);  // stops at the NUL after the text
    if (code < 0) { return json_fail(s, s->p, "\\u is not followed by four hexadecimal digits"); }
    size_t used = 6;
    if (code >= 0xD800 && code < 0xE000) {
        int low = code < 0xDC00 && s->p[6] == '\\' && s->p[7] == 'u' ? json_hex4(s->p + 8) : -1;
        if (low < 0xDC00 || low > 0xDFFF) { return json_fail(s, s->p, "a surrogate without its other half"); }
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        used = 12;
    }
    *out += utf8_encode(*out, code);
    s->p += used;
    return true;
}

/* Decodes the string at s->p (its opening quote) in place, to *length bytes at s->text + *at. */
static inline bool json_parse_string(JsonParser* s, uint32_t* at, uint32_t* length) {
    char* out = ++s->p;
    *at = (uint32_t)(out - s->text);
    for (;;) {
        const unsigned char c = (unsigned char)*s->p;
        if (c == '"') { break; }
        if (c == '\\') {
            if (!json_escape(s, &out)) { return false; }
        } else if (c < 0x20) {
            return json_unexpected(s, "the string to go on or to end");
        } else if (c < 0x80) {
            *out++ = *s->p++;
        } else {
            size_t len = utf8_char_length(s->p, (size_t)(s->end - s->p));
            if (len == 0) { return json_fail(s, s->p, "byte 0x%02x is not valid UTF-8", c); }
            for (; len > 0; len--) { *out++ = *s->p++; }
        }
    }
    *length = (uint32_t)(out - s->text) - *at;
    *out = 0;  // at or before the closing quote
    s->p++;
    return true;
}

static inline bool json_digits(JsonParser* s) {
    if (*s->p < '0' || *s->p > '9') { return json_unexpected(s, "a digit"); }
    while (*s->p >= '0' && *s->p <= '9') { s->p++; }
    return true;
}

static inline bool json_word(JsonParser* s, const char* word) {
    size_t len = strlen(word);
    if (strncmp(s->p, word, len) != 0) { return json_unexpected(s, "a value"); }
    s->p += len;
    return true;
}

static inline bool json_parse_number(JsonParser* s, JsonNode* n) {
    n->at = (uint32_t)(s->p - s->text);
    if (*s->p == '-') { s->p++; }
    if (*s->p == 'N' || *s->p == 'I') {  // Python writes these three, and reads no -NaN
        const bool signed_word = s->p != s->text + n->at;
        if (!json_word(s, *s->p == 'I' || signed_word ? "Infinity" : "NaN")) { return false; }
        n->length = (uint32_t)(s->p - s->text) - n->at;
        return true;
    }
    if (*s->p == '0') {
        s->p++;  // no digit may follow: the caller finds it where it wants a comma
    } else if (!json_digits(s)) {
        return false;
    }
    if (*s->p == '.') {
        s->p++;
        if (!json_digits(s)) { return false; }
    }
    if (*s->p == 'e' || *s->p == 'E') {
        s->p++;
        if (*s->p == '+' || *s->p == '-') { s->p++; }
        if (!json_digits(s)) { return false; }
    }
    n->length = (uint32_t)(s->p - s->text) - n->at;
    return true;
}

static inline bool json_same_key(const Json* j, const JsonNode* a, const JsonNode* b) {
    return a->key_len == b->key_len && memcmp(j->text + a->key, j->text + b->key, a->key_len) == 0;
}

static inline bool json_duplicate(JsonParser* s, const JsonNode* n) {
    char shown[100];
    return json_fail(s, s->p, "the object that ends here has the key \"%s\" twice",
                     show_text(shown, sizeof shown, s->j->text + n->key, n->key_len));
}

/* Checks that no two members of an object share a key, with an open-addressed hash table. */
static inline bool json_check_keys(JsonParser* s, uint32_t object) {
    const Json* j = s->j;
    const JsonNode* nodes = j->nodes;
    const size_t count = nodes[object].length;
    if (count < 2) { return true; }
    size_t slots = 4;
    while (slots < count * 2) { slots *= 2; }
    uint32_t* table = (uint32_t*)calloc(slots, sizeof(uint32_t));  // node index; 0: empty (node 0, the root, is no member)
    if (!table) { return json_fail(s, s->p, "out of memory for an object of %zu members", count); }
    const HashSeed seed = hash_seed();
    bool ok = true;
    for (uint32_t a = object + 1; ok && a; a = nodes[a].next) {
        const size_t len = nodes[a].key_len;
        const uint64_t key = len ? hash_key(seed, j->text + nodes[a].key, len) : 0;
        size_t slot = (size_t)hash_place(seed, key, len) & (slots - 1);
        while (ok && table[slot]) {
            if (json_same_key(j, &nodes[a], &nodes[table[slot]])) { ok = json_duplicate(s, &nodes[a]); }
            slot = (slot + 1) & (slots - 1);
        }
        table[slot] = a;
    }
    free(table);
    return ok;
}

/* Parses the value at s->p; *index is its node. Recurses at most JSON_MAX_DEPTH deep. */
static inline bool json_parse_value(JsonParser* s, int depth, uint32_t* index) {
    const char c = *s->p;
    const JsonType type = c == '{'   ? JSON_OBJECT
                          : c == '[' ? JSON_ARRAY
                          : c == '"' ? JSON_STRING
                          : c == 't' ? JSON_TRUE
                          : c == 'f' ? JSON_FALSE
                          : c == 'n' ? JSON_NULL
                                     : JSON_NUMBER;
    if (type == JSON_NUMBER && !(c && strchr("-0123456789NI", c))) { return json_unexpected(s, "a value"); }
    if (!json_new_node(s, type, index)) { return false; }
    JsonNode* n = &s->j->nodes[*index];
    switch (type) {
        case JSON_NULL: return json_word(s, "null");
        case JSON_TRUE: return json_word(s, "true");
        case JSON_FALSE: return json_word(s, "false");
        case JSON_NUMBER: return json_parse_number(s, n);
        case JSON_STRING: return json_parse_string(s, &n->at, &n->length);
        default: break;
    }
    if (depth == JSON_MAX_DEPTH) { return json_fail(s, s->p, "nested more than %d deep", JSON_MAX_DEPTH); }
    const char close = type == JSON_OBJECT ? '}' : ']';
    uint32_t last = 0, count = 0;
    s->p++;
    json_skip_space(s);
    while (*s->p != close || count > 0) {
        uint32_t key = 0, key_len = 0, child = 0;
        if (type == JSON_OBJECT) {
            if (*s->p != '"') { return json_unexpected(s, "a key in quotes"); }
            if (!json_parse_string(s, &key, &key_len)) { return false; }
            json_skip_space(s);
            if (*s->p != ':') { return json_unexpected(s, "':'"); }
            s->p++;
            json_skip_space(s);
        }
        if (!json_parse_value(s, depth + 1, &child)) { return false; }
        s->j->nodes[child].key = key;
        s->j->nodes[child].key_len = key_len;
        if (last) { s->j->nodes[last].next = child; }
        last = child;
        count++;
        json_skip_space(s);
        if (*s->p == close) { break; }
        if (*s->p != ',') { return json_unexpected(s, type == JSON_OBJECT ? "',' or '}'" : "',' or ']'"); }
        s->p++;
        json_skip_space(s);
    }
    s->p++;
    s->j->nodes[*index].length = count;
    return type == JSON_ARRAY || json_check_keys(s, *index);
}

static inline void json_free(Json* j) {
    free(j->nodes);
    free(j->text);
    memset(j, 0, sizeof *j);
}

/* Parses `len` bytes of text. `text` comes from malloc, has a NUL at text[len], and belongs to the Json from now on, also
 * if parsing fails. `path` names the text in messages and is borrowed. */
static inline bool json_parse(Json* j, char* text, size_t len, const char* path, Error* e) {
    memset(j, 0, sizeof *j);
    j->text = text;
    j->path = path;
    JsonParser s = {j, text, text, text + len, text, 1, 0, e};
    uint32_t root = 0;
    bool ok = len < UINT32_MAX || fail(e, "%s: is %zu bytes long, wanted less than 4 GiB of JSON", path, len);
    if (ok && len >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) {
        ok = json_fail(&s, text, "starts with a byte order mark, which JSON does not allow");
    }
    if (ok) {
        json_skip_space(&s);
        ok = json_parse_value(&s, 0, &root);
    }
    if (ok) {
        json_skip_space(&s);
        ok = s.p == s.end || json_unexpected(&s, "the end of the text");
    }
    if (!ok) { json_free(j); }
    return ok;
}

/* Parses one line of a file of JSON lines, which stays as it is. `at`, "FILE:LINE", names it in messages and is borrowed. */
static inline bool json_parse_line(Json* j, const char* line, size_t len, const char* at, Error* e) {
    char in_line[PATH_CAP + 64];
    Error inner = NO_ERROR;
    if (json_parse(j, xcopy_text(line, len), len, at, &inner)) { return true; }
    // the parser counts lines too: it says "FILE:7:1:COLUMN" for column COLUMN of line 7
    snprintf(in_line, sizeof in_line, "%s:1:", at);
    const size_t skip = strncmp(inner.msg, in_line, strlen(in_line)) == 0 ? strlen(in_line) - 1 : 0;
    return skip ? fail(e, "%s%s", at, inner.msg + skip) : fail(e, "%s", inner.msg);
}

/* Reads and parses a file of at most max_bytes. */
static inline bool json_read_file(Json* j, const char* path, uint64_t max_bytes, Error* e) {
    memset(j, 0, sizeof *j);
    size_t len = 0;
    char* text = read_file(path, &len, max_bytes, e);
    if (!text) { return false; }
    const char* kind = file_looks_like(text, len);
    if (kind && strcmp(kind, "JSON text") != 0) {
        free(text);
        return fail(e, "%s: is %s, wanted JSON text", path, kind);
    }
    return json_parse(j, text, len, path, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// walking

static inline const JsonNode* json_root(const Json* j) { return &j->nodes[0]; }

static inline bool json_is_container(const JsonNode* n) { return n->type == JSON_ARRAY || n->type == JSON_OBJECT; }

/* Returns the first element or member of a container; NULL if it is empty or not a container. */
static inline const JsonNode* json_first(const Json* j, const JsonNode* n) {
    (void)j;
    return json_is_container(n) && n->length > 0 ? n + 1 : NULL;
}

/* Returns the next sibling of n, or NULL. */
static inline const JsonNode* json_next(const Json* j, const JsonNode* n) { return n->next ? &j->nodes[n->next] : NULL; }

/* Returns the number of elements of an array, members of an object, or bytes of a string. */
static inline size_t json_length(const JsonNode* n) { return n->length; }

/* Returns the key of an object's member; `len` (or NULL) gets its bytes. */
static inline const char* json_key(const Json* j, const JsonNode* n, size_t* len) {
    if (len) { *len = n->key_len; }
    return j->text + n->key;
}

/* Returns the bytes of a string, followed by a NUL; NULL if n is NULL or not a string. `len` may be NULL. */
static inline const char* json_string(const Json* j, const JsonNode* n, size_t* len) {
    if (!n || n->type != JSON_STRING) { return NULL; }
    if (len) { *len = n->length; }
    return j->text + n->at;
}

/* Returns the member with this key, even if it is null; NULL if it is absent or `object` is not an object. Linear. */
static inline const JsonNode* json_get_any(const Json* j, const JsonNode* object, const char* key) {
    if (!object || object->type != JSON_OBJECT) { return NULL; }
    const size_t len = strlen(key);
    for (const JsonNode* n = json_first(j, object); n; n = json_next(j, n)) {
        if (n->key_len == len && memcmp(j->text + n->key, key, len) == 0) { return n; }
    }
    return NULL;
}

/* Returns the member with this key; NULL if it is absent or null. */
static inline const JsonNode* json_get(const Json* j, const JsonNode* object, const char* key) {
    const JsonNode* n = json_get_any(j, object, key);
    return n && n->type != JSON_NULL ? n : NULL;
}

/* Reads an integer without fraction or exponent; false if it does not fit. */
static inline bool json_node_u64(const Json* j, const JsonNode* n, uint64_t* out) {
    if (!n || n->type != JSON_NUMBER) { return false; }
    const char* s = j->text + n->at;
    uint64_t value = 0;
    for (size_t i = 0; i < n->length; i++) {
        if (s[i] < '0' || s[i] > '9' || __builtin_mul_overflow(value, (uint64_t)10, &value)) { return false; }
        if (__builtin_add_overflow(value, (uint64_t)(s[i] - '0'), &value)) { return false; }
    }
    *out = value;
    return true;
}

/* Does the same with a sign. */
static inline bool json_node_int(const Json* j, const JsonNode* n, int64_t* out) {
    if (!n || n->type != JSON_NUMBER) { return false; }
    const bool negative = j->text[n->at] == '-';
    JsonNode digits = *n;
    uint64_t value = 0;
    digits.at += negative;
    digits.length -= negative;
    if (!json_node_u64(j, &digits, &value) || value > (uint64_t)INT64_MAX + negative) { return false; }
    *out = (int64_t)(negative ? -value : value);
    return true;
}

/* Reads a number as the nearest double; infinite if it is too large. */
static inline bool json_node_double(const Json* j, const JsonNode* n, double* out) {
    if (!n || n->type != JSON_NUMBER) { return false; }
    *out = strtod(j->text + n->at, NULL);  // the byte after a number (comma, bracket, space, NUL) stops strtod
    return true;
}

/* Returns whether a node is the string `want`. */
static inline bool json_is_string(const Json* j, const JsonNode* n, const char* want) {
    size_t len = 0;
    const char* s = json_string(j, n, &len);
    return s && len == strlen(want) && memcmp(s, want, len) == 0;
}

/* Returns whether the member is absent, null, false, 0, "", [] or {}: all mean off. */
static inline bool json_is_off(const Json* j, const JsonNode* object, const char* key) {
    const JsonNode* n = json_get(j, object, key);
    double value = 1;
    return !n || n->type == JSON_FALSE || (n->type == JSON_STRING && n->length == 0) ||
           (json_is_container(n) && json_length(n) == 0) || (json_node_double(j, n, &value) && value == 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// typed fields. Each function reads the member `key` of `object`, or fails with "FILE: FIELD is FOUND, wanted WANTED",
// where FIELD is the dotted path. Without `_or` the field must be there; with `_or` an absent or null
// field leaves *out as it is.

/* Writes a node's value for a message. */
static inline const char* json_show(char* out, size_t cap, const Json* j, const JsonNode* n) {
    if (!n) {
        snprintf(out, cap, "missing");
    } else if (n->type == JSON_STRING) {
        out[0] = '"';
        show_text(out + 1, size_min(80, cap - 2), j->text + n->at, n->length);
        const size_t len = strlen(out);
        memcpy(out + len, "\"", 2);
    } else if (n->type == JSON_NUMBER) {
        show_text(out, cap < 60 ? cap : 60, j->text + n->at, n->length);
    } else {
        static const char* const names[] = {"null", "false", "true", "", "", "an array", "an object"};
        snprintf(out, cap, "%s", names[n->type]);
    }
    return out;
}

/* Writes the dotted path of a member of `object`: "rope_scaling.factor"; array elements count from 0. */
static inline const char* json_field(char* out, size_t cap, const Json* j, const JsonNode* object, const char* key) {
    size_t used = 0;
    const JsonNode* at = json_root(j);
    out[0] = 0;
    // a subtree is one range of nodes, so the child that holds `object` is the last one that starts before it
    while (at && at != object) {
        const JsonNode* inside = NULL;
        size_t place = 0, inside_place = 0;
        for (const JsonNode* n = json_first(j, at); n && n <= object; n = json_next(j, n), place++) {
            inside = n;
            inside_place = place;
        }
        if (!inside) { break; }
        char name[100];
        if (at->type == JSON_OBJECT) {
            show_text(name, sizeof name, j->text + inside->key, inside->key_len);
        } else {
            snprintf(name, sizeof name, "%zu", inside_place);
        }
        used += (size_t)snprintf(out + used, cap - used, "%s.", name);
        if (used >= cap) { return out; }
        at = inside;
    }
    char last[100];
    snprintf(out + used, cap - used, "%s", show_text(last, sizeof last, key, strlen(key)));
    return out;
}

/* Fails with "FILE: FIELD is FOUND, wanted ..."; the format gives what was wanted. */
LLMC_PRINTF(5, 6)
static bool json_wanted(const Json* j, const JsonNode* object, const char* key, Error* e, const char* fmt, ...) {
    char field[256], found[128], wanted[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(wanted, sizeof wanted, fmt, ap);
    va_end(ap);
    return fail(e, "%s: %s is %s, wanted %s", j->path, json_field(field, sizeof field, j, object, key),
                json_show(found, sizeof found, j, json_get_any(j, object, key)), wanted);
}

static inline bool json_int(const Json* j, const JsonNode* object, const char* key, int64_t min, int64_t max, int64_t* out,
                            Error* e) {
    int64_t value = 0;
    if (json_node_int(j, json_get(j, object, key), &value) && value >= min && value <= max) {
        *out = value;
        return true;
    }
    return json_wanted(j, object, key, e, "an integer from %lld to %lld", (long long)min, (long long)max);
}

static inline bool json_int_or(const Json* j, const JsonNode* object, const char* key, int64_t min, int64_t max, int64_t* out,
                               Error* e) {
    return !json_get(j, object, key) || json_int(j, object, key, min, max, out, e);
}

static inline bool json_u64(const Json* j, const JsonNode* object, const char* key, uint64_t* out, Error* e) {
    if (json_node_u64(j, json_get(j, object, key), out)) { return true; }
    return json_wanted(j, object, key, e, "an integer from 0 to 2^64 - 1");
}

static inline bool json_u64_or(const Json* j, const JsonNode* object, const char* key, uint64_t* out, Error* e) {
    return !json_get(j, object, key) || json_u64(j, object, key, out, e);
}

static inline bool json_double(const Json* j, const JsonNode* object, const char* key, double min, double max, double* out,
                               Error* e) {
    double value = 0;
    if (json_node_double(j, json_get(j, object, key), &value) && isfinite(value) && value >= min && value <= max) {
        *out = value;
        return true;
    }
    return json_wanted(j, object, key, e, "a number from %g to %g", min, max);
}

static inline bool json_double_or(const Json* j, const JsonNode* object, const char* key, double min, double max, double* out,
                                  Error* e) {
    return !json_get(j, object, key) || json_double(j, object, key, min, max, out, e);
}

static inline bool json_bool(const Json* j, const JsonNode* object, const char* key, bool* out, Error* e) {
    const JsonNode* n = json_get(j, object, key);
    if (n && (n->type == JSON_TRUE || n->type == JSON_FALSE)) {
        *out = n->type == JSON_TRUE;
        return true;
    }
    return json_wanted(j, object, key, e, "true or false");
}

static inline bool json_bool_or(const Json* j, const JsonNode* object, const char* key, bool* out, Error* e) {
    return !json_get(j, object, key) || json_bool(j, object, key, out, e);
}

/* Reads a string without NULs; it is borrowed from the Json. */
static inline bool json_text(const Json* j, const JsonNode* object, const char* key, const char** out, Error* e) {
    size_t len = 0;
    const char* s = json_string(j, json_get(j, object, key), &len);
    if (s && strlen(s) == len) {
        *out = s;
        return true;
    }
    return json_wanted(j, object, key, e, s ? "a string without U+0000" : "a string");
}

/* Reads a string that json_write_bytes() wrote, or another one without U+0000. The caller frees *out. */
static inline bool json_bytes(const Json* j, const JsonNode* object, const char* key, char** out, Error* e) {
    size_t length = 0, count = 0;
    const char* text = json_string(j, json_get(j, object, key), &length);
    const bool coded = text && length > 0 && text[0] == 0;
    *out = NULL;
    if (!text || (!coded && strlen(text) != length)) { return json_wanted(j, object, key, e, "a string"); }
    char* bytes = (char*)xmalloc(length + 1);
    for (size_t i = coded; i < length;) {
        uint32_t c = (uint8_t)text[i];
        i += coded ? (size_t)utf8_decode((const uint8_t*)text + i, length - i, &c) : 1;
        if (coded && (c == 0 || c > 255)) {
            free(bytes);
            return json_wanted(j, object, key, e, "characters up to U+00FF behind U+0000");
        }
        bytes[count++] = (char)c;
    }
    bytes[count] = 0;
    *out = bytes;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// writing

/* Writes a string in quotes. Each byte that is not part of a UTF-8 character becomes U+FFFD. */
static inline void json_write_string(FILE* f, const char* s, size_t len) {
    static const char from[] = "\"\\\n\t\r", to[] = "\"\\ntr";
    fputc('"', f);
    for (size_t i = 0; i < len;) {
        uint32_t c;
        const size_t start = i;
        while (i < len && s[i] >= ' ' && s[i] < 0x7F && s[i] != '"' && s[i] != '\\') { i++; }
        if (i > start) { fwrite(s + start, 1, i - start, f); }
        if (i == len) { break; }
        const size_t bytes = (size_t)utf8_decode((const uint8_t*)s + i, len - i, &c);
        if (bytes == 0) {
            fputs("\xEF\xBF\xBD", f);
            i++;
            continue;
        }
        const char* found = c ? strchr(from, s[i]) : NULL;
        if (found) {
            fprintf(f, "\\%c", to[found - from]);
        } else if (plain_char_length(s + i, bytes) > 0) {
            fwrite(s + i, 1, bytes, f);
        } else {  // also DEL and C1: nothing in a file of ours drives the terminal that shows it
            fprintf(f, "\\u%04x", c);
        }
        i += bytes;
    }
    fputc('"', f);
}

/* Writes a C string in quotes, as json_write_string(). */
static inline void json_write_text(FILE* f, const char* text) { json_write_string(f, text, strlen(text)); }

/* Writes a text that json_bytes() reads back byte for byte, such as a path, even if it is not UTF-8: then as U+0000, and a
 * character U+0001 to U+00FF for each byte. */
static inline void json_write_bytes(FILE* f, const char* text) {
    const size_t length = strlen(text);
    size_t valid = 0;
    for (size_t n = 1; n > 0; valid += n) { n = utf8_char_length(text + valid, length - valid); }
    if (valid == length) {
        json_write_text(f, text);
        return;
    }
    char* coded = (char*)xmalloc(2 * length + 1);
    size_t count = 1;
    coded[0] = 0;
    for (size_t i = 0; i < length; i++) { count += utf8_encode(coded + count, (uint8_t)text[i]); }
    json_write_string(f, coded, count);
    free(coded);
}

/* Writes at most *room bytes of a text, and lessens *room by them. A text that is cut ends in an ellipsis. */
static inline void json_write_part(FILE* f, const char* text, size_t length, size_t* room) {
    static const char ellipsis[] = "\xE2\x80\xA6";
    const size_t dots = sizeof ellipsis - 1;
    size_t n = length;
    if (length > *room) {
        n = *room > dots ? *room - dots : 0;
        while (n > 0 && ((uint8_t)text[n] & 0xC0) == 0x80) { n--; }  // back to the start of a character
    }
    char* part = (char*)xmalloc(n + dots);
    memcpy(part, text, n);
    memcpy(part + n, ellipsis, dots);
    json_write_string(f, part, n < length ? n + dots : n);
    free(part);
    *room -= n < length ? *room : n;
}

/* Writes a value that was read; an array or object becomes null. */
static inline void json_write_value(FILE* f, const Json* j, const JsonNode* n) {
    switch (n->type) {
        case JSON_STRING: json_write_string(f, j->text + n->at, n->length); break;
        case JSON_NUMBER: fwrite(j->text + n->at, 1, n->length, f); break;
        case JSON_TRUE: fputs("true", f); break;
        case JSON_FALSE: fputs("false", f); break;
        default: fputs("null", f); break;
    }
}

/* Writes the shortest decimal that reads back as the same double, always as a float ("8.0"), to `text`, as Python does. */
static inline const char* double_text(char text[40], double value) {
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, value);
        if (strtod(text, NULL) == value) { break; }
    }
    if (strchr(text, 'e') && fabs(value) >= 1 && fabs(value) < 1e16) { snprintf(text, 32, "%.0f", value); }
    return strpbrk(text, ".en") ? text : strcat(text, ".0");
}

/* Writes a number so. A value that is not finite is written as null: JSON has no word for it. */
static inline void json_write_double(FILE* f, double value) {
    char text[40];
    fputs(isfinite(value) ? double_text(text, value) : "null", f);
}

/* Writes the shortest decimal that reads back as the same float. */
static inline void json_write_float(FILE* f, float value) {
    char text[40];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) { break; }
    }
    json_write_double(f, strtod(text, NULL));
}

/* Writes token ids as the files of a model spell them: null, an id, or a list. */
static inline void json_write_ids(FILE* f, const int* ids, int count) {
    fputs(count == 0 ? "null" : count > 1 ? "[" : "", f);
    for (int i = 0; i < count; i++) { fprintf(f, "%s%d", i ? ", " : "", ids[i]); }
    fputs(count > 1 ? "]" : "", f);
}

// ---------------------------------------------------------------------------------------------------------------------
// changing one member of an object in its text, so that every other byte stays. json_parse() must have accepted the text as an
// object: nothing is checked again here. Only top-level members are found, by a key without escapes.

/* Returns the end of the string that starts at s, past its closing quote. */
static inline const char* json_skip_string(const char* s) {
    for (s++; *s != '"'; s++) { s += *s == '\\'; }
    return s + 1;
}

static inline const char* json_skip_blank(const char* s) { return s + strspn(s, " \t\r\n"); }

/* Finds the value of the top-level member `key` in the text of a JSON object, from *from up to *to; false if there is none. */
static inline bool json_find_member(const char* text, const char* key, const char** from, const char** to) {
    const char* s = json_skip_blank(text) + 1;
    const size_t key_len = strlen(key);
    while (*(s = json_skip_blank(s)) == '"') {
        const bool found = strncmp(s + 1, key, key_len) == 0 && s[key_len + 1] == '"';
        *from = s = json_skip_blank(json_skip_blank(json_skip_string(s)) + 1);
        for (int depth = 0; depth > 0 || (*s != ',' && *s != '}');) {
            depth += (*s == '{' || *s == '[') - (*s == '}' || *s == ']');
            s = *s == '"' ? json_skip_string(s) : s + 1;
        }
        *to = s;
        if (found) { return true; }
        s += *s == ',';
    }
    return false;
}

/* Returns the text with the value of `key` replaced, or with the member added in front if it is absent. Release it with
 * free(). */
static inline char* json_with_member(const char* text, const char* key, const char* value) {
    const char *from = NULL, *to = NULL;
    const bool there = json_find_member(text, key, &from, &to);
    const size_t size = strlen(text) + strlen(key) + strlen(value) + 16;
    char* out = (char*)xmalloc(size);
    if (!there) { from = to = json_skip_blank(text) + 1; }
    const size_t head = (size_t)(from - text);
    memcpy(out, text, head);
    if (there) {
        snprintf(out + head, size - head, "%s%s", value, to);
    } else {
        const char* comma = *json_skip_blank(to) == '}' ? "" : ",";
        snprintf(out + head, size - head, "\n  \"%s\": %s%s%s", key, value, comma, to);
    }
    return out;
}

/* Replaces *text by its json_with_member(); frees the old text. */
static inline void json_set_member(char** text, const char* key, const char* value) {
    char* changed = json_with_member(*text, key, value);
    free(*text);
    *text = changed;
}

#endif
