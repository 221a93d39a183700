/* template_functions.h -- what a chat template may call: filters (x | trim), tests (x is defined), methods (x.split()) and
 * functions (namespace()). Each is a row of a table: its name, its parameters, its function. The results are Python's and
 * jinja2's.
 */
#ifndef LLMC_TEMPLATE_FUNCTIONS_H
#define LLMC_TEMPLATE_FUNCTIONS_H

#include "llmc/text/template_strings.h"  // defines: JinjaFunction, JinjaArguments, jinja_list_of, jinja_join, jinja_do_split
#include "llmc/text/template_value.h"    // defines: Jinja, JinjaText, TemplateValue, jinja_fail, jinja_str

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
    if (a->how == 'l' && v.type == TEMPLATE_ITERATOR) { jinja_misused(j, v, "asked for its last item"); }
    const TemplateList* list = jinja_list_of(j, v).as.list;
    if (list->count) { return list->items[a->how == 'f' ? 0 : list->count - 1]; }
    return jinja_undefined(j, "%s", a->how == 'f' ? "No first item, sequence was empty." : "No last item, sequence was empty.");
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
    const bool exact = jinja_truth(a->v[1]), down = jinja_integer(j, a->v[0], 0) != 0;
    TemplatePair* p = jinja_keyed(j, list.as.list, a->v[2], exact);
    jinja_sort(j, p, list.as.list->count, down);
    for (size_t i = 0; i < list.as.list->count; i++) { list.as.list->items[i] = p[i].value; }
    return list;
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
    const TemplateValue list = jinja_do_items(j, v, a);
    const TemplateValue by = template_int(a->v[1].type == TEMPLATE_STRING && template_is(a->v[1], "value"));
    TemplatePair* p = jinja_keyed(j, list.as.list, by, jinja_truth(a->v[0]));
    jinja_sort(j, p, list.as.list->count, jinja_truth(a->v[2]));
    for (size_t i = 0; i < list.as.list->count; i++) { list.as.list->items[i] = p[i].value; }
    return list;
}

static inline TemplateValue jinja_call_filter(Jinja* j, TemplateValue name, TemplateValue self, const JinjaArguments* a);
static inline bool jinja_call_test(Jinja* j, TemplateValue name, TemplateValue self, const JinjaArguments* a);

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
    if (v.type == TEMPLATE_UNDEFINED) { jinja_misused(j, v, "made a number"); }
    if (jinja_is_integer(v)) { return template_int(v.as.i); }
    if (v.type != TEMPLATE_FLOAT && (v.type != TEMPLATE_STRING || !jinja_read_number(j, v, &d, &i, &whole))) {
        return otherwise;
    }
    if (whole) { return template_int(i); }
    return fabs(d) < 9e18 ? template_int((int64_t)d) : otherwise;
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
        how.comma = jinja_text(j, a->v[2].as.list->items[0], NULL);
        how.colon = jinja_text(j, a->v[2].as.list->items[1], NULL);
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
                            : jinja_call_filter(j, jinja_text(j, a->v[0], NULL), list->items[i], &rest));
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
        const bool passes =
            a->count <= member ? jinja_truth(of) : jinja_call_test(j, jinja_text(j, a->v[member], NULL), of, &rest);
        if (passes == !(a->how & SELECT_NOT)) { jinja_add(j, kept, list->items[i]); }
    }
    return jinja_as(kept, TEMPLATE_ITERATOR);
}

static const JinjaFunction jinja_filters_known[] = {
    {"capitalize", "", jinja_do_case, 'c'},
    {"count", "", jinja_do_length, 0},
    {"d", "default_value boolean", jinja_do_default, 0},
    {"default", "default_value boolean", jinja_do_default, 0},
    {"dictsort", "case_sensitive by reverse", jinja_do_dictsort, 0},
    {"first", "", jinja_do_end_item, 'f'},
    {"indent", "width first blank", jinja_do_indent, 0},
    {"int", "default", jinja_do_int, 0},
    {"items", "", jinja_do_items, 0},
    {"join", "d attribute", jinja_do_join, 0},
    {"last", "", jinja_do_end_item, 'l'},
    {"length", "", jinja_do_length, 0},
    {"list", "", jinja_do_list, 0},
    {"lower", "", jinja_do_case, 'l'},
    {"map", "*", jinja_do_map, 0},
    {"reject", "*", jinja_do_select, SELECT_NOT},
    {"rejectattr", "*", jinja_do_select, SELECT_MEMBER | SELECT_NOT},
    {"replace", "old new count", jinja_do_replace, 'f'},
    {"reverse", "", jinja_do_reverse, 0},
    {"safe", "", jinja_do_string, 0},
    {"select", "*", jinja_do_select, 0},
    {"selectattr", "*", jinja_do_select, SELECT_MEMBER},
    {"sort", "reverse case_sensitive attribute", jinja_do_sort, 0},
    {"string", "", jinja_do_string, 0},
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
    {"count", "_sub", jinja_do_count, 0},
    {"endswith", "_suffix", jinja_do_end, 'e'},
    {"find", "_sub", jinja_do_find, 0},
    {"isdigit", "", jinja_do_isdigit, 0},
    {"join", "_iterable", jinja_do_joined, 0},
    {"lower", "", jinja_do_case, 'l'},
    {"lstrip", "_chars", jinja_do_strip, 'l'},
    {"removeprefix", "_prefix", jinja_do_remove, 's'},
    {"removesuffix", "_suffix", jinja_do_remove, 'e'},
    {"replace", "_old _new _count", jinja_do_replace, 0},
    {"rsplit", "sep maxsplit", jinja_do_split, 'r'},
    {"rstrip", "_chars", jinja_do_strip, 'r'},
    {"split", "sep maxsplit", jinja_do_split, 0},
    {"splitlines", "keepends", jinja_do_splitlines, 0},
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
