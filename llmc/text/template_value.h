/* template_value.h -- the values of a chat template (text/template.h): made by the caller, by JSON, or by the template; their
 * memory; and what Python's bool(), ==, <, str(), repr() and json.dumps() make of them.
 *
 * Every byte of a string has a mark: 1 if the template wrote it (its text, its literals, and strings that the caller says are
 * the template's, such as bos_token), 0 if it comes from data. A number, true or none has one mark for the digits or letters
 * that it prints. What repr() and tojson write is data.
 *
 * Memory: all values lie in a TemplateArena and live until the caller resets it. A template may take ever more memory, so a
 * render has a limit, but the caller's own values have none. Strings are UTF-8, at most 4 GiB - 1 long; indices and lengths
 * count code points, as in Python. Integers have 64 bits: a larger result is an error. Larger numbers of JSON print exactly.
 *
 * An error leaves by longjmp() to template_parse() or template_render(): an expression is many calls deep, and each of them
 * would have to ask. Nothing needs freeing on the way, since the arena owns everything.
 */
#ifndef LLMC_TEMPLATE_VALUE_H
#define LLMC_TEMPLATE_VALUE_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/files/json.h"    // defines: Json, json_first, json_next, json_key, json_string, json_node_int, json_node_double
#include "llmc/text/unicode.h"  // defines: unicode_class, unicode_is_stripped

#include <ctype.h>

#include <float.h>
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
    bytes = round_up(bytes, 16);
    if (!a->chunk || a->chunk->size - a->chunk->used < bytes) {
        const size_t head = round_up(sizeof(TemplateChunk), 16);
        const size_t size = size_max(bytes, size_min(size_max(a->total, 1 << 14), 1 << 20));
        TemplateChunk* chunk = (TemplateChunk*)xmalloc(head + size);
        const TemplateChunk filled = {a->chunk, size, 0};
        *chunk = filled;
        a->chunk = chunk;
        a->total += size;
    }
    char* p = (char*)a->chunk + round_up(sizeof(TemplateChunk), 16) + a->chunk->used;
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
    TEMPLATE_DICT,
    TEMPLATE_RANGE,
    TEMPLATE_VIEW,       // dict.keys(), dict.values() or dict.items()
    TEMPLATE_ITERATOR,   // what map, select, reverse ... return: its items are taken once
    TEMPLATE_NAMESPACE,  // a dict whose members the template may set
    TEMPLATE_LOOP,
    TEMPLATE_CYCLER,
    TEMPLATE_JOINER,
    TEMPLATE_FUNCTION,  // a function of ours, with the value whose method it is
    TEMPLATE_MACRO,
    TEMPLATE_ABSENT,  // an argument that was not given, a variable that is not set; no value of a template
} TemplateType;

typedef struct TemplateValue {
    uint8_t type;  // TemplateType
    uint8_t mark;  // none, bool, int, float: 1 if the template's, 0 if data's
    uint8_t
        detail;  // string: 1 if safe or escape made it; view: 'k', 'v' or 'i'; float: 1 if an integer of JSON, with its digits
    uint32_t len;  // string, digits, name of an undefined value: bytes
    union {
        int64_t i;      // bool, int
        double d;       // float
        const char* s;  // string; undefined: the name
        struct TemplateList* list;
        struct TemplateDict* dict;  // dict, view, namespace
        struct JinjaRange* range;
        struct JinjaIterator* iterator;
        struct JinjaLoop* loop;
        struct JinjaCycler* cycler;  // cycler, joiner
        struct JinjaBound* bound;    // function
        struct JinjaMacro* macro;
    } as;
    union {
        const uint8_t* marks;  // string: one a byte
        const char* text;      // float: the digits; undefined: the type that has no such member, "" if the name is the message
    } more;
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

static inline TemplateValue template_value(TemplateType type, int64_t i, bool from_template) {
    TemplateValue v;
    memset(&v, 0, sizeof v);
    v.type = (uint8_t)type;
    v.mark = from_template;
    v.as.i = i;
    return v;
}
static inline TemplateValue template_none(void) { return template_value(TEMPLATE_NONE, 0, true); }
static inline TemplateValue template_bool(bool b) { return template_value(TEMPLATE_BOOL, b, true); }
static inline TemplateValue template_int(int64_t i) { return template_value(TEMPLATE_INT, i, true); }
static inline TemplateValue template_float(double d) {
    TemplateValue v = template_value(TEMPLATE_FLOAT, 0, true);
    v.as.d = d;
    return v;
}

/* Makes a string of `len` bytes of UTF-8, which must outlive it. */
static inline TemplateValue template_string(TemplateArena* a, const char* s, size_t len, bool from_template) {
    TemplateValue v = template_value(TEMPLATE_STRING, 0, false);
    v.as.s = s;
    v.len = (uint32_t)len;
    v.more.marks = (uint8_t*)memset(template_alloc(a, len), from_template, len);
    return v;
}

static inline TemplateValue template_list(TemplateArena* a) {
    TemplateValue v = template_value(TEMPLATE_LIST, 0, false);
    v.as.list = (TemplateList*)memset(template_alloc(a, sizeof(TemplateList)), 0, sizeof(TemplateList));
    return v;
}

static inline TemplateValue template_dict(TemplateArena* a) {
    TemplateValue v = template_value(TEMPLATE_DICT, 0, false);
    v.as.dict = (TemplateDict*)memset(template_alloc(a, sizeof(TemplateDict)), 0, sizeof(TemplateDict));
    return v;
}

/* Returns room for one more item than `count`: the old items, or a copy of them in twice the memory. */
static inline void* template_grow(TemplateArena* a, void* items, size_t count, size_t* cap, size_t bytes) {
    if (count < *cap) { return items; }
    *cap = *cap ? *cap * 2 : 4;
    void* copy = template_alloc(a, *cap * bytes);
    if (count) { memcpy(copy, items, count * bytes); }
    return copy;
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

/* Sets a member by a name, which must outlive the dict. */
static inline void template_dict_set(TemplateArena* a, TemplateValue dict, const char* name, TemplateValue value) {
    for (size_t i = 0; i < dict.as.dict->count; i++) {
        TemplatePair* p = &dict.as.dict->items[i];
        if (p->key.type == TEMPLATE_STRING && p->key.len == strlen(name) && memcmp(p->key.as.s, name, p->key.len) == 0) {
            p->value = value;
            return;
        }
    }
    template_dict_add(a, dict, template_string(a, name, strlen(name), true), value);
}

/* Makes a number as Python's json does: an integer if the text has neither point nor exponent. */
static inline TemplateValue template_number_from_json(const Json* j, const JsonNode* n) {
    TemplateValue v = template_value(TEMPLATE_INT, 0, false);
    int64_t i = 0;
    double d = 0;
    if (json_node_int(j, n, &i)) {
        v.as.i = i;
        return v;
    }
    json_node_double(j, n, &d);
    v.type = TEMPLATE_FLOAT;
    v.as.d = d;
    v.detail = strcspn(j->text + n->at, ".eE") >= n->length;
    v.len = n->length;
    v.more.text = j->text + n->at;
    return v;
}

/* Makes the value of a JSON node, all of it data. The Json must outlive the value. Nodes are at most JSON_MAX_DEPTH deep. */
static inline TemplateValue template_from_json(TemplateArena* a, const Json* j, const JsonNode* n) {
    TemplateValue v = template_value(TEMPLATE_NONE, 0, false);
    size_t len = 0;
    switch (n->type) {
        case JSON_NULL: return v;
        case JSON_FALSE:
        case JSON_TRUE: return template_value(TEMPLATE_BOOL, n->type == JSON_TRUE, false);
        case JSON_NUMBER: return template_number_from_json(j, n);
        case JSON_STRING: return template_string(a, json_string(j, n, &len), n->length, false);
        default: v = n->type == JSON_ARRAY ? template_list(a) : template_dict(a);
    }
    for (const JsonNode* child = json_first(j, n); child; child = json_next(j, child)) {
        const TemplateValue value = template_from_json(a, j, child);
        if (n->type == JSON_ARRAY) {
            template_list_add(a, v, value);
        } else {
            const char* key = json_key(j, child, &len);
            template_dict_add(a, v, template_string(a, key, len, false), value);
        }
    }
    return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// a parse or a render: where it is, what it may still use, and how it fails

enum {
    JINJA_MAX_DEPTH = 1000,     // calls inside calls of the evaluator and repr()
    JINJA_MAX_HEIGHT = 300,     // levels of the tree, brackets and tags inside one another
    JINJA_MAX_STEPS = 1 << 23,  // nodes evaluated, and pieces of 64 bytes copied or searched
    JINJA_MAX_BYTES = 64 << 20  // memory that a parse or a render takes
};

/* A text that grows in the arena, with its marks. */
typedef struct {
    char* s;
    uint8_t* marks;
    size_t len, cap;
} JinjaText;

typedef struct Jinja {
    TemplateArena* arena;
    size_t start;      // the arena's bytes when the parse or render began
    const char* path;  // for messages
    const char* text;  // the template
    size_t at;         // the byte of the template that is being parsed or evaluated
    size_t steps;
    int depth;
    Error* e;
    jmp_buf leave;
    struct JinjaScope* scope;  // the variables in sight
    JinjaText* out;            // where text goes
    JinjaText* main;           // the rendering itself
    TemplateValue variables;   // the caller's
    struct tm now;
    struct TemplateSpan* spans;
    size_t num_spans, cap_spans;
} Jinja;

/* Fails with "PATH:LINE:COLUMN: ..." at the place that is being parsed or evaluated. */
LLMC_NORETURN LLMC_PRINTF(2, 3) static void jinja_fail(Jinja* j, const char* fmt, ...) {
    char cause[600];
    size_t line = 1, start = 0;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(cause, sizeof cause, fmt, ap);
    va_end(ap);
    for (size_t i = 0; i < j->at; i++) {
        if (j->text[i] == '\n') {
            line++;
            start = i + 1;
        }
    }
    fail(j->e, "%s:%zu:%zu: %s", j->path, line, j->at - start + 1, cause);
    longjmp(j->leave, 1);
}

static inline void jinja_spend(Jinja* j, size_t steps) {
    j->steps += steps;
    if (j->steps > JINJA_MAX_STEPS) { jinja_fail(j, "the template does not end within %d steps", JINJA_MAX_STEPS); }
}

/* Counts a call inside a call; pairs with j->depth--. */
static inline void jinja_descend(Jinja* j) {
    if (++j->depth > JINJA_MAX_DEPTH) { jinja_fail(j, "the template is nested more than %d deep", JINJA_MAX_DEPTH); }
}

static inline void* jinja_alloc(Jinja* j, size_t bytes) {
    if (bytes > JINJA_MAX_BYTES || j->arena->total + bytes > j->start + JINJA_MAX_BYTES) {
        jinja_fail(j, "the template needs more than %d MiB of memory", JINJA_MAX_BYTES >> 20);
    }
    return template_alloc(j->arena, bytes);
}

static inline void jinja_add(Jinja* j, TemplateValue list, TemplateValue item) {
    if (list.as.list->count == list.as.list->cap) { jinja_alloc(j, 0); }
    template_list_add(j->arena, list, item);
    if (list.as.list->count * sizeof item > JINJA_MAX_BYTES) { jinja_alloc(j, SIZE_MAX); }
}

// ---------------------------------------------------------------------------------------------------------------------
// strings

/* Appends n bytes with their marks; marks NULL: all have `mark`. */
static inline void jinja_append(Jinja* j, JinjaText* t, const char* s, const uint8_t* marks, int mark, size_t n) {
    if (t->len + n > t->cap) {
        const size_t cap = size_max(t->len + n, t->cap * 2 + 64);
        char* copy = (char*)jinja_alloc(j, 2 * cap);
        uint8_t* marks_copy = (uint8_t*)copy + cap;
        if (t->len) {
            memcpy(copy, t->s, t->len);
            memcpy(marks_copy, t->marks, t->len);
        }
        t->s = copy;
        t->marks = marks_copy;
        t->cap = cap;
    }
    if (n == 0) { return; }
    jinja_spend(j, n / 64);
    memcpy(t->s + t->len, s, n);
    if (marks) {
        memcpy(t->marks + t->len, marks, n);
    } else {
        memset(t->marks + t->len, mark, n);
    }
    t->len += n;
}

static inline void jinja_append_string(Jinja* j, JinjaText* t, TemplateValue v) {
    jinja_append(j, t, v.as.s, v.more.marks, 0, v.len);
}

/* Appends text that has one mark. */
static inline void jinja_append_text(Jinja* j, JinjaText* t, const char* s, int mark) {
    jinja_append(j, t, s, NULL, mark, strlen(s));
}

/* Makes a string of the text so far. */
static inline TemplateValue jinja_string(const JinjaText* t) {
    TemplateValue v = template_value(TEMPLATE_STRING, 0, false);
    v.as.s = t->s;
    v.more.marks = t->marks;
    v.len = (uint32_t)t->len;
    return v;
}

/* Makes a string of the template's own; `s` must live as long as the program. */
static inline TemplateValue jinja_word(Jinja* j, const char* s) {
    jinja_alloc(j, 0);
    return template_string(j->arena, s, strlen(s), true);
}

/* Returns bytes [from, to) of a string. */
static inline TemplateValue jinja_cut(TemplateValue v, size_t from, size_t to) {
    v.as.s += from;
    v.more.marks += from;
    v.len = (uint32_t)(to - from);
    return v;
}

/* Returns the length of the UTF-8 character at byte `at` of a string. */
static inline size_t jinja_char(TemplateValue v, size_t at, uint32_t* c) {
    uint32_t code;
    const int n = utf8_decode((const uint8_t*)v.as.s + at, v.len - at, &code);
    if (c) { *c = n ? code : (uint8_t)v.as.s[at]; }
    return n ? (size_t)n : 1;
}

static inline size_t jinja_text_length(Jinja* j, TemplateValue v) {
    size_t count = 0;
    jinja_spend(j, v.len / 64);
    for (size_t i = 0; i < v.len; i++) { count += ((uint8_t)v.as.s[i] & 0xC0) != 0x80; }
    return count;
}

/* Returns the byte at which code point number `index` of a string starts. */
static inline size_t jinja_text_offset(Jinja* j, TemplateValue v, size_t index) {
    size_t at = 0;
    jinja_spend(j, index / 16);
    while (index > 0 && at < v.len) {
        at += jinja_char(v, at, NULL);
        index--;
    }
    return at;
}

/* Returns the byte of the first place at or after `from` where `part` stands in a string; SIZE_MAX if there is none. */
static inline size_t jinja_find(Jinja* j, TemplateValue v, TemplateValue part, size_t from) {
    if (from > v.len) { return SIZE_MAX; }
    const char* found = part.len ? (const char*)memmem(v.as.s + from, v.len - from, part.as.s, part.len) : v.as.s + from;
    jinja_spend(j, ((found ? (size_t)(found - v.as.s) : v.len) - from) / 64);
    return found ? (size_t)(found - v.as.s) : SIZE_MAX;
}

static inline bool jinja_is(TemplateValue v, const char* s) {
    return v.type == TEMPLATE_STRING && v.len == strlen(s) && memcmp(v.as.s, s, v.len) == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// names of types, and numbers

/* Returns the name of a value's type in Python. */
static inline const char* jinja_type_name(TemplateValue v) {
    static const char* const names[] = {
        "Undefined", "NoneType",  "bool",      "int",         "float",  "str",    "list",     "tuple", "dict",   "range",
        "dict view", "generator", "Namespace", "LoopContext", "Cycler", "Joiner", "function", "Macro", "missing"};
    return names[v.type];
}

static inline TemplateValue jinja_undefined(const char* name, size_t len, const char* of) {
    TemplateValue v = template_value(TEMPLATE_UNDEFINED, 0, false);
    v.as.s = name;
    v.len = (uint32_t)len;
    v.more.text = of;
    return v;
}
static inline TemplateValue jinja_undefined_hint(const char* hint) { return jinja_undefined(hint, strlen(hint), ""); }

/* Fails since an undefined value was used for more than printing and testing. */
LLMC_NORETURN static inline void jinja_fail_undefined(Jinja* j, TemplateValue v) {
    const int n = (int)size_min(v.len, 200);
    if (!v.more.text) { jinja_fail(j, "'%.*s' is undefined", n, v.as.s); }
    if (!*v.more.text) { jinja_fail(j, "%.*s", n, v.as.s); }
    if (v.detail) { jinja_fail(j, "%s has no element %.*s", v.more.text, n, v.as.s); }
    jinja_fail(j, "'%s' has no attribute '%.*s'", v.more.text, n, v.as.s);
}

static inline bool jinja_is_integer(TemplateValue v) { return v.type == TEMPLATE_INT || v.type == TEMPLATE_BOOL; }
static inline bool jinja_is_number(TemplateValue v) { return jinja_is_integer(v) || v.type == TEMPLATE_FLOAT; }
static inline double jinja_double(TemplateValue v) { return v.type == TEMPLATE_FLOAT ? v.as.d : (double)v.as.i; }
static inline bool jinja_is_sequence(TemplateValue v) { return v.type == TEMPLATE_LIST || v.type == TEMPLATE_TUPLE; }

/* Writes the shortest text that reads back as the same double, as Python's repr() does; `out` holds 40 bytes. */
static inline void jinja_float_text(char* out, double d) {
    char digits[32];
    int precision = 0;
    if (isnan(d) || isinf(d)) {
        snprintf(out, 40, "%s", isnan(d) ? "nan" : d < 0 ? "-inf" : "inf");
        return;
    }
    do { snprintf(digits, sizeof digits, "%.*e", precision, d); } while (strtod(digits, NULL) != d && ++precision < 17);
    const int exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        snprintf(out, 40, "%.*f", precision > exponent ? precision - exponent : 1, d);
    } else {
        snprintf(out, 40, "%s", digits);
    }
}

static inline void jinja_write_number(Jinja* j, JinjaText* t, TemplateValue v, int mark) {
    char text[40];
    if (v.type == TEMPLATE_FLOAT && v.detail) {
        jinja_append(j, t, v.more.text, NULL, mark, v.len);
        return;
    }
    if (v.type == TEMPLATE_FLOAT) {
        jinja_float_text(text, v.as.d);
    } else {
        snprintf(text, sizeof text, "%lld", (long long)v.as.i);
    }
    jinja_append_text(j, t, text, mark);
}

// ---------------------------------------------------------------------------------------------------------------------
// truth, order

typedef struct JinjaRange {
    int64_t start, step;
    size_t count;
} JinjaRange;

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
        case TEMPLATE_DICT:
        case TEMPLATE_VIEW: return v.as.dict->count > 0;
        case TEMPLATE_RANGE: return v.as.range->count > 0;
        default: return true;
    }
}

static inline bool jinja_equal(Jinja* j, TemplateValue a, TemplateValue b);

static inline bool jinja_equal_lists(Jinja* j, const TemplateList* a, const TemplateList* b) {
    bool equal = a->count == b->count;
    for (size_t i = 0; equal && i < a->count; i++) { equal = jinja_equal(j, a->items[i], b->items[i]); }
    return equal;
}

/* Returns the place of a key in a dict, or its count. */
static inline size_t jinja_dict_find(Jinja* j, const TemplateDict* d, TemplateValue key) {
    size_t i = 0;
    while (i < d->count &&
           !(d->items[i].key.type == key.type && d->items[i].key.len == key.len && jinja_equal(j, d->items[i].key, key)) &&
           !(key.type != TEMPLATE_STRING && jinja_equal(j, d->items[i].key, key))) {
        i++;
    }
    jinja_spend(j, i / 8);
    return i;
}

/* Python's a == b. */
static inline bool jinja_equal(Jinja* j, TemplateValue a, TemplateValue b) {
    if (jinja_is_number(a) && jinja_is_number(b)) {
        const bool floats = a.type == TEMPLATE_FLOAT || b.type == TEMPLATE_FLOAT;
        return floats ? jinja_double(a) == jinja_double(b) : a.as.i == b.as.i;
    }
    if (a.type != b.type) { return false; }
    jinja_spend(j, 1);
    jinja_descend(j);
    bool equal = a.as.dict == b.as.dict;
    if (a.type == TEMPLATE_STRING) {
        jinja_spend(j, a.len / 64);
        equal = a.len == b.len && memcmp(a.as.s, b.as.s, a.len) == 0;
    } else if (a.type == TEMPLATE_UNDEFINED || a.type == TEMPLATE_NONE) {
        equal = true;
    } else if (jinja_is_sequence(a)) {
        equal = jinja_equal_lists(j, a.as.list, b.as.list);
    } else if (a.type == TEMPLATE_DICT || (a.type == TEMPLATE_VIEW && a.detail != 'v' && a.detail == b.detail)) {
        equal = a.as.dict->count == b.as.dict->count;
        for (size_t i = 0; equal && i < a.as.dict->count; i++) {
            const size_t found = jinja_dict_find(j, b.as.dict, a.as.dict->items[i].key);
            equal = found < b.as.dict->count &&
                    (a.detail == 'k' || jinja_equal(j, a.as.dict->items[i].value, b.as.dict->items[found].value));
        }
    } else if (a.type == TEMPLATE_RANGE) {
        const JinjaRange *x = a.as.range, *y = b.as.range;
        equal = x->count == y->count && (!x->count || (x->start == y->start && (x->count == 1 || x->step == y->step)));
    }
    j->depth--;
    return equal;
}

/* Returns the sign of a compared with b for Python's <, > and their kin; NaN: 2. Fails if they have no order. */
static inline int jinja_order(Jinja* j, TemplateValue a, TemplateValue b) {
    if (a.type == TEMPLATE_UNDEFINED) { jinja_fail_undefined(j, a); }
    if (b.type == TEMPLATE_UNDEFINED) { jinja_fail_undefined(j, b); }
    if (jinja_is_integer(a) && jinja_is_integer(b)) { return (a.as.i > b.as.i) - (a.as.i < b.as.i); }
    if (jinja_is_number(a) && jinja_is_number(b)) {
        const double x = jinja_double(a), y = jinja_double(b);
        return isnan(x) || isnan(y) ? 2 : (x > y) - (x < y);
    }
    if (a.type == TEMPLATE_STRING && b.type == TEMPLATE_STRING) {
        const int sign = memcmp(a.as.s, b.as.s, size_min(a.len, b.len));  // the order of UTF-8 is that of code points
        jinja_spend(j, 1 + size_min(a.len, b.len) / 64);
        return sign ? (sign > 0) - (sign < 0) : (a.len > b.len) - (a.len < b.len);
    }
    if (!jinja_is_sequence(a) || a.type != b.type) {
        jinja_fail(j, "values of the types %s and %s have no order", jinja_type_name(a), jinja_type_name(b));
    }
    jinja_descend(j);
    const TemplateList *x = a.as.list, *y = b.as.list;
    size_t i = 0;
    while (i < x->count && i < y->count && jinja_equal(j, x->items[i], y->items[i])) { i++; }
    const int sign =
        i < x->count && i < y->count ? jinja_order(j, x->items[i], y->items[i]) : (x->count > y->count) - (x->count < y->count);
    j->depth--;
    return sign;
}

// ---------------------------------------------------------------------------------------------------------------------
// text of values

/* Returns whether repr() writes a character as it is. Python also escapes code points that its Unicode version has not. */
static inline bool jinja_is_printable(uint32_t c) {
    if (c < 0x20 || (c >= 0x7F && c <= 0xA0) || c == 0xAD) { return false; }
    if (unicode_class(c) == UNICODE_SPACE) { return c == ' '; }
    return !((c >= 0x600 && c <= 0x605) || c == 0x61C || c == 0x6DD || c == 0x70F || c == 0x890 || c == 0x891 || c == 0x8E2 ||
             c == 0x180E || (c >= 0x200B && c <= 0x200F) || (c >= 0x202A && c <= 0x202E) || (c >= 0x2060 && c <= 0x206F) ||
             (c >= 0xE000 && c <= 0xF8FF) || c == 0xFEFF || (c >= 0xFFF0 && c <= 0xFFFB) || (c & 0xFFFE) == 0xFFFE ||
             c == 0x110BD || c == 0x110CD || (c >= 0x13430 && c <= 0x1343F) || (c >= 0x1BCA0 && c <= 0x1BCA3) ||
             (c >= 0x1D173 && c <= 0x1D17A) || (c >= 0xE0000 && c <= 0xE0FFF && !(c >= 0xE0100 && c <= 0xE01EF)) ||
             c >= 0xF0000);
}

/* Appends a string as repr() writes it: in quotes, with escapes. */
static inline void jinja_repr_string(Jinja* j, JinjaText* t, TemplateValue v) {
    const bool one = v.len && memchr(v.as.s, '\'', v.len), two = v.len && memchr(v.as.s, '"', v.len);
    const char quote = one && !two ? '"' : '\'';
    char escape[16];
    jinja_append(j, t, &quote, NULL, 0, 1);
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        uint32_t c;
        n = jinja_char(v, i, &c);
        const char* plain = (c < 0x20 && c) || c == '\\' ? strchr("\nn\rr\tt\\\\", (int)c) : NULL;
        if (plain || c == (uint32_t)quote) {
            snprintf(escape, sizeof escape, "\\%c", plain ? plain[c == '\\' ? 0 : 1] : quote);
        } else if (jinja_is_printable(c)) {
            jinja_append(j, t, v.as.s + i, NULL, 0, n);
            continue;
        } else {
            snprintf(escape, sizeof escape, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
        }
        jinja_append_text(j, t, escape, 0);
    }
    jinja_append(j, t, &quote, NULL, 0, 1);
}

static inline void jinja_repr(Jinja* j, JinjaText* t, TemplateValue v);

/* Appends the members of a dict or view: "{'a': 1}", "dict_items([('a', 1)])". */
static inline void jinja_repr_dict(Jinja* j, JinjaText* t, TemplateValue v) {
    const bool view = v.type == TEMPLATE_VIEW;
    const char* open = !view ? "{" : v.detail == 'k' ? "dict_keys([" : v.detail == 'v' ? "dict_values([" : "dict_items([";
    jinja_append_text(j, t, open, 0);
    for (size_t i = 0; i < v.as.dict->count; i++) {
        jinja_append_text(j, t, i ? ", " : "", 0);
        if (view && v.detail == 'i') { jinja_append_text(j, t, "(", 0); }
        if (!view || v.detail != 'v') { jinja_repr(j, t, v.as.dict->items[i].key); }
        if (!view || v.detail == 'i') { jinja_append_text(j, t, view ? ", " : ": ", 0); }
        if (!view || v.detail != 'k') { jinja_repr(j, t, v.as.dict->items[i].value); }
        if (view && v.detail == 'i') { jinja_append_text(j, t, ")", 0); }
    }
    jinja_append_text(j, t, view ? "])" : "}", 0);
}

/* Appends repr(v); all of it counts as data. */
static inline void jinja_repr(Jinja* j, JinjaText* t, TemplateValue v) {
    char text[100];
    jinja_spend(j, 1);
    jinja_descend(j);
    if (v.type == TEMPLATE_UNDEFINED) {
        jinja_append_text(j, t, "Undefined", 0);
    } else if (v.type == TEMPLATE_NONE || v.type == TEMPLATE_BOOL) {
        jinja_append_text(j, t, v.type == TEMPLATE_NONE ? "None" : v.as.i ? "True" : "False", 0);
    } else if (jinja_is_number(v)) {
        jinja_write_number(j, t, v, 0);
    } else if (v.type == TEMPLATE_STRING) {
        jinja_repr_string(j, t, v);
    } else if (jinja_is_sequence(v)) {
        const bool list = v.type == TEMPLATE_LIST;
        jinja_append_text(j, t, list ? "[" : "(", 0);
        for (size_t i = 0; i < v.as.list->count; i++) {
            jinja_append_text(j, t, i ? ", " : "", 0);
            jinja_repr(j, t, v.as.list->items[i]);
        }
        jinja_append_text(j, t, list ? "]" : v.as.list->count == 1 ? ",)" : ")", 0);
    } else if (v.type == TEMPLATE_DICT || v.type == TEMPLATE_VIEW) {
        jinja_repr_dict(j, t, v);
    } else if (v.type == TEMPLATE_NAMESPACE) {
        jinja_append_text(j, t, "<Namespace ", 0);
        v.type = TEMPLATE_DICT;
        jinja_repr(j, t, v);
        jinja_append_text(j, t, ">", 0);
    } else if (v.type == TEMPLATE_RANGE) {
        const JinjaRange* r = v.as.range;
        const long long start = r->start, step = r->step, stop = start + step * (long long)r->count;
        snprintf(text, sizeof text, step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)", start, stop, step);
        jinja_append_text(j, t, text, 0);
    } else {
        jinja_fail(j, "a value of the type %s has no text to print", jinja_type_name(v));
    }
    j->depth--;
}

/* Appends str(v), as {{ v }} prints it. */
static inline void jinja_write(Jinja* j, JinjaText* t, TemplateValue v) {
    if (v.type == TEMPLATE_STRING) {
        jinja_append_string(j, t, v);
    } else if (v.type == TEMPLATE_NONE || v.type == TEMPLATE_BOOL) {
        jinja_append_text(j, t, v.type == TEMPLATE_NONE ? "None" : v.as.i ? "True" : "False", v.mark);
    } else if (jinja_is_number(v)) {
        jinja_write_number(j, t, v, v.mark);
    } else if (v.type != TEMPLATE_UNDEFINED) {
        jinja_repr(j, t, v);
    }
}

/* Returns str(v). */
static inline TemplateValue jinja_str(Jinja* j, TemplateValue v) {
    if (v.type == TEMPLATE_STRING) { return v; }
    JinjaText t = {NULL, NULL, 0, 0};
    jinja_write(j, &t, v);
    return jinja_string(&t);
}

// ---------------------------------------------------------------------------------------------------------------------
// JSON

/* How json.dumps() writes. */
typedef struct {
    bool ascii, sort_keys;
    TemplateValue indent;        // string; ABSENT: everything on one line
    TemplateValue comma, colon;  // strings
    void (*sort)(Jinja*, TemplatePair*, size_t);
} JinjaJson;

static inline void jinja_json_string(Jinja* j, JinjaText* t, TemplateValue v, bool ascii) {
    char escape[16];
    jinja_append_text(j, t, "\"", 0);
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        uint32_t c;
        n = jinja_char(v, i, &c);
        const char* plain = c && c < 0x80 ? strchr("\"\\\bb\ff\nn\rr\tt", (int)c) : NULL;
        if (c == '"' || c == '\\') {
            snprintf(escape, sizeof escape, "\\%c", (int)c);
        } else if (plain && c < 0x20) {
            snprintf(escape, sizeof escape, "\\%c", plain[1]);
        } else if (c < 0x20 || (ascii && c >= 0x80 && c < 0x10000)) {
            snprintf(escape, sizeof escape, "\\u%04x", c);
        } else if (ascii && c >= 0x10000) {
            snprintf(escape, sizeof escape, "\\u%04x\\u%04x", 0xD800 + ((c - 0x10000) >> 10), 0xDC00 + (c & 0x3FF));
        } else {
            jinja_append(j, t, v.as.s + i, NULL, 0, n);
            continue;
        }
        jinja_append_text(j, t, escape, 0);
    }
    jinja_append_text(j, t, "\"", 0);
}

static inline void jinja_json_line(Jinja* j, JinjaText* t, const JinjaJson* how, size_t level) {
    if (how->indent.type == TEMPLATE_ABSENT) { return; }
    jinja_append_text(j, t, "\n", 0);
    for (size_t i = 0; i < level; i++) { jinja_append(j, t, how->indent.as.s, NULL, 0, how->indent.len); }
}

static inline void jinja_json(Jinja* j, JinjaText* t, TemplateValue v, const JinjaJson* how, size_t level);

/* Appends the key of a dict: a string, or what json.dumps() makes one of. */
static inline void jinja_json_key(Jinja* j, JinjaText* t, TemplateValue key, const JinjaJson* how) {
    if (key.type == TEMPLATE_STRING) {
        jinja_json_string(j, t, key, how->ascii);
        return;
    }
    if (key.type == TEMPLATE_TUPLE) { jinja_fail(j, "keys of JSON must be strings, numbers, true, false or none, not tuple"); }
    jinja_append_text(j, t, "\"", 0);
    jinja_json(j, t, key, how, 0);
    jinja_append_text(j, t, "\"", 0);
}

/* Appends json.dumps(v); all of it counts as data. */
static inline void jinja_json(Jinja* j, JinjaText* t, TemplateValue v, const JinjaJson* how, size_t level) {
    jinja_spend(j, 1);
    jinja_descend(j);
    const bool list = jinja_is_sequence(v), dict = v.type == TEMPLATE_DICT;
    if (v.type == TEMPLATE_NONE || v.type == TEMPLATE_BOOL) {
        jinja_append_text(j, t, v.type == TEMPLATE_NONE ? "null" : v.as.i ? "true" : "false", 0);
    } else if (v.type == TEMPLATE_FLOAT && !v.detail && !isfinite(v.as.d)) {
        jinja_append_text(j, t, isnan(v.as.d) ? "NaN" : v.as.d < 0 ? "-Infinity" : "Infinity", 0);
    } else if (jinja_is_number(v)) {
        jinja_write_number(j, t, v, 0);
    } else if (v.type == TEMPLATE_STRING) {
        jinja_json_string(j, t, v, how->ascii);
    } else if (!list && !dict) {
        jinja_fail(j, "Object of type %s is not JSON serializable", jinja_type_name(v));
    } else if ((list ? v.as.list->count : v.as.dict->count) == 0) {
        jinja_append_text(j, t, list ? "[]" : "{}", 0);
    } else {
        const size_t count = list ? v.as.list->count : v.as.dict->count;
        TemplatePair* pairs = dict ? v.as.dict->items : NULL;
        if (dict && how->sort_keys) {
            pairs = (TemplatePair*)memcpy(jinja_alloc(j, count * sizeof *pairs), pairs, count * sizeof *pairs);
            how->sort(j, pairs, count);
        }
        jinja_append_text(j, t, list ? "[" : "{", 0);
        for (size_t i = 0; i < count; i++) {
            if (i) { jinja_append(j, t, how->comma.as.s, NULL, 0, how->comma.len); }
            jinja_json_line(j, t, how, level + 1);
            if (dict) {
                jinja_json_key(j, t, pairs[i].key, how);
                jinja_append(j, t, how->colon.as.s, NULL, 0, how->colon.len);
            }
            jinja_json(j, t, list ? v.as.list->items[i] : pairs[i].value, how, level + 1);
        }
        jinja_json_line(j, t, how, level);
        jinja_append_text(j, t, list ? "]" : "}", 0);
    }
    j->depth--;
}

#endif
