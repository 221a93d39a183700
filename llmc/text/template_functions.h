/* template_functions.h -- what a chat template may call: filters (x | trim), tests (x is defined), methods (x.split()) and
 * functions (namespace()). Each is a row of a table: its name, its parameters, its function. The results are Python's and
 * jinja2's; of letters, upper and lower know ASCII alone.
 */
#ifndef LLMC_TEMPLATE_FUNCTIONS_H
#define LLMC_TEMPLATE_FUNCTIONS_H

#include "llmc/text/template_value.h"  // defines: Jinja, JinjaText, TemplateValue, jinja_fail, jinja_append, jinja_str

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

/* What a value of type TEMPLATE_FUNCTION is: a function of a table with the value whose method it is, or a macro. */
typedef struct JinjaBound {
    const JinjaFunction* function;  // NULL: the macro
    TemplateValue self;
    const struct JinjaNode* macro;
    struct JinjaScope* scope;  // where it was defined
} JinjaBound;

/* The loop variable. */
typedef struct JinjaLoop {
    const TemplateList* items;
    size_t index;          // from 0
    TemplateValue before;  // of loop.changed()
} JinjaLoop;

static inline TemplateValue jinja_call_filter(Jinja* j, TemplateValue name, TemplateValue self, const JinjaArguments* a);
static inline bool jinja_call_test(Jinja* j, TemplateValue name, TemplateValue self, const JinjaArguments* a);
static inline TemplateValue jinja_member(Jinja* j, TemplateValue of, TemplateValue key, bool attribute);

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
    if (in.type == TEMPLATE_DICT) { return jinja_dict_find(j, in.as.dict, v) < in.as.dict->count; }
    const TemplateList* list = jinja_list_of(j, in).as.list;
    size_t i = 0;
    while (i < list->count && !jinja_equal(j, list->items[i], v)) { i++; }
    return i < list->count;
}

/* Returns a member by its path "a.b"; `v` itself without a path. */
static inline TemplateValue jinja_member_at(Jinja* j, TemplateValue v, TemplateValue path, TemplateValue otherwise) {
    if (!jinja_given(path)) { return v; }
    if (path.type != TEMPLATE_STRING) { return jinja_member(j, v, path, false); }
    for (size_t from = 0, to; from <= path.len; from = to + 1) {
        const char* dot = (const char*)memchr(path.as.s + from, '.', path.len - from);
        to = dot ? (size_t)(dot - path.as.s) : path.len;
        const TemplateValue part = jinja_cut(path, from, to);
        const bool number = part.len > 0 && part.len < 10 && strspn(part.as.s, "0123456789") >= part.len;
        v = jinja_member(j, v, number ? template_int(strtol(part.as.s, NULL, 10)) : part, false);
        if (v.type == TEMPLATE_UNDEFINED) { return otherwise.type == TEMPLATE_UNDEFINED ? v : otherwise; }
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
                const int order = a < middle && b < to ? jinja_order(j, p[a].key, p[b].key) : a < middle ? -1 : 1;
                spare[at] = (a < middle && b < to && down ? order >= 0 : order <= 0) ? p[a++] : p[b++];
            }
            memcpy(p + from, spare + from, (to - from) * sizeof *p);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// strings

/* Return a letter in the other case. One that becomes several letters stays. */
static inline uint32_t jinja_cased(uint32_t c, bool upper) {
    if (c < 0x80) { return upper ? (uint32_t)toupper((int)c) : (uint32_t)tolower((int)c); }
    const locale_t l = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    if (l == (locale_t)0) { return c; }
    const wint_t other = upper ? towupper_l(c, l) : towlower_l(c, l);
    freelocale(l);
    return (uint32_t)other;
}
static inline uint32_t jinja_upper(uint32_t c) { return jinja_cased(c, true); }
static inline uint32_t jinja_lower(uint32_t c) { return jinja_cased(c, false); }
static inline bool jinja_is_letter(uint32_t c) { return unicode_class(c) == UNICODE_LETTER; }

/* Returns a string in another case: 'u' upper, 'l' lower, 'c' its first letter upper, 't' the first of each word. */
static inline TemplateValue jinja_in_case(Jinja* j, TemplateValue v, int how) {
    JinjaText t = {NULL, NULL, 0, 0};
    bool start = true;
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        char out[8];
        uint32_t c;
        n = jinja_char(v, i, &c);
        const uint32_t to = how == 'u' || (how != 'l' && start) ? jinja_upper(c) : jinja_lower(c);
        jinja_append(j, &t, out, utf8_encode(out, (int)to), NULL, v.marks[i]);
        start = how == 't' && !jinja_is_letter(c);
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
            jinja_add(j, list, jinja_strip(j, v, none, right, !right));
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
            size_t at = jinja_find(j, v, by, 0);
            for (size_t next = at; right && next != SIZE_MAX; next = jinja_find(j, v, by, next + 1)) { at = next; }
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
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        uint32_t c;
        n = jinja_char(v, i, &c);
        const bool ends = (c >= '\n' && c <= '\r') || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
        if (!ends) { continue; }
        if (c == '\r' && i + 1 < v.len && v.as.s[i + 1] == '\n') { n = 2; }
        jinja_add(j, list, jinja_cut(v, from, keeps ? i + n : i));
        from = i + n;
    }
    if (from < v.len) { jinja_add(j, list, jinja_cut(v, from, v.len)); }
    return list;
}

static inline TemplateValue jinja_do_replace(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue old = jinja_text(j, a->v[0], NULL), by = jinja_text(j, a->v[1], NULL);
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
    const size_t at = jinja_find(j, v, jinja_text(j, a->v[0], NULL), 0);
    return template_int(at == SIZE_MAX ? -1 : (int64_t)jinja_code_points(j, jinja_cut(v, 0, at)));
}

static inline TemplateValue jinja_do_count(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    int64_t count = 0;
    if (v.type != TEMPLATE_STRING) {
        for (size_t i = 0; i < v.as.list->count; i++) { count += jinja_equal(j, v.as.list->items[i], a->v[0]); }
        return template_int(count);
    }
    const TemplateValue part = jinja_text(j, a->v[0], NULL);
    if (part.len == 0) { return template_int((int64_t)jinja_code_points(j, v) + 1); }
    for (size_t at = jinja_find(j, v, part, 0); at != SIZE_MAX; at = jinja_find(j, v, part, at + part.len)) { count++; }
    return template_int(count);
}

/* Returns whether a string is not empty and all of its characters are of a kind: digits 'd', letters 'a', both 'n', space 's',
 * or has letters, all of them upper 'u' or lower 'l'. */
static inline bool jinja_all(TemplateValue v, int kind) {
    bool some = false;
    for (size_t i = 0, n = 0; i < v.len; i += n) {
        uint32_t c;
        n = jinja_char(v, i, &c);
        const bool letter = jinja_is_letter(c), digit = unicode_class(c) == UNICODE_NUMBER;
        const bool wrong_case = kind == 'u' ? jinja_upper(c) != c : jinja_lower(c) != c;
        if (kind == 'u' || kind == 'l'
                ? letter && wrong_case
                : !(kind == 's' ? unicode_is_stripped(c) : (digit && kind != 'a') || (letter && kind != 'd'))) {
            return false;
        }
        some = some || letter || (kind != 'u' && kind != 'l');
    }
    return some;
}
static inline TemplateValue jinja_do_all(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    (void)j;
    return template_bool(jinja_all(v, a->how));
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
    return jinja_join(j, v, a->v[0], template_none());
}

static inline TemplateValue jinja_do_indent(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const bool first = jinja_truth(a->v[1]), blank = jinja_truth(a->v[2]), text = a->v[0].type == TEMPLATE_STRING;
    const int64_t width = text ? 0 : jinja_integer(j, a->v[0], 4);
    JinjaText t = {NULL, NULL, 0, 0};
    v = jinja_text(j, v, NULL);
    for (size_t from = 0, to = 0; from <= v.len; from = to + 1) {
        const char* newline = (const char*)memchr(v.as.s + from, '\n', v.len - from);
        to = newline ? (size_t)(newline - v.as.s) : v.len;
        if (from > 0) { jinja_append(j, &t, "\n", 1, NULL, 1); }
        if (from == 0 ? first : blank || to > from) {
            if (text) { jinja_append_string(j, &t, a->v[0]); }
            for (int64_t i = 0; i < width; i++) { jinja_append(j, &t, " ", 1, NULL, 1); }
        }
        jinja_append_string(j, &t, jinja_cut(v, from, to));
    }
    return jinja_string(&t);
}

static inline TemplateValue jinja_do_escape(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    static const char* const names[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    JinjaText t = {NULL, NULL, 0, 0};
    (void)a;
    v = jinja_str(j, v);
    for (size_t i = 0; i < v.len; i++) {
        const char* found = v.as.s[i] ? strchr("&<>'\"", v.as.s[i]) : NULL;
        jinja_append(j, &t, v.as.s + i, found ? 0 : 1, v.marks + i, 0);
        if (found) { jinja_append_text(j, &t, names[strchr("&<>'\"", v.as.s[i]) - "&<>'\""]); }
    }
    return jinja_string(&t);
}

// ---------------------------------------------------------------------------------------------------------------------
// the other filters

static inline TemplateValue jinja_do_string(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    (void)a;
    return jinja_str(j, v);
}
static inline TemplateValue jinja_do_length(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    (void)a;
    return template_int((int64_t)jinja_length(j, v));
}
static inline TemplateValue jinja_do_list(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    (void)a;
    return jinja_list_of(j, v);
}
static inline TemplateValue jinja_do_end_item(Jinja* j, TemplateValue v, const JinjaArguments* a) {  // 'f'irst, 'l'ast
    const TemplateList* list = jinja_list_of(j, v).as.list;
    return list->count ? list->items[a->how == 'f' ? 0 : list->count - 1] : template_value(TEMPLATE_UNDEFINED);
}
static inline TemplateValue jinja_do_reverse(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue list = jinja_list_of(j, v);
    jinja_turn(list.as.list);
    return v.type == TEMPLATE_STRING ? jinja_join(j, jinja_word(j, ""), list, a->v[0]) : jinja_as(list, TEMPLATE_ITERATOR);
}

/* Returns the items with what they are compared by: a member of each, without case unless `exact`. */
static inline TemplatePair* jinja_keyed(Jinja* j, const TemplateList* list, TemplateValue attribute, bool exact) {
    TemplatePair* p = (TemplatePair*)jinja_alloc(j, list->count * sizeof *p);
    for (size_t i = 0; i < list->count; i++) {
        const TemplateValue key = jinja_member_at(j, list->items[i], attribute, template_value(TEMPLATE_UNDEFINED));
        p[i].key = key.type == TEMPLATE_STRING && !exact ? jinja_in_case(j, key, 'l') : key;
        p[i].value = list->items[i];
    }
    return p;
}
static inline TemplateValue jinja_do_sort(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue list = jinja_list_of(j, v);
    TemplatePair* p = jinja_keyed(j, list.as.list, a->v[2], jinja_truth(a->v[1]));
    jinja_sort(j, p, list.as.list->count, jinja_truth(a->v[0]));
    for (size_t i = 0; i < list.as.list->count; i++) { list.as.list->items[i] = p[i].value; }
    return list;
}
static inline TemplateValue jinja_do_unique(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateList* list = jinja_list_of(j, v).as.list;
    const TemplatePair* p = jinja_keyed(j, list, a->v[1], jinja_truth(a->v[0]));
    TemplateValue kept = template_list(j->arena), seen = template_list(j->arena);
    for (size_t i = 0; i < list->count; i++) {
        if (jinja_contains(j, seen, p[i].key)) { continue; }
        jinja_add(j, seen, p[i].key);
        jinja_add(j, kept, p[i].value);
    }
    return jinja_as(kept, TEMPLATE_ITERATOR);
}
static inline TemplateValue jinja_do_extreme(Jinja* j, TemplateValue v, const JinjaArguments* a) {  // max, -1: min
    const TemplateList* list = jinja_list_of(j, v).as.list;
    const TemplatePair* p = jinja_keyed(j, list, a->v[1], jinja_truth(a->v[0]));
    size_t best = 0;
    for (size_t i = 1; i < list->count; i++) { best = a->how * jinja_order(j, p[i].key, p[best].key) > 0 ? i : best; }
    return list->count ? list->items[best] : template_value(TEMPLATE_UNDEFINED);
}

/* Returns the pairs of a dict, or only its 'k'eys or 'v'alues. */
static inline TemplateValue jinja_do_items(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    TemplateValue list = template_list(j->arena);
    if (v.type != TEMPLATE_DICT && v.type != TEMPLATE_UNDEFINED) { jinja_misused(j, v, "asked for its items"); }
    for (size_t i = 0; v.type == TEMPLATE_DICT && i < v.as.dict->count; i++) {
        const TemplatePair* p = &v.as.dict->items[i];
        jinja_add(j, list, a->how == 'k' ? p->key : a->how == 'v' ? p->value : jinja_pair(j, p->key, p->value));
    }
    return list;
}
static inline TemplateValue jinja_do_dictsort(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue list = jinja_do_items(j, v, a);
    const TemplateValue by = template_int(a->v[1].type == TEMPLATE_STRING && template_is(a->v[1], "value"));
    TemplatePair* p = jinja_keyed(j, list.as.list, by, jinja_truth(a->v[0]));
    jinja_sort(j, p, list.as.list->count, jinja_truth(a->v[2]));
    for (size_t i = 0; i < list.as.list->count; i++) { list.as.list->items[i] = p[i].value; }
    return list;
}

static inline TemplateValue jinja_binary(Jinja* j, TemplateValue op, TemplateValue a, TemplateValue b);

static inline TemplateValue jinja_do_sum(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateList* list = jinja_list_of(j, v).as.list;
    TemplateValue sum = a->v[1].type == TEMPLATE_UNDEFINED ? template_int(0) : a->v[1];
    const TemplateValue plus = jinja_word(j, "+"), missing = template_value(TEMPLATE_UNDEFINED);
    for (size_t i = 0; i < list->count; i++) {
        sum = jinja_binary(j, plus, sum, jinja_member_at(j, list->items[i], a->v[0], missing));
    }
    return sum;
}
static inline TemplateValue jinja_do_abs(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    (void)a;
    if (!jinja_is_number(v)) { jinja_misused(j, v, "made positive"); }
    if (v.type == TEMPLATE_FLOAT) { return template_float(fabs(v.as.d)); }
    return template_int(v.as.i < 0 && v.as.i != INT64_MIN ? -v.as.i : v.as.i);
}

/* Reads a number from a string; false: it is none. */
static inline bool jinja_read_number(Jinja* j, TemplateValue v, double* d, int64_t* i, bool* whole) {
    const TemplateValue t = jinja_strip(j, v, template_none(), true, true);
    char text[64], *end = text;
    if (t.len == 0 || t.len >= sizeof text || memchr(t.as.s, 'x', t.len) || memchr(t.as.s, 'X', t.len)) { return false; }
    memcpy(text, t.as.s, t.len);
    text[t.len] = 0;
    errno = 0;
    *i = strtoll(text, &end, 10);
    *whole = !*end && !errno;
    *d = strtod(text, &end);
    return !*end;
}
static inline TemplateValue jinja_do_int(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue otherwise = a->v[0].type == TEMPLATE_UNDEFINED ? template_int(0) : a->v[0];
    double d = jinja_is_number(v) ? jinja_double(v) : 0;
    int64_t i = 0;
    bool whole = false;
    if (jinja_is_integer(v)) { return template_int(v.as.i); }
    if (v.type != TEMPLATE_FLOAT && (v.type != TEMPLATE_STRING || !jinja_read_number(j, v, &d, &i, &whole))) {
        return otherwise;
    }
    if (whole) { return template_int(i); }
    return fabs(d) < 9e18 ? template_int((int64_t)d) : otherwise;
}
static inline TemplateValue jinja_do_float(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    double d = jinja_is_number(v) ? jinja_double(v) : 0;
    int64_t i;
    bool whole;
    if (jinja_is_number(v) || (v.type == TEMPLATE_STRING && jinja_read_number(j, v, &d, &i, &whole))) {
        return template_float(d);
    }
    return a->v[0].type == TEMPLATE_UNDEFINED ? template_float(0) : a->v[0];
}
static inline TemplateValue jinja_do_round(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const int64_t places = jinja_integer(j, a->v[0], 0);
    const double scale = pow(10, (double)places), d = jinja_is_number(v) ? jinja_double(v) : 0;
    char text[400];
    if (!jinja_is_number(v) || places < 0 || places > 20) { jinja_misused(j, v, "rounded"); }
    if (template_is(a->v[1], "ceil")) { return template_float(ceil(d * scale) / scale); }
    if (template_is(a->v[1], "floor")) { return template_float(floor(d * scale) / scale); }
    snprintf(text, sizeof text, "%.*f", (int)places, d);
    return jinja_is_integer(v) ? template_int(v.as.i) : template_float(strtod(text, NULL));
}

static inline TemplateValue jinja_do_default(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const bool absent = v.type == TEMPLATE_UNDEFINED || (jinja_truth(a->v[1]) && !jinja_truth(v));
    return !absent ? v : a->v[0].type == TEMPLATE_UNDEFINED ? jinja_word(j, "") : a->v[0];
}

/* json.dumps() */
static inline TemplateValue jinja_do_tojson(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    JinjaJson how = {jinja_truth(a->v[0]), jinja_truth(a->v[3]), template_value(TEMPLATE_UNDEFINED), jinja_word(j, ", "),
                     jinja_word(j, ": ")};
    JinjaText t = {NULL, NULL, 0, 0}, indent = {NULL, NULL, 0, 0};
    if (jinja_given(a->v[1])) {
        how.comma = jinja_word(j, ",");
        const int64_t width = a->v[1].type == TEMPLATE_STRING ? 0 : jinja_integer(j, a->v[1], 0);
        for (int64_t i = 0; i < width; i++) { jinja_append_text(j, &indent, " "); }
        how.indent = a->v[1].type == TEMPLATE_STRING ? a->v[1] : jinja_string(&indent);
    }
    if (jinja_given(a->v[2])) {
        if (!jinja_has_items(a->v[2]) || a->v[2].as.list->count != 2) { jinja_misused(j, a->v[2], "used as two separators"); }
        how.comma = jinja_text(j, a->v[2].as.list->items[0], NULL);
        how.colon = jinja_text(j, a->v[2].as.list->items[1], NULL);
    }
    jinja_json(j, &t, v, &how, 0);
    return jinja_string(&t);
}

/* Returns the arguments from the n-th on. */
static inline JinjaArguments jinja_rest(const JinjaArguments* a, size_t n) {
    JinjaArguments rest;
    rest.count = 0;
    for (size_t i = n; i < a->count; i++) {
        rest.v[rest.count] = a->v[i];
        rest.names[rest.count++] = a->names[i];
    }
    return rest;
}

/* map('upper'), map(attribute='role', default='') */
static inline TemplateValue jinja_do_map(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateList* list = jinja_list_of(j, v).as.list;
    const bool attribute = a->count > 0 && template_is(a->names[0], "attribute");
    const TemplateValue otherwise =
        attribute && a->count > 1 && template_is(a->names[1], "default") ? a->v[1] : template_value(TEMPLATE_UNDEFINED);
    TemplateValue mapped = template_list(j->arena);
    if (a->count == 0) { jinja_fail(j, "the filter \"map\" needs the name of a filter, or attribute="); }
    const JinjaArguments rest = jinja_rest(a, 1);
    for (size_t i = 0; i < list->count; i++) {
        jinja_add(j, mapped,
                  attribute ? jinja_member_at(j, list->items[i], a->v[0], otherwise)
                            : jinja_call_filter(j, jinja_text(j, a->v[0], NULL), list->items[i], &rest));
    }
    return jinja_as(mapped, TEMPLATE_ITERATOR);
}

/* Returns the items that pass a test, or with the bit SELECT_MEMBER those of which a member does; with SELECT_NOT the others. */
enum { SELECT_MEMBER = 1, SELECT_NOT = 2 };
static inline TemplateValue jinja_do_select(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateList* list = jinja_list_of(j, v).as.list;
    const size_t member = a->how & SELECT_MEMBER;
    TemplateValue kept = template_list(j->arena);
    if (a->count < member) { jinja_fail(j, "a filter needs the name of a member"); }
    const JinjaArguments rest = jinja_rest(a, member + 1);
    for (size_t i = 0; i < list->count; i++) {
        const TemplateValue path = member ? a->v[0] : template_none();
        const TemplateValue of = jinja_member_at(j, list->items[i], path, template_value(TEMPLATE_UNDEFINED));
        const bool passes =
            a->count <= member ? jinja_truth(of) : jinja_call_test(j, jinja_text(j, a->v[member], NULL), of, &rest);
        if (passes == !(a->how & SELECT_NOT)) { jinja_add(j, kept, list->items[i]); }
    }
    return jinja_as(kept, TEMPLATE_ITERATOR);
}

static const JinjaFunction jinja_filters_known[] = {
    {"abs", "", jinja_do_abs, 0},
    {"capitalize", "", jinja_do_case, 'c'},
    {"count", "", jinja_do_length, 0},
    {"d", "default_value boolean", jinja_do_default, 0},
    {"default", "default_value boolean", jinja_do_default, 0},
    {"dictsort", "case_sensitive by reverse", jinja_do_dictsort, 0},
    {"e", "", jinja_do_escape, 0},
    {"escape", "", jinja_do_escape, 0},
    {"first", "", jinja_do_end_item, 'f'},
    {"float", "default", jinja_do_float, 0},
    {"indent", "width first blank", jinja_do_indent, 0},
    {"int", "default", jinja_do_int, 0},
    {"items", "", jinja_do_items, 0},
    {"join", "d attribute", jinja_do_join, 0},
    {"last", "", jinja_do_end_item, 'l'},
    {"length", "", jinja_do_length, 0},
    {"list", "", jinja_do_list, 0},
    {"lower", "", jinja_do_case, 'l'},
    {"map", "*", jinja_do_map, 0},
    {"max", "case_sensitive attribute", jinja_do_extreme, 1},
    {"min", "case_sensitive attribute", jinja_do_extreme, -1},
    {"reject", "*", jinja_do_select, SELECT_NOT},
    {"rejectattr", "*", jinja_do_select, SELECT_MEMBER | SELECT_NOT},
    {"replace", "old new count", jinja_do_replace, 0},
    {"reverse", "", jinja_do_reverse, 0},
    {"round", "precision method", jinja_do_round, 0},
    {"safe", "", jinja_do_string, 0},
    {"select", "*", jinja_do_select, 0},
    {"selectattr", "*", jinja_do_select, SELECT_MEMBER},
    {"sort", "reverse case_sensitive attribute", jinja_do_sort, 0},
    {"string", "", jinja_do_string, 0},
    {"sum", "attribute start", jinja_do_sum, 0},
    {"title", "", jinja_do_case, 't'},
    {"tojson", "ensure_ascii indent separators sort_keys", jinja_do_tojson, 0},
    {"trim", "chars", jinja_do_strip, 0},
    {"unique", "case_sensitive attribute", jinja_do_unique, 0},
    {"upper", "", jinja_do_case, 'u'},
    {NULL, NULL, NULL, 0},
};

// ---------------------------------------------------------------------------------------------------------------------
// methods

static inline TemplateValue jinja_do_get(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const size_t at = jinja_dict_find(j, v.as.dict, a->v[0]);
    if (at < v.as.dict->count) { return v.as.dict->items[at].value; }
    return a->v[1].type == TEMPLATE_UNDEFINED ? template_none() : a->v[1];
}
static inline TemplateValue jinja_do_index(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    for (size_t i = 0; i < v.as.list->count; i++) {
        if (jinja_equal(j, v.as.list->items[i], a->v[0])) { return template_int((int64_t)i); }
    }
    jinja_fail(j, "index(): the list has no such item");
}
static inline TemplateValue jinja_do_cycle(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    if (a->count == 0) { jinja_fail(j, "loop.cycle() needs an argument"); }
    return a->v[v.as.loop->index % a->count];
}
static inline TemplateValue jinja_do_changed(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    TemplateValue now = template_list(j->arena);
    for (size_t i = 0; i < a->count; i++) { jinja_add(j, now, a->v[i]); }
    const bool changed = v.as.loop->before.type != TEMPLATE_LIST || !jinja_equal(j, v.as.loop->before, now);
    v.as.loop->before = now;
    return template_bool(changed);
}

static const JinjaFunction jinja_string_methods[] = {
    {"capitalize", "", jinja_do_case, 'c'},
    {"count", "sub", jinja_do_count, 0},
    {"endswith", "suffix", jinja_do_end, 'e'},
    {"find", "sub", jinja_do_find, 0},
    {"isalnum", "", jinja_do_all, 'n'},
    {"isalpha", "", jinja_do_all, 'a'},
    {"isdigit", "", jinja_do_all, 'd'},
    {"islower", "", jinja_do_all, 'l'},
    {"isnumeric", "", jinja_do_all, 'd'},
    {"isspace", "", jinja_do_all, 's'},
    {"isupper", "", jinja_do_all, 'u'},
    {"join", "iterable", jinja_do_joined, 0},
    {"lower", "", jinja_do_case, 'l'},
    {"lstrip", "chars", jinja_do_strip, 'l'},
    {"removeprefix", "prefix", jinja_do_remove, 's'},
    {"removesuffix", "suffix", jinja_do_remove, 'e'},
    {"replace", "old new count", jinja_do_replace, 0},
    {"rsplit", "sep maxsplit", jinja_do_split, 'r'},
    {"rstrip", "chars", jinja_do_strip, 'r'},
    {"split", "sep maxsplit", jinja_do_split, 0},
    {"splitlines", "keepends", jinja_do_splitlines, 0},
    {"startswith", "prefix", jinja_do_end, 's'},
    {"strip", "chars", jinja_do_strip, 0},
    {"title", "", jinja_do_case, 't'},
    {"upper", "", jinja_do_case, 'u'},
    {NULL, NULL, NULL, 0},
};
static const JinjaFunction jinja_list_methods[] = {
    {"count", "value", jinja_do_count, 0}, {"index", "value", jinja_do_index, 0}, {NULL, NULL, NULL, 0}};
static const JinjaFunction jinja_dict_methods[] = {{"get", "key default", jinja_do_get, 0},
                                                   {"items", "", jinja_do_items, 0},
                                                   {"keys", "", jinja_do_items, 'k'},
                                                   {"values", "", jinja_do_items, 'v'},
                                                   {NULL, NULL, NULL, 0}};
static const JinjaFunction jinja_loop_methods[] = {
    {"cycle", "*", jinja_do_cycle, 0}, {"changed", "*", jinja_do_changed, 0}, {NULL, NULL, NULL, 0}};

// ---------------------------------------------------------------------------------------------------------------------
// functions

static inline TemplateValue jinja_do_range(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const int64_t one = jinja_integer(j, a->v[0], 0), two = jinja_integer(j, a->v[1], 0), step = jinja_integer(j, a->v[2], 1);
    const bool has_two = a->v[1].type != TEMPLATE_UNDEFINED;
    const int64_t from = has_two ? one : 0, to = has_two ? two : one;
    TemplateValue list = template_list(j->arena);
    (void)v;
    if (step == 0) { jinja_fail(j, "range() needs a step that is not 0"); }
    for (int64_t i = from; step > 0 ? i < to : i > to; i += step) {
        if (list.as.list->count == JINJA_MAX_RANGE) { jinja_fail(j, "range() is longer than %d", JINJA_MAX_RANGE); }
        jinja_add(j, list, template_int(i));
        if (step > 0 ? i > INT64_MAX - step : i < INT64_MIN - step) { break; }
    }
    return list;
}

/* dict(a=1), namespace(a=1): of a dict, if one is given, and of the arguments with names. */
static inline TemplateValue jinja_do_dict(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    TemplateValue dict = template_dict(j->arena);
    (void)v;
    for (size_t i = 0; i < a->count; i++) {
        const TemplateValue members = a->v[i];
        if (a->names[i].type == TEMPLATE_STRING) {
            template_dict_add(j->arena, dict, a->names[i], members);
        } else if (members.type == TEMPLATE_DICT) {
            for (size_t k = 0; k < members.as.dict->count; k++) {
                jinja_spend(j, 0);
                template_dict_add(j->arena, dict, members.as.dict->items[k].key, members.as.dict->items[k].value);
            }
        } else {
            jinja_misused(j, members, "made a dict");
        }
    }
    return dict;
}
static inline TemplateValue jinja_do_namespace(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    return jinja_as(jinja_do_dict(j, v, a), TEMPLATE_NAMESPACE);
}
static inline TemplateValue jinja_do_raise_exception(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue text = jinja_str(j, a->v[0]);
    (void)v;
    jinja_fail(j, "%.*s", (int)size_min(text.len, 400), text.as.s);
}
static inline TemplateValue jinja_do_strftime_now(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue format = jinja_text(j, a->v[0], NULL);
    char text[256], out[512];
    (void)v;
    if (format.len >= sizeof text) { jinja_fail(j, "strftime_now(): the format is too long"); }
    memcpy(text, format.as.s, format.len);
    text[format.len] = 0;
    const size_t n = strftime(out, sizeof out, text, &j->now);
    return template_string(j->arena, (char*)memcpy(jinja_alloc(j, n + 1), out, n), n, true);
}

static const JinjaFunction jinja_functions[] = {{"range", "start stop step", jinja_do_range, 0},
                                                {"dict", "*", jinja_do_dict, 0},
                                                {"namespace", "*", jinja_do_namespace, 0},
                                                {"raise_exception", "message", jinja_do_raise_exception, 0},
                                                {"strftime_now", "format", jinja_do_strftime_now, 0},
                                                {NULL, NULL, NULL, 0}};

static inline const JinjaFunction* jinja_named(const JinjaFunction* table, TemplateValue name) {
    while (table->name && !template_is(name, table->name)) { table++; }
    return table->name ? table : NULL;
}

static inline const JinjaFunction* jinja_method(TemplateValue of, TemplateValue name) {
    return of.type == TEMPLATE_STRING ? jinja_named(jinja_string_methods, name)
           : of.type == TEMPLATE_DICT ? jinja_named(jinja_dict_methods, name)
           : jinja_has_items(of)      ? jinja_named(jinja_list_methods, name)
           : of.type == TEMPLATE_LOOP ? jinja_named(jinja_loop_methods, name)
                                      : NULL;
}

/* Calls a function with its arguments in the order of its parameters. */
static inline TemplateValue jinja_call_function(Jinja* j, const JinjaFunction* f, TemplateValue self, const JinjaArguments* a) {
    JinjaArguments bound = *a;
    bound.how = f->how;
    if (f->parameters[0] == '*') { return f->call(j, self, &bound); }
    for (int i = 0; i < JINJA_MAX_ARGUMENTS; i++) { bound.v[i] = template_value(TEMPLATE_UNDEFINED); }
    for (size_t i = 0; i < a->count; i++) {
        const TemplateValue name = a->names[i];
        const char* w = f->parameters;
        size_t at = 0, n = strcspn(w, " ");
        while (*w && (name.type == TEMPLATE_STRING ? n != name.len || memcmp(w, name.as.s, n) != 0 : at < i)) {
            w += n + strspn(w + n, " ");
            n = strcspn(w, " ");
            at++;
        }
        if (!*w && name.type == TEMPLATE_STRING) {
            jinja_fail(j, "\"%s\" has no argument \"%.*s\"", f->name, (int)name.len, name.as.s);
        }
        if (!*w) { jinja_fail(j, "\"%s\" has too many arguments", f->name); }
        bound.v[at] = a->v[i];
    }
    return f->call(j, self, &bound);
}

static inline TemplateValue jinja_call_filter(Jinja* j, TemplateValue name, TemplateValue self, const JinjaArguments* a) {
    const JinjaFunction* f = jinja_named(jinja_filters_known, name);
    if (!f) { jinja_fail(j, "the filter \"%.*s\" is not known here", (int)name.len, name.as.s); }
    return jinja_call_function(j, f, self, a);
}

// ---------------------------------------------------------------------------------------------------------------------
// tests

static inline bool jinja_call_test(Jinja* j, TemplateValue name, TemplateValue v, const JinjaArguments* a) {
    static const char* const operators[][4] = {{"eq", "equalto", "=="},    {"ne", "!="}, {"lt", "lessthan", "<"}, {"le", "<="},
                                               {"gt", "greaterthan", ">"}, {"ge", ">="}};
    const TemplateValue other = a->count ? a->v[0] : template_value(TEMPLATE_UNDEFINED);
    const bool integer = jinja_is_integer(v), items = jinja_has_items(v);
    for (int i = 0; i < 6; i++) {
        for (int k = 0; k < 4 && operators[i][k]; k++) {
            if (!template_is(name, operators[i][k])) { continue; }
            if (i < 2) { return jinja_equal(j, v, other) == (i == 0); }
            const int order = jinja_order(j, v, other);
            return i == 2 ? order < 0 : i == 3 ? order <= 0 : i == 4 ? order > 0 : order >= 0;
        }
    }
    const bool countable = v.type == TEMPLATE_STRING || v.type == TEMPLATE_DICT || v.type == TEMPLATE_UNDEFINED;
    const struct {
        const char* name;
        bool is;
    } types[] = {{"defined", v.type != TEMPLATE_UNDEFINED},
                 {"undefined", v.type == TEMPLATE_UNDEFINED},
                 {"none", v.type == TEMPLATE_NONE},
                 {"boolean", v.type == TEMPLATE_BOOL},
                 {"true", v.type == TEMPLATE_BOOL && v.as.i},
                 {"false", v.type == TEMPLATE_BOOL && !v.as.i},
                 {"integer", v.type == TEMPLATE_INT},
                 {"float", v.type == TEMPLATE_FLOAT},
                 {"number", jinja_is_number(v)},
                 {"string", v.type == TEMPLATE_STRING},
                 {"mapping", v.type == TEMPLATE_DICT},
                 {"sequence", countable || (items && v.type != TEMPLATE_ITERATOR)},
                 {"iterable", countable || items},
                 {"callable", v.type == TEMPLATE_FUNCTION || v.type == TEMPLATE_UNDEFINED}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (template_is(name, types[i].name)) { return types[i].is; }
    }
    if (template_is(name, "lower")) { return jinja_all(jinja_str(j, v), 'l'); }
    if (template_is(name, "upper")) { return jinja_all(jinja_str(j, v), 'u'); }
    if (template_is(name, "in")) { return jinja_contains(j, other, v); }
    if (template_is(name, "sameas")) { return v.type == other.type && jinja_equal(j, v, other); }
    const bool odd = template_is(name, "odd"), even = template_is(name, "even");
    if (odd || even || template_is(name, "divisibleby")) {
        const int64_t by = odd || even ? 2 : jinja_integer(j, other, 0);
        if (!integer || by == 0) { jinja_misused(j, v, "divided like this"); }
        return by == -1 || (v.as.i % by != 0) == odd;
    }
    jinja_fail(j, "the test \"%.*s\" is not known here", (int)name.len, name.as.s);
}

#endif
