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
 * tags break and continue. Variables that are not set are undefined; transformers sets messages, tools and documents (none if
 * there are none), add_generation_prompt, bos_token, eos_token and the other names of special tokens. It also leaves members out
 * of a message that are null.
 *
 * Every byte of the result says who wrote it: the template, or data (text/template_value.h).
 *
 * A template is hostile input. It reaches nothing but its values; steps, depth and memory are bounded (JINJA_MAX_*). What is not
 * known here is refused by name, at its place: "FILE:12:7: the filter "foo" is not known ..."; inside an if only when it is
 * asked, as jinja2 does. Not known: loops that are recursive, other templates (extends, include, import, block), autoescape, and
 * integers beyond 64 bits.
 */
#ifndef LLMC_TEMPLATE_H
#define LLMC_TEMPLATE_H

#include "llmc/text/template_functions.h"  // defines: JinjaFunction, JinjaIterator, jinja_filter_named, jinja_member, jinja_binary
#include "llmc/text/template_parse.h"      // defines: JinjaNode, JinjaParser, JinjaLexer, jinja_lex, jinja_statements
#include "llmc/text/template_value.h"      // defines: TemplateValue, TemplateArena, template_dict, template_string ...

typedef struct {
    char* text;  // with newlines \n alone
    char* path;
    TemplateArena arena;    // the tree
    const JinjaNode* root;  // the first statement
    bool has_generation;    // the template has the tag generation
} Template;

/* Bytes [from, to) of a rendering. */
typedef struct TemplateSpan {
    size_t from, to;
} TemplateSpan;

typedef struct {
    const char* text;              // len bytes; no NUL behind them
    const uint8_t* from_template;  // one a byte: 1 if the template wrote it, 0 if it comes from data
    size_t len;
    const TemplateSpan* generations;  // what stood between {% generation %} and {% endgeneration %}
    size_t num_generations;
} TemplateRendered;

// ---------------------------------------------------------------------------------------------------------------------
// variables

/* A place with variables of its own: the template, a loop's body, a macro's body ... */
typedef struct JinjaScope {
    struct JinjaScope* above;  // NULL: the caller's variables come next
    TemplateValue variables;   // dict
} JinjaScope;

typedef struct JinjaMacro {
    const JinjaNode* node;
    JinjaScope* scope;  // where it was defined
} JinjaMacro;

static inline JinjaScope* jinja_new_scope(Jinja* j, JinjaScope* above) {
    JinjaScope* scope = (JinjaScope*)jinja_alloc(j, sizeof *scope);
    scope->above = above;
    scope->variables = template_dict(j->arena);
    return scope;
}

static inline TemplateValue* jinja_slot(TemplateValue dict, TemplateValue name) {
    TemplateDict* d = dict.as.dict;
    for (size_t i = 0; i < d->count; i++) {
        const TemplateValue key = d->items[i].key;
        if (key.len == name.len && key.type == TEMPLATE_STRING && memcmp(key.as.s, name.as.s, name.len) == 0) {
            return &d->items[i].value;
        }
    }
    return NULL;
}

static inline void jinja_set(Jinja* j, JinjaScope* scope, TemplateValue name, TemplateValue v) {
    TemplateValue* slot = jinja_slot(scope->variables, name);
    if (slot) {
        *slot = v;
    } else {
        jinja_alloc(j, 0);
        template_dict_add(j->arena, scope->variables, name, v);
    }
}

static inline TemplateValue jinja_lookup(Jinja* j, TemplateValue name) {
    const TemplateValue* slot = NULL;
    for (const JinjaScope* s = j->scope; s && !slot; s = s->above) {
        slot = jinja_slot(s->variables, name);
        jinja_spend(j, 1);
    }
    if (!slot) { slot = jinja_slot(j->variables, name); }
    if (slot && jinja_given(*slot)) { return *slot; }
    const JinjaFunction* global = slot ? NULL : jinja_function_named(TABLE_global, name);
    return global ? jinja_function_value(j, jinja_absent(), global) : jinja_undefined(name.as.s, name.len, NULL);
}

static inline TemplateValue jinja_eval(Jinja* j, const JinjaNode* n);

/* Assigns to a name, a member of a namespace, or a tuple of them. */
static inline void jinja_assign(Jinja* j, const JinjaNode* target, TemplateValue v) {
    if (target->kind == NODE_NAME) {
        jinja_set(j, j->scope, target->value, v);
    } else if (target->kind == NODE_MEMBER) {
        TemplateValue space = jinja_lookup(j, target->value);
        j->at = target->at;
        jinja_check_member(j, target->b->value);
        TemplateValue* slot = jinja_slot(space, target->b->value);
        if (slot) { *slot = v; }
        if (!slot) { template_dict_add(j->arena, space, target->b->value, v); }
    } else {
        JinjaIterator* it = jinja_iterate(j, v);
        TemplateValue item;
        const JinjaNode* part = target->a;
        for (; part && jinja_next(j, it, &item); part = part->next) { jinja_assign(j, part, item); }
        if (part || jinja_next(j, it, &item)) { jinja_fail(j, "wanted as many values as names to unpack them to"); }
    }
}

/* Fails unless the namespaces that a target names are ones. */
static inline void jinja_check_namespaces(Jinja* j, const JinjaNode* target) {
    for (const JinjaNode* part = target->a; part && target->kind == NODE_TUPLE; part = part->next) {
        jinja_check_namespaces(j, part);
    }
    if (target->kind != NODE_MEMBER || jinja_lookup(j, target->value).type == TEMPLATE_NAMESPACE) { return; }
    j->at = target->at;
    jinja_fail(j, "cannot assign attribute on non-namespace object");
}

// ---------------------------------------------------------------------------------------------------------------------
// statements

typedef enum { JINJA_NEXT, JINJA_BREAK, JINJA_CONTINUE } JinjaFlow;

static inline JinjaFlow jinja_run(Jinja* j, const JinjaNode* n);

/* Runs statements in a scope of their own and sets *v to what they print. */
static inline JinjaFlow jinja_capture(Jinja* j, const JinjaNode* body, JinjaScope* scope, TemplateValue* v) {
    JinjaText text = {NULL, NULL, 0, 0};
    JinjaText* out = j->out;
    JinjaScope* outside = j->scope;
    j->out = &text;
    j->scope = scope;
    const JinjaFlow flow = jinja_run(j, body);
    j->out = out;
    j->scope = outside;
    *v = jinja_string(&text);
    return flow;
}

static inline TemplateValue jinja_macro_value(Jinja* j, const JinjaNode* n) {
    TemplateValue v = template_value(TEMPLATE_MACRO, 0, false);
    v.as.macro = (JinjaMacro*)jinja_alloc(j, sizeof(JinjaMacro));
    v.as.macro->node = n;
    v.as.macro->scope = j->scope;
    return v;
}

/* Gives a macro's parameters their values. */
static inline void jinja_pass(Jinja* j, const JinjaMacro* macro, JinjaScope* scope, const JinjaArguments* a) {
    const JinjaNode* n = macro->node;
    const TemplateValue more = template_list(j->arena), named = template_dict(j->arena);
    size_t i = 0;
    const JinjaNode* p = n->a;
    for (; i < a->count && !jinja_given(a->names[i]); i++, p = p ? p->next : NULL) {
        p ? jinja_set(j, scope, p->value, a->v[i]) : jinja_add(j, more, a->v[i]);
    }
    for (; i < a->count; i++) {
        const JinjaNode* known = p;
        while (known && !jinja_equal(j, known->value, a->names[i])) { known = known->next; }
        known ? jinja_set(j, scope, known->value, a->v[i]) : template_dict_add(j->arena, named, a->names[i], a->v[i]);
    }
    for (; p; p = p->next) {
        if (jinja_slot(scope->variables, p->value)) { continue; }
        JinjaText hint = {NULL, NULL, 0, 0};
        if (!p->a) {
            jinja_append_text(j, &hint, "parameter '", 1);
            jinja_append_string(j, &hint, p->value);
            jinja_append_text(j, &hint, "' was not provided", 1);
        }
        jinja_set(j, scope, p->value, p->a ? jinja_eval(j, p->a) : jinja_undefined(hint.s, hint.len, ""));
    }
    TemplateValue* caller = jinja_slot(named, jinja_word(j, "caller"));
    if (n->op & JINJA_USES_CALLER) {
        jinja_set(j, scope, jinja_word(j, "caller"), caller ? *caller : jinja_undefined_hint("No caller defined"));
    }
    if (n->op & JINJA_USES_KWARGS) { jinja_set(j, scope, jinja_word(j, "kwargs"), named); }
    const bool known = (n->op & JINJA_USES_KWARGS) || named.as.dict->count == (caller && (n->op & JINJA_USES_CALLER));
    if (!known) { jinja_fail(j, "the macro takes no argument of this name, or takes it once"); }
    TemplateValue rest = more;
    rest.type = TEMPLATE_TUPLE;
    if (n->op & JINJA_USES_VARARGS) { jinja_set(j, scope, jinja_word(j, "varargs"), rest); }
    if (!(n->op & JINJA_USES_VARARGS) && more.as.list->count) {
        jinja_fail(j, "the macro was given more arguments than it takes");
    }
}

static inline TemplateValue jinja_call_macro(Jinja* j, const JinjaMacro* macro, const JinjaArguments* a) {
    TemplateValue v;
    JinjaScope* outside = j->scope;
    jinja_descend(j);
    JinjaScope* scope = j->scope = jinja_new_scope(j, macro->scope);
    jinja_pass(j, macro, scope, a);
    j->scope = outside;
    jinja_capture(j, macro->node->d, scope, &v);
    j->depth--;
    return v;
}

static inline TemplateValue jinja_call(Jinja* j, TemplateValue callee, const JinjaArguments* a) {
    if (callee.type == TEMPLATE_MACRO) { return jinja_call_macro(j, callee.as.macro, a); }
    if (callee.type == TEMPLATE_FUNCTION) { return jinja_apply(j, callee.as.bound->function, callee.as.bound->self, a); }
    if (callee.type == TEMPLATE_JOINER && a->count == 0) {
        return callee.as.cycler->at++ ? callee.as.cycler->items : jinja_word(j, "");
    }
    if (callee.type == TEMPLATE_LOOP) { jinja_fail(j, "the loop is called, but loops that are recursive are not known here"); }
    jinja_fail_type(j, callee, "what can be called");
}

/* Sets *v to the next item of a loop's items for which its condition holds. */
static inline bool jinja_next_of_loop(Jinja* j, JinjaIterator* it, TemplateValue* v) {
    JinjaScope* outside = j->scope;
    bool found = false;
    while (!found && jinja_next(j, it->from, v)) {
        j->scope = jinja_new_scope(j, it->scope);
        jinja_assign(j, it->loop->a, *v);
        found = jinja_truth(jinja_eval(j, it->loop->c));
    }
    j->scope = outside;
    return found;
}

static inline JinjaFlow jinja_run_for(Jinja* j, const JinjaNode* n) {
    JinjaScope* outside = j->scope;
    JinjaLoop* loop = (JinjaLoop*)memset(jinja_alloc(j, sizeof *loop), 0, sizeof *loop);
    JinjaFlow flow = JINJA_NEXT;
    bool ran = false;  // a turn came to the body's end, without break and continue
    loop->items = jinja_iterate(j, jinja_eval(j, n->b));
    if (n->c) {
        JinjaIterator* filter = jinja_new_iterator(j, ITERATE_LOOP, loop->items);
        filter->loop = n;
        filter->scope = outside;
        loop->items = filter;
    }
    loop->index0 = loop->length = -1;
    loop->after = loop->changed = loop->before = jinja_absent();
    TemplateValue self = template_value(TEMPLATE_LOOP, 0, false), item, current = jinja_absent();
    self.as.loop = loop;
    for (; flow != JINJA_BREAK; loop->index0++, j->scope = outside) {
        item = loop->after;
        loop->after = jinja_absent();
        if (!jinja_given(item) && !jinja_next(j, loop->items, &item)) { break; }
        loop->before = current;
        current = item;
        j->scope = jinja_new_scope(j, outside);
        loop->index0++;
        jinja_set(j, j->scope, jinja_word(j, "loop"), self);
        jinja_assign(j, n->a, item);
        flow = jinja_run(j, n->d);
        ran |= flow == JINJA_NEXT;
        loop->index0--;
    }
    j->scope = outside;
    if (!n->e || ran) { return JINJA_NEXT; }
    j->scope = jinja_new_scope(j, outside);
    flow = jinja_run(j, n->e);
    j->scope = outside;
    return flow;
}

/* Puts `v` through the filters of a block. */
static inline TemplateValue jinja_filter_block(Jinja* j, const JinjaNode* filter, TemplateValue v);

static inline JinjaFlow jinja_run_set_block(Jinja* j, const JinjaNode* n) {
    TemplateValue v;
    jinja_check_namespaces(j, n->a);
    JinjaScope* scope = jinja_new_scope(j, j->scope);
    const JinjaFlow flow = jinja_capture(j, n->d, scope, &v);
    if (flow == JINJA_NEXT) { jinja_assign(j, n->a, jinja_filter_block(j, n->b, v)); }
    return flow;
}

static inline void jinja_run_generation(Jinja* j, const JinjaNode* n) {
    TemplateValue v;
    jinja_capture(j, n->d, jinja_new_scope(j, j->scope), &v);
    if (j->num_spans == j->cap_spans) { jinja_alloc(j, 0); }
    j->spans = (TemplateSpan*)template_grow(j->arena, j->spans, j->num_spans, &j->cap_spans, sizeof *j->spans);
    const TemplateSpan span = {j->main->len, j->main->len + v.len};
    j->spans[j->num_spans++] = span;
    jinja_append_string(j, j->out, v);
}

static inline TemplateValue jinja_eval_call(Jinja* j, const JinjaNode* n, const TemplateValue* caller);

/* Runs a list of statements. */
static inline JinjaFlow jinja_run(Jinja* j, const JinjaNode* n) {
    JinjaFlow flow = JINJA_NEXT;
    JinjaScope* outside = j->scope;
    TemplateValue v;
    jinja_descend(j);
    for (; n && flow == JINJA_NEXT; n = n->next) {
        const JinjaNode* branch = n->a;
        jinja_spend(j, 1);
        j->at = n->at;
        switch (n->kind) {
            case NODE_TEXT: jinja_append_string(j, j->out, n->value); break;
            case NODE_PRINT:
                v = jinja_eval(j, n->a);
                j->at = n->a->at;
                jinja_write(j, j->out, v);
                break;
            case NODE_FOR: flow = jinja_run_for(j, n); break;
            case NODE_IF:
                while (branch && branch->a && !jinja_truth(jinja_eval(j, branch->a))) { branch = branch->next; }
                if (branch) { flow = jinja_run(j, branch->d); }
                break;
            case NODE_SET:
                jinja_check_namespaces(j, n->a);
                jinja_assign(j, n->a, jinja_eval(j, n->b));
                break;
            case NODE_SET_BLOCK: flow = jinja_run_set_block(j, n); break;
            case NODE_MACRO: jinja_set(j, j->scope, n->value, jinja_macro_value(j, n)); break;
            case NODE_CALL_BLOCK:
                v = jinja_macro_value(j, n);
                jinja_write(j, j->out, jinja_eval_call(j, n->b, &v));
                break;
            case NODE_FILTER_BLOCK:
                flow = jinja_capture(j, n->d, jinja_new_scope(j, j->scope), &v);
                if (flow == JINJA_NEXT) { jinja_write(j, j->out, jinja_filter_block(j, n->b, v)); }
                break;
            case NODE_WITH: {
                JinjaScope* scope = jinja_new_scope(j, outside);
                for (const JinjaNode* one = n->a; one; one = one->next) {
                    v = jinja_eval(j, one->a);
                    j->scope = scope;
                    jinja_assign(j, one->b, v);
                    j->scope = outside;
                }
                j->scope = scope;
                flow = jinja_run(j, n->d);
                j->scope = outside;
                break;
            }
            case NODE_GENERATION: jinja_run_generation(j, n); break;
            default: flow = n->kind == NODE_BREAK ? JINJA_BREAK : JINJA_CONTINUE; break;
        }
    }
    j->depth--;
    return flow;
}

// ---------------------------------------------------------------------------------------------------------------------
// expressions

/* Evaluates the arguments of a call. */
static inline JinjaArguments jinja_eval_arguments(Jinja* j, const JinjaNode* n) {
    JinjaArguments a = {NULL, NULL, 0, 0};
    for (; n; n = n->next) {
        if (n->kind != NODE_KEYWORD) {
            jinja_add_argument(j, &a, jinja_eval(j, n), jinja_absent());
            continue;
        }
        const TemplateValue v = jinja_eval(j, n->a);
        TemplateValue item;
        if (n->op == 'p' && v.type != TEMPLATE_DICT) { jinja_fail_type(j, v, "a dict behind **"); }
        if (n->op == 'p') {
            for (size_t i = 0; i < v.as.dict->count; i++) {
                jinja_add_argument(j, &a, v.as.dict->items[i].value, jinja_text(j, v.as.dict->items[i].key));
            }
        } else if (n->op == '*') {
            JinjaIterator* it = jinja_iterate(j, v);
            while (jinja_next(j, it, &item)) {
                jinja_add_argument(j, &a, item, jinja_absent());
                for (size_t i = a.count - 1; i > 0 && jinja_given(a.names[i - 1]); i--) {  // before those with names
                    a.v[i] = a.v[i - 1];
                    a.names[i] = a.names[i - 1];
                    a.v[i - 1] = item;
                    a.names[i - 1] = jinja_absent();
                }
            }
        } else {
            jinja_add_argument(j, &a, v, n->value);
        }
    }
    return a;
}

/* Evaluates a call; `caller`: the body of the call block around it, or NULL. */
static inline TemplateValue jinja_eval_call(Jinja* j, const JinjaNode* n, const TemplateValue* caller) {
    const TemplateValue callee = jinja_eval(j, n->a);
    JinjaArguments a = jinja_eval_arguments(j, n->b);
    if (caller) { jinja_add_argument(j, &a, *caller, jinja_word(j, "caller")); }
    j->at = n->a->at;
    return jinja_call(j, callee, &a);
}

/* Applies a filter or test to a value. */
static inline TemplateValue jinja_eval_function(Jinja* j, const JinjaNode* n, TemplateValue v) {
    const JinjaArguments a = jinja_eval_arguments(j, n->b);
    j->at = n->at;
    if (!n->function) {
        jinja_fail(j, "the %s \"%.*s\" is not known, wanted one of Jinja's that chat templates use",
                   n->kind == NODE_FILTER ? "filter" : "test", (int)size_min(n->value.len, 60), n->value.as.s);
    }
    return jinja_apply(j, n->function, v, &a);
}

static inline TemplateValue jinja_filter_block(Jinja* j, const JinjaNode* filter, TemplateValue v) {
    if (!filter) { return v; }
    return jinja_eval_function(j, filter, jinja_filter_block(j, filter->a, v));
}

static inline TemplateValue jinja_eval_items(Jinja* j, const JinjaNode* n) {
    jinja_alloc(j, 0);
    TemplateValue v = n->kind == NODE_DICT ? template_dict(j->arena) : template_list(j->arena);
    for (const JinjaNode* item = n->a; item; item = item->next) {
        const TemplateValue first = jinja_eval(j, item);
        if (n->kind != NODE_DICT) {
            jinja_add(j, v, first);
            continue;
        }
        item = item->next;
        const TemplateValue second = jinja_eval(j, item);
        if (first.type == TEMPLATE_LIST || first.type == TEMPLATE_DICT) { jinja_fail_type(j, first, "a key of a dict"); }
        const size_t at = jinja_dict_find(j, v.as.dict, first);
        if (at < v.as.dict->count) { v.as.dict->items[at].value = second; }
        if (at == v.as.dict->count) { template_dict_add(j->arena, v, first, second); }
    }
    if (n->kind == NODE_TUPLE) { v.type = TEMPLATE_TUPLE; }
    return v;
}

static inline TemplateValue jinja_eval_compare(Jinja* j, const JinjaNode* n) {
    TemplateValue left = jinja_eval(j, n->a);
    for (const JinjaNode* operand = n->b; operand; operand = operand->next) {
        const TemplateValue right = jinja_eval(j, operand->a);
        j->at = operand->at;
        if (!jinja_compares(j, operand->op, left, right)) { return template_bool(false); }
        left = right;
    }
    return template_bool(true);
}

static inline TemplateValue jinja_eval_slice(Jinja* j, const JinjaNode* n) {
    const TemplateValue of = jinja_eval(j, n->a);
    const TemplateValue bounds[3] = {n->b ? jinja_eval(j, n->b) : jinja_absent(), n->c ? jinja_eval(j, n->c) : jinja_absent(),
                                     n->d ? jinja_eval(j, n->d) : jinja_absent()};
    j->at = n->at;
    return jinja_slice(j, of, bounds);
}

static inline TemplateValue jinja_eval_sign(Jinja* j, const JinjaNode* n) {
    const TemplateValue v = jinja_eval(j, n->a);
    j->at = n->at;
    if (!jinja_is_number(v)) { jinja_fail_type(j, v, "a number behind a sign"); }
    if (n->op == '+') { return v.type == TEMPLATE_FLOAT ? v : template_int(v.as.i); }
    return v.type == TEMPLATE_FLOAT ? template_float(-v.as.d) : jinja_binary(j, '-', template_int(0), v);
}

static inline TemplateValue jinja_eval(Jinja* j, const JinjaNode* n) {
    TemplateValue v = template_none();
    jinja_spend(j, 1);
    jinja_descend(j);
    j->at = n->at;
    switch (n->kind) {
        case NODE_CONSTANT: v = n->value; break;
        case NODE_NAME: v = jinja_lookup(j, n->value); break;
        case NODE_LIST:
        case NODE_TUPLE:
        case NODE_DICT: v = jinja_eval_items(j, n); break;
        case NODE_ATTRIBUTE:
            v = jinja_eval(j, n->a);
            j->at = n->at;
            v = jinja_member(j, v, n->value, true);
            break;
        case NODE_ITEM: {
            const TemplateValue of = jinja_eval(j, n->a);
            v = jinja_eval(j, n->b);
            j->at = n->at;
            v = jinja_member(j, of, v, false);
            break;
        }
        case NODE_SLICE: v = jinja_eval_slice(j, n); break;
        case NODE_CALL: v = jinja_eval_call(j, n, NULL); break;
        case NODE_FILTER:
        case NODE_TEST: v = jinja_eval_function(j, n, jinja_eval(j, n->a)); break;
        case NODE_NOT: v = template_bool(!jinja_truth(jinja_eval(j, n->a))); break;
        case NODE_SIGN: v = jinja_eval_sign(j, n); break;
        case NODE_AND:
        case NODE_OR:
            v = jinja_eval(j, n->a);
            if (jinja_truth(v) == (n->kind == NODE_AND)) { v = jinja_eval(j, n->b); }
            break;
        case NODE_COMPARE: v = jinja_eval_compare(j, n); break;
        case NODE_BINARY: {
            const TemplateValue left = jinja_eval(j, n->a);
            v = jinja_eval(j, n->b);
            j->at = n->at;
            v = jinja_binary(j, n->op, left, v);
            break;
        }
        case NODE_CONCAT: {
            JinjaText text = {NULL, NULL, 0, 0};
            for (const JinjaNode* part = n->a; part; part = part->next) { jinja_write(j, &text, jinja_eval(j, part)); }
            v = jinja_string(&text);
            break;
        }
        case NODE_CHOICE:
            if (jinja_truth(jinja_eval(j, n->b))) {
                v = jinja_eval(j, n->a);
            } else {
                v = n->c ? jinja_eval(j, n->c)
                         : jinja_undefined_hint("the inline if-expression evaluated to false and no else section was defined.");
            }
            break;
        default: break;
    }
    j->depth--;
    return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// the two doors

/* Makes the tree; leaves by jinja_fail(). */
static inline void jinja_parse(Jinja* j, Template* t, size_t len) {
    JinjaLexer l;
    memset(&l, 0, sizeof l);
    l.j = j;
    l.s = t->text;
    l.len = len;
    jinja_lex(&l);
    JinjaParser p = {j, l.tokens, false, NULL, 0, 0};
    t->root = jinja_statements(&p, NULL, NULL);
    for (size_t i = 0; i + 1 < l.count; i++) {
        t->has_generation |= l.tokens[i].type == TOKEN_TAG && jinja_at_name(&l.tokens[i + 1], "generation");
    }
    if (p.unknown) {
        j->at = p.unknown->at;
        jinja_fail(j, "the %s \"%.*s\" is not known, wanted one of Jinja's that chat templates use",
                   p.unknown->kind == NODE_FILTER ? "filter" : "test", (int)size_min(p.unknown->value.len, 60),
                   p.unknown->value.as.s);
    }
}

static inline void template_free(Template* t) {
    template_arena_free(&t->arena);
    free(t->text);
    free(t->path);
    memset(t, 0, sizeof *t);
}

/* Parses a template of `len` bytes, which is copied. `path` names it in messages. */
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
    memset(t->text + used, 0, 4);  // the lexer looks up to three bytes ahead
    Jinja j;
    memset(&j, 0, sizeof j);
    j.arena = &t->arena;
    j.path = t->path;
    j.text = t->text;
    j.e = e;
    j.depth = JINJA_MAX_DEPTH - JINJA_MAX_HEIGHT;
    if (setjmp(j.leave)) {
        template_free(t);
        return false;
    }
    for (size_t i = 0, n = 0; i < used; i += n) {
        j.at = i;
        n = utf8_char_length(t->text + i, used - i);
        if (!n || !t->text[i]) { jinja_fail(&j, "byte 0x%02x is not valid UTF-8 text", (uint8_t)t->text[i]); }
    }
    jinja_parse(&j, t, used);
    return true;
}

/* Renders a template with a dict of variables that lies in the arena; so does the result. `now` is what strftime_now() prints,
 * NULL: this moment, in local time. Fails with what raise_exception() says, and with every error of jinja2's. */
static inline bool template_render(const Template* t, TemplateArena* arena, TemplateValue variables, const struct tm* now,
                                   TemplateRendered* out, Error* e) {
    JinjaText text = {NULL, NULL, 0, 0};
    Jinja j;
    memset(&j, 0, sizeof j);
    memset(out, 0, sizeof *out);
    j.arena = arena;
    j.start = arena->total;
    j.path = t->path;
    j.text = t->text;
    j.e = e;
    j.out = j.main = &text;
    j.variables = variables;
    const time_t moment = time(NULL);
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
