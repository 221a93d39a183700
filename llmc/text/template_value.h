/* template_value.h -- the values of a chat template (text/template.h): made by the caller, from JSON, or by the template; their
 * memory; and what Python's bool(), ==, <, str(), repr() and json.dumps() make of them.
 *
 * Every byte of a string has a mark: 1 if the template wrote it (its text, its literals, and strings that the caller says are
 * the template's, such as bos_token), 0 if it comes from data. A number, true or none carries one for its text. The text that
 * repr() makes of a list, and tojson of anything, is data.
 *
 * Memory: all values lie in a TemplateArena and live until the caller resets it. Strings are UTF-8; indices and lengths count
 * code points, as in Python. Integers have 64 bits; larger ones of JSON become floats.
 *
 * An error leaves by longjmp() to template_parse() or template_render(): an expression is many calls deep, and each of them
 * would have to ask. Nothing needs freeing on the way, since the arena owns everything.
 */
#ifndef LLMC_TEMPLATE_VALUE_H
#define LLMC_TEMPLATE_VALUE_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/base/utf8.h"   // defines: utf8_decode
#include "llmc/files/json.h"  // defines: Json, json_first, json_next, json_string, json_node_int, json_node_double, double_text
#include "llmc/text/unicode.h"  // defines: unicode_class

#include <setjmp.h>

// ---------------------------------------------------------------------------------------------------------------------
// memory

typedef struct TemplateChunk {
    struct TemplateChunk* before;
    size_t size, used;  // bytes behind this header
} TemplateChunk;

/* All zeros is an empty arena. Not shared by threads. */
typedef struct {
    TemplateChunk* chunk;  // the newest
    size_t total;          // bytes of all chunks
} TemplateArena;

static inline void template_arena_free(TemplateArena* a) {
    for (TemplateChunk* before; a->chunk; a->chunk = before) {
        before = a->chunk->before;
        free(a->chunk);
    }
    a->total = 0;
}

/* Forgets all values; keeps the newest chunk of memory for the next ones. */
static inline void template_arena_reset(TemplateArena* a) {
    if (!a->chunk) { return; }
    TemplateArena rest = {a->chunk->before, 0};
    template_arena_free(&rest);
    a->chunk->before = NULL;
    a->chunk->used = 0;
    a->total = a->chunk->size;
}

/* Returns memory for `bytes` bytes, aligned to 16. It is not zeroed. */
static inline void* template_alloc(TemplateArena* a, size_t bytes) {
    const size_t head = round_up(sizeof(TemplateChunk), 16);
    bytes = round_up(bytes, 16);
    if (!a->chunk || a->chunk->size - a->chunk->used < bytes) {
        const size_t size = size_max(bytes, size_min(size_max(a->total, 1 << 14), 1 << 20));
        TemplateChunk* chunk = (TemplateChunk*)xmalloc(head + size);
        const TemplateChunk filled = {a->chunk, size, 0};
        *chunk = filled;
        a->chunk = chunk;
        a->total += size;
    }
    char* p = (char*)a->chunk + head + a->chunk->used;
    a->chunk->used += bytes;
    return p;
}

// ---------------------------------------------------------------------------------------------------------------------
// values

typedef enum {
    TEMPLATE_UNDEFINED,  // a name or member that is not there: prints nothing, is false, and most uses of it are errors
    TEMPLATE_NONE,
    TEMPLATE_BOOL,
    TEMPLATE_INT,
    TEMPLATE_FLOAT,
    TEMPLATE_STRING,
    TEMPLATE_LIST,
    TEMPLATE_TUPLE,
    TEMPLATE_ITERATOR,  // what map, select, items ... return: a list without a length, which is never false
    TEMPLATE_DICT,
    TEMPLATE_NAMESPACE,  // a dict whose members the template may set
    TEMPLATE_LOOP,
    TEMPLATE_FUNCTION,  // a function or macro, or a method with its value
} TemplateType;

typedef struct TemplateValue {
    TemplateType type;
    int data;    // none, bool, int, float: 1 if it comes from data
    size_t len;  // bytes of a string
    union {
        int64_t i;      // bool, int
        double d;       // float
        const char* s;  // string; undefined: what to say of it, or NULL
        struct TemplateList* list;
        struct TemplateDict* dict;
        struct JinjaLoop* loop;
        const struct JinjaBound* bound;
    } as;
    const uint8_t* marks;  // string: one a byte
} TemplateValue;

typedef struct TemplateList {
    TemplateValue* items;
    size_t count, cap;
} TemplateList;

typedef struct {
    TemplateValue key, value;
} TemplatePair;

typedef struct TemplateDict {
    TemplatePair* items;
    size_t count, cap;
} TemplateDict;

static inline TemplateValue template_value(TemplateType type) {
    TemplateValue v;
    memset(&v, 0, sizeof v);
    v.type = type;
    return v;
}
static inline TemplateValue template_none(void) { return template_value(TEMPLATE_NONE); }
static inline TemplateValue template_int(int64_t i) {
    TemplateValue v = template_value(TEMPLATE_INT);
    v.as.i = i;
    return v;
}
static inline TemplateValue template_bool(bool b) {
    TemplateValue v = template_value(TEMPLATE_BOOL);
    v.as.i = b;
    return v;
}
static inline TemplateValue template_float(double d) {
    TemplateValue v = template_value(TEMPLATE_FLOAT);
    v.as.d = d;
    return v;
}

/* Makes a string of `len` bytes of UTF-8, which must outlive it. */
static inline TemplateValue template_string(TemplateArena* a, const char* s, size_t len, bool from_template) {
    TemplateValue v = template_value(TEMPLATE_STRING);
    v.as.s = s;
    v.len = len;
    v.marks = (uint8_t*)memset(template_alloc(a, len), from_template, len);
    return v;
}

static inline TemplateValue template_list(TemplateArena* a) {
    TemplateValue v = template_value(TEMPLATE_LIST);
    v.as.list = (TemplateList*)memset(template_alloc(a, sizeof(TemplateList)), 0, sizeof(TemplateList));
    return v;
}

static inline TemplateValue template_dict(TemplateArena* a) {
    TemplateValue v = template_value(TEMPLATE_DICT);
    v.as.dict = (TemplateDict*)memset(template_alloc(a, sizeof(TemplateDict)), 0, sizeof(TemplateDict));
    return v;
}

/* Returns room for one more item than `count`: the old items, or a copy of them in twice the memory. */
static inline void* template_grow(TemplateArena* a, void* items, size_t count, size_t* cap, size_t bytes) {
    if (count < *cap) { return items; }
    *cap = *cap ? *cap * 2 : 4;
    void* copy = template_alloc(a, *cap * bytes);
    return count ? memcpy(copy, items, count * bytes) : copy;
}

static inline void template_list_add(TemplateArena* a, TemplateValue list, TemplateValue item) {
    TemplateList* l = list.as.list;
    l->items = (TemplateValue*)template_grow(a, l->items, l->count, &l->cap, sizeof item);
    l->items[l->count++] = item;
}

/* Appends a member whose key the dict does not have yet. */
static inline void template_dict_add(TemplateArena* a, TemplateValue dict, TemplateValue key, TemplateValue value) {
    TemplateDict* d = dict.as.dict;
    const TemplatePair pair = {key, value};
    d->items = (TemplatePair*)template_grow(a, d->items, d->count, &d->cap, sizeof pair);
    d->items[d->count++] = pair;
}

/* Returns whether a string is this text. */
static inline bool template_is(TemplateValue v, const char* text) {
    return v.type == TEMPLATE_STRING && v.len == strlen(text) && memcmp(v.as.s, text, v.len) == 0;
}

/* Sets a member by a name, which must outlive the dict. */
static inline void template_dict_set(TemplateArena* a, TemplateValue dict, const char* name, TemplateValue value) {
    TemplateDict* d = dict.as.dict;
    size_t i = 0;
    while (i < d->count && !template_is(d->items[i].key, name)) { i++; }
    if (i == d->count) { template_dict_add(a, dict, template_string(a, name, strlen(name), true), value); }
    d->items[i].value = value;
}

/* Makes a value of a node of JSON; all of its bytes are data. Texts stay in the Json, which must outlive the value. */
static inline TemplateValue template_from_json(TemplateArena* a, const Json* j, const JsonNode* n) {
    TemplateValue v = template_value(TEMPLATE_NONE);
    double number = 0;
    size_t len = 0;
    v.data = 1;
    switch (n ? (JsonType)n->type : JSON_NULL) {
        case JSON_NULL: return v;
        case JSON_FALSE:
        case JSON_TRUE:
            v.type = TEMPLATE_BOOL;
            v.as.i = n->type == JSON_TRUE;
            return v;
        case JSON_NUMBER: {
            const char* text = j->text + n->at;
            const bool whole = strcspn(text, ".eEnIN") >= n->length;
            v.type = whole && json_node_int(j, n, &v.as.i) ? TEMPLATE_INT : TEMPLATE_FLOAT;
            if (v.type == TEMPLATE_FLOAT) { v.as.d = json_node_double(j, n, &number) ? number : strtod(text, NULL); }
            return v;
        }
        case JSON_STRING: {
            const char* text = json_string(j, n, &len);
            return template_string(a, text, len, false);
        }
        case JSON_ARRAY:
            v = template_list(a);
            for (n = json_first(j, n); n; n = json_next(j, n)) { template_list_add(a, v, template_from_json(a, j, n)); }
            return v;
        case JSON_OBJECT:
            v = template_dict(a);
            for (n = json_first(j, n); n; n = json_next(j, n)) {
                const char* key = json_key(j, n, &len);
                template_dict_add(a, v, template_string(a, key, len, false), template_from_json(a, j, n));
            }
            return v;
    }
    return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// what parses or renders

enum {
    JINJA_MAX_DEPTH = 320,         // of expressions, statements and values within each other
    JINJA_MAX_STEPS = 1 << 22,     // of a rendering: operations, and 64 bytes of text each
    JINJA_MAX_MEMORY = 64 << 20,   // bytes of a rendering's values
    TEMPLATE_MAX_BYTES = 1 << 20,  // of a template's text
    JINJA_MAX_RANGE = 100000,      // as jinja2's sandbox has it
};

/* Bytes [from, to) of a rendering. */
typedef struct TemplateSpan {
    size_t from, to;
} TemplateSpan;

/* A string that grows. */
typedef struct {
    char* s;
    uint8_t* marks;
    size_t len, cap;
} JinjaText;

/* The state of one template_parse() or template_render(). */
typedef struct Jinja {
    TemplateArena* arena;
    size_t start;             // bytes that the arena had before
    const char *text, *path;  // of the template
    size_t at;                // the place in the text of what is parsed or computed now, for messages
    size_t steps;
    int depth;
    JinjaText *out, *whole;  // where text goes now; the rendering
    TemplateSpan* spans;     // of generations
    size_t num_spans, spans_cap;
    struct JinjaScope* scope;
    TemplateValue variables;  // the caller's
    // what filters and tests ask of the evaluator (template.h): v.key or v[key], and a op b
    TemplateValue (*member)(struct Jinja* j, TemplateValue v, TemplateValue key, bool attribute);
    TemplateValue (*binary)(struct Jinja* j, TemplateValue op, TemplateValue a, TemplateValue b);
    struct tm now;
    jmp_buf leave;
    Error* e;
} Jinja;

/* Ends the parsing or rendering with an error at j->at: FILE:LINE:COLUMN: ... */
LLMC_NORETURN LLMC_PRINTF(2, 3) static void jinja_fail(Jinja* j, const char* fmt, ...) {
    char cause[512];
    size_t line = 1, column = 1;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(cause, sizeof cause, fmt, ap);
    va_end(ap);
    for (size_t i = 0; i < j->at && j->text[i]; i++) {
        column = j->text[i] == '\n' ? 1 : column + 1;
        line += j->text[i] == '\n';
    }
    fail(j->e, "%s:%zu:%zu: %s", j->path, line, column, cause);
    longjmp(j->leave, 1);
}

static inline void jinja_spend(Jinja* j, size_t bytes) {
    j->steps += 1 + bytes / 64;
    if (j->steps > JINJA_MAX_STEPS) { jinja_fail(j, "the template takes more than %d steps", JINJA_MAX_STEPS); }
}

static inline void jinja_enter(Jinja* j) {
    if (++j->depth > JINJA_MAX_DEPTH) { jinja_fail(j, "is nested more than %d deep", JINJA_MAX_DEPTH); }
}

static inline void* jinja_alloc(Jinja* j, size_t bytes) {
    if (bytes > JINJA_MAX_MEMORY || j->arena->total - j->start > JINJA_MAX_MEMORY - bytes) {
        jinja_fail(j, "the template takes more than %d MiB", JINJA_MAX_MEMORY >> 20);
    }
    return template_alloc(j->arena, bytes);
}

static inline void jinja_add(Jinja* j, TemplateValue list, TemplateValue item) {
    jinja_spend(j, 0);
    if (list.as.list->count == list.as.list->cap) { jinja_alloc(j, 0); }
    template_list_add(j->arena, list, item);
}

/* Appends n bytes; `marks` (n), or NULL for the one mark of all. */
static inline void jinja_append(Jinja* j, JinjaText* t, const char* s, size_t n, const uint8_t* marks, int mark) {
    jinja_spend(j, n);
    if (t->cap - t->len < n) {
        const size_t cap = size_max(2 * t->cap, size_max(t->len + n, 64));
        char* grown = (char*)jinja_alloc(j, 2 * cap);
        if (t->len) {
            memcpy(grown, t->s, t->len);
            memcpy(grown + cap, t->marks, t->len);
        }
        t->s = grown;
        t->marks = (uint8_t*)grown + cap;
        t->cap = cap;
    }
    if (n == 0) { return; }
    memcpy(t->s + t->len, s, n);
    marks ? (void)memcpy(t->marks + t->len, marks, n) : (void)memset(t->marks + t->len, mark, n);
    t->len += n;
}

static inline void jinja_append_string(Jinja* j, JinjaText* t, TemplateValue v) {
    jinja_append(j, t, v.as.s, v.len, v.marks, 0);
}
static inline void jinja_append_text(Jinja* j, JinjaText* t, const char* s) { jinja_append(j, t, s, strlen(s), NULL, 0); }

static inline TemplateValue jinja_string(const JinjaText* t) {
    TemplateValue v = template_value(TEMPLATE_STRING);
    v.as.s = t->s ? t->s : "";
    v.len = t->len;
    v.marks = t->marks;
    return v;
}

/* Returns bytes [from, to) of a string. */
static inline TemplateValue jinja_cut(TemplateValue v, size_t from, size_t to) {
    v.as.s += from;
    if (v.marks) { v.marks += from; }
    v.len = to - from;
    return v;
}

/* Returns the bytes of the character at a byte of a string, and the character. */
static inline size_t jinja_char(TemplateValue v, size_t at, uint32_t* c) {
    const int n = utf8_decode((const uint8_t*)v.as.s + at, v.len - at, c);
    if (n == 0) { *c = 0xFFFD; }
    return n ? (size_t)n : 1;
}

static inline size_t jinja_code_points(Jinja* j, TemplateValue v) {
    size_t count = 0;
    jinja_spend(j, v.len);
    for (size_t i = 0; i < v.len; i++) { count += (v.as.s[i] & 0xC0) != 0x80; }
    return count;
}

/* Returns the byte at which a part first stands, from a byte on; SIZE_MAX: nowhere. */
static inline size_t jinja_find(Jinja* j, TemplateValue v, TemplateValue part, size_t from) {
    const char* found = from <= v.len ? (const char*)memmem(v.as.s + from, v.len - from, part.as.s, part.len) : NULL;
    jinja_spend(j, from > v.len ? 0 : (found ? (size_t)(found - v.as.s) : v.len) - from);
    return found ? (size_t)(found - v.as.s) : SIZE_MAX;
}

// ---------------------------------------------------------------------------------------------------------------------
// truth, equality, order

static inline bool jinja_is_integer(TemplateValue v) { return v.type == TEMPLATE_INT || v.type == TEMPLATE_BOOL; }
static inline bool jinja_is_number(TemplateValue v) { return jinja_is_integer(v) || v.type == TEMPLATE_FLOAT; }
static inline bool jinja_has_items(TemplateValue v) { return v.type >= TEMPLATE_LIST && v.type <= TEMPLATE_ITERATOR; }
static inline double jinja_double(TemplateValue v) { return v.type == TEMPLATE_FLOAT ? v.as.d : (double)v.as.i; }

/* Returns a type's name in messages, as jinja2 has it. */
static inline const char* jinja_type_name(TemplateValue v) {
    // clang-format off
    static const char* const names[] = {
        "undefined", "None", "bool object", "int object", "float object", "str object", "list object", "tuple object",
        "generator object", "dict object", "transformers.utils.chat_template_utils.TemplateNamespace object",
        "jinja2.runtime.LoopContext object", "builtin_function_or_method object"
    };
    // clang-format on
    return names[v.type];
}

/* Returns an undefined value, and what to say of it. */
LLMC_PRINTF(2, 3) static TemplateValue jinja_undefined(Jinja* j, const char* fmt, ...) {
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    TemplateValue v = template_value(TEMPLATE_UNDEFINED);
    v.as.s = strcpy((char*)jinja_alloc(j, strlen(text) + 1), text);
    return v;
}

/* Ends the rendering, since a value cannot be used like this. */
LLMC_NORETURN static void jinja_misused(Jinja* j, TemplateValue v, const char* use) {
    if (v.type == TEMPLATE_UNDEFINED) { jinja_fail(j, "%s", v.as.s ? v.as.s : "an argument is missing"); }
    jinja_fail(j, "'%s' cannot be %s", jinja_type_name(v), use);
}

static inline bool jinja_truth(TemplateValue v) {
    switch (v.type) {
        case TEMPLATE_UNDEFINED:
        case TEMPLATE_NONE: return false;
        case TEMPLATE_BOOL:
        case TEMPLATE_INT: return v.as.i != 0;
        case TEMPLATE_FLOAT: return v.as.d != 0;
        case TEMPLATE_STRING: return v.len > 0;
        case TEMPLATE_LIST:
        case TEMPLATE_TUPLE: return v.as.list->count > 0;
        case TEMPLATE_DICT: return v.as.dict->count > 0;
        default: return true;
    }
}

static inline bool jinja_equal(Jinja* j, TemplateValue a, TemplateValue b);

/* Returns the place of a key in a dict, its count if there is none. */
static inline size_t jinja_dict_find(Jinja* j, const TemplateDict* d, TemplateValue key) {
    size_t i = 0;
    while (i < d->count && !jinja_equal(j, d->items[i].key, key)) { i++; }
    return i;
}

static inline bool jinja_equal(Jinja* j, TemplateValue a, TemplateValue b) {
    jinja_spend(j, 0);
    if (jinja_is_integer(a) && jinja_is_integer(b)) { return a.as.i == b.as.i; }
    if (jinja_is_number(a) && jinja_is_number(b)) { return jinja_double(a) == jinja_double(b); }
    if (a.type != b.type) { return false; }
    bool same = true;
    jinja_enter(j);
    switch (a.type) {
        case TEMPLATE_STRING: same = a.len == b.len && memcmp(a.as.s, b.as.s, a.len) == 0; break;
        case TEMPLATE_LIST:
        case TEMPLATE_TUPLE:
            same = a.as.list->count == b.as.list->count;
            for (size_t i = 0; same && i < a.as.list->count; i++) {
                same = jinja_equal(j, a.as.list->items[i], b.as.list->items[i]);
            }
            break;
        case TEMPLATE_DICT:
            same = a.as.dict->count == b.as.dict->count;
            for (size_t i = 0; same && i < a.as.dict->count; i++) {
                const size_t at = jinja_dict_find(j, b.as.dict, a.as.dict->items[i].key);
                same = at < b.as.dict->count && jinja_equal(j, a.as.dict->items[i].value, b.as.dict->items[at].value);
            }
            break;
        case TEMPLATE_UNDEFINED:
        case TEMPLATE_NONE: break;
        default: same = a.as.s == b.as.s;  // the same object
    }
    j->depth--;
    return same;
}

/* Returns a number below, at or above 0 as a < b, a == b or a > b. NaN counts as equal. */
static inline int jinja_order(Jinja* j, TemplateValue a, TemplateValue b) {
    jinja_spend(j, 0);
    if (jinja_is_integer(a) && jinja_is_integer(b)) { return (a.as.i > b.as.i) - (a.as.i < b.as.i); }
    if (jinja_is_number(a) && jinja_is_number(b)) {
        const double x = jinja_double(a), y = jinja_double(b);
        return (x > y) - (x < y);
    }
    if (a.type == TEMPLATE_STRING && b.type == TEMPLATE_STRING) {  // UTF-8 sorts as code points do
        const int sign = memcmp(a.as.s, b.as.s, size_min(a.len, b.len));
        return sign ? sign : (a.len > b.len) - (a.len < b.len);
    }
    if (a.type != b.type || !jinja_has_items(a) || a.type == TEMPLATE_ITERATOR) {
        jinja_misused(j, b.type == TEMPLATE_UNDEFINED && a.type != TEMPLATE_UNDEFINED ? b : a,
                      "put in order with another type");
    }
    int sign = 0;
    const TemplateList *x = a.as.list, *y = b.as.list;
    jinja_enter(j);
    for (size_t i = 0; !sign && i < size_min(x->count, y->count); i++) {
        if (!jinja_equal(j, x->items[i], y->items[i])) { sign = jinja_order(j, x->items[i], y->items[i]); }
    }
    j->depth--;
    return sign ? sign : (x->count > y->count) - (x->count < y->count);
}

// ---------------------------------------------------------------------------------------------------------------------
// text

/* Returns whether repr() writes a character as it is. Python also escapes code points that its Unicode version has not. */
static inline bool jinja_is_printable(uint32_t c) {
    if (c < 0x20 || (c >= 0x7F && c <= 0xA0) || c == 0xAD || (unicode_class(c) == UNICODE_SPACE && c != ' ')) { return false; }
    return !((c >= 0x200B && c <= 0x200F) || (c >= 0x202A && c <= 0x202E) || (c >= 0x2060 && c <= 0x206F) ||
             (c >= 0xE000 && c <= 0xF8FF) || c == 0xFEFF || (c & 0xFFFE) == 0xFFFE || (c >= 0xE0000 && c < 0xE0100) ||
             c > 0xE01EF);
}

/* How a value is written: by Python's repr(), or by json.dumps(). */
typedef struct {
    bool json, ascii;
    TemplateValue indent;        // a string for each level; undefined: all in one line
    TemplateValue comma, colon;  // separators
} JinjaStyle;

static inline void jinja_write_string(Jinja* j, JinjaText* t, TemplateValue v, const JinjaStyle* how) {
    const bool one = v.len && memchr(v.as.s, '\'', v.len), two = v.len && memchr(v.as.s, '"', v.len);
    const char quote = how->json || (one && !two) ? '"' : '\'';
    char escape[16];
    jinja_append(j, t, &quote, 1, NULL, 0);
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        uint32_t c;
        n = jinja_char(v, i, &c);
        const bool plain = how->json ? c >= 0x20 && (c < 0x80 || !how->ascii) : jinja_is_printable(c);
        const char* known = c && c < 0x20 ? strchr(how->json ? "\nn\rr\tt\bb\ff" : "\nn\rr\tt", (int)c) : NULL;
        if (known || c == (uint32_t)quote || c == '\\') {
            snprintf(escape, sizeof escape, "\\%c", known ? known[1] : (char)c);
        } else if (plain) {
            jinja_append(j, t, v.as.s + i, n, NULL, 0);
            continue;
        } else if (how->json && c >= 0x10000) {
            snprintf(escape, sizeof escape, "\\u%04x\\u%04x", 0xD800 + ((c - 0x10000) >> 10), 0xDC00 + ((c - 0x10000) & 0x3FF));
        } else {
            snprintf(escape, sizeof escape, !how->json && c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
        }
        jinja_append_text(j, t, escape);
    }
    jinja_append(j, t, &quote, 1, NULL, 0);
}

static inline void jinja_write_line(Jinja* j, JinjaText* t, const JinjaStyle* how, size_t level) {
    if (how->indent.type == TEMPLATE_UNDEFINED) { return; }
    jinja_append_text(j, t, "\n");
    for (size_t i = 0; i < level; i++) { jinja_append_string(j, t, how->indent); }
}

/* Appends a value that has no items. */
static inline void jinja_write_plain(Jinja* j, JinjaText* t, TemplateValue v, const JinjaStyle* how) {
    static const char* const words[2][6] = {{"None", "False", "True", "nan", "-inf", "inf"},
                                            {"null", "false", "true", "NaN", "-Infinity", "Infinity"}};
    const char* const* word = words[how->json];
    char text[40] = "Undefined";
    if (v.type == TEMPLATE_STRING) {
        jinja_write_string(j, t, v, how);
        return;
    }
    if (v.type > TEMPLATE_FLOAT || (v.type == TEMPLATE_UNDEFINED && how->json)) {
        jinja_misused(j, v, how->json ? "written as JSON" : "printed");
    }
    if (v.type == TEMPLATE_INT) { snprintf(text, sizeof text, "%lld", (long long)v.as.i); }
    if (v.type == TEMPLATE_FLOAT) { double_text(text, v.as.d); }
    jinja_append_text(j, t,
                      v.type == TEMPLATE_NONE                         ? word[0]
                      : v.type == TEMPLATE_BOOL                       ? word[1 + (v.as.i != 0)]
                      : v.type == TEMPLATE_FLOAT && !isfinite(v.as.d) ? word[isnan(v.as.d) ? 3
                                                                             : v.as.d < 0  ? 4
                                                                                           : 5]
                                                                      : text);
}

/* Appends a value. */
static inline void jinja_write(Jinja* j, JinjaText* t, TemplateValue v, const JinjaStyle* how, size_t level) {
    const bool space = !how->json && v.type == TEMPLATE_NAMESPACE, tuple = !how->json && v.type == TEMPLATE_TUPLE;
    const bool dict = space || v.type == TEMPLATE_DICT, list = v.type == TEMPLATE_LIST || v.type == TEMPLATE_TUPLE;
    if (!dict && !list) {
        jinja_write_plain(j, t, v, how);
        return;
    }
    const size_t count = dict ? v.as.dict->count : v.as.list->count;
    jinja_enter(j);
    jinja_append_text(j, t, space ? "<Namespace {" : dict ? "{" : tuple ? "(" : "[");
    for (size_t i = 0; i < count; i++) {
        if (i) { jinja_append_string(j, t, how->comma); }
        jinja_write_line(j, t, how, level + 1);
        if (dict) {
            TemplateValue key = v.as.dict->items[i].key;
            JinjaText text = {NULL, NULL, 0, 0};
            if (how->json && key.type != TEMPLATE_STRING) {  // a key of JSON is a string
                jinja_write(j, &text, key, how, level);
                key = jinja_string(&text);
            }
            jinja_write(j, t, key, how, level);
            jinja_append_string(j, t, how->colon);
        }
        jinja_write(j, t, dict ? v.as.dict->items[i].value : v.as.list->items[i], how, level + 1);
    }
    if (count) { jinja_write_line(j, t, how, level); }
    jinja_append_text(j, t, space ? "}>" : dict ? "}" : !tuple ? "]" : count == 1 ? ",)" : ")");
    j->depth--;
}

/* Appends a value as repr() writes it. */
static inline void jinja_repr(Jinja* j, JinjaText* t, TemplateValue v) {
    const JinjaStyle python = {false, false, template_value(TEMPLATE_UNDEFINED), template_string(j->arena, ", ", 2, false),
                               template_string(j->arena, ": ", 2, false)};
    jinja_write(j, t, v, &python, 0);
}

/* Returns a value as str() writes it. */
static inline TemplateValue jinja_str(Jinja* j, TemplateValue v) {
    JinjaText t = {NULL, NULL, 0, 0};
    if (v.type == TEMPLATE_STRING) { return v; }
    if (v.type != TEMPLATE_UNDEFINED) { jinja_repr(j, &t, v); }
    if (v.type <= TEMPLATE_FLOAT && t.len) { memset(t.marks, !v.data, t.len); }
    return jinja_string(&t);
}

#endif
