/* template.h -- renders a chat template: an interpreter of the part of Jinja that chat templates use. It knows nothing of
 * tokenizers and models.
 *
 *   Template t;                                        parse once; const while it renders, so threads may share it
 *   template_parse(&t, text, len, "chat_template.jinja", &e);
 *   TemplateArena arena = {NULL, 0};                   one a thread; template_arena_reset() between renderings
 *   TemplateValue variables = template_dict(&arena);
 *   template_dict_set(&arena, variables, "messages", template_from_json(&arena, &json, json_root(&json)));
 *   template_dict_set(&arena, variables, "bos_token", template_string(&arena, "<s>", 3, true));
 *   template_render(&t, &arena, variables, NULL, &out, &e);    out lies in the arena
 *   template_arena_free(&arena);
 *   template_free(&t);
 *
 * The result is that of jinja2's ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True) with what transformers
 * adds: the functions raise_exception and strftime_now, tojson as json.dumps(ensure_ascii=False), the tag generation, and the
 * tags break and continue. Every byte of the result says who wrote it: the template, or data (text/template_value.h).
 *
 * A template is hostile input. It reaches nothing but its values; steps, depth and memory are bounded (JINJA_MAX_*). Unknown
 * things are refused by name and place: "FILE:12:7: the filter "foo" is not known here", a filter or test only when it is met.
 * Not known: the tags raw, with, call, include, import, extends and block, recursive loops, chains of comparisons, the operator
 * **, members that are numbers, functions that no published template calls, and integers beyond 64 bits.
 */
#ifndef LLMC_TEMPLATE_H
#define LLMC_TEMPLATE_H

#include "llmc/text/template_functions.h"  // defines: jinja_call_filter, jinja_call_test, jinja_method, JinjaBound, JinjaLoop
#include "llmc/text/template_lex.h"        // defines: JinjaLexer, jinja_lex
#include "llmc/text/template_parse.h"      // defines: JinjaNode, JinjaParser, jinja_statements
#include "llmc/text/template_value.h"  // defines: TemplateValue, TemplateArena, template_dict, template_string, template_value

typedef struct {
    char* text;  // with newlines \n alone
    char* path;
    TemplateArena arena;    // the tree
    const JinjaNode* root;  // the first statement
    bool has_generation;    // the template has the tag generation
} Template;

typedef struct {
    const char* text;              // len bytes; no NUL behind them
    const uint8_t* from_template;  // one a byte: 1 if the template wrote it, 0 if it comes from data
    size_t len;
    const TemplateSpan* generations;  // what stood between {% generation %} and {% endgeneration %}
    size_t num_generations;
} TemplateRendered;

// ---------------------------------------------------------------------------------------------------------------------
// variables

/* A place with variables of its own: the template, a turn of a loop, a call of a macro. */
typedef struct JinjaScope {
    struct JinjaScope* above;  // NULL: the caller's variables come next
    TemplateValue variables;   // dict
} JinjaScope;

static inline JinjaScope* jinja_new_scope(Jinja* j, JinjaScope* above) {
    JinjaScope* scope = (JinjaScope*)jinja_alloc(j, sizeof *scope);
    scope->above = above;
    scope->variables = template_dict(j->arena);
    return scope;
}

static inline void jinja_put(Jinja* j, TemplateValue dict, TemplateValue name, TemplateValue value) {
    const size_t at = jinja_dict_find(j, dict.as.dict, name);
    if (at == dict.as.dict->count) { template_dict_add(j->arena, dict, name, value); }
    dict.as.dict->items[at].value = value;
}

static inline TemplateValue jinja_bind(Jinja* j, const JinjaFunction* f, TemplateValue self, const JinjaNode* macro,
                                       JinjaScope* scope) {
    const JinjaBound filled = {f, self, macro, scope};
    JinjaBound* bound = (JinjaBound*)jinja_alloc(j, sizeof *bound);
    *bound = filled;
    TemplateValue v = template_value(TEMPLATE_FUNCTION);
    v.as.bound = bound;
    return v;
}

static inline TemplateValue jinja_variable(Jinja* j, TemplateValue name) {
    for (const JinjaScope* s = j->scope; s; s = s->above) {
        const size_t at = jinja_dict_find(j, s->variables.as.dict, name);
        if (at < s->variables.as.dict->count) { return s->variables.as.dict->items[at].value; }
    }
    const size_t at = jinja_dict_find(j, j->variables.as.dict, name);
    if (at < j->variables.as.dict->count) { return j->variables.as.dict->items[at].value; }
    const JinjaFunction* f = jinja_named(jinja_functions, name);
    return f ? jinja_bind(j, f, template_none(), NULL, NULL)
             : jinja_undefined(j, "'%.*s' is undefined", (int)size_min(name.len, 200), name.as.s);
}

static inline void jinja_loop_fill(Jinja* j, JinjaLoop* loop, size_t want);

/* Returns the undefined member of a value. */
static inline TemplateValue jinja_no_member(Jinja* j, TemplateValue of, TemplateValue key) {
    JinjaText t = {NULL, NULL, 0, 0};
    jinja_repr(j, &t, key);
    return jinja_undefined(j, key.type == TEMPLATE_STRING ? "'%s' has no attribute %.*s" : "%s has no element %.*s",
                           jinja_type_name(of), (int)size_min(t.len, 200), t.s);
}

/* Returns loop.NAME. */
static inline TemplateValue jinja_loop_member(Jinja* j, TemplateValue of, TemplateValue name) {
    JinjaLoop* loop = of.as.loop;
    static const char* const names[] = {"length", "revindex", "revindex0", "last",    "nextitem",
                                        "index",  "index0",   "first",     "previtem"};
    const TemplateList* items = loop->items.as.list;
    const int64_t i = (int64_t)loop->index;
    int which = 0;
    while (which < 9 && !template_is(name, names[which])) { which++; }
    if (loop->node->kids[4] && which < 5) { jinja_loop_fill(j, loop, which < 3 ? SIZE_MAX : loop->index + 2); }
    const int64_t n = (int64_t)items->count;
    const int64_t numbers[] = {n, n - i, n - i - 1, i + 1 == n, 0, i + 1, i, i == 0};
    if (which == 4 && i + 1 < n) { return items->items[i + 1]; }
    if (which == 8 && i > 0) { return items->items[i - 1]; }
    if (which == 3 || which == 7) { return template_bool(numbers[which]); }
    if (which < 8 && which != 4) { return template_int(numbers[which]); }
    if (which == 9) { return jinja_no_member(j, of, name); }
    return jinja_undefined(j, "there is no %s item", which == 4 ? "next" : "previous");
}

/* Returns of.key (`attribute`) or of[key]: an item, or a method; jinja2 looks for them in this or the other order. */
static inline TemplateValue jinja_member(Jinja* j, TemplateValue of, TemplateValue key, bool attribute) {
    if (of.type == TEMPLATE_UNDEFINED) { jinja_misused(j, of, "asked for a member"); }
    const JinjaFunction* method = key.type == TEMPLATE_STRING ? jinja_method(of, key) : NULL;
    if (method && attribute) { return jinja_bind(j, method, of, NULL, NULL); }
    if (of.type == TEMPLATE_LOOP) { return jinja_loop_member(j, of, key); }
    if (of.type == TEMPLATE_DICT || of.type == TEMPLATE_NAMESPACE) {
        const size_t at = jinja_dict_find(j, of.as.dict, key);
        if (at < of.as.dict->count) { return of.as.dict->items[at].value; }
    } else if (jinja_is_integer(key) && (of.type == TEMPLATE_LIST || of.type == TEMPLATE_TUPLE || of.type == TEMPLATE_STRING)) {
        const TemplateList* items = of.type == TEMPLATE_STRING ? jinja_list_of(j, of).as.list : of.as.list;
        const int64_t n = (int64_t)items->count, i = key.as.i < 0 ? key.as.i + n : key.as.i;
        if (i >= 0 && i < n) { return items->items[i]; }
    }
    if (method) { return jinja_bind(j, method, of, NULL, NULL); }
    return jinja_no_member(j, of, key);
}

// ---------------------------------------------------------------------------------------------------------------------
// expressions

static inline TemplateValue jinja_eval(Jinja* j, const JinjaNode* n);
static inline int jinja_run(Jinja* j, const JinjaNode* n);

static inline TemplateValue jinja_arithmetic(Jinja* j, char op, bool twice, TemplateValue a, TemplateValue b) {
    if (!jinja_is_number(a) || !jinja_is_number(b)) {
        jinja_misused(j, jinja_is_number(a) ? b : a, op == '+' ? "added to this" : "used in arithmetic");
    }
    const double x = jinja_double(a), y = jinja_double(b);
    const bool integers = jinja_is_integer(a) && jinja_is_integer(b);
    const bool whole = integers && !(op == '/' && !twice);
    int64_t r = 0;
    if ((op == '/' || op == '%') && y == 0) { jinja_fail(j, "division by zero"); }
    if (!whole && (twice || op == '%')) { jinja_fail(j, "the operators // and %% of fractions are not known here"); }
    if (!whole) { return template_float(op == '+' ? x + y : op == '-' ? x - y : op == '*' ? x * y : x / y); }
    const bool overflows = op == '+'   ? __builtin_add_overflow(a.as.i, b.as.i, &r)
                           : op == '-' ? __builtin_sub_overflow(a.as.i, b.as.i, &r)
                           : op == '*' ? __builtin_mul_overflow(a.as.i, b.as.i, &r)
                                       : op == '/' && a.as.i == INT64_MIN && b.as.i == -1;
    if (overflows) { jinja_fail(j, "a number has more than 64 bits"); }
    if (op != '/' && op != '%') { return template_int(r); }
    const int64_t left = b.as.i == -1 ? 0 : a.as.i % b.as.i;
    const bool down = left != 0 && (left < 0) != (b.as.i < 0);  // Python rounds down
    return template_int(op == '/' ? (b.as.i == -1 ? -a.as.i : a.as.i / b.as.i) - down : down ? left + b.as.i : left);
}

/* Returns a op b: comparisons, arithmetic, and what + * ~ and % make of strings and lists. */
static inline TemplateValue jinja_binary(Jinja* j, TemplateValue op, TemplateValue a, TemplateValue b) {
    const char c = op.as.s[0];
    JinjaText t = {NULL, NULL, 0, 0};
    if (c == 'i' || c == 'n') { return template_bool(jinja_contains(j, b, a) == (c == 'i')); }  // in, not in
    if (c == '=' || c == '!') { return template_bool(jinja_equal(j, a, b) == (c == '=')); }
    if (c == '<' || c == '>') {
        const int order = jinja_order(j, a, b);
        return template_bool((c == '<' ? order < 0 : order > 0) || (op.len == 2 && order == 0));
    }
    if (c == '~') {
        jinja_append_string(j, &t, jinja_str(j, a));
        jinja_append_string(j, &t, jinja_str(j, b));
        return jinja_string(&t);
    }
    if (a.type == TEMPLATE_UNDEFINED) { jinja_misused(j, a, "used in arithmetic"); }
    if (b.type == TEMPLATE_UNDEFINED) { jinja_misused(j, b, "used in arithmetic"); }
    if (c == '+' && a.type == TEMPLATE_STRING && b.type == TEMPLATE_STRING) {
        jinja_append_string(j, &t, a);
        jinja_append_string(j, &t, b);
        return jinja_string(&t);
    }
    if (c == '+' && a.type == b.type && (a.type == TEMPLATE_LIST || a.type == TEMPLATE_TUPLE)) {
        const TemplateValue sum = jinja_list_of(j, a);
        for (size_t i = 0; i < b.as.list->count; i++) { jinja_add(j, sum, b.as.list->items[i]); }
        return jinja_as(sum, a.type);
    }
    if (c == '*' && jinja_is_integer(a) && !jinja_is_number(b)) { return jinja_binary(j, op, b, a); }
    if (c == '*' && jinja_is_integer(b) && (a.type == TEMPLATE_STRING || jinja_has_items(a))) {
        const TemplateValue product = template_list(j->arena), items = jinja_list_of(j, a);
        for (int64_t i = 0; i < b.as.i; i++) {
            jinja_spend(j, 0);
            for (size_t k = 0; k < items.as.list->count; k++) { jinja_add(j, product, items.as.list->items[k]); }
        }
        return a.type == TEMPLATE_STRING ? jinja_join(j, jinja_word(j, ""), product, template_none())
                                         : jinja_as(product, a.type);
    }
    if (c == '%' && a.type == TEMPLATE_STRING) { jinja_fail(j, "the operator %% on strings is not known here"); }
    TemplateValue v = jinja_arithmetic(j, c, op.len == 2, a, b);
    v.data = a.data || b.data;
    return v;
}

static inline TemplateValue jinja_slice(Jinja* j, TemplateValue of, const JinjaNode* n) {
    const bool text = of.type == TEMPLATE_STRING;
    if (!text && of.type != TEMPLATE_LIST && of.type != TEMPLATE_TUPLE) { jinja_misused(j, of, "sliced"); }
    const TemplateValue items = jinja_list_of(j, of), out = template_list(j->arena);
    const int64_t count = (int64_t)items.as.list->count;
    int64_t at[3];
    at[2] = n->kids[3] ? jinja_integer(j, jinja_eval(j, n->kids[3]), 1) : 1;
    if (at[2] == 0) { jinja_fail(j, "a slice needs a step that is not 0"); }
    const bool back = at[2] < 0;
    for (int i = 0; i < 2; i++) {
        const int64_t absent = (i == 0) != back ? 0 : count, low = back ? -1 : 0, high = back ? count - 1 : count;
        const TemplateValue bound = n->kids[i + 1] ? jinja_eval(j, n->kids[i + 1]) : template_none();
        if (bound.type == TEMPLATE_UNDEFINED) { jinja_misused(j, bound, "the end of a slice"); }
        at[i] = jinja_integer(j, bound, 0);
        if (at[i] < 0) { at[i] += count; }
        at[i] = at[i] < low ? low : at[i] > high ? high : at[i];
        if (bound.type == TEMPLATE_NONE) { at[i] = back ? (i == 0 ? count - 1 : -1) : absent; }
    }
    for (int64_t i = at[0]; back ? i > at[1] : i < at[1]; i += at[2]) {
        jinja_add(j, out, items.as.list->items[i]);
        if (back ? at[2] < at[1] - i : at[2] > at[1] - i) { break; }
    }
    return text ? jinja_join(j, template_string(j->arena, "", 0, true), out, template_none()) : jinja_as(out, of.type);
}

static inline void jinja_add_argument(Jinja* j, JinjaArguments* a, TemplateValue v, TemplateValue name) {
    if (a->count == JINJA_MAX_ARGUMENTS) { jinja_fail(j, "more than %d arguments are not known here", JINJA_MAX_ARGUMENTS); }
    a->v[a->count] = v;
    a->names[a->count++] = name;
}

static inline JinjaArguments jinja_eval_arguments(Jinja* j, const JinjaNode* n) {
    JinjaArguments a;
    a.how = 0;
    a.count = 0;
    for (; n; n = n->next) {
        const TemplateValue v = jinja_eval(j, n->kids[0]), none = template_none();
        if (n->kind == NODE_ARGUMENT) {
            jinja_add_argument(j, &a, v, n->value);
            continue;
        }
        const TemplateList* list = jinja_list_of(j, v).as.list;  // the items of *v, the keys of **v
        if (n->kind == NODE_DICT && v.type != TEMPLATE_DICT) { jinja_misused(j, v, "given as arguments with names"); }
        for (size_t i = 0; i < list->count; i++) {
            const bool dict = n->kind == NODE_DICT;
            jinja_add_argument(j, &a, dict ? v.as.dict->items[i].value : list->items[i], dict ? list->items[i] : none);
        }
    }
    return a;
}

/* Runs a macro's body and returns its text. */
static inline TemplateValue jinja_call_macro(Jinja* j, const JinjaBound* macro, const JinjaArguments* a) {
    JinjaScope *scope = jinja_new_scope(j, macro->scope), *before = j->scope;
    JinjaText text = {NULL, NULL, 0, 0}, *out = j->out;
    const JinjaNode* p = macro->macro->kids[0];
    size_t used = 0, i = 0;
    j->scope = scope;
    for (; p; p = p->next, i++) {
        const bool placed = i < a->count && a->names[i].type == TEMPLATE_NONE;
        size_t at = placed ? i : 0;
        while (!placed && at < a->count && !(a->names[at].type == TEMPLATE_STRING && jinja_equal(j, a->names[at], p->value))) {
            at++;
        }
        used += at < a->count;
        jinja_put(j, scope->variables, p->value,
                  at < a->count ? a->v[at]
                  : p->kids[0]  ? jinja_eval(j, p->kids[0])
                                : jinja_undefined(j, "parameter '%.*s' was not provided", (int)size_min(p->value.len, 200),
                                                  p->value.as.s));
    }
    if (used < a->count) {
        jinja_fail(j, "the macro \"%.*s\" does not take these arguments", (int)macro->macro->value.len,
                   macro->macro->value.as.s);
    }
    j->out = &text;
    jinja_run(j, macro->macro->kids[1]);
    j->out = out;
    j->scope = before;
    return jinja_string(&text);
}

/* Calls a function or macro. */
static inline TemplateValue jinja_call(Jinja* j, const JinjaNode* n) {
    const TemplateValue f = jinja_eval(j, n->kids[0]);
    const JinjaArguments a = jinja_eval_arguments(j, n->kids[1]);
    j->at = n->at;
    if (f.type == TEMPLATE_UNDEFINED && f.as.s) { jinja_fail(j, "%s that is known here", f.as.s); }
    if (f.type != TEMPLATE_FUNCTION) { jinja_misused(j, f, "called: it is no function that is known here"); }
    return f.as.bound->function ? jinja_call_function(j, f.as.bound->function, f.as.bound->self, &a)
                                : jinja_call_macro(j, f.as.bound, &a);
}

static inline TemplateValue jinja_eval_items(Jinja* j, const JinjaNode* n) {
    TemplateValue list = template_list(j->arena), dict = template_dict(j->arena);
    for (const JinjaNode* item = n->kids[0]; item; item = item->next) {
        if (n->kind == NODE_DICT) {
            const TemplateValue key = jinja_eval(j, item->kids[0]);
            jinja_put(j, dict, key, jinja_eval(j, item->kids[1]));
        } else {
            jinja_add(j, list, jinja_eval(j, item));
        }
    }
    return n->kind == NODE_DICT ? dict : jinja_as(list, n->kind == NODE_LIST ? TEMPLATE_LIST : TEMPLATE_TUPLE);
}

static inline TemplateValue jinja_eval_node(Jinja* j, const JinjaNode* n) {
    const JinjaNode *x = n->kids[0], *y = n->kids[1];
    TemplateValue a = template_none(), b = a;
    const bool first =
        n->kind >= NODE_ATTRIBUTE && n->kind <= NODE_BINARY && n->kind != NODE_CALL;  // the first kid has a value
    if (first) { a = jinja_eval(j, x); }
    switch (n->kind) {
        case NODE_CONSTANT: return n->value;
        case NODE_NAME: return jinja_variable(j, n->value);
        case NODE_LIST:
        case NODE_TUPLE:
        case NODE_DICT: return jinja_eval_items(j, n);
        case NODE_ATTRIBUTE: j->at = n->at; return jinja_member(j, a, n->value, true);
        case NODE_ITEM:
            b = jinja_eval(j, y);
            j->at = n->at;
            return jinja_member(j, a, b, false);
        case NODE_SLICE: return jinja_slice(j, a, n);
        case NODE_CALL: return jinja_call(j, n);
        case NODE_FILTER:
        case NODE_TEST: {
            const JinjaArguments arguments = jinja_eval_arguments(j, y);
            j->at = n->at;
            if (n->kind == NODE_FILTER) { return jinja_call_filter(j, n->value, a, &arguments); }
            return template_bool(jinja_call_test(j, n->value, a, &arguments));
        }
        case NODE_NOT: return template_bool(!jinja_truth(a));
        case NODE_SIGN:
            b = jinja_arithmetic(j, n->value.as.s[0], false, template_int(0), a);
            if (a.type == TEMPLATE_FLOAT && n->value.as.s[0] == '-') { b.as.d = -a.as.d; }  // 0 - 0.0 is no -0.0
            b.data = a.data;
            return b;
        case NODE_BINARY:
            if (template_is(n->value, "and")) { return jinja_truth(a) ? jinja_eval(j, y) : a; }
            if (template_is(n->value, "or")) { return jinja_truth(a) ? a : jinja_eval(j, y); }
            b = jinja_eval(j, y);
            j->at = n->at;
            return jinja_binary(j, n->value, a, b);
        case NODE_CHOICE:
            if (jinja_truth(jinja_eval(j, x))) { return jinja_eval(j, y); }
            if (n->kids[2]) { return jinja_eval(j, n->kids[2]); }
            return jinja_undefined(j, "the inline if-expression evaluated to false and no else section was defined.");
        default: return a;
    }
}

static inline TemplateValue jinja_eval(Jinja* j, const JinjaNode* n) {
    jinja_spend(j, 0);
    jinja_enter(j);
    j->at = n->at;
    const TemplateValue v = jinja_eval_node(j, n);
    j->depth--;
    return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// statements

enum { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };  // what a statement does to the loop around it

/* Sets a name, a namespace's member, or several from a sequence. */
static inline void jinja_assign(Jinja* j, const JinjaNode* target, TemplateValue v) {
    j->at = target->at;
    if (target->kind == NODE_TUPLE) {
        const TemplateList* list = jinja_list_of(j, v).as.list;
        size_t i = 0;
        for (const JinjaNode* t = target->kids[0]; t; t = t->next, i++) {
            if (i < list->count) { jinja_assign(j, t, list->items[i]); }
        }
        if (i != list->count) { jinja_fail(j, "%zu values cannot be set from %zu", i, list->count); }
    } else if (target->kind == NODE_ATTRIBUTE) {
        const TemplateValue of = jinja_variable(j, target->kids[0]->value);
        if (of.type != TEMPLATE_NAMESPACE) { jinja_fail(j, "cannot assign attribute on non-namespace object"); }
        if (target->value.as.s[0] == '_') { jinja_fail(j, "a namespace has no members that begin with _"); }
        jinja_put(j, of, target->value, v);
    } else {
        jinja_put(j, j->scope->variables, target->value, v);
    }
}

/* Takes the items that pass a loop's condition until it has `want` of them, or there are no more. */
static inline void jinja_loop_fill(Jinja* j, JinjaLoop* loop, size_t want) {
    JinjaScope* before = j->scope;
    while (loop->items.as.list->count < want && loop->from < loop->source->count) {
        const TemplateValue item = loop->source->items[loop->from++];
        j->scope = jinja_new_scope(j, loop->scope);
        jinja_assign(j, loop->node->kids[0], item);
        if (jinja_truth(jinja_eval(j, loop->node->kids[4]))) { jinja_add(j, loop->items, item); }
    }
    j->scope = before;
}

static inline int jinja_run_for(Jinja* j, const JinjaNode* n) {
    JinjaScope* outer = j->scope;
    const TemplateValue items = jinja_list_of(j, jinja_eval(j, n->kids[1]));
    JinjaLoop* loop = (JinjaLoop*)jinja_alloc(j, sizeof *loop);
    const JinjaLoop fresh = {n->kids[4] ? template_list(j->arena) : items, 0, n, items.as.list, 0, outer};
    *loop = fresh;
    TemplateValue v = template_value(TEMPLATE_LOOP);
    v.as.loop = loop;
    bool ran = false;  // a turn came to its end: neither break nor continue cut it short
    for (;; loop->index++) {
        if (n->kids[4]) { jinja_loop_fill(j, loop, loop->index + 1); }
        if (loop->index >= loop->items.as.list->count) { break; }
        j->scope = jinja_new_scope(j, outer);
        template_dict_set(j->arena, j->scope->variables, "loop", v);
        jinja_assign(j, n->kids[0], loop->items.as.list->items[loop->index]);
        const int flow = jinja_run(j, n->kids[2]);
        ran = ran || flow == FLOW_ON;
        if (flow == FLOW_BREAK) { break; }
    }
    j->scope = ran ? outer : jinja_new_scope(j, outer);
    const int flow = ran ? FLOW_ON : jinja_run(j, n->kids[3]);
    j->scope = outer;
    return flow;
}

/* Runs statements with variables of their own and sets *v to their text. */
static inline int jinja_capture(Jinja* j, const JinjaNode* body, TemplateValue* v) {
    JinjaText text = {NULL, NULL, 0, 0}, *out = j->out;
    JinjaScope* outer = j->scope;
    j->out = &text;
    j->scope = jinja_new_scope(j, outer);
    const int flow = jinja_run(j, body);
    j->scope = outer;
    j->out = out;
    *v = jinja_string(&text);
    return flow;
}

/* Puts a block's text through its filters. */
static inline TemplateValue jinja_filtered(Jinja* j, const JinjaNode* filter, TemplateValue v) {
    if (!filter) { return v; }
    v = jinja_filtered(j, filter->kids[0], v);
    const JinjaArguments a = jinja_eval_arguments(j, filter->kids[1]);
    return jinja_call_filter(j, filter->value, v, &a);
}

static inline void jinja_run_generation(Jinja* j, const JinjaNode* n) {
    TemplateValue v;
    jinja_capture(j, n->kids[0], &v);
    const TemplateSpan span = {j->whole->len, j->whole->len + v.len};  // also in a macro, as transformers counts
    j->spans = (TemplateSpan*)template_grow(j->arena, j->spans, j->num_spans, &j->spans_cap, sizeof span);
    j->spans[j->num_spans++] = span;
    jinja_append_string(j, j->out, v);
}

/* Runs a list of statements. */
static inline int jinja_run(Jinja* j, const JinjaNode* n) {
    int flow = FLOW_ON;
    jinja_enter(j);
    for (; n && flow == FLOW_ON; n = n->next) {
        j->at = n->at;
        jinja_spend(j, 0);
        switch (n->kind) {
            case NODE_TEXT: jinja_append_string(j, j->out, n->value); break;
            case NODE_OUTPUT: jinja_append_string(j, j->out, jinja_str(j, jinja_eval(j, n->kids[0]))); break;
            case NODE_IF: {
                const JinjaNode* at = n;  // kids[3] leads from an if to its elif
                bool passes = jinja_truth(jinja_eval(j, at->kids[0]));
                for (; !passes && at->kids[3]; passes = jinja_truth(jinja_eval(j, at->kids[0]))) { at = at->kids[3]; }
                flow = jinja_run(j, at->kids[passes ? 1 : 2]);
                break;
            }
            case NODE_FOR: flow = jinja_run_for(j, n); break;
            case NODE_SET: jinja_assign(j, n->kids[0], jinja_eval(j, n->kids[1])); break;
            case NODE_SET_BLOCK:
            case NODE_FILTER_BLOCK: {
                TemplateValue v;
                flow = jinja_capture(j, n->kids[2], &v);
                if (flow != FLOW_ON) { break; }
                v = jinja_filtered(j, n->kids[1], v);
                n->kids[0] ? jinja_assign(j, n->kids[0], v) : jinja_append_string(j, j->out, jinja_str(j, v));
                break;
            }
            case NODE_MACRO:
                jinja_put(j, j->scope->variables, n->value, jinja_bind(j, NULL, template_none(), n, j->scope));
                break;
            case NODE_GENERATION: jinja_run_generation(j, n); break;
            case NODE_BREAK: flow = FLOW_BREAK; break;
            default: flow = FLOW_CONTINUE;
        }
    }
    j->depth--;
    return flow;
}

// ---------------------------------------------------------------------------------------------------------------------
// the door

static inline void template_free(Template* t) {
    template_arena_free(&t->arena);
    free(t->text);
    free(t->path);
    memset(t, 0, sizeof *t);
}

/* Sets up the state of a parsing or rendering. */
static inline Jinja jinja_begin(const Template* t, TemplateArena* arena, Error* e) {
    Jinja j;
    memset(&j, 0, sizeof j);
    j.arena = arena;
    j.start = arena->total;
    j.text = t->text;
    j.path = t->path;
    j.e = e;
    return j;
}

/* Parses a template's text of `len` bytes; `path` names it in messages. Free with template_free(). */
static inline bool template_parse(Template* t, const char* text, size_t len, const char* path, Error* e) {
    memset(t, 0, sizeof *t);
    if (len > TEMPLATE_MAX_BYTES) {
        return fail(e, "%s: is %zu bytes long, wanted a chat template of at most 1 MiB", path, len);
    }
    t->text = (char*)xmalloc(len + 4);
    t->path = xstrdup(path);
    size_t used = 0;
    for (size_t i = 0; i < len; i++) {
        if (text[i] == '\n' && i > 0 && text[i - 1] == '\r') { continue; }
        t->text[used++] = text[i] == '\r' ? '\n' : text[i];
    }
    used -= used > 0 && t->text[used - 1] == '\n';
    memset(t->text + used, 0, len + 4 - used);  // the lexer looks ahead
    Jinja j = jinja_begin(t, &t->arena, e);
    if (setjmp(j.leave)) {
        template_free(t);
        return false;
    }
    for (size_t i = 0, n = 0; i < used; i += n) {
        j.at = i;
        n = utf8_char_length(t->text + i, used - i);
        if (!n || !t->text[i]) { jinja_fail(&j, "byte 0x%02x is not valid UTF-8 text", (uint8_t)t->text[i]); }
    }
    JinjaLexer l = {&j, t->text, 0, used, NULL, 0, 0, true};
    jinja_lex(&l);
    JinjaParser p = {&j, l.tokens, 0, false};
    t->root = jinja_statements(&p, "");
    t->has_generation = p.has_generation;
    return true;
}

/* Renders a template with a dict of variables that lies in the arena; so does the result. `now` is what strftime_now() prints,
 * NULL: this moment, in local time. Fails with what raise_exception() says, and with every error of jinja2's. */
static inline bool template_render(const Template* t, TemplateArena* arena, TemplateValue variables, const struct tm* now,
                                   TemplateRendered* out, Error* e) {
    JinjaText text = {NULL, NULL, 0, 0};
    Jinja j = jinja_begin(t, arena, e);
    const time_t moment = time(NULL);
    memset(out, 0, sizeof *out);
    j.out = j.whole = &text;
    j.member = jinja_member;
    j.binary = jinja_binary;
    j.variables = variables;
    now ? (void)(j.now = *now) : (void)localtime_r(&moment, &j.now);
    if (setjmp(j.leave)) { return false; }
    j.scope = jinja_new_scope(&j, NULL);
    jinja_run(&j, t->root);
    out->text = text.s;
    out->from_template = text.marks;
    out->len = text.len;
    out->generations = j.spans;
    out->num_generations = j.num_spans;
    return true;
}

#endif
