/* template_functions.h -- what a chat template (text/template.h) may call: Jinja's filters and tests, the methods of Python's
 * strings, lists and dicts, and the functions that transformers adds. Nothing here reaches anything but the template's values.
 *
 * Each is a row of a table: its name, the names of its parameters, and a function of C. Where Python would give an error, so
 * do they; what Python has and these tables have not is refused by name. A filter that returns a generator in jinja2 returns an
 * iterator: its items are made when they are asked for, once.
 */
#ifndef LLMC_TEMPLATE_FUNCTIONS_H
#define LLMC_TEMPLATE_FUNCTIONS_H

#include "llmc/text/template_parse.h"  // defines: JinjaNode, Jinja, TemplateValue

// ---------------------------------------------------------------------------------------------------------------------
// calls

/* The arguments of a call. */
typedef struct {
    TemplateValue* v;
    TemplateValue* names;  // ABSENT: an argument without a name
    size_t count, cap;
} JinjaArguments;

/* A function. Its arguments come in the order of its parameters, ABSENT where there is none. */
typedef struct JinjaFunction {
    const char* name;
    const char* parameters;  // with spaces between; "!": must be given; "*": arguments come as they were given
    TemplateValue (*call)(Jinja* j, TemplateValue self, const JinjaArguments* a);
} JinjaFunction;

typedef struct JinjaBound {
    TemplateValue self;
    const JinjaFunction* function;
} JinjaBound;

typedef struct JinjaLoop {
    struct JinjaIterator* items;
    int64_t index0, length;  // length -1: not asked yet
    int64_t depth0;
    TemplateValue before, current, after, changed;  // ABSENT where there is none
} JinjaLoop;

typedef struct JinjaCycler {
    TemplateValue items;  // list; of a joiner: the separator
    size_t at;
} JinjaCycler;

static inline TemplateValue jinja_absent(void) { return template_value(TEMPLATE_ABSENT, 0, false); }
static inline bool jinja_given(TemplateValue v) { return v.type != TEMPLATE_ABSENT; }

static inline void jinja_add_argument(Jinja* j, JinjaArguments* a, TemplateValue v, TemplateValue name) {
    if (a->count == a->cap) {
        const size_t cap = a->cap * 2 + 4;
        TemplateValue* grown = (TemplateValue*)jinja_alloc(j, 2 * cap * sizeof v);
        if (a->count) {
            memcpy(grown, a->v, a->count * sizeof v);
            memcpy(grown + cap, a->names, a->count * sizeof v);
        }
        a->v = grown;
        a->names = grown + cap;
        a->cap = cap;
    }
    a->v[a->count] = v;
    a->names[a->count++] = name;
}

/* Puts arguments in the order of a function's parameters. */
static inline JinjaArguments jinja_bind(Jinja* j, const JinjaFunction* f, const JinjaArguments* given) {
    JinjaArguments bound = {NULL, NULL, 0, 0};
    size_t positional = 0, used = 0;
    while (positional < given->count && !jinja_given(given->names[positional])) { positional++; }
    for (const char* p = f->parameters; *p;) {
        const bool must = *p == '!';
        const char* name = p + must;
        const size_t len = strcspn(name, " ");
        TemplateValue v = jinja_absent();
        if (bound.count < positional) {
            v = given->v[bound.count];
            used++;
        }
        for (size_t i = positional; i < given->count; i++) {
            if (given->names[i].len != len || memcmp(given->names[i].as.s, name, len) != 0) { continue; }
            if (jinja_given(v)) { jinja_fail(j, "%s() got the argument %.*s twice", f->name, (int)len, name); }
            v = given->v[i];
            used++;
        }
        if (must && !jinja_given(v)) { jinja_fail(j, "%s() got no argument %.*s", f->name, (int)len, name); }
        jinja_add_argument(j, &bound, v, jinja_absent());
        p = name + len + (name[len] == ' ');
    }
    if (used < given->count) { jinja_fail(j, "%s() got more arguments than it knows: wanted (%s)", f->name, f->parameters); }
    return bound;
}

static inline TemplateValue jinja_apply(Jinja* j, const JinjaFunction* f, TemplateValue self, const JinjaArguments* given) {
    const size_t at = j->at;
    jinja_spend(j, 1);
    if (*f->parameters == '*') { return f->call(j, self, given); }
    const JinjaArguments bound = jinja_bind(j, f, given);
    const TemplateValue v = f->call(j, self, &bound);
    j->at = at;
    return v;
}

static inline TemplateValue jinja_call(Jinja* j, TemplateValue callee, const JinjaArguments* a);  // template.h
static inline bool jinja_next_of_loop(Jinja* j, struct JinjaIterator* it, TemplateValue* v);      // template.h

// ---------------------------------------------------------------------------------------------------------------------
// arguments of one kind

LLMC_NORETURN static inline void jinja_fail_type(Jinja* j, TemplateValue v, const char* wanted) {
    if (v.type == TEMPLATE_UNDEFINED) { jinja_fail_undefined(j, v); }
    jinja_fail(j, "found a value of the type %s, wanted %s", jinja_type_name(v), wanted);
}

static inline int64_t jinja_integer_or(Jinja* j, TemplateValue v, int64_t otherwise) {
    if (!jinja_given(v)) { return otherwise; }
    if (!jinja_is_integer(v)) { jinja_fail_type(j, v, "an integer"); }
    return v.as.i;
}
static inline bool jinja_flag(TemplateValue v, bool otherwise) { return jinja_given(v) ? jinja_truth(v) : otherwise; }
static inline TemplateValue jinja_text_or(Jinja* j, TemplateValue v, const char* otherwise) {
    if (!jinja_given(v)) { return jinja_word(j, otherwise); }
    if (v.type != TEMPLATE_STRING) { jinja_fail_type(j, v, "a string"); }
    return v;
}
static inline TemplateValue jinja_text(Jinja* j, TemplateValue v) { return jinja_text_or(j, v, ""); }

// ---------------------------------------------------------------------------------------------------------------------
// items

typedef enum { ITERATE_ITEMS, ITERATE_MAP, ITERATE_SELECT, ITERATE_UNIQUE, ITERATE_BATCH, ITERATE_LOOP } JinjaIteration;

/* Gives items one by one. */
typedef struct JinjaIterator {
    JinjaIteration kind;
    TemplateValue over;          // ITEMS: list, tuple, string, dict, view or range
    size_t at;                   // ITEMS: index, of a string byte
    bool backwards, negate;      // ITEMS; SELECT
    bool case_sensitive;         // UNIQUE
    struct JinjaIterator* from;  // of the others
    const JinjaFunction* function;
    JinjaArguments arguments;
    TemplateValue attribute, otherwise;  // ABSENT: the item itself; for an attribute that is not there
    TemplateValue seen;                  // UNIQUE: list of keys
    int64_t size;                        // BATCH
    const JinjaNode* loop;               // LOOP
    struct JinjaScope* scope;
} JinjaIterator;

static inline TemplateValue jinja_tuple2(Jinja* j, TemplateValue a, TemplateValue b) {
    jinja_alloc(j, 0);
    TemplateValue v = template_list(j->arena);
    jinja_add(j, v, a);
    jinja_add(j, v, b);
    v.type = TEMPLATE_TUPLE;
    return v;
}

static inline TemplateValue jinja_pair(Jinja* j, const TemplatePair* p) { return jinja_tuple2(j, p->key, p->value); }

/* Returns len(v), or -1 if it has none. */
static inline int64_t jinja_length(Jinja* j, TemplateValue v) {
    switch (v.type) {
        case TEMPLATE_UNDEFINED: return 0;
        case TEMPLATE_STRING: return (int64_t)jinja_text_length(j, v);
        case TEMPLATE_LIST:
        case TEMPLATE_TUPLE: return (int64_t)v.as.list->count;
        case TEMPLATE_DICT:
        case TEMPLATE_VIEW: return (int64_t)v.as.dict->count;
        case TEMPLATE_RANGE: return (int64_t)v.as.range->count;
        default: return -1;
    }
}

/* Returns item `i` of what has a length; not of a string. */
static inline TemplateValue jinja_item_at(Jinja* j, TemplateValue v, size_t i) {
    if (jinja_is_sequence(v)) { return v.as.list->items[i]; }
    if (v.type == TEMPLATE_RANGE) { return template_int(v.as.range->start + v.as.range->step * (int64_t)i); }
    const TemplatePair* p = &v.as.dict->items[i];
    return v.type == TEMPLATE_DICT || v.detail == 'k' ? p->key : v.detail == 'v' ? p->value : jinja_pair(j, p);
}

static inline JinjaIterator* jinja_new_iterator(Jinja* j, JinjaIteration kind, JinjaIterator* from) {
    JinjaIterator* it = (JinjaIterator*)memset(jinja_alloc(j, sizeof *it), 0, sizeof *it);
    it->kind = kind;
    it->from = from;
    it->attribute = it->otherwise = jinja_absent();
    return it;
}

/* Python's iter(v). */
static inline JinjaIterator* jinja_iterate(Jinja* j, TemplateValue v) {
    if (v.type == TEMPLATE_ITERATOR) { return v.as.iterator; }
    if (jinja_length(j, v) < 0) { jinja_fail_type(j, v, "what can be iterated"); }
    JinjaIterator* it = jinja_new_iterator(j, ITERATE_ITEMS, NULL);
    it->over = v;
    return it;
}

static inline TemplateValue jinja_iterator_value(JinjaIterator* it) {
    TemplateValue v = template_value(TEMPLATE_ITERATOR, 0, false);
    v.as.iterator = it;
    return v;
}

static inline TemplateValue jinja_attribute_of(Jinja* j, TemplateValue v, TemplateValue path, TemplateValue otherwise);
static inline TemplateValue jinja_ignore_case(Jinja* j, TemplateValue v);
static inline bool jinja_contains(Jinja* j, TemplateValue items, TemplateValue v);

/* Sets *v to the next item; false: there is none. */
static inline bool jinja_next(Jinja* j, JinjaIterator* it, TemplateValue* v) {
    jinja_spend(j, 1);
    if (it->kind == ITERATE_ITEMS) {
        const TemplateValue over = it->over;
        if (over.type == TEMPLATE_STRING) {
            if (it->at >= over.len) { return false; }
            const size_t from = it->at;
            it->at += jinja_char(over, from, NULL);
            *v = jinja_cut(over, from, it->at);
            return true;
        }
        const size_t count = over.type == TEMPLATE_UNDEFINED ? 0 : (size_t)jinja_length(j, over);
        if (it->at >= count) { return false; }
        *v = jinja_item_at(j, over, it->backwards ? count - 1 - it->at : it->at);
        it->at++;
        return true;
    }
    if (it->kind == ITERATE_LOOP) { return jinja_next_of_loop(j, it, v); }
    if (it->kind == ITERATE_BATCH) {
        TemplateValue item;
        *v = template_list(j->arena);
        while ((int64_t)v->as.list->count < it->size && jinja_next(j, it->from, &item)) { jinja_add(j, *v, item); }
        if (v->as.list->count == 0) { return false; }
        while (jinja_given(it->otherwise) && (int64_t)v->as.list->count < it->size) { jinja_add(j, *v, it->otherwise); }
        return true;
    }
    while (jinja_next(j, it->from, v)) {
        TemplateValue of = jinja_given(it->attribute) ? jinja_attribute_of(j, *v, it->attribute, it->otherwise) : *v;
        if (it->kind == ITERATE_UNIQUE) {
            of = it->case_sensitive ? of : jinja_ignore_case(j, of);
            if (jinja_contains(j, it->seen, of)) { continue; }
            jinja_add(j, it->seen, of);
            return true;
        }
        if (it->function) { of = jinja_apply(j, it->function, of, &it->arguments); }
        if (it->kind == ITERATE_MAP) {
            *v = of;
            return true;
        }
        if (jinja_truth(of) != it->negate) { return true; }
    }
    return false;
}

/* Python's list(v). */
static inline TemplateValue jinja_list(Jinja* j, TemplateValue v) {
    JinjaIterator* it = jinja_iterate(j, v);
    jinja_alloc(j, 0);
    const TemplateValue list = template_list(j->arena);
    for (TemplateValue item; jinja_next(j, it, &item);) { jinja_add(j, list, item); }
    return list;
}

/* Python's v in items. */
static inline bool jinja_contains(Jinja* j, TemplateValue items, TemplateValue v) {
    if (items.type == TEMPLATE_STRING) {
        if (v.type != TEMPLATE_STRING) { jinja_fail_type(j, v, "a string, since the right side of \"in\" is one"); }
        return jinja_find(j, items, v, 0) != SIZE_MAX;
    }
    if (items.type == TEMPLATE_DICT || (items.type == TEMPLATE_VIEW && items.detail == 'k')) {
        if (v.type == TEMPLATE_LIST || v.type == TEMPLATE_DICT) { jinja_fail_type(j, v, "a key of a dict"); }
        return jinja_dict_find(j, items.as.dict, v) < items.as.dict->count;
    }
    JinjaIterator* it = jinja_iterate(j, items);
    for (TemplateValue item; jinja_next(j, it, &item);) {
        if (jinja_equal(j, item, v)) { return true; }
    }
    return false;
}

/* Sorts n values stably by their keys: merges halves. `spare` holds 2 n. */
static inline void jinja_merge_sort(Jinja* j, TemplatePair* p, TemplatePair* spare, size_t n, bool down) {
    if (n < 2) { return; }
    const size_t half = n / 2;
    jinja_merge_sort(j, p, spare, half, down);
    jinja_merge_sort(j, p + half, spare, n - half, down);
    memcpy(spare, p, half * sizeof *p);
    for (size_t a = 0, b = half, to = 0; a < half; to++) {
        jinja_spend(j, 1);
        const bool second =
            b < n && (down ? jinja_order(j, spare[a].key, p[b].key) == -1 : jinja_order(j, p[b].key, spare[a].key) == -1);
        p[to] = second ? p[b++] : spare[a++];
    }
}
static inline void jinja_sort_pairs(Jinja* j, TemplatePair* p, size_t n, bool down) {
    jinja_merge_sort(j, p, (TemplatePair*)jinja_alloc(j, n * sizeof *p), n, down);
}
static inline void jinja_sort_keys(Jinja* j, TemplatePair* p, size_t n) { jinja_sort_pairs(j, p, n, false); }

// ---------------------------------------------------------------------------------------------------------------------
// characters

/* Writes the upper ('u'), lower ('l') or title ('t') case of a character to `out`, 16 bytes; returns the length. */
static inline size_t jinja_case(char* out, uint32_t c, int to) {
    if (to == 'l' ? c >= 'A' && c <= 'Z' : c >= 'a' && c <= 'z') { c ^= 0x20; }
    return utf8_encode(out, (int)c);
}
static inline bool jinja_has_case(uint32_t c, int other) {
    char out[16], same[16];
    const size_t n = jinja_case(out, c, other);
    return n != utf8_encode(same, (int)c) || memcmp(out, same, n) != 0;
}
static inline bool jinja_is_letter(uint32_t c) { return unicode_class(c) == UNICODE_LETTER; }
static inline bool jinja_is_digit(uint32_t c) { return unicode_class(c) == UNICODE_NUMBER; }
static inline bool jinja_is_cased(uint32_t c) { return jinja_has_case(c, 'u') || jinja_has_case(c, 'l'); }

/* Returns a string in another case: 'u' upper, 'l' lower, 'c' first upper and the others lower, 's' swapped, 't' upper where a word
 * starts (str.title()), 'w' the same by the words of the filter title. */
static inline TemplateValue jinja_in_case(Jinja* j, TemplateValue v, int to) {
    JinjaText t = {NULL, NULL, 0, 0};
    bool start = true;
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        char out[16];
        uint32_t c;
        n = jinja_char(v, i, &c);
        const int one = to == 'u' || to == 'l' ? to
                        : to == 's'            ? (jinja_has_case(c, 'l') ? 'l' : 'u')
                        : !start               ? 'l'
                        : to == 'w'            ? 'u'
                                               : 't';
        const size_t len = jinja_case(out, c, one);
        jinja_append(j, &t, out, NULL, v.more.marks[i], len);
        start = to == 't' ? !jinja_is_cased(c)
                          : to == 'w' && (unicode_is_stripped(c) || (c < 0x80 && c && strchr("-({[<", (int)c)));
    }
    return jinja_string(&t);
}

static inline TemplateValue jinja_ignore_case(Jinja* j, TemplateValue v) {
    return v.type == TEMPLATE_STRING ? jinja_in_case(j, v, 'l') : v;
}

/* Returns a string without the characters at its ends ('l' left, 'r' right, 'b' both) that are in `chars`; ABSENT or none: white
 * space. */
static inline TemplateValue jinja_strip(Jinja* j, TemplateValue v, TemplateValue chars, int side) {
    size_t from = 0, to = v.len;
    uint32_t c;
    const bool space = !jinja_given(chars) || chars.type == TEMPLATE_NONE;
    if (!space) { jinja_text(j, chars); }
    for (size_t n = 0; side != 'r' && from < to; from += n) {
        n = jinja_char(v, from, &c);
        jinja_spend(j, space ? 0 : chars.len / 64);
        if (space ? !unicode_is_stripped(c) : jinja_find(j, chars, jinja_cut(v, from, from + n), 0) == SIZE_MAX) { break; }
    }
    while (side != 'l' && to > from) {
        size_t at = to - 1;
        while (at > from && ((uint8_t)v.as.s[at] & 0xC0) == 0x80) { at--; }
        jinja_char(v, at, &c);
        if (space ? !unicode_is_stripped(c) : jinja_find(j, chars, jinja_cut(v, at, to), 0) == SIZE_MAX) { break; }
        to = at;
    }
    return jinja_cut(v, from, to);
}

static inline bool jinja_ends(TemplateValue v, TemplateValue part, bool at_start) {
    return part.len <= v.len && memcmp(v.as.s + (at_start ? 0 : v.len - part.len), part.as.s, part.len) == 0;
}

/* str.split() and str.rsplit() at white space. */
static inline TemplateValue jinja_split_space(Jinja* j, TemplateValue v, int64_t most, bool right) {
    const TemplateValue list = template_list(j->arena);
    v = jinja_strip(j, v, jinja_absent(), right ? 'r' : 'l');
    while (v.len) {
        size_t word = 0;  // bytes of the next word, from its end of the string
        uint32_t c;
        while (word < v.len) {
            size_t at = right ? v.len - word - 1 : word;
            while (right && at > 0 && ((uint8_t)v.as.s[at] & 0xC0) == 0x80) { at--; }
            const size_t n = jinja_char(v, at, &c);
            if (unicode_is_stripped(c)) { break; }
            word += n;
        }
        if (most-- == 0) { word = v.len; }
        jinja_add(j, list, right ? jinja_cut(v, v.len - word, v.len) : jinja_cut(v, 0, word));
        jinja_spend(j, 1 + word / 16);
        v = right ? jinja_cut(v, 0, v.len - word) : jinja_cut(v, word, v.len);
        v = jinja_strip(j, v, jinja_absent(), right ? 'r' : 'l');
    }
    return list;
}

static inline void jinja_reverse_list(TemplateValue list) {
    TemplateList* l = list.as.list;
    for (size_t i = 0; i < l->count / 2; i++) {
        const TemplateValue swap = l->items[i];
        l->items[i] = l->items[l->count - 1 - i];
        l->items[l->count - 1 - i] = swap;
    }
}

/* Returns the byte of the last place where `part` stands in a string; SIZE_MAX if there is none. */
static inline size_t jinja_find_last(Jinja* j, TemplateValue v, TemplateValue part) {
    jinja_spend(j, v.len / 16);
    for (size_t at = part.len <= v.len ? v.len - part.len + 1 : 0; at-- > 0;) {
        if (memcmp(v.as.s + at, part.as.s, part.len) == 0) { return at; }
    }
    return SIZE_MAX;
}

/* str.split() and str.rsplit(). */
static inline TemplateValue jinja_split(Jinja* j, TemplateValue v, TemplateValue by, TemplateValue maximum, bool right) {
    int64_t most = jinja_integer_or(j, maximum, -1);
    TemplateValue list;
    if (!jinja_given(by) || by.type == TEMPLATE_NONE) {
        list = jinja_split_space(j, v, most, right);
    } else {
        if (jinja_text(j, by).len == 0) { jinja_fail(j, "empty separator"); }
        list = template_list(j->arena);
        for (size_t at; most-- != 0 && (at = right ? jinja_find_last(j, v, by) : jinja_find(j, v, by, 0)) != SIZE_MAX;) {
            jinja_add(j, list, right ? jinja_cut(v, at + by.len, v.len) : jinja_cut(v, 0, at));
            v = right ? jinja_cut(v, 0, at) : jinja_cut(v, at + by.len, v.len);
            jinja_spend(j, 1);
        }
        jinja_add(j, list, v);
    }
    if (right) { jinja_reverse_list(list); }
    return list;
}

/* str.splitlines(). */
static inline TemplateValue jinja_lines(Jinja* j, TemplateValue v, bool keep) {
    const TemplateValue list = template_list(j->arena);
    size_t start = 0;
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        uint32_t c;
        n = jinja_char(v, i, &c);
        if (!((c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029)) { continue; }
        if (c == '\r' && i + 1 < v.len && v.as.s[i + 1] == '\n') { n = 2; }
        jinja_add(j, list, jinja_cut(v, start, keep ? i + n : i));
        start = i + n;
    }
    if (start < v.len) { jinja_add(j, list, jinja_cut(v, start, v.len)); }
    return list;
}

/* str.replace(). */
static inline TemplateValue jinja_replace(Jinja* j, TemplateValue v, TemplateValue old, TemplateValue by, int64_t most) {
    JinjaText t = {NULL, NULL, 0, 0};
    size_t at = 0;
    if (old.len == 0) {
        for (; most-- != 0; at += jinja_char(v, at, NULL)) {
            jinja_append_string(j, &t, by);
            jinja_spend(j, 1);
            if (at >= v.len) { return jinja_string(&t); }
            jinja_append_string(j, &t, jinja_cut(v, at, at + jinja_char(v, at, NULL)));
        }
    } else {
        for (size_t found; most-- != 0 && (found = jinja_find(j, v, old, at)) != SIZE_MAX; at = found + old.len) {
            jinja_append_string(j, &t, jinja_cut(v, at, found));
            jinja_append_string(j, &t, by);
            jinja_spend(j, 1);
        }
        if (at == 0) { return v; }
    }
    jinja_append_string(j, &t, jinja_cut(v, at, v.len));
    return jinja_string(&t);
}

/* Joins str() of the items; `strings`: they must be strings, as for str.join(). */
static inline TemplateValue jinja_join(Jinja* j, TemplateValue by, JinjaIterator* it, TemplateValue attribute, bool strings) {
    JinjaText t = {NULL, NULL, 0, 0};
    TemplateValue item;
    for (bool first = true; jinja_next(j, it, &item); first = false) {
        if (!first) { jinja_append_string(j, &t, by); }
        if (jinja_given(attribute)) { item = jinja_attribute_of(j, item, attribute, jinja_absent()); }
        if (strings) { jinja_text(j, item); }
        jinja_write(j, &t, item);
    }
    return jinja_string(&t);
}

static inline TemplateValue jinja_escape_html(Jinja* j, TemplateValue v) {
    static const char* const names[] = {"&#34;", "&amp;", "&#39;", "&lt;", "&gt;"};
    JinjaText t = {NULL, NULL, 0, 0};
    if (v.type == TEMPLATE_STRING && v.detail) { return v; }
    v = jinja_str(j, v);
    for (size_t i = 0; i < v.len; i++) {
        const char* found = v.as.s[i] ? strchr("\"&'<>", v.as.s[i]) : NULL;
        if (found) { jinja_append_text(j, &t, names[found - "\"&'<>"], v.more.marks[i]); }
        if (!found) { jinja_append_string(j, &t, jinja_cut(v, i, i + 1)); }
    }
    v = jinja_string(&t);
    v.detail = 1;
    return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// members

static inline TemplateValue jinja_function_value(Jinja* j, TemplateValue self, const JinjaFunction* f) {
    TemplateValue v = template_value(TEMPLATE_FUNCTION, 0, false);
    v.as.bound = (JinjaBound*)jinja_alloc(j, sizeof(JinjaBound));
    v.as.bound->self = self;
    v.as.bound->function = f;
    return v;
}

/* Returns what is undefined about a member of v. */
static inline TemplateValue jinja_no_member(Jinja* j, TemplateValue v, TemplateValue key) {
    static const char* const types[] = {"",
                                        "None",
                                        "bool object",
                                        "int object",
                                        "float object",
                                        "str object",
                                        "list object",
                                        "tuple object",
                                        "dict object",
                                        "range object",
                                        "dict view object",
                                        "generator object",
                                        "transformers.utils.chat_template_utils.TemplateNamespace object",
                                        "jinja2.runtime.LoopContext object",
                                        "jinja2.utils.Cycler object",
                                        "jinja2.utils.Joiner object",
                                        "builtin_function_or_method object",
                                        "jinja2.runtime.Macro object",
                                        ""};
    if (key.type == TEMPLATE_STRING) { return jinja_undefined(key.as.s, key.len, types[v.type]); }
    JinjaText t = {NULL, NULL, 0, 0};
    jinja_repr(j, &t, key);
    TemplateValue none = jinja_undefined(t.s, t.len, types[v.type]);
    none.detail = 1;
    return none;
}

static inline TemplateValue jinja_peek(Jinja* j, JinjaLoop* loop) {
    if (!jinja_given(loop->after) && !jinja_next(j, loop->items, &loop->after)) { loop->after = jinja_absent(); }
    return loop->after;
}

/* Returns the length of a loop: takes all items if they have to be counted. */
static inline int64_t jinja_loop_length(Jinja* j, JinjaLoop* loop) {
    JinjaIterator* it = loop->items;
    if (loop->length >= 0) { return loop->length; }
    if (it->kind == ITERATE_ITEMS && !it->backwards) { return loop->length = jinja_length(j, it->over); }
    const TemplateValue rest = jinja_list(j, jinja_iterator_value(it));
    loop->items = jinja_iterate(j, rest);
    return loop->length = (int64_t)rest.as.list->count + loop->index0 + 1 + jinja_given(loop->after);
}

/* Sets *v to a member of `loop`. */
static inline bool jinja_loop_member(Jinja* j, JinjaLoop* loop, TemplateValue name, TemplateValue* v) {
    static const char* const names[] = {"index",  "index0", "revindex", "revindex0", "length",  "depth",
                                        "depth0", "first",  "last",     "previtem",  "nextitem"};
    int i = 0;
    while (i < 11 && !jinja_is(name, names[i])) { i++; }
    switch (i) {
        case 0: *v = template_int(loop->index0 + 1); break;
        case 1: *v = template_int(loop->index0); break;
        case 2: *v = template_int(jinja_loop_length(j, loop) - loop->index0); break;
        case 3: *v = template_int(jinja_loop_length(j, loop) - loop->index0 - 1); break;
        case 4: *v = template_int(jinja_loop_length(j, loop)); break;
        case 5: *v = template_int(1); break;
        case 6: *v = template_int(0); break;
        case 7: *v = template_bool(loop->index0 == 0); break;
        case 8: *v = template_bool(!jinja_given(jinja_peek(j, loop))); break;
        case 9: *v = loop->index0 == 0 ? jinja_undefined_hint("there is no previous item") : loop->before; break;
        case 10: *v = jinja_given(jinja_peek(j, loop)) ? loop->after : jinja_undefined_hint("there is no next item"); break;
        default: return false;
    }
    return true;
}

static inline const JinjaFunction* jinja_method_named(TemplateValue of, TemplateValue name);

/* Returns whether a name is one of a list with spaces around each. */
static inline bool jinja_listed(const char* names, TemplateValue name) {
    char word[40];
    if (name.len > 32 || memchr(name.as.s, ' ', name.len)) { return false; }
    snprintf(word, sizeof word, " %.*s ", (int)name.len, name.as.s);
    return strstr(names, word) != NULL;
}

/* Sets *v to an attribute that Python's type of `of` has. Those which jinja2's sandbox closes are undefined. */
static inline bool jinja_attribute(Jinja* j, TemplateValue of, TemplateValue name, TemplateValue* v) {
    static const char* const closed[] = {" append clear extend insert pop remove reverse sort ",
                                         " clear pop popitem setdefault update "};
    static const char* const missing[] = {
        " casefold center encode expandtabs format_map isascii isdecimal isidentifier isprintable istitle ljust maketrans "
        "rjust "
        "swapcase translate zfill ",
        " copy ", " fromkeys "};
    const JinjaFunction* method = jinja_method_named(of, name);
    const bool list = of.type == TEMPLATE_LIST, dict = of.type == TEMPLATE_DICT;
    const bool hidden = name.len > 4 && memcmp(name.as.s, "__", 2) == 0 && memcmp(name.as.s + name.len - 2, "__", 2) == 0;
    if (of.type == TEMPLATE_NAMESPACE && !hidden) {
        const size_t i = jinja_dict_find(j, of.as.dict, name);
        if (i < of.as.dict->count) { *v = of.as.dict->items[i].value; }
        return i < of.as.dict->count;
    }
    if (method) {
        *v = jinja_function_value(j, of, method);
        return true;
    }
    if (hidden || ((list || dict) && jinja_listed(closed[dict], name))) {
        JinjaText t = {NULL, NULL, 0, 0};
        jinja_append_text(j, &t, "access to attribute '", 0);
        jinja_append_string(j, &t, name);
        jinja_append_text(j, &t, "' of '", 0);
        jinja_append_text(j, &t, jinja_type_name(of), 0);
        jinja_append_text(j, &t, "' object is unsafe.", 0);
        *v = jinja_undefined(t.s, t.len, "");
        return true;
    }
    if (jinja_listed(of.type == TEMPLATE_STRING ? missing[0] : list ? missing[1] : dict ? missing[2] : "", name)) {
        jinja_fail(j, "the method \"%.*s\" of %s is not known here", (int)name.len, name.as.s, jinja_type_name(of));
    }
    if (of.type == TEMPLATE_LOOP) { return jinja_loop_member(j, of.as.loop, name, v); }
    if (of.type == TEMPLATE_CYCLER && jinja_is(name, "current")) {
        *v = of.as.cycler->items.as.list->items[of.as.cycler->at];
        return true;
    }
    if (of.type == TEMPLATE_TUPLE && of.detail && (jinja_is(name, "grouper") || jinja_is(name, "list"))) {  // of groupby
        *v = of.as.list->items[jinja_is(name, "list")];
        return true;
    }
    return false;
}

/* Sets *v to of[key], if it is there. */
static inline bool jinja_item(Jinja* j, TemplateValue of, TemplateValue key, TemplateValue* v) {
    if (of.type == TEMPLATE_DICT) {
        if (key.type == TEMPLATE_LIST || key.type == TEMPLATE_DICT) { return false; }
        const size_t i = jinja_dict_find(j, of.as.dict, key);
        if (i < of.as.dict->count) { *v = of.as.dict->items[i].value; }
        return i < of.as.dict->count;
    }
    if (!jinja_is_integer(key) || !(of.type == TEMPLATE_STRING || jinja_is_sequence(of) || of.type == TEMPLATE_RANGE)) {
        return false;
    }
    const int64_t length = jinja_length(j, of), i = key.as.i < 0 ? key.as.i + length : key.as.i;
    if (i < 0 || i >= length) { return false; }
    if (of.type == TEMPLATE_STRING) {
        const size_t at = jinja_text_offset(j, of, (size_t)i);
        *v = jinja_cut(of, at, at + jinja_char(of, at, NULL));
    } else {
        *v = jinja_item_at(j, of, (size_t)i);
    }
    return true;
}

/* of.name (attribute first) or of[key] (item first), as jinja2's sandbox looks for them. */
static inline TemplateValue jinja_member(Jinja* j, TemplateValue of, TemplateValue key, bool attribute_first) {
    TemplateValue v;
    if (of.type == TEMPLATE_UNDEFINED) { jinja_fail_undefined(j, of); }
    if (attribute_first && jinja_attribute(j, of, key, &v)) { return v; }
    if (jinja_item(j, of, key, &v)) { return v; }
    if (!attribute_first && key.type == TEMPLATE_STRING && jinja_attribute(j, of, key, &v)) { return v; }
    return jinja_no_member(j, of, key);
}

/* The member at a path such as "function.name" or 0, for the filters that take an attribute. */
static inline TemplateValue jinja_attribute_of(Jinja* j, TemplateValue v, TemplateValue path, TemplateValue otherwise) {
    if (path.type != TEMPLATE_STRING) {
        v = path.type == TEMPLATE_NONE ? v : jinja_member(j, v, path, false);
        return v.type == TEMPLATE_UNDEFINED && jinja_given(otherwise) ? otherwise : v;
    }
    for (size_t from = 0, to; from <= path.len; from = to + 1) {
        for (to = from; to < path.len && path.as.s[to] != '.'; to++) {}
        TemplateValue part = jinja_cut(path, from, to);
        if (part.len > 0 && part.len < 10 && strspn(part.as.s, "0123456789") >= part.len) {
            part = template_int(atoi(part.as.s));
        }
        v = jinja_member(j, v, part, false);
        if (v.type == TEMPLATE_UNDEFINED && jinja_given(otherwise)) { v = otherwise; }
    }
    return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// operators

LLMC_NORETURN static inline void jinja_fail_overflow(Jinja* j) { jinja_fail(j, "a number needs more than 64 bits"); }

/* Integer ** and its kin for floats. */
static inline TemplateValue jinja_power(Jinja* j, TemplateValue a, TemplateValue b) {
    if (!jinja_is_integer(a) || !jinja_is_integer(b) || b.as.i < 0) {
        if (jinja_double(a) == 0 && jinja_double(b) < 0) { jinja_fail(j, "0 cannot be raised to a negative power"); }
        const double d = pow(jinja_double(a), jinja_double(b));
        if (isinf(d) && isfinite(jinja_double(a)) && isfinite(jinja_double(b))) {
            jinja_fail(j, "the result of ** is too large");
        }
        return template_float(d);
    }
    int64_t result = 1, base = a.as.i;
    for (int64_t n = b.as.i; n > 0; n >>= 1) {
        if ((n & 1) && __builtin_mul_overflow(result, base, &result)) { jinja_fail_overflow(j); }
        if (n > 1 && __builtin_mul_overflow(base, base, &base)) { jinja_fail_overflow(j); }
    }
    return template_int(result);
}

/* a op b of two numbers; op as in JinjaNode. */
static inline TemplateValue jinja_arithmetic(Jinja* j, int op, TemplateValue a, TemplateValue b) {
    const bool whole = jinja_is_integer(a) && jinja_is_integer(b);
    const double x = jinja_double(a), y = jinja_double(b);
    int64_t i = 0;
    bool overflow = false;
    if (strchr("/f%", op) && y == 0) { jinja_fail(j, "division by zero"); }
    if (op == 'p') { return jinja_power(j, a, b); }
    if (op == '/') { return template_float(x / y); }
    if (!whole) {
        if (op == 'f' || op == '%') {
            double rest = fmod(x, y);
            if (rest != 0 && (rest < 0) != (y < 0)) { rest += y; }
            if (rest == 0) { rest = copysign(0, y); }
            if (op == '%') { return template_float(rest); }
            const double quotient = (x - rest) / y, low = floor(quotient);
            return template_float(quotient == 0 ? copysign(0, x / y) : quotient - low > 0.5 ? low + 1 : low);
        }
        return template_float(op == '+' ? x + y : op == '-' ? x - y : x * y);
    }
    if (op == 'f' || op == '%') {
        if (b.as.i == -1) {
            overflow = op == 'f' && __builtin_sub_overflow((int64_t)0, a.as.i, &i);
        } else {
            const int64_t rest = a.as.i % b.as.i, up = rest != 0 && (rest < 0) != (b.as.i < 0);
            i = op == '%' ? rest + (up ? b.as.i : 0) : a.as.i / b.as.i - up;
        }
    } else {
        overflow = op == '+'   ? __builtin_add_overflow(a.as.i, b.as.i, &i)
                   : op == '-' ? __builtin_sub_overflow(a.as.i, b.as.i, &i)
                               : __builtin_mul_overflow(a.as.i, b.as.i, &i);
    }
    if (overflow) { jinja_fail_overflow(j); }
    return template_int(i);
}

/* A string or list n times. */
static inline TemplateValue jinja_repeat(Jinja* j, TemplateValue v, int64_t n) {
    JinjaText t = {NULL, NULL, 0, 0};
    if (v.type == TEMPLATE_STRING) {
        for (; n > 0 && v.len; n--) { jinja_append_string(j, &t, v); }
        return jinja_string(&t);
    }
    TemplateValue list = template_list(j->arena);
    list.type = v.type;
    for (; n > 0 && v.as.list->count; n--) {
        for (size_t i = 0; i < v.as.list->count; i++) { jinja_add(j, list, v.as.list->items[i]); }
        jinja_spend(j, v.as.list->count);
    }
    return list;
}

static inline TemplateValue jinja_format(Jinja* j, TemplateValue format, const JinjaArguments* a);

/* Python's a op b; op as in JinjaNode. */
static inline TemplateValue jinja_binary(Jinja* j, int op, TemplateValue a, TemplateValue b) {
    if (a.type == TEMPLATE_UNDEFINED) { jinja_fail_undefined(j, a); }
    if (b.type == TEMPLATE_UNDEFINED && !(op == '%' && a.type == TEMPLATE_STRING)) { jinja_fail_undefined(j, b); }
    if (jinja_is_number(a) && jinja_is_number(b)) {
        TemplateValue v = jinja_arithmetic(j, op, a, b);
        v.mark = a.mark && b.mark;
        return v;
    }
    const bool lists = jinja_is_sequence(a) && a.type == b.type;
    if (op == '+' && a.type == TEMPLATE_STRING && b.type == TEMPLATE_STRING) {
        JinjaText t = {NULL, NULL, 0, 0};
        const int safe = a.detail || b.detail;
        jinja_append_string(j, &t, safe ? jinja_escape_html(j, a) : a);
        jinja_append_string(j, &t, safe ? jinja_escape_html(j, b) : b);
        a = jinja_string(&t);
        a.detail = (uint8_t)safe;
        return a;
    }
    if (op == '+' && lists) {
        TemplateValue list = jinja_repeat(j, a, 1);
        for (size_t i = 0; i < b.as.list->count; i++) { jinja_add(j, list, b.as.list->items[i]); }
        jinja_spend(j, b.as.list->count);
        return list;
    }
    if (op == '*' && jinja_is_integer(a)) { return jinja_binary(j, op, b, a); }
    if (op == '*' && jinja_is_integer(b) && (a.type == TEMPLATE_STRING || jinja_is_sequence(a))) {
        return jinja_repeat(j, a, b.as.i);
    }
    if (op == '%' && a.type == TEMPLATE_STRING) {
        JinjaArguments one = {&b, NULL, 1, 1};
        if (b.type == TEMPLATE_TUPLE) {
            one.v = b.as.list->items;
            one.count = b.as.list->count;
        }
        return jinja_format(j, a, &one);
    }
    jinja_fail(j, "the operator %s does not take values of the types %s and %s",
               op == 'p'   ? "**"
               : op == 'f' ? "//"
               : op == '+' ? "+"
               : op == '-' ? "-"
               : op == '*' ? "*"
               : op == '/' ? "/"
                           : "%",
               jinja_type_name(a), jinja_type_name(b));
}

/* Python's of[start:stop:step]; ABSENT or none: to the end. */
static inline TemplateValue jinja_slice(Jinja* j, TemplateValue of, const TemplateValue bounds[3]) {
    const int64_t n =
        of.type == TEMPLATE_UNDEFINED || of.type == TEMPLATE_DICT || of.type == TEMPLATE_VIEW ? -1 : jinja_length(j, of);
    int64_t at[3] = {0, 0, 1};
    if (n < 0) { jinja_fail_type(j, of, "what can be sliced"); }
    for (int i = 2; i >= 0; i--) {
        const bool given = jinja_given(bounds[i]) && bounds[i].type != TEMPLATE_NONE;
        if (given && !jinja_is_integer(bounds[i])) { jinja_fail_type(j, bounds[i], "an integer as a slice's bound"); }
        if (i == 2) {
            at[2] = given ? bounds[2].as.i : 1;
            continue;
        }
        const int64_t low = at[2] < 0 ? -1 : 0, high = at[2] < 0 ? n - 1 : n;
        at[i] = given ? bounds[i].as.i : (i == 0) == (at[2] > 0) ? low : high;
        if (given && at[i] < 0) { at[i] += n; }
        at[i] = at[i] < low ? low : at[i] > high ? high : at[i];
    }
    if (at[2] == 0) { jinja_fail(j, "slice step cannot be zero"); }
    if (of.type == TEMPLATE_STRING && at[2] == 1) {
        const size_t from = jinja_text_offset(j, of, (size_t)at[0]);
        return jinja_cut(
            of, from, at[1] > at[0] ? from + jinja_text_offset(j, jinja_cut(of, from, of.len), (size_t)(at[1] - at[0])) : from);
    }
    const TemplateValue items = of.type == TEMPLATE_STRING ? jinja_list(j, of) : of;
    TemplateValue list = template_list(j->arena);
    list.type = of.type == TEMPLATE_TUPLE ? TEMPLATE_TUPLE : TEMPLATE_LIST;
    if (of.type == TEMPLATE_RANGE) {
        const JinjaRange* r = of.as.range;
        const int64_t count = at[2] > 0 ? (at[1] - at[0] + at[2] - 1) / at[2] : (at[0] - at[1] - at[2] - 1) / -at[2];
        const JinjaRange part = {r->start + at[0] * r->step, r->step * at[2], (size_t)(count > 0 ? count : 0)};
        of.as.range = (JinjaRange*)memcpy(jinja_alloc(j, sizeof part), &part, sizeof part);
        return of;
    }
    for (int64_t i = at[0]; at[2] > 0 ? i < at[1] : i > at[1]; i += at[2]) {
        jinja_add(j, list, jinja_item_at(j, items, (size_t)i));
        jinja_spend(j, 1);
        if (at[2] > n || at[2] < -n) { break; }
    }
    return of.type == TEMPLATE_STRING ? jinja_join(j, jinja_word(j, ""), jinja_iterate(j, list), jinja_absent(), true) : list;
}

// ---------------------------------------------------------------------------------------------------------------------
// printf, format, numbers from text

/* Appends a number as Python's "%d" and its kin print it: `spec` is flags, width and precision, `type` the letter. */
static inline void jinja_format_number(Jinja* j, JinjaText* t, const char* spec, char type, TemplateValue v) {
    char how[48], text[512];
    if (!jinja_is_number(v)) { jinja_fail_type(j, v, "a number for this format"); }
    if (strchr("diuxXo", type)) {
        if (v.type == TEMPLATE_FLOAT && (!strchr("diu", type) || !(fabs(v.as.d) < 9e18))) {
            jinja_fail_type(j, v, "an integer");
        }
        snprintf(how, sizeof how, "%%%sll%c", spec, type == 'u' ? 'd' : type);
        snprintf(text, sizeof text, how, (long long)(v.type == TEMPLATE_FLOAT ? (int64_t)v.as.d : v.as.i));
    } else {
        snprintf(how, sizeof how, "%%%s%c", spec, type);
        snprintf(text, sizeof text, how, jinja_double(v));
    }
    jinja_append_text(j, t, text, v.mark);
}

/* Appends n spaces. */
static inline void jinja_pad(Jinja* j, JinjaText* t, int64_t n) {
    for (; n > 0; n--) { jinja_append_text(j, t, " ", 1); }
}

/* Python's format % arguments. */
static inline TemplateValue jinja_format(Jinja* j, TemplateValue format, const JinjaArguments* a) {
    JinjaText t = {NULL, NULL, 0, 0};
    size_t used = 0;
    bool by_name = false;
    for (size_t i = 0; i < format.len;) {
        char spec[24];
        const char* next = (const char*)memchr(format.as.s + i, '%', format.len - i);
        const size_t plain = next ? (size_t)(next - format.as.s) : format.len;
        jinja_append_string(j, &t, jinja_cut(format, i, plain));
        if (!next) { break; }
        i = plain + 1;
        TemplateValue v = jinja_absent();
        if (i < format.len && format.as.s[i] == '(' && a->count == 1 && a->v[0].type == TEMPLATE_DICT) {
            const size_t close = jinja_find(j, format, jinja_word(j, ")"), i);
            if (close == SIZE_MAX) { jinja_fail(j, "incomplete format key"); }
            if (!jinja_item(j, a->v[0], jinja_cut(format, i + 1, close), &v)) {
                jinja_fail(j, "a key of the format is not there");
            }
            i = close + 1;
            by_name = true;
        }
        const size_t start = i;
        while (i < format.len && strchr("-+ #0123456789.", format.as.s[i])) { i++; }
        if (i >= format.len || i - start > 12) { jinja_fail(j, "incomplete format"); }
        snprintf(spec, sizeof spec, "%.*s", (int)(i - start), format.as.s + start);
        const char type = format.as.s[i++];
        if (type == '%') {
            jinja_append_text(j, &t, "%", 1);
            continue;
        }
        if (!jinja_given(v) && used >= a->count) { jinja_fail(j, "not enough arguments for format string"); }
        v = jinja_given(v) ? v : a->v[used++];
        const char* point = strchr(spec, '.');
        const int width = atoi(spec + strspn(spec, "-+ #0")), most = point ? atoi(point + 1) : -1;
        if (width > 500 || most > 200) { jinja_fail(j, "a width of more than 500 in a format"); }
        if (strchr("diuxXoeEfFgG", type)) {
            jinja_format_number(j, &t, spec, type, v);
            continue;
        }
        if (!strchr("src", type)) { jinja_fail(j, "unsupported format character '%c'", type); }
        JinjaText one = {NULL, NULL, 0, 0};
        type == 'r' ? jinja_repr(j, &one, v) : jinja_write(j, &one, v);
        TemplateValue text = jinja_string(&one);
        const TemplateValue bounds[3] = {jinja_absent(), most >= 0 ? template_int(most) : jinja_absent(), jinja_absent()};
        text = jinja_slice(j, text, bounds);
        const int64_t gap = width - (int64_t)jinja_text_length(j, text);
        jinja_pad(j, &t, *spec == '-' ? 0 : gap);
        jinja_append_string(j, &t, text);
        jinja_pad(j, &t, *spec == '-' ? gap : 0);
    }
    if (used < a->count && !by_name && !(a->count == 1 && a->v[0].type == TEMPLATE_DICT)) {
        jinja_fail(j, "not all arguments converted during string formatting");
    }
    return jinja_string(&t);
}

/* str.format(), with the fields {}, {0} and {name}. */
static inline TemplateValue jinja_format_fields(Jinja* j, TemplateValue format, const JinjaArguments* a) {
    JinjaText t = {NULL, NULL, 0, 0};
    size_t next = 0;
    for (size_t i = 0; i < format.len; i++) {
        const char c = format.as.s[i];
        if ((c != '{' && c != '}') || (i + 1 < format.len && format.as.s[i + 1] == c)) {
            jinja_append_string(j, &t, jinja_cut(format, i, i + 1));
            i += c == '{' || c == '}';
            continue;
        }
        const size_t close = jinja_find(j, format, jinja_word(j, "}"), i);
        if (c == '}' || close == SIZE_MAX) { jinja_fail(j, "a single '%c' in a format", c); }
        const TemplateValue name = jinja_cut(format, i + 1, close);
        size_t at = SIZE_MAX;
        if (strspn(name.as.s, "0123456789") >= name.len) { at = name.len ? (size_t)atoi(name.as.s) : next++; }
        for (size_t k = 0; k < a->count; k++) {
            if (jinja_given(a->names[k]) ? jinja_equal(j, a->names[k], name) : k == at) { at = k + (size_t)1e6; }
        }
        if (at < (size_t)1e6 || at == SIZE_MAX) {
            jinja_fail(j, "the field {%.*s} is not known here, wanted {}, {0} or {name}", (int)size_min(name.len, 40),
                       name.as.s);
        }
        jinja_write(j, &t, a->v[at - (size_t)1e6]);
        i = close;
    }
    return jinja_string(&t);
}

/* Sets *out to the number that Python's float() reads in a string. */
static inline bool jinja_read_float(Jinja* j, TemplateValue v, double* out) {
    char text[400];
    size_t n = 0;
    v = jinja_strip(j, v, jinja_absent(), 'b');
    for (size_t i = 0; i < v.len && n + 1 < sizeof text; i++) {
        if (v.as.s[i] == '_' && i > 0 && i + 1 < v.len && isdigit((uint8_t)v.as.s[i - 1]) && isdigit((uint8_t)v.as.s[i + 1])) {
            continue;
        }
        if (!v.as.s[i] || !strchr("0123456789+-.eEinfatyINFATY", v.as.s[i])) { return false; }
        text[n++] = v.as.s[i];
    }
    text[n] = 0;
    char* end = text;
    *out = strtod(text, &end);
    return n > 0 && *end == 0 && !strchr(text, '(');
}

/* Sets *out to the integer that Python's int() reads in a string. */
static inline bool jinja_read_int(Jinja* j, TemplateValue v, int64_t base, int64_t* out) {
    char text[80];
    size_t n = 0;
    v = jinja_strip(j, v, jinja_absent(), 'b');
    if (v.len >= sizeof text - 1) { return false; }
    for (size_t i = 0; i < v.len; i++) {
        if (v.as.s[i] == '_' && i > 0 && i + 1 < v.len && isalnum((uint8_t)v.as.s[i - 1]) && isalnum((uint8_t)v.as.s[i + 1])) {
            continue;
        }
        if (!isalnum((uint8_t)v.as.s[i]) && !(i == 0 && strchr("+-", v.as.s[i]))) { return false; }
        text[n++] = v.as.s[i];
    }
    text[n] = 0;
    char* digits = text + (text[0] == '-' || text[0] == '+');
    const char letter = digits[0] == '0' ? (char)(digits[1] | 0x20) : 0;
    const int prefix = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 0;
    if (prefix && (base == prefix || base == 0)) {
        digits[0] = digits[1] = text[0] == '-' ? '-' : '+';
        base = prefix;
        digits++;
        if (!isalnum((uint8_t)digits[1])) { return false; }
    } else {
        digits = text;
    }
    base = base == 0 ? 10 : base;
    char* end = digits;
    errno = 0;
    *out = base >= 2 && base <= 36 && n ? strtoll(digits, &end, (int)base) : 0;
    if (errno) { jinja_fail_overflow(j); }
    return n > 0 && *end == 0 && end != digits;
}

static inline TemplateValue jinja_float_to_int(Jinja* j, double d) {
    if (!(fabs(d) < 9.2e18)) { jinja_fail_overflow(j); }
    return template_int((int64_t)d);
}

// ---------------------------------------------------------------------------------------------------------------------
// filters of more than a line

static inline TemplateValue jinja_filter_int(Jinja* j, TemplateValue v, TemplateValue otherwise, TemplateValue base) {
    int64_t i = 0;
    double d = 0;
    if (v.type == TEMPLATE_UNDEFINED) { jinja_fail_undefined(j, v); }
    if (v.type == TEMPLATE_STRING && jinja_read_int(j, v, jinja_integer_or(j, base, 10), &i)) { return template_int(i); }
    if (jinja_is_integer(v)) { return template_int(v.as.i); }
    if (v.type == TEMPLATE_FLOAT && isfinite(v.as.d)) { return jinja_float_to_int(j, v.as.d); }
    if (v.type == TEMPLATE_STRING && jinja_read_float(j, v, &d) && isfinite(d)) { return jinja_float_to_int(j, d); }
    return jinja_given(otherwise) ? otherwise : template_int(0);
}

static inline TemplateValue jinja_filter_float(Jinja* j, TemplateValue v, TemplateValue otherwise) {
    double d = 0;
    if (v.type == TEMPLATE_UNDEFINED) { jinja_fail_undefined(j, v); }
    if (jinja_is_number(v)) { return template_float(jinja_double(v)); }
    if (v.type == TEMPLATE_STRING && jinja_read_float(j, v, &d)) { return template_float(d); }
    return jinja_given(otherwise) ? otherwise : template_float(0);
}

static inline TemplateValue jinja_filter_round(Jinja* j, TemplateValue v, TemplateValue precision, TemplateValue method) {
    const int64_t digits = jinja_integer_or(j, precision, 0);
    const bool common = !jinja_given(method) || jinja_is(method, "common");
    char text[400];
    if (!jinja_is_number(v)) { jinja_fail_type(j, v, "a number"); }
    if (!common && !jinja_is(method, "ceil") && !jinja_is(method, "floor")) {
        jinja_fail(j, "method must be common, ceil or floor");
    }
    if (digits > 300 || digits < -300) { return v; }
    const double scale = pow(10, (double)digits);
    if (!common) {
        const double scaled = jinja_double(v) * scale;
        return template_float((jinja_is(method, "ceil") ? ceil(scaled) : floor(scaled)) / scale);
    }
    if (jinja_is_integer(v) && digits >= 0) { return template_int(v.as.i); }
    if (!isfinite(jinja_double(v))) { return v; }
    if (digits < 0) {  // to even, as Python
        const double rounded = nearbyint(jinja_double(v) * scale) / scale;
        return jinja_is_integer(v) ? template_int((int64_t)rounded) : template_float(rounded);
    }
    snprintf(text, sizeof text, "%.*f", (int)size_min((size_t)digits, 60), v.as.d);
    return template_float(strtod(text, NULL));
}

static inline TemplateValue jinja_filter_abs(Jinja* j, TemplateValue v) {
    if (!jinja_is_number(v)) { jinja_fail_type(j, v, "a number"); }
    if (v.type == TEMPLATE_FLOAT) { return template_float(fabs(v.as.d)); }
    if (v.as.i == INT64_MIN) { jinja_fail_overflow(j); }
    return template_int(v.as.i < 0 ? -v.as.i : v.as.i);
}

static inline TemplateValue jinja_filter_indent(Jinja* j, TemplateValue v, const TemplateValue* a) {
    JinjaText t = {NULL, NULL, 0, 0}, indent = {NULL, NULL, 0, 0};
    if (jinja_given(a[0]) && a[0].type == TEMPLATE_STRING) {
        jinja_append_string(j, &indent, a[0]);
    } else {
        jinja_pad(j, &indent, jinja_integer_or(j, a[0], 4));
    }
    if (v.type != TEMPLATE_STRING) { jinja_fail_type(j, v, "a string"); }
    JinjaText whole = {NULL, NULL, 0, 0};
    jinja_append_string(j, &whole, v);
    jinja_append_text(j, &whole, "\n", 1);
    const TemplateValue lines = jinja_lines(j, jinja_string(&whole), false);
    for (size_t i = 0; i < lines.as.list->count; i++) {
        const TemplateValue line = lines.as.list->items[i];
        if (i) { jinja_append_text(j, &t, "\n", 1); }
        if (i == 0 ? jinja_flag(a[1], false) : line.len || jinja_flag(a[2], false)) {
            jinja_append_string(j, &t, jinja_string(&indent));
        }
        jinja_append_string(j, &t, line);
    }
    return jinja_string(&t);
}

/* Sorts items by an attribute, or several with commas between. */
static inline TemplateValue jinja_sorted(Jinja* j, TemplateValue v, TemplateValue attribute, bool case_sensitive, bool down) {
    const TemplateValue items = jinja_list(j, v);
    const size_t n = items.as.list->count;
    TemplatePair* pairs = (TemplatePair*)jinja_alloc(j, (n + 1) * sizeof *pairs);
    const TemplateValue paths = jinja_given(attribute) && attribute.type == TEMPLATE_STRING
                                    ? jinja_split(j, attribute, jinja_word(j, ","), jinja_absent(), false)
                                    : template_list(j->arena);
    for (size_t i = 0; i < n; i++) {
        TemplateValue key = pairs[i].value = items.as.list->items[i];
        if (paths.as.list->count) {
            key = template_list(j->arena);
            for (size_t k = 0; k < paths.as.list->count; k++) {
                const TemplateValue part = jinja_attribute_of(j, pairs[i].value, paths.as.list->items[k], jinja_absent());
                jinja_add(j, key, case_sensitive ? part : jinja_ignore_case(j, part));
            }
        } else {
            key = jinja_given(attribute) ? jinja_attribute_of(j, key, attribute, jinja_absent()) : key;
            key = case_sensitive ? key : jinja_ignore_case(j, key);
        }
        pairs[i].key = key;
    }
    jinja_sort_pairs(j, pairs, n, down);
    for (size_t i = 0; i < n; i++) { items.as.list->items[i] = pairs[i].value; }
    return items;
}

static inline TemplateValue jinja_filter_dictsort(Jinja* j, TemplateValue v, const TemplateValue* a) {
    const bool by_value = jinja_given(a[1]) && jinja_is(a[1], "value");
    if (v.type != TEMPLATE_DICT) { jinja_fail_type(j, v, "a dict"); }
    if (jinja_given(a[1]) && !by_value && !jinja_is(a[1], "key")) {
        jinja_fail(j, "You can only sort by either \"key\" or \"value\"");
    }
    TemplateValue items = template_value(TEMPLATE_VIEW, 0, false);
    items.detail = 'i';
    items.as.dict = v.as.dict;
    return jinja_sorted(j, items, template_int(by_value), jinja_flag(a[0], false), jinja_flag(a[2], false));
}

static inline TemplateValue jinja_filter_groupby(Jinja* j, TemplateValue v, const TemplateValue* a) {
    const bool sensitive = jinja_flag(a[2], false);
    const TemplateValue groups = template_list(j->arena), sorted = jinja_sorted(j, v, a[0], sensitive, false);
    TemplateValue last = jinja_absent();
    for (size_t i = 0; i < sorted.as.list->count; i++) {
        const TemplateValue item = sorted.as.list->items[i], value = jinja_attribute_of(j, item, a[0], a[1]);
        const TemplateValue key = sensitive ? value : jinja_ignore_case(j, value);
        if (!jinja_given(last) || !jinja_equal(j, key, last)) {
            TemplateValue group = jinja_tuple2(j, value, template_list(j->arena));
            group.detail = 1;
            jinja_add(j, groups, group);
        }
        last = key;
        jinja_add(j, groups.as.list->items[groups.as.list->count - 1].as.list->items[1], item);
    }
    return groups;
}

/* The smallest (sign -1) or largest (1) item; the first one of several. */
static inline TemplateValue jinja_extreme(Jinja* j, TemplateValue v, const TemplateValue* a, int sign) {
    JinjaIterator* it = jinja_iterate(j, v);
    TemplateValue best = jinja_absent(), best_key = best;
    for (TemplateValue item; jinja_next(j, it, &item);) {
        TemplateValue key = jinja_given(a[1]) ? jinja_attribute_of(j, item, a[1], jinja_absent()) : item;
        if (!jinja_flag(a[0], false)) { key = jinja_ignore_case(j, key); }
        if (jinja_given(best) && jinja_order(j, key, best_key) != sign) { continue; }
        best = item;
        best_key = key;
    }
    return jinja_given(best) ? best : jinja_undefined_hint("No aggregated item, sequence was empty.");
}

static inline TemplateValue jinja_filter_sum(Jinja* j, TemplateValue v, TemplateValue attribute, TemplateValue start) {
    TemplateValue sum = jinja_given(start) ? start : template_int(0);
    if (sum.type == TEMPLATE_STRING) { jinja_fail_type(j, sum, "a start that is no string"); }
    JinjaIterator* it = jinja_iterate(j, v);
    for (TemplateValue item; jinja_next(j, it, &item);) {
        sum = jinja_binary(j, '+', sum, jinja_given(attribute) ? jinja_attribute_of(j, item, attribute, jinja_absent()) : item);
    }
    return sum;
}

/* first, last */
static inline TemplateValue jinja_end_item(Jinja* j, TemplateValue v, bool last) {
    TemplateValue item;
    if (last && v.type == TEMPLATE_STRING) { v = jinja_list(j, v); }
    if (last && v.type == TEMPLATE_ITERATOR) { jinja_fail_type(j, v, "a list"); }
    JinjaIterator* it = jinja_iterate(j, v);
    it->backwards = last;
    if (jinja_next(j, it, &item)) { return item; }
    return jinja_undefined_hint(last ? "No last item, sequence was empty." : "No first item, sequence was empty.");
}

static inline TemplateValue jinja_filter_reverse(Jinja* j, TemplateValue v) {
    const TemplateValue bounds[3] = {jinja_absent(), jinja_absent(), template_int(-1)};
    if (v.type == TEMPLATE_STRING) { return jinja_slice(j, v, bounds); }
    if (v.type == TEMPLATE_ITERATOR) {
        const TemplateValue list = jinja_list(j, v);
        jinja_reverse_list(list);
        return list;
    }
    JinjaIterator* it = jinja_iterate(j, v);
    it->backwards = true;
    return jinja_iterator_value(it);
}

static inline TemplateValue jinja_filter_items(Jinja* j, TemplateValue v) {
    if (v.type != TEMPLATE_DICT && v.type != TEMPLATE_UNDEFINED) { jinja_fail_type(j, v, "a dict"); }
    if (v.type == TEMPLATE_DICT) {
        v.type = TEMPLATE_VIEW;
        v.detail = 'i';
    }
    return jinja_iterator_value(jinja_iterate(j, v));
}

/* Takes the first `n` arguments away. */
static inline JinjaArguments jinja_rest(const JinjaArguments* a, size_t n) {
    JinjaArguments rest = *a;
    rest.v += n;
    rest.names += n;
    rest.count -= n;
    rest.cap = rest.count;
    return rest;
}

/* map: by an attribute, or by a filter with arguments. */
static inline TemplateValue jinja_filter_map(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    if (!jinja_truth(v)) { return jinja_iterator_value(jinja_iterate(j, jinja_undefined_hint(""))); }
    JinjaIterator* it = jinja_new_iterator(j, ITERATE_MAP, jinja_iterate(j, v));
    if (a->count && !jinja_given(a->names[0])) {
        it->function = a->v[0].type == TEMPLATE_STRING ? jinja_filter_named(a->v[0]) : NULL;
        if (!it->function) { jinja_fail(j, "the filter that map was given is not known"); }
        it->arguments = jinja_rest(a, 1);
        return jinja_iterator_value(it);
    }
    for (size_t i = 0; i < a->count; i++) {
        if (jinja_is(a->names[i], "attribute")) {
            it->attribute = a->v[i];
        } else if (jinja_is(a->names[i], "default")) {
            it->otherwise = a->v[i].type == TEMPLATE_NONE ? jinja_absent() : a->v[i];
        } else {
            jinja_fail(j, "map() does not know an argument, wanted attribute, default, or the name of a filter");
        }
    }
    if (!jinja_given(it->attribute)) { jinja_fail(j, "map requires a filter argument"); }
    return jinja_iterator_value(it);
}

/* select, reject, selectattr, rejectattr */
static inline TemplateValue jinja_select(Jinja* j, TemplateValue v, const JinjaArguments* a, bool attribute, bool negate) {
    if (!jinja_truth(v)) { return jinja_iterator_value(jinja_iterate(j, jinja_undefined_hint(""))); }
    JinjaIterator* it = jinja_new_iterator(j, ITERATE_SELECT, jinja_iterate(j, v));
    size_t used = attribute;
    it->negate = negate;
    if (attribute && !a->count) { jinja_fail(j, "Missing parameter for attribute name"); }
    if (attribute) { it->attribute = a->v[0]; }
    if (a->count > used && !jinja_given(a->names[used])) {
        it->function = a->v[used].type == TEMPLATE_STRING ? jinja_test_named(a->v[used]) : NULL;
        if (!it->function) {
            const TemplateValue name = jinja_str(j, a->v[used]);
            jinja_fail(j, "the test \"%.*s\" is not known", (int)size_min(name.len, 60), name.as.s);
        }
        used++;
    }
    it->arguments = jinja_rest(a, used);
    return jinja_iterator_value(it);
}

static inline TemplateValue jinja_filter_unique(Jinja* j, TemplateValue v, const TemplateValue* a) {
    JinjaIterator* it = jinja_new_iterator(j, ITERATE_UNIQUE, jinja_iterate(j, v));
    it->case_sensitive = jinja_flag(a[0], false);
    it->attribute = a[1];
    it->seen = template_list(j->arena);
    return jinja_iterator_value(it);
}

static inline TemplateValue jinja_filter_batch(Jinja* j, TemplateValue v, const TemplateValue* a) {
    JinjaIterator* it = jinja_new_iterator(j, ITERATE_BATCH, jinja_iterate(j, v));
    it->size = jinja_integer_or(j, a[0], 1);
    it->otherwise = a[1].type == TEMPLATE_NONE ? jinja_absent() : a[1];
    return jinja_iterator_value(it);
}

static inline TemplateValue jinja_filter_tojson(Jinja* j, TemplateValue v, const TemplateValue* a) {
    JinjaText t = {NULL, NULL, 0, 0}, indent = {NULL, NULL, 0, 0};
    const bool lines = jinja_given(a[1]) && a[1].type != TEMPLATE_NONE;
    JinjaJson how = {jinja_flag(a[0], false),           jinja_flag(a[3], false), jinja_absent(),
                     jinja_word(j, lines ? "," : ", "), jinja_word(j, ": "),     jinja_sort_keys};
    if (lines && a[1].type != TEMPLATE_STRING) { jinja_pad(j, &indent, jinja_integer_or(j, a[1], 0)); }
    if (lines) { how.indent = a[1].type == TEMPLATE_STRING ? a[1] : jinja_string(&indent); }
    if (jinja_given(a[2]) && a[2].type != TEMPLATE_NONE) {
        if (!jinja_is_sequence(a[2]) || a[2].as.list->count != 2) { jinja_fail_type(j, a[2], "two separators"); }
        how.comma = jinja_text(j, a[2].as.list->items[0]);
        how.colon = jinja_text(j, a[2].as.list->items[1]);
    }
    jinja_json(j, &t, v, &how, 0);
    return jinja_string(&t);
}

// ---------------------------------------------------------------------------------------------------------------------
// tests, methods and functions of more than a line

/* Returns whether all characters are of a class, and there is one. */
static inline bool jinja_all(TemplateValue v, bool (*is)(uint32_t)) {
    bool all = v.len > 0;
    for (size_t i = 0; all && i < v.len;) {
        uint32_t c;
        i += jinja_char(v, i, &c);
        all = is(c);
    }
    return all;
}
static inline bool jinja_is_alphanumeric(uint32_t c) { return jinja_is_letter(c) || jinja_is_digit(c); }
static inline bool jinja_is_space(uint32_t c) { return unicode_is_stripped(c); }

/* Returns whether a string has letters of a case ('u' or 'l') and none of the other. */
static inline bool jinja_only_case(TemplateValue v, int want) {
    bool any = false;
    for (size_t i = 0; i < v.len;) {
        uint32_t c;
        i += jinja_char(v, i, &c);
        if (jinja_has_case(c, want)) { return false; }
        any |= jinja_has_case(c, want == 'u' ? 'l' : 'u');
    }
    return any;
}

static inline bool jinja_test_divisible(Jinja* j, TemplateValue v, TemplateValue by, int64_t rest) {
    const TemplateValue left = jinja_binary(j, '%', v, by);
    return jinja_equal(j, left, template_int(rest));
}

static inline bool jinja_test_sequence(TemplateValue v) {
    return v.type == TEMPLATE_UNDEFINED || v.type == TEMPLATE_STRING || jinja_is_sequence(v) || v.type == TEMPLATE_DICT ||
           v.type == TEMPLATE_RANGE;
}
static inline bool jinja_test_iterable(Jinja* j, TemplateValue v) {
    return v.type == TEMPLATE_ITERATOR || v.type == TEMPLATE_LOOP || jinja_length(j, v) >= 0;
}
static inline bool jinja_test_callable(TemplateValue v) {
    return v.type == TEMPLATE_UNDEFINED || v.type == TEMPLATE_FUNCTION || v.type == TEMPLATE_MACRO || v.type == TEMPLATE_LOOP ||
           v.type == TEMPLATE_JOINER;
}
static inline bool jinja_test_same(Jinja* j, TemplateValue a, TemplateValue b) {
    if (a.type != b.type || a.type == TEMPLATE_UNDEFINED) { return false; }
    return a.type <= TEMPLATE_STRING ? jinja_equal(j, a, b) : a.as.list == b.as.list;
}

/* startswith, endswith: one string or a tuple of them */
static inline bool jinja_starts(Jinja* j, TemplateValue v, TemplateValue parts, bool start) {
    if (parts.type != TEMPLATE_TUPLE) { return jinja_ends(v, jinja_text(j, parts), start); }
    for (size_t i = 0; i < parts.as.list->count; i++) {
        if (jinja_ends(v, jinja_text(j, parts.as.list->items[i]), start)) { return true; }
    }
    return false;
}

/* str.find() and its kin, in code points; `must`: its absence is an error. */
static inline TemplateValue jinja_position(Jinja* j, TemplateValue v, const TemplateValue* a, bool last, bool must) {
    const TemplateValue bounds[3] = {a[1], a[2], jinja_absent()}, all = v;
    v = jinja_slice(j, v, bounds);
    const size_t at = last ? jinja_find_last(j, v, jinja_text(j, a[0])) : jinja_find(j, v, jinja_text(j, a[0]), 0);
    if (at == SIZE_MAX && must) { jinja_fail(j, "substring not found"); }
    if (at == SIZE_MAX) { return template_int(-1); }
    return template_int((int64_t)jinja_text_length(j, jinja_cut(all, 0, (size_t)(v.as.s - all.as.s) + at)));
}

static inline TemplateValue jinja_count_text(Jinja* j, TemplateValue v, TemplateValue part) {
    int64_t count = 0;
    if (jinja_text(j, part).len == 0) { return template_int((int64_t)jinja_text_length(j, v) + 1); }
    for (size_t at = 0; (at = jinja_find(j, v, part, at)) != SIZE_MAX; at += part.len) {
        count++;
        jinja_spend(j, 1);
    }
    return template_int(count);
}

/* str.partition() and str.rpartition() */
static inline TemplateValue jinja_partition(Jinja* j, TemplateValue v, TemplateValue by, bool last) {
    if (jinja_text(j, by).len == 0) { jinja_fail(j, "empty separator"); }
    const size_t at = last ? jinja_find_last(j, v, by) : jinja_find(j, v, by, 0), none = last ? 0 : v.len;
    const bool found = at != SIZE_MAX;
    TemplateValue parts = jinja_tuple2(j, jinja_cut(v, 0, found ? at : none), found ? by : jinja_cut(v, 0, 0));
    jinja_add(j, parts, jinja_cut(v, found ? at + by.len : none, v.len));
    return parts;
}

/* list.index() and list.count() */
static inline TemplateValue jinja_index_of(Jinja* j, TemplateValue v, TemplateValue of, bool count) {
    JinjaIterator* it = jinja_iterate(j, v);
    TemplateValue item;
    int64_t found = 0;
    for (int64_t i = 0; jinja_next(j, it, &item); i++) {
        const bool equal = jinja_equal(j, item, of);
        if (equal && !count) { return template_int(i); }
        found += equal;
    }
    if (!count) { jinja_fail(j, "the value is not in the list"); }
    return template_int(found);
}

static inline TemplateValue jinja_view(TemplateValue dict, char what) {
    dict.type = TEMPLATE_VIEW;
    dict.detail = (uint8_t)what;
    return dict;
}

static inline TemplateValue jinja_get_or(Jinja* j, TemplateValue dict, const TemplateValue* a) {
    TemplateValue v;
    if (a[0].type == TEMPLATE_LIST || a[0].type == TEMPLATE_DICT) { jinja_fail_type(j, a[0], "a key of a dict"); }
    return jinja_item(j, dict, a[0], &v) ? v : jinja_given(a[1]) ? a[1] : template_none();
}

/* dict(): from a dict or pairs, and arguments with names. */
static inline TemplateValue jinja_make_dict(Jinja* j, const JinjaArguments* a) {
    jinja_alloc(j, 0);
    const TemplateValue dict = template_dict(j->arena);
    for (size_t i = 0; i < a->count; i++) {
        TemplateValue key = a->names[i], v = a->v[i], pair;
        if (!jinja_given(key)) {
            if (i > 0) { jinja_fail(j, "dict expected at most 1 argument"); }
            if (v.type == TEMPLATE_DICT) { v = jinja_view(v, 'i'); }
            JinjaIterator* it = jinja_iterate(j, v);
            while (jinja_next(j, it, &pair)) {
                const TemplateValue two = jinja_list(j, pair);
                if (two.as.list->count != 2) { jinja_fail_type(j, pair, "a pair"); }
                const size_t at = jinja_dict_find(j, dict.as.dict, two.as.list->items[0]);
                if (at < dict.as.dict->count) { dict.as.dict->items[at].value = two.as.list->items[1]; }
                if (at == dict.as.dict->count) {
                    template_dict_add(j->arena, dict, two.as.list->items[0], two.as.list->items[1]);
                }
            }
            continue;
        }
        const size_t at = jinja_dict_find(j, dict.as.dict, key);
        if (at < dict.as.dict->count) { dict.as.dict->items[at].value = v; }
        if (at == dict.as.dict->count) { template_dict_add(j->arena, dict, key, v); }
    }
    return dict;
}

static inline void jinja_check_member(Jinja* j, TemplateValue name) {
    if (name.type != TEMPLATE_STRING || name.len == 0 || name.as.s[0] != '_') { return; }
    jinja_fail(j,
               "Chat templates cannot store underscore-prefixed attributes on a namespace, but got '%.*s'. Please rename the "
               "attribute.",
               (int)size_min(name.len, 100), name.as.s);
}

static inline TemplateValue jinja_make_namespace(Jinja* j, const JinjaArguments* a) {
    TemplateValue v = jinja_make_dict(j, a);
    for (size_t i = 0; i < v.as.dict->count; i++) { jinja_check_member(j, v.as.dict->items[i].key); }
    v.type = TEMPLATE_NAMESPACE;
    return v;
}

static inline TemplateValue jinja_make_range(Jinja* j, const TemplateValue* a) {
    const bool one = !jinja_given(a[1]);
    const int64_t start = one ? 0 : jinja_integer_or(j, a[0], 0), stop = jinja_integer_or(j, a[one ? 0 : 1], 0);
    const int64_t step = jinja_integer_or(j, a[2], 1);
    if (step == 0) { jinja_fail(j, "range() arg 3 must not be zero"); }
    const double count = ceil(((double)stop - (double)start) / (double)step);
    if (count > 100000) { jinja_fail(j, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000)."); }
    const JinjaRange range = {start, step, count > 0 ? (size_t)count : 0};
    TemplateValue v = template_value(TEMPLATE_RANGE, 0, false);
    v.as.range = (JinjaRange*)memcpy(jinja_alloc(j, sizeof range), &range, sizeof range);
    return v;
}

LLMC_NORETURN static inline void jinja_raise(Jinja* j, TemplateValue message) {
    message = jinja_str(j, message);
    jinja_fail(j, "the template refuses the conversation: %.*s", (int)size_min(message.len, 500), message.as.s);
}

static inline TemplateValue jinja_date(Jinja* j, TemplateValue format) {
    char text[256];
    JinjaText t = {NULL, NULL, 0, 0};
    jinja_append_string(j, &t, jinja_text(j, format));
    jinja_append(j, &t, "", NULL, 0, 1);
    jinja_append(j, &t, text, NULL, 1, 0);
    const size_t n = strftime(text, sizeof text, t.s, &j->now);
    if (n == 0 && format.len) { jinja_fail(j, "strftime_now: the date is longer than %zu bytes", sizeof text - 1); }
    JinjaText out = {NULL, NULL, 0, 0};
    jinja_append(j, &out, text, NULL, 1, n);
    return jinja_string(&out);
}

/* cycler(...), joiner(separator) */
static inline TemplateValue jinja_make_cycler(Jinja* j, TemplateType type, TemplateValue items) {
    if (type == TEMPLATE_CYCLER && items.as.list->count == 0) { jinja_fail(j, "at least one item has to be provided"); }
    TemplateValue v = template_value(type, 0, false);
    v.as.cycler = (JinjaCycler*)jinja_alloc(j, sizeof(JinjaCycler));
    v.as.cycler->items = items;
    v.as.cycler->at = 0;
    return v;
}

static inline TemplateValue jinja_cycle(JinjaCycler* c) {
    const TemplateValue v = c->items.as.list->items[c->at];
    c->at = (c->at + 1) % c->items.as.list->count;
    return v;
}

static inline TemplateValue jinja_list_of_arguments(Jinja* j, const JinjaArguments* a) {
    const TemplateValue list = template_list(j->arena);
    for (size_t i = 0; i < a->count; i++) { jinja_add(j, list, a->v[i]); }
    return list;
}

static inline TemplateValue jinja_loop_cycle(Jinja* j, const JinjaLoop* loop, const JinjaArguments* a) {
    if (a->count == 0) { jinja_fail(j, "no items for cycling given"); }
    return a->v[(size_t)loop->index0 % a->count];
}

static inline bool jinja_loop_changed(Jinja* j, JinjaLoop* loop, TemplateValue now) {
    if (jinja_given(loop->changed) && jinja_equal(j, loop->changed, now)) { return false; }
    loop->changed = now;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// the tables

static inline TemplateValue jinja_filter_length(Jinja* j, TemplateValue v) {
    const int64_t n = v.type == TEMPLATE_LOOP ? jinja_loop_length(j, v.as.loop) : jinja_length(j, v);
    if (n < 0) { jinja_fail_type(j, v, "what has a length"); }
    return template_int(n);
}

static inline TemplateValue jinja_filter_default(Jinja* j, TemplateValue v, const TemplateValue* a) {
    const bool keep = jinja_flag(a[1], false) ? jinja_truth(v) : v.type != TEMPLATE_UNDEFINED;
    return keep ? v : jinja_given(a[0]) ? a[0] : jinja_word(j, "");
}

/* format: the arguments are all without names, or all with names. */
static inline TemplateValue jinja_filter_format(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    if (!a->count || !jinja_given(a->names[a->count - 1])) { return jinja_format(j, jinja_str(j, v), a); }
    if (!jinja_given(a->names[0])) { jinja_fail(j, "can't handle positional and keyword arguments at the same time"); }
    TemplateValue dict = jinja_make_dict(j, a);
    const JinjaArguments one = {&dict, NULL, 1, 1};
    return jinja_format(j, jinja_str(j, v), &one);
}

static inline TemplateValue jinja_safe(Jinja* j, TemplateValue v) {
    v = jinja_str(j, v);
    v.detail = 1;
    return v;
}

static inline TemplateValue jinja_copy_dict(Jinja* j, TemplateValue v) {
    TemplateValue name = jinja_absent();
    const JinjaArguments one = {&v, &name, 1, 1};
    return jinja_make_dict(j, &one);
}

static inline TemplateValue jinja_reset_cycler(JinjaCycler* c) {
    c->at = 0;
    return template_none();
}

/* Python's a < b and its kin; op as in JinjaNode. */
static inline bool jinja_compares(Jinja* j, int op, TemplateValue a, TemplateValue b) {
    if (op == 'e' || op == 'n') { return jinja_equal(j, a, b) == (op == 'e'); }
    if (op == 'i' || op == 'x') { return jinja_contains(j, b, a) == (op == 'i'); }
    const int order = jinja_order(j, a, b);
    return op == '<' ? order == -1 : op == 'l' ? order <= 0 : op == '>' ? order == 1 : order == 0 || order == 1;
}

#define ROW(table, id, name, parameters, expression)                                                              \
    static inline TemplateValue jinja_row_##table##_##id(Jinja* j, TemplateValue self, const JinjaArguments* a) { \
        const TemplateValue* v = a->v;                                                                            \
        (void)j, (void)self, (void)v;                                                                             \
        return expression;                                                                                        \
    }
#include "llmc/text/template_functions.def"
#undef ROW

typedef enum {
    TABLE_filter,
    TABLE_test,
    TABLE_string,
    TABLE_dict,
    TABLE_list,
    TABLE_loop,
    TABLE_cycler,
    TABLE_global
} JinjaTable;

/* Returns the row of a table with this name, or NULL. */
static inline const JinjaFunction* jinja_function_named(JinjaTable table, TemplateValue name) {
#define ROW(table, id, name, parameters, expression) {TABLE_##table, {name, parameters, jinja_row_##table##_##id}},
    static const struct {
        JinjaTable table;
        JinjaFunction function;
    } rows[] = {
#include "llmc/text/template_functions.def"
    };
#undef ROW
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].table == table && jinja_is(name, rows[i].function.name)) { return &rows[i].function; }
    }
    return NULL;
}

static inline const JinjaFunction* jinja_filter_named(TemplateValue name) { return jinja_function_named(TABLE_filter, name); }
static inline const JinjaFunction* jinja_test_named(TemplateValue name) { return jinja_function_named(TABLE_test, name); }
static inline const JinjaFunction* jinja_method_named(TemplateValue of, TemplateValue name) {
    const int table = of.type == TEMPLATE_STRING                           ? TABLE_string
                      : of.type == TEMPLATE_DICT                           ? TABLE_dict
                      : jinja_is_sequence(of) || of.type == TEMPLATE_RANGE ? TABLE_list
                      : of.type == TEMPLATE_LOOP                           ? TABLE_loop
                      : of.type == TEMPLATE_CYCLER                         ? TABLE_cycler
                                                                           : -1;
    return table < 0 ? NULL : jinja_function_named((JinjaTable)table, name);
}

#endif
