/* template_strings.h -- how functions of a chat template (text/template.h) are called, and those that work on strings and
 * lists: what Python's and jinja2's functions of the same names return. Every byte keeps its mark.
 */
#ifndef LLMC_TEMPLATE_STRINGS_H
#define LLMC_TEMPLATE_STRINGS_H

#include "llmc/text/template_value.h"  // defines: Jinja, JinjaText, TemplateValue, jinja_fail, jinja_append, jinja_str
#include "llmc/text/unicode.h"         // defines: unicode_class, unicode_is_stripped

#include <ctype.h>
#include <locale.h>
#include <wctype.h>

enum { JINJA_MAX_ARGUMENTS = 16 };

/* The arguments of a call: in the order of the row's parameters, those that are absent undefined; with the parameters "*" as
 * they came. */
typedef struct {
    int how;  // the row's
    TemplateValue v[JINJA_MAX_ARGUMENTS];
    TemplateValue names[JINJA_MAX_ARGUMENTS];  // none: it has no name
    size_t count;
} JinjaArguments;

typedef TemplateValue (*JinjaCall)(Jinja* j, TemplateValue self, const JinjaArguments* a);

typedef struct {
    const char *name, *parameters;  // names with blanks between them
    JinjaCall call;
    int how;  // which of several that share a function
} JinjaFunction;

/* A value of type TEMPLATE_FUNCTION: a function of a table, with the value whose method it is, or a macro. */
typedef struct JinjaBound {
    const JinjaFunction* function;  // NULL: the macro
    TemplateValue self;
    const struct JinjaNode* macro;
    struct JinjaScope* scope;  // where it was defined
} JinjaBound;

/* The loop variable. */
typedef struct JinjaLoop {
    TemplateValue items;           // a list; with a condition: of those that were found to pass it
    size_t index;                  // from 0
    const struct JinjaNode* node;  // with a condition: the loop
    const TemplateList* source;    // what it goes through
    size_t from;                   // the item of it that comes next
    struct JinjaScope* scope;      // around the loop
} JinjaLoop;

static inline bool jinja_given(TemplateValue v) { return v.type != TEMPLATE_UNDEFINED && v.type != TEMPLATE_NONE; }

static inline int64_t jinja_integer(Jinja* j, TemplateValue v, int64_t otherwise) {
    if (!jinja_given(v)) { return otherwise; }
    if (!jinja_is_integer(v)) { jinja_misused(j, v, "used as a whole number"); }
    return v.as.i;
}

static inline TemplateValue jinja_word(Jinja* j, const char* s) { return template_string(j->arena, s, strlen(s), true); }

/* Returns a string argument, or `otherwise` where it is absent. */
static inline TemplateValue jinja_text(Jinja* j, TemplateValue v, const char* otherwise) {
    if (v.type == TEMPLATE_STRING) { return v; }
    if (!otherwise || jinja_given(v)) { jinja_misused(j, v, "used as a string"); }
    return jinja_word(j, otherwise);
}

// ---------------------------------------------------------------------------------------------------------------------
// lists

/* Returns a copy of the items that a loop over a value has; of a string its characters, of a dict its keys. */
static inline TemplateValue jinja_list_of(Jinja* j, TemplateValue v) {
    TemplateValue list = template_list(j->arena);
    if (jinja_has_items(v)) {
        for (size_t i = 0; i < v.as.list->count; i++) { jinja_add(j, list, v.as.list->items[i]); }
        if (v.type == TEMPLATE_ITERATOR) { v.as.list->count = 0; }  // it is used up
    } else if (v.type == TEMPLATE_DICT) {
        for (size_t i = 0; i < v.as.dict->count; i++) { jinja_add(j, list, v.as.dict->items[i].key); }
    } else if (v.type == TEMPLATE_STRING) {
        uint32_t c;
        for (size_t i = 0, n = 0; i < v.len; i += n) {
            n = jinja_char(v, i, &c);
            jinja_add(j, list, jinja_cut(v, i, i + n));
        }
    } else if (v.type != TEMPLATE_UNDEFINED) {
        jinja_misused(j, v, "gone through");
    }
    return list;
}

static inline TemplateValue jinja_as(TemplateValue list, TemplateType type) {
    list.type = type;
    return list;
}

static inline TemplateValue jinja_pair(Jinja* j, TemplateValue a, TemplateValue b) {
    TemplateValue pair = template_list(j->arena);
    jinja_add(j, pair, a);
    jinja_add(j, pair, b);
    return jinja_as(pair, TEMPLATE_TUPLE);
}

static inline size_t jinja_length(Jinja* j, TemplateValue v) {
    if (v.type == TEMPLATE_STRING) { return jinja_code_points(j, v); }
    if (v.type == TEMPLATE_LIST || v.type == TEMPLATE_TUPLE) { return v.as.list->count; }
    if (v.type == TEMPLATE_DICT) { return v.as.dict->count; }
    if (v.type != TEMPLATE_UNDEFINED) { jinja_misused(j, v, "counted"); }
    return 0;
}

static inline bool jinja_contains(Jinja* j, TemplateValue in, TemplateValue v) {
    if (in.type == TEMPLATE_STRING) { return jinja_find(j, in, jinja_text(j, v, NULL), 0) != SIZE_MAX; }
    if (in.type == TEMPLATE_DICT && (v.type == TEMPLATE_LIST || v.type == TEMPLATE_DICT)) { jinja_misused(j, v, "a key"); }
    if (in.type == TEMPLATE_DICT) { return jinja_dict_find(j, in.as.dict, v) < in.as.dict->count; }
    const TemplateList* list = jinja_list_of(j, in).as.list;
    size_t i = 0;
    while (i < list->count && !jinja_equal(j, list->items[i], v)) { i++; }
    return i < list->count;
}

/* Returns a member by its path "a.b"; `v` itself without a path. */
static inline TemplateValue jinja_member_at(Jinja* j, TemplateValue v, TemplateValue path, TemplateValue otherwise) {
    if (!jinja_given(path)) { return v; }
    if (path.type != TEMPLATE_STRING) { return j->member(j, v, path, false); }
    for (size_t from = 0, to; from <= path.len; from = to + 1) {
        const char* dot = (const char*)memchr(path.as.s + from, '.', path.len - from);
        to = dot ? (size_t)(dot - path.as.s) : path.len;
        const TemplateValue part = jinja_cut(path, from, to);
        const bool number = part.len > 0 && part.len < 10 && strspn(part.as.s, "0123456789") >= part.len;
        v = j->member(j, v, number ? template_int(strtol(part.as.s, NULL, 10)) : part, false);
        if (v.type == TEMPLATE_UNDEFINED && otherwise.type != TEMPLATE_UNDEFINED) { v = otherwise; }
    }
    return v;
}

/* Sorts pairs by their keys; what is equal stays in order. */
static inline void jinja_sort(Jinja* j, TemplatePair* p, size_t n, bool down) {
    TemplatePair* spare = (TemplatePair*)jinja_alloc(j, n * sizeof *spare);
    for (size_t half = 1; half < n; half *= 2) {
        for (size_t from = 0; from + half < n; from += 2 * half) {
            const size_t middle = from + half, to = size_min(n, middle + half);
            for (size_t a = from, b = middle, at = from; at < to; at++) {
                const bool both = a < middle && b < to, equal = both && jinja_equal(j, p[a].key, p[b].key);
                const int order = equal ? 0 : both ? jinja_order(j, p[a].key, p[b].key) : a < middle ? -1 : 1;
                spare[at] = (both && down ? order >= 0 : order <= 0) ? p[a++] : p[b++];
            }
            memcpy(p + from, spare + from, (to - from) * sizeof *p);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// strings

/* Returns a letter in upper or lower case. One that becomes several letters stays. */
static inline uint32_t jinja_cased(uint32_t c, bool upper) {
    if (c < 0x80) { return upper ? (uint32_t)toupper((int)c) : (uint32_t)tolower((int)c); }
    const locale_t l = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    if (l == (locale_t)0) { return c; }
    const wint_t other = upper ? towupper_l((wint_t)c, l) : towlower_l((wint_t)c, l);
    freelocale(l);
    return (uint32_t)other;
}
static inline bool jinja_is_cased(uint32_t c) { return jinja_cased(c, true) != c || jinja_cased(c, false) != c; }

/* Returns a string in another case: 'u' upper, 'l' lower, 'c' the first letter upper, 't' the first of each word, 'w' the same
 * with the words of the filter title. */
static inline TemplateValue jinja_in_case(Jinja* j, TemplateValue v, int how) {
    JinjaText t = {NULL, NULL, 0, 0};
    bool start = true;
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        char text[8];
        uint32_t c;
        n = jinja_char(v, i, &c);
        const uint32_t to = jinja_cased(c, how == 'u' || (how != 'l' && start));
        jinja_append(j, &t, text, utf8_encode(text, (int)to), NULL, v.marks[i]);
        start = how == 't' ? !jinja_is_cased(c)
                           : how == 'w' && (unicode_is_stripped(c) || (c && c < 0x80 && strchr("-({[<", (int)c)));
    }
    return jinja_string(&t);
}
static inline TemplateValue jinja_do_case(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    return jinja_in_case(j, jinja_str(j, v), a->how);
}

/* Returns a string without the characters at its ends that are in `chars`, or without white space. */
static inline TemplateValue jinja_strip(Jinja* j, TemplateValue v, TemplateValue chars, bool left, bool right) {
    const bool any = jinja_given(chars);
    size_t from = SIZE_MAX, to = 0;
    if (any) { jinja_text(j, chars, NULL); }
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        uint32_t c;
        n = jinja_char(v, i, &c);
        const bool goes = any ? jinja_find(j, chars, jinja_cut(v, i, i + n), 0) != SIZE_MAX : unicode_is_stripped(c);
        if (goes) { continue; }
        if (from == SIZE_MAX) { from = i; }
        to = i + n;
    }
    jinja_spend(j, v.len);
    from = !left ? 0 : from == SIZE_MAX ? v.len : from;
    return jinja_cut(v, from, right ? size_max(from, to) : v.len);
}
static inline TemplateValue jinja_do_strip(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    return jinja_strip(j, jinja_str(j, v), a->v[0], a->how != 'r', a->how != 'l');
}

/* Splits at white space, from the left or from the right, at most `most` times; -1: always. */
static inline TemplateValue jinja_split_words(Jinja* j, TemplateValue v, int64_t most, bool right) {
    TemplateValue list = template_list(j->arena);
    const TemplateValue none = template_none();
    for (v = jinja_strip(j, v, none, !right, right); v.len > 0; v = jinja_strip(j, v, none, !right, right)) {
        size_t from = right ? 0 : v.len, to = v.len;  // of the word
        for (size_t i = 0, n = 0; most != 0 && i < v.len; i += n) {
            uint32_t c;
            n = jinja_char(v, i, &c);
            if (!unicode_is_stripped(c)) { continue; }
            from = right ? i + n : i;
            if (!right) { break; }
        }
        if (most == 0) {
            jinja_add(j, list, v);
            break;
        }
        most--;
        jinja_add(j, list, right ? jinja_cut(v, from, to) : jinja_cut(v, 0, from));
        v = right ? jinja_cut(v, 0, from) : jinja_cut(v, from, to);
    }
    return list;
}

static inline void jinja_turn(TemplateList* l) {
    for (size_t i = 0; i < l->count / 2; i++) {
        const TemplateValue item = l->items[i];
        l->items[i] = l->items[l->count - 1 - i];
        l->items[l->count - 1 - i] = item;
    }
}

/* Returns the byte at which a part last stands; SIZE_MAX: nowhere. */
static inline size_t jinja_find_last(Jinja* j, TemplateValue v, TemplateValue part) {
    size_t at = part.len > v.len ? SIZE_MAX : v.len - part.len;
    while (at != SIZE_MAX && memcmp(v.as.s + at, part.as.s, part.len) != 0) { at--; }
    jinja_spend(j, v.len);
    return at;
}

static inline TemplateValue jinja_do_split(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const bool right = a->how == 'r';
    int64_t most = jinja_integer(j, a->v[1], -1);
    TemplateValue list = template_list(j->arena);
    if (!jinja_given(a->v[0])) {
        list = jinja_split_words(j, v, most, right);
    } else {
        const TemplateValue by = jinja_text(j, a->v[0], NULL);
        if (by.len == 0) { jinja_fail(j, "split() needs a separator that is not empty"); }
        for (; most != 0; most--) {
            const size_t at = right ? jinja_find_last(j, v, by) : jinja_find(j, v, by, 0);
            if (at == SIZE_MAX) { break; }
            jinja_add(j, list, right ? jinja_cut(v, at + by.len, v.len) : jinja_cut(v, 0, at));
            v = right ? jinja_cut(v, 0, at) : jinja_cut(v, at + by.len, v.len);
        }
        jinja_add(j, list, v);
    }
    if (right) { jinja_turn(list.as.list); }
    return list;
}
static inline TemplateValue jinja_do_splitlines(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    TemplateValue list = template_list(j->arena);
    const bool keeps = jinja_truth(a->v[0]);
    size_t from = 0;
    for (size_t at = 0, n = 0; at < v.len; at += n) {
        uint32_t c;
        n = jinja_char(v, at, &c);
        if (!((c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029)) { continue; }
        if (c == '\r' && at + 1 < v.len && v.as.s[at + 1] == '\n') { n = 2; }
        jinja_add(j, list, jinja_cut(v, from, keeps ? at + n : at));
        from = at + n;
    }
    if (from < v.len) { jinja_add(j, list, jinja_cut(v, from, v.len)); }
    return list;
}

static inline TemplateValue jinja_do_replace(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const bool filter = a->how == 'f';  // it takes values of any type
    const TemplateValue old = filter ? jinja_str(j, a->v[0]) : jinja_text(j, a->v[0], NULL);
    const TemplateValue by = filter ? jinja_str(j, a->v[1]) : jinja_text(j, a->v[1], NULL);
    int64_t most = jinja_integer(j, a->v[2], -1);
    JinjaText t = {NULL, NULL, 0, 0};
    size_t from = 0;
    v = jinja_str(j, v);
    for (; most != 0; most--) {
        uint32_t c;
        const size_t at = jinja_find(j, v, old, from);
        if (at == SIZE_MAX) { break; }
        jinja_append_string(j, &t, jinja_cut(v, from, at));
        jinja_append_string(j, &t, by);
        from = at + old.len;
        if (old.len > 0) { continue; }  // an empty text stands before each character, and at the end
        if (at == v.len) { return jinja_string(&t); }
        const size_t n = jinja_char(v, at, &c);
        jinja_append_string(j, &t, jinja_cut(v, at, at + n));
        from = at + n;
    }
    jinja_append_string(j, &t, jinja_cut(v, size_min(from, v.len), v.len));
    return jinja_string(&t);
}

/* Returns whether a string starts or ends with a part, or with one of a tuple of parts. */
static inline bool jinja_is_at_end(Jinja* j, TemplateValue v, TemplateValue part, bool start) {
    bool is = false;
    if (part.type == TEMPLATE_TUPLE) {
        for (size_t i = 0; i < part.as.list->count; i++) { is = is || jinja_is_at_end(j, v, part.as.list->items[i], start); }
        return is;
    }
    jinja_text(j, part, NULL);
    return part.len <= v.len && memcmp(start ? v.as.s : v.as.s + v.len - part.len, part.as.s, part.len) == 0;
}
static inline TemplateValue jinja_do_end(Jinja* j, TemplateValue v, const JinjaArguments* a) {  // 's'tartswith, 'e'ndswith
    return template_bool(jinja_is_at_end(j, v, a->v[0], a->how == 's'));
}
static inline TemplateValue jinja_do_remove(Jinja* j, TemplateValue v,
                                            const JinjaArguments* a) {  // 's': its prefix, 'e': suffix
    const bool prefix = a->how == 's';
    const size_t n = jinja_is_at_end(j, v, a->v[0], prefix) ? a->v[0].len : 0;
    return prefix ? jinja_cut(v, n, v.len) : jinja_cut(v, 0, v.len - n);
}

static inline TemplateValue jinja_do_find(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue part = jinja_text(j, a->v[0], NULL);
    const size_t at = jinja_find(j, v, part, 0);
    return template_int(at == SIZE_MAX ? -1 : (int64_t)jinja_code_points(j, jinja_cut(v, 0, at)));
}

static inline TemplateValue jinja_do_count(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    int64_t count = 0;
    const TemplateValue part = jinja_text(j, a->v[0], NULL);
    if (part.len == 0) { return template_int((int64_t)jinja_code_points(j, v) + 1); }
    for (size_t at = jinja_find(j, v, part, 0); at != SIZE_MAX; at = jinja_find(j, v, part, at + part.len)) { count++; }
    return template_int(count);
}

static inline TemplateValue jinja_do_isdigit(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    bool is = v.len > 0;
    (void)j, (void)a;
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        uint32_t c;
        n = jinja_char(v, i, &c);
        is = is && unicode_class(c) == UNICODE_NUMBER;
    }
    return template_bool(is);
}

static inline TemplateValue jinja_join(Jinja* j, TemplateValue by, TemplateValue items, TemplateValue attribute) {
    const TemplateList* list = jinja_list_of(j, items).as.list;
    JinjaText t = {NULL, NULL, 0, 0};
    for (size_t i = 0; i < list->count; i++) {
        if (i) { jinja_append_string(j, &t, by); }
        jinja_append_string(j, &t,
                            jinja_str(j, jinja_member_at(j, list->items[i], attribute, template_value(TEMPLATE_UNDEFINED))));
    }
    return jinja_string(&t);
}
static inline TemplateValue jinja_do_join(Jinja* j, TemplateValue v, const JinjaArguments* a) {  // the filter
    return jinja_join(j, jinja_given(a->v[0]) ? jinja_str(j, a->v[0]) : jinja_word(j, ""), v, a->v[1]);
}
static inline TemplateValue jinja_do_joined(Jinja* j, TemplateValue v, const JinjaArguments* a) {  // the method
    const TemplateValue list = jinja_list_of(j, a->v[0]);
    for (size_t i = 0; i < list.as.list->count; i++) { jinja_text(j, list.as.list->items[i], NULL); }
    return jinja_join(j, v, list, template_none());
}

static inline TemplateValue jinja_do_indent(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const bool first = jinja_truth(a->v[1]), blank = jinja_truth(a->v[2]), text = a->v[0].type == TEMPLATE_STRING;
    const int64_t width = text ? 0 : jinja_integer(j, a->v[0], 4);
    JinjaText t = {NULL, NULL, 0, 0};
    JinjaText whole = {NULL, NULL, 0, 0};
    JinjaArguments none = *a;
    none.v[0] = template_none();
    jinja_append_string(j, &whole, jinja_text(j, v, NULL));
    jinja_append(j, &whole, "\n", 1, NULL, 1);
    const TemplateList* lines = jinja_do_splitlines(j, jinja_string(&whole), &none).as.list;
    for (size_t k = 0; k < lines->count; k++) {
        if (k > 0) { jinja_append(j, &t, "\n", 1, NULL, 1); }
        if (k == 0 ? first : blank || lines->items[k].len > 0) {
            if (text) { jinja_append_string(j, &t, a->v[0]); }
            for (int64_t i = 0; i < width; i++) { jinja_append(j, &t, " ", 1, NULL, 1); }
        }
        jinja_append_string(j, &t, lines->items[k]);
    }
    return jinja_string(&t);
}

#endif
