/* template_functions.h -- what a chat template (text/template.h) may call: filters (x | trim), tests (x is defined), methods
 * (x.split()) and functions (namespace()). Each is a row of a table: its name, its parameters, its function. The results are
 * Python's and jinja2's. Every byte of a string keeps its mark.
 */
#ifndef LLMC_TEMPLATE_FUNCTIONS_H
#define LLMC_TEMPLATE_FUNCTIONS_H

#include "llmc/base/os.h"              // defines: OS_UTF8_LOCALE
#include "llmc/text/template_value.h"  // defines: Jinja, JinjaText, TemplateValue, jinja_fail, jinja_append, jinja_str
#include "llmc/text/unicode.h"         // defines: unicode_is_stripped

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

/* Returns an argument that must be a string. */
static inline TemplateValue jinja_text(Jinja* j, TemplateValue v) {
    if (v.type != TEMPLATE_STRING) { jinja_misused(j, v, "used as a string"); }
    return v;
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
    if (in.type == TEMPLATE_STRING) { return jinja_find(j, in, jinja_text(j, v), 0) != SIZE_MAX; }
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
        v = j->member(j, v, part, false);
        if (v.type == TEMPLATE_UNDEFINED && otherwise.type != TEMPLATE_UNDEFINED) { v = otherwise; }
    }
    return v;
}

/* Sorts pairs by their keys; what is equal stays in order. */
static inline void jinja_sort(Jinja* j, TemplatePair* p, size_t n, bool down) {
    for (size_t i = 1; i < n; i++) {
        const TemplatePair pair = p[i];
        size_t k = i;
        for (; k > 0; k--) {
            const int order = jinja_order(j, p[k - 1].key, pair.key);
            if (down ? order >= 0 : order <= 0) { break; }
            p[k] = p[k - 1];
        }
        p[k] = pair;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// strings

/* Returns a letter in upper or lower case. One that becomes several letters stays. */
static inline uint32_t jinja_cased(uint32_t c, bool upper) {
    if (c < 0x80) { return upper ? (uint32_t)toupper((int)c) : (uint32_t)tolower((int)c); }
    const locale_t l = newlocale(LC_CTYPE_MASK, OS_UTF8_LOCALE, (locale_t)0);
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
    if (any) { jinja_text(j, chars); }
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

/* Splits at a text, or at white space, at most maxsplit times. */
static inline TemplateValue jinja_do_split(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const bool words = !jinja_given(a->v[0]);
    int64_t most = jinja_integer(j, a->v[1], -1);
    TemplateValue list = template_list(j->arena);
    const TemplateValue by = words ? a->v[0] : jinja_text(j, a->v[0]), none = template_none();
    if (!words && by.len == 0) { jinja_fail(j, "split() needs a separator that is not empty"); }
    if (words) { v = jinja_strip(j, v, none, true, false); }
    for (; most != 0 && v.len > 0; most--) {
        size_t at = words ? 0 : jinja_find(j, v, by, 0);
        uint32_t c;
        for (size_t n; words && at < v.len; at += n) {
            n = jinja_char(v, at, &c);
            if (unicode_is_stripped(c)) { break; }
        }
        if (at >= v.len) { break; }
        jinja_add(j, list, jinja_cut(v, 0, at));
        v = words ? jinja_strip(j, jinja_cut(v, at, v.len), none, true, false) : jinja_cut(v, at + by.len, v.len);
    }
    if (!words || v.len > 0) { jinja_add(j, list, v); }
    return list;
}

static inline TemplateValue jinja_do_replace(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const bool filter = a->how == 'f';  // it takes values of any type
    const TemplateValue old = filter ? jinja_str(j, a->v[0]) : jinja_text(j, a->v[0]);
    const TemplateValue by = filter ? jinja_str(j, a->v[1]) : jinja_text(j, a->v[1]);
    int64_t most = jinja_integer(j, a->v[2], -1);
    JinjaText t = {NULL, NULL, 0, 0};
    size_t from = 0;
    v = jinja_str(j, v);
    if (old.len == 0) { jinja_fail(j, "replace() needs a text that is not empty"); }
    for (size_t at; most != 0 && (at = jinja_find(j, v, old, from)) != SIZE_MAX; most--) {
        jinja_append_string(j, &t, jinja_cut(v, from, at));
        jinja_append_string(j, &t, by);
        from = at + old.len;
    }
    jinja_append_string(j, &t, jinja_cut(v, from, v.len));
    return jinja_string(&t);
}

/* Returns whether a string 's'tarts or 'e'nds with a part. */
static inline TemplateValue jinja_do_end(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue part = jinja_text(j, a->v[0]);
    return template_bool(part.len <= v.len &&
                         memcmp(a->how == 's' ? v.as.s : v.as.s + v.len - part.len, part.as.s, part.len) == 0);
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
    for (size_t i = 0; i < list.as.list->count; i++) { jinja_text(j, list.as.list->items[i]); }
    return jinja_join(j, v, list, template_none());
}

// ---------------------------------------------------------------------------------------------------------------------
// the other filters

/* Returns a value as a 's'tring, the 'n'umber of its items, or the 'l'ist of them. */
static inline TemplateValue jinja_do_convert(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    return a->how == 's' ? jinja_str(j, v) : a->how == 'n' ? template_int((int64_t)jinja_length(j, v)) : jinja_list_of(j, v);
}
static inline TemplateValue jinja_do_end_item(Jinja* j, TemplateValue v, const JinjaArguments* a) {  // 'f'irst, 'l'ast
    if (a->how == 'l' && v.type == TEMPLATE_ITERATOR) { jinja_misused(j, v, "asked for its last item"); }
    const TemplateList* list = jinja_list_of(j, v).as.list;
    if (list->count) { return list->items[a->how == 'f' ? 0 : list->count - 1]; }
    return jinja_undefined(j, "%s", a->how == 'f' ? "No first item, sequence was empty." : "No last item, sequence was empty.");
}
static inline TemplateValue jinja_do_reverse(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue items = jinja_list_of(j, v), list = template_list(j->arena);
    for (size_t i = items.as.list->count; i > 0; i--) { jinja_add(j, list, items.as.list->items[i - 1]); }
    return v.type == TEMPLATE_STRING ? jinja_join(j, jinja_word(j, ""), list, a->v[0]) : jinja_as(list, TEMPLATE_ITERATOR);
}

/* Sorts a list by a member of each item, without case unless `exact`. */
static inline TemplateValue jinja_sorted(Jinja* j, TemplateValue list, TemplateValue attribute, bool exact, bool down) {
    const TemplateList* l = list.as.list;
    TemplatePair* p = (TemplatePair*)jinja_alloc(j, l->count * sizeof *p);
    for (size_t i = 0; i < l->count; i++) {
        const TemplateValue key = jinja_member_at(j, l->items[i], attribute, template_value(TEMPLATE_UNDEFINED));
        p[i].key = key.type == TEMPLATE_STRING && !exact ? jinja_in_case(j, key, 'l') : key;
        p[i].value = l->items[i];
    }
    jinja_sort(j, p, l->count, down);
    for (size_t i = 0; i < l->count; i++) { l->items[i] = p[i].value; }
    return list;
}
static inline TemplateValue jinja_do_sort(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    return jinja_sorted(j, jinja_list_of(j, v), a->v[2], jinja_truth(a->v[1]), jinja_integer(j, a->v[0], 0) != 0);
}

/* Returns the pairs of a dict, or only its 'k'eys or 'v'alues. */
static inline TemplateValue jinja_do_items(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    TemplateValue list = template_list(j->arena);
    if (v.type != TEMPLATE_DICT && v.type != TEMPLATE_UNDEFINED) { jinja_misused(j, v, "asked for its items"); }
    for (size_t i = 0; v.type == TEMPLATE_DICT && i < v.as.dict->count; i++) {
        const TemplatePair* p = &v.as.dict->items[i];
        jinja_add(j, list, a->how == 'k' ? p->key : a->how == 'v' ? p->value : jinja_pair(j, p->key, p->value));
    }
    return a->how ? list : jinja_as(list, TEMPLATE_ITERATOR);
}
static inline TemplateValue jinja_do_dictsort(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    if (v.type != TEMPLATE_DICT) { jinja_misused(j, v, "sorted as a dict"); }
    const TemplateValue by = template_int(a->v[1].type == TEMPLATE_STRING && template_is(a->v[1], "value"));
    return jinja_sorted(j, jinja_do_items(j, v, a), by, jinja_truth(a->v[0]), jinja_truth(a->v[2]));
}

static inline TemplateValue jinja_call_filter(Jinja* j, TemplateValue name, TemplateValue self, const JinjaArguments* a);
static inline bool jinja_call_test(Jinja* j, TemplateValue name, TemplateValue self, const JinjaArguments* a);

static inline TemplateValue jinja_do_int(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    double d = v.type == TEMPLATE_FLOAT ? v.as.d : NAN;
    char text[64], *end = text;
    TemplateValue number = template_int(v.as.i);
    if (v.type == TEMPLATE_UNDEFINED) { jinja_misused(j, v, "made a number"); }
    number.data = v.type == TEMPLATE_STRING && v.len > 0 ? memchr(v.marks, 0, v.len) != NULL : v.data;
    if (jinja_is_integer(v)) { return number; }
    if (v.type == TEMPLATE_STRING) {
        const TemplateValue t = jinja_strip(j, v, template_none(), true, true);
        snprintf(text, sizeof text, "%.*s", (int)size_min(t.len, sizeof text - 1), t.as.s);
        errno = 0;
        number.as.i = strtoll(text, &end, 10);
        if (*text && !*end && !errno) { return number; }
        d = strtod(text, &end);
        if (!*text || *end || strpbrk(text, "xX")) { d = NAN; }
    }
    number.as.i = fabs(d) < 9e18 ? (int64_t)d : 0;
    return fabs(d) < 9e18 || a->v[0].type == TEMPLATE_UNDEFINED ? number : a->v[0];
}

static inline TemplateValue jinja_do_default(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const bool absent = v.type == TEMPLATE_UNDEFINED || (jinja_truth(a->v[1]) && !jinja_truth(v));
    return !absent ? v : a->v[0].type == TEMPLATE_UNDEFINED ? jinja_word(j, "") : a->v[0];
}

/* json.dumps() */
static inline TemplateValue jinja_do_tojson(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    JinjaStyle how = {true, jinja_truth(a->v[0]), template_value(TEMPLATE_UNDEFINED), template_string(j->arena, ", ", 2, false),
                      template_string(j->arena, ": ", 2, false)};
    JinjaText t = {NULL, NULL, 0, 0}, indent = {NULL, NULL, 0, 0};
    if (jinja_given(a->v[1])) {
        how.comma.len = 1;
        const int64_t width = a->v[1].type == TEMPLATE_STRING ? 0 : jinja_integer(j, a->v[1], 0);
        for (int64_t i = 0; i < width; i++) { jinja_append_text(j, &indent, " "); }
        how.indent = a->v[1].type == TEMPLATE_STRING ? a->v[1] : jinja_string(&indent);
    }
    if (jinja_given(a->v[2])) {
        if (!jinja_has_items(a->v[2]) || a->v[2].as.list->count != 2) { jinja_misused(j, a->v[2], "used as two separators"); }
        how.comma = jinja_text(j, a->v[2].as.list->items[0]);
        how.colon = jinja_text(j, a->v[2].as.list->items[1]);
    }
    jinja_write(j, &t, v, &how, 0);
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
                            : jinja_call_filter(j, jinja_text(j, a->v[0]), list->items[i], &rest));
    }
    return jinja_as(mapped, TEMPLATE_ITERATOR);
}

/* Returns the items that pass a test. SELECT_MEMBER: a member of the item is tested. SELECT_NOT: returns the others instead. */
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
        const bool passes = a->count <= member ? jinja_truth(of) : jinja_call_test(j, jinja_text(j, a->v[member]), of, &rest);
        if (passes == !(a->how & SELECT_NOT)) { jinja_add(j, kept, list->items[i]); }
    }
    return jinja_as(kept, TEMPLATE_ITERATOR);
}

static const JinjaFunction jinja_filters_known[] = {
    {"capitalize", "", jinja_do_case, 'c'},
    {"count", "", jinja_do_convert, 'n'},
    {"d", "default_value boolean", jinja_do_default, 0},
    {"default", "default_value boolean", jinja_do_default, 0},
    {"dictsort", "case_sensitive by reverse", jinja_do_dictsort, 0},
    {"first", "", jinja_do_end_item, 'f'},
    {"int", "default", jinja_do_int, 0},
    {"items", "", jinja_do_items, 0},
    {"join", "d attribute", jinja_do_join, 0},
    {"last", "", jinja_do_end_item, 'l'},
    {"length", "", jinja_do_convert, 'n'},
    {"list", "", jinja_do_convert, 'l'},
    {"lower", "", jinja_do_case, 'l'},
    {"map", "*", jinja_do_map, 0},
    {"reject", "*", jinja_do_select, SELECT_NOT},
    {"rejectattr", "*", jinja_do_select, SELECT_MEMBER | SELECT_NOT},
    {"replace", "old new count", jinja_do_replace, 'f'},
    {"reverse", "", jinja_do_reverse, 0},
    {"safe", "", jinja_do_convert, 's'},
    {"select", "*", jinja_do_select, 0},
    {"selectattr", "*", jinja_do_select, SELECT_MEMBER},
    {"sort", "reverse case_sensitive attribute", jinja_do_sort, 0},
    {"string", "", jinja_do_convert, 's'},
    {"title", "", jinja_do_case, 'w'},
    {"tojson", "ensure_ascii indent separators", jinja_do_tojson, 0},
    {"trim", "chars", jinja_do_strip, 0},
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

static const JinjaFunction jinja_string_methods[] = {
    {"capitalize", "", jinja_do_case, 'c'},
    {"endswith", "_suffix", jinja_do_end, 'e'},
    {"join", "_iterable", jinja_do_joined, 0},
    {"lower", "", jinja_do_case, 'l'},
    {"lstrip", "_chars", jinja_do_strip, 'l'},
    {"replace", "_old _new _count", jinja_do_replace, 0},
    {"rstrip", "_chars", jinja_do_strip, 'r'},
    {"split", "sep maxsplit", jinja_do_split, 0},
    {"startswith", "_prefix", jinja_do_end, 's'},
    {"strip", "_chars", jinja_do_strip, 0},
    {"title", "", jinja_do_case, 't'},
    {"upper", "", jinja_do_case, 'u'},
    {NULL, NULL, NULL, 0},
};
static const JinjaFunction jinja_dict_methods[] = {{"get", "_key _default", jinja_do_get, 0},
                                                   {"items", "", jinja_do_items, 'i'},
                                                   {"keys", "", jinja_do_items, 'k'},
                                                   {"values", "", jinja_do_items, 'v'},
                                                   {NULL, NULL, NULL, 0}};

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
    return jinja_as(dict, (TemplateType)a->how);
}
static inline TemplateValue jinja_do_raise_exception(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue text = jinja_str(j, a->v[0]);
    (void)v;
    jinja_fail(j, "%.*s", (int)size_min(text.len, 400), text.as.s);
}
static inline TemplateValue jinja_do_strftime_now(Jinja* j, TemplateValue v, const JinjaArguments* a) {
    const TemplateValue format = jinja_text(j, a->v[0]);
    char text[256], out[512];
    (void)v;
    if (format.len >= sizeof text) { jinja_fail(j, "strftime_now(): the format is too long"); }
    memcpy(text, format.as.s, format.len);
    text[format.len] = 0;
    const size_t n = strftime(out, sizeof out, text, &j->now);
    return template_string(j->arena, (char*)memcpy(jinja_alloc(j, n + 1), out, n), n, true);
}

static const JinjaFunction jinja_functions[] = {
    {"range", "start stop step", jinja_do_range, 0},       {"dict", "*", jinja_do_dict, TEMPLATE_DICT},
    {"namespace", "*", jinja_do_dict, TEMPLATE_NAMESPACE}, {"raise_exception", "message", jinja_do_raise_exception, 0},
    {"strftime_now", "format", jinja_do_strftime_now, 0},  {NULL, NULL, NULL, 0}};

static inline const JinjaFunction* jinja_named(const JinjaFunction* table, TemplateValue name) {
    while (table->name && !template_is(name, table->name)) { table++; }
    return table->name ? table : NULL;
}

static inline const JinjaFunction* jinja_method(TemplateValue of, TemplateValue name) {
    return of.type == TEMPLATE_STRING ? jinja_named(jinja_string_methods, name)
           : of.type == TEMPLATE_DICT ? jinja_named(jinja_dict_methods, name)
                                      : NULL;
}

/* Calls a function with its arguments in the order of its parameters. Those that begin with _ cannot be named. */
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

LLMC_NORETURN static void jinja_not_known(Jinja* j, const char* what, TemplateValue name) {
    jinja_fail(j, "the %s \"%.*s\" is not known here, wanted one that chat templates use", what, (int)size_min(name.len, 100),
               name.as.s);
}

static inline TemplateValue jinja_call_filter(Jinja* j, TemplateValue name, TemplateValue self, const JinjaArguments* a) {
    const JinjaFunction* f = jinja_named(jinja_filters_known, name);
    if (!f) { jinja_not_known(j, "filter", name); }
    return jinja_call_function(j, f, self, a);
}

// ---------------------------------------------------------------------------------------------------------------------
// tests

#define TYPE(name) (1 << TEMPLATE_##name)
enum {
    TYPES_NUMBERS = TYPE(BOOL) | TYPE(INT) | TYPE(FLOAT),
    TYPES_SEQUENCES = TYPE(UNDEFINED) | TYPE(STRING) | TYPE(DICT) | TYPE(LIST) | TYPE(TUPLE),
    TYPES_ITERABLE = TYPES_SEQUENCES | TYPE(ITERATOR) | TYPE(LOOP),
};

// Tests: of a value's type, and those that compare it with an argument by an operator.
static const struct {
    const char* name;
    int types;
    const char* op;
} jinja_tests_known[] = {
    {"defined", ~TYPE(UNDEFINED), NULL},
    {"undefined", TYPE(UNDEFINED), NULL},
    {"none", TYPE(NONE), NULL},
    {"boolean", TYPE(BOOL), NULL},
    {"true", TYPE(BOOL), NULL},
    {"false", TYPE(BOOL), NULL},
    {"integer", TYPE(INT), NULL},
    {"float", TYPE(FLOAT), NULL},
    {"number", TYPES_NUMBERS, NULL},
    {"string", TYPE(STRING), NULL},
    {"mapping", TYPE(DICT), NULL},
    {"sequence", TYPES_SEQUENCES, NULL},
    {"iterable", TYPES_ITERABLE, NULL},
    {"callable", TYPE(UNDEFINED) | TYPE(LOOP) | TYPE(FUNCTION), NULL},
    {"eq", 0, "=="},
    {"equalto", 0, "=="},
    {"ne", 0, "!="},
    {"lt", 0, "<"},
    {"lessthan", 0, "<"},
    {"le", 0, "<="},
    {"gt", 0, ">"},
    {"greaterthan", 0, ">"},
    {"ge", 0, ">="},
    {"in", 0, "in"},
    {"sameas", 0, "=="},
    {"divisibleby", 0, "%"},
    {"odd", 0, "%"},
    {"even", 0, "%"},
};
#undef TYPE

static inline bool jinja_call_test(Jinja* j, TemplateValue name, TemplateValue v, const JinjaArguments* a) {
    const bool odd = template_is(name, "odd"), halves = odd || template_is(name, "even");
    const TemplateValue other = halves ? template_int(2) : a->count ? a->v[0] : template_value(TEMPLATE_UNDEFINED);
    for (size_t i = 0; i < sizeof jinja_tests_known / sizeof *jinja_tests_known; i++) {
        const char *known = jinja_tests_known[i].name, *op = jinja_tests_known[i].op;
        const bool is = jinja_tests_known[i].types >> v.type & 1;
        if (!template_is(name, known)) { continue; }
        if (!op && a->count) { jinja_fail(j, "the test \"%s\" takes no argument", known); }
        if (!op) { return is && ((strcmp(known, "true") != 0 && strcmp(known, "false") != 0) || v.as.i == (known[0] == 't')); }
        if (strcmp(known, "sameas") == 0 && v.type != other.type) { return false; }
        const TemplateValue result = j->binary(j, jinja_word(j, op), v, other);
        return op[0] == '%' ? jinja_equal(j, result, template_int(odd)) : jinja_truth(result);
    }
    jinja_not_known(j, "test", name);
}

#endif
