/* template_parse.h -- makes a tree of nodes from the tokens of a chat template (text/template.h).
 *
 * Expressions, loosest first:
 *   a if b else c | or | and | not | == != < <= > >= in, not in | + - | ~ | * / // % | - + |
 *   x.y x[y] x[a:b] x(y) | x|filter, x is test
 */
#ifndef LLMC_TEMPLATE_PARSE_H
#define LLMC_TEMPLATE_PARSE_H

#include "llmc/text/template_lex.h"    // defines: JinjaToken, JinjaTokenType
#include "llmc/text/template_value.h"  // defines: Jinja, JinjaText, TemplateValue, jinja_fail

// ---------------------------------------------------------------------------------------------------------------------
// nodes

/* kids[0] ... of each kind; lists of nodes go on by `next`. */
typedef enum {
    // expressions
    NODE_CONSTANT,   // value
    NODE_NAME,       // value
    NODE_LIST,       // items
    NODE_TUPLE,      // items
    NODE_DICT,       // items: NODE_PAIRs
    NODE_PAIR,       // key, value
    NODE_ATTRIBUTE,  // of; value: the name
    NODE_ITEM,       // of, key
    NODE_SLICE,      // of, start, stop, step; NULL where absent
    NODE_CALL,       // function, arguments
    NODE_ARGUMENT,   // expression; value: its name, or none; NODE_LIST or NODE_DICT instead: *expression, **expression
    NODE_FILTER,     // of (NULL: the text of a block), arguments; value: the name
    NODE_TEST,       // of, arguments; value: the name
    NODE_NOT,        // a
    NODE_SIGN,       // a; value: - or +
    NODE_BINARY,     // a, b; value: the operator
    NODE_CHOICE,     // condition, a, b or NULL
    // statements
    NODE_TEXT,          // value
    NODE_OUTPUT,        // expression
    NODE_IF,            // condition, body, else, elif (a NODE_IF)
    NODE_FOR,           // target, items, body, else, condition
    NODE_SET,           // target, expression
    NODE_SET_BLOCK,     // target, filters, body
    NODE_FILTER_BLOCK,  // NULL, filters, body
    NODE_MACRO,         // parameters (NODE_ARGUMENTs with their default), body; value: the name
    NODE_GENERATION,    // body
    NODE_BREAK,
    NODE_CONTINUE,
} JinjaKind;

typedef struct JinjaNode {
    JinjaKind kind;
    size_t at;
    TemplateValue value;
    struct JinjaNode *kids[5], *next;
} JinjaNode;

typedef struct {
    Jinja* j;
    const JinjaToken* token;  // the next one
    int loops;                // within which the parser is
    bool has_generation;      // it has met the tag generation
} JinjaParser;

static inline JinjaNode* jinja_node(JinjaParser* p, JinjaKind kind, TemplateValue value, JinjaNode* a, JinjaNode* b) {
    JinjaNode* n = (JinjaNode*)memset(template_alloc(p->j->arena, sizeof *n), 0, sizeof *n);
    n->kind = kind;
    n->at = p->token->at;
    n->value = value;
    n->kids[0] = a;
    n->kids[1] = b;
    return n;
}

static inline bool jinja_next_is(JinjaParser* p, JinjaTokenType type, const char* text) {
    p->j->at = p->token->at;
    return p->token->type == type && (!text || template_is(p->token->value, text));
}

/* Moves past a token if it is this one. */
static inline bool jinja_skip(JinjaParser* p, JinjaTokenType type, const char* text) {
    const bool is = jinja_next_is(p, type, text);
    p->token += is;
    return is;
}
static inline bool jinja_skip_operator(JinjaParser* p, const char* text) { return jinja_skip(p, TOKEN_OPERATOR, text); }
static inline bool jinja_skip_word(JinjaParser* p, const char* text) { return jinja_skip(p, TOKEN_NAME, text); }

LLMC_NORETURN static void jinja_unexpected(JinjaParser* p, const char* wanted) {
    static const char* const names[] = {
        "text", "{{", "}}", "{%", "%}", "", "a string or number", "", "the end of the template"};
    const TemplateValue v = p->token->value;
    const bool shown = p->token->type == TOKEN_NAME || p->token->type == TOKEN_OPERATOR;
    p->j->at = p->token->at;
    if (shown) { jinja_fail(p->j, "found \"%.*s\", wanted %s", (int)v.len, v.as.s, wanted); }
    jinja_fail(p->j, "found %s, wanted %s", names[p->token->type], wanted);
}

static inline void jinja_expect(JinjaParser* p, JinjaTokenType type, const char* text, const char* wanted) {
    if (!jinja_skip(p, type, text)) { jinja_unexpected(p, wanted); }
}

static inline TemplateValue jinja_expect_name(JinjaParser* p, const char* wanted) {
    if (!jinja_next_is(p, TOKEN_NAME, NULL)) { jinja_unexpected(p, wanted); }
    return p->token++->value;
}

// ---------------------------------------------------------------------------------------------------------------------
// expressions

/* Returns whether a name is one of the words of a text. */
static inline bool jinja_listed(const char* words, TemplateValue name) {
    for (const char* w = words; *w; w += strspn(w, " ")) {
        const size_t n = strcspn(w, " ");
        if (n == name.len && memcmp(w, name.as.s, n) == 0) { return true; }
        w += n;
    }
    return false;
}

// What a tuple is made of: any expressions, those without an if of their own, or what can be set.
typedef enum { ITEMS_ANY, ITEMS_PLAIN, ITEMS_TARGETS } JinjaItems;

static inline JinjaNode* jinja_expression(JinjaParser* p);
static inline JinjaNode* jinja_level(JinjaParser* p, size_t level);
static inline JinjaNode* jinja_postfix(JinjaParser* p, JinjaNode* n, bool with_filters);
static inline JinjaNode* jinja_tuple(JinjaParser* p, JinjaItems items);

/* Parses a list of expressions up to the closing operator, with a comma allowed at its end. */
static inline JinjaNode* jinja_items_until(JinjaParser* p, const char* close) {
    JinjaNode *first = NULL, **end = &first;
    while (!jinja_skip_operator(p, close)) {
        if (first) { jinja_expect(p, TOKEN_OPERATOR, ",", "a comma"); }
        if (first && jinja_skip_operator(p, close)) { break; }
        *end = jinja_expression(p);
        if (close[0] == '}') {
            jinja_expect(p, TOKEN_OPERATOR, ":", "a colon");
            *end = jinja_node(p, NODE_PAIR, template_none(), *end, NULL);
            (*end)->kids[1] = jinja_expression(p);
        }
        end = &(*end)->next;
    }
    return first;
}

static inline JinjaNode* jinja_primary(JinjaParser* p) {
    static const char* const words[] = {"true", "True", "false", "False", "none", "None"};
    const TemplateValue v = p->token->value;
    if (jinja_next_is(p, TOKEN_NAME, NULL)) {
        int word = 0;
        while (word < 6 && !template_is(v, words[word])) { word++; }
        JinjaNode* n = jinja_node(p, word < 6 ? NODE_CONSTANT : NODE_NAME, v, NULL, NULL);
        if (word < 6) { n->value = word < 4 ? template_bool(word < 2) : template_none(); }
        p->token++;
        return n;
    }
    if (jinja_next_is(p, TOKEN_CONSTANT, NULL)) {
        JinjaNode* n = jinja_node(p, NODE_CONSTANT, v, NULL, NULL);
        JinjaText t = {NULL, NULL, 0, 0};
        p->token++;
        if (v.type != TEMPLATE_STRING || p->token->type != TOKEN_CONSTANT || p->token->value.type != TEMPLATE_STRING) {
            return n;
        }
        jinja_append_string(p->j, &t, v);  // neighbours are one string
        for (; p->token->type == TOKEN_CONSTANT && p->token->value.type == TEMPLATE_STRING; p->token++) {
            jinja_append_string(p->j, &t, p->token->value);
        }
        n->value = jinja_string(&t);
        return n;
    }
    if (jinja_skip_operator(p, "(")) {
        if (jinja_skip_operator(p, ")")) { return jinja_node(p, NODE_TUPLE, template_none(), NULL, NULL); }
        JinjaNode* n = jinja_tuple(p, ITEMS_ANY);
        jinja_expect(p, TOKEN_OPERATOR, ")", "\")\"");
        return n;
    }
    if (jinja_skip_operator(p, "[")) { return jinja_node(p, NODE_LIST, template_none(), jinja_items_until(p, "]"), NULL); }
    if (jinja_skip_operator(p, "{")) { return jinja_node(p, NODE_DICT, template_none(), jinja_items_until(p, "}"), NULL); }
    jinja_unexpected(p, "an expression");
}

/* Parses the arguments of a call, after its "(". */
static inline JinjaNode* jinja_arguments(JinjaParser* p) {
    JinjaNode *first = NULL, **end = &first;
    bool named = false;
    while (!jinja_skip_operator(p, ")")) {
        if (first) { jinja_expect(p, TOKEN_OPERATOR, ",", "a comma or \")\""); }
        if (first && jinja_skip_operator(p, ")")) { break; }
        JinjaNode* n = jinja_node(p, NODE_ARGUMENT, template_none(), NULL, NULL);
        const bool has_name =
            p->token->type == TOKEN_NAME && p->token[1].type == TOKEN_OPERATOR && template_is(p->token[1].value, "=");
        if (jinja_next_is(p, TOKEN_OPERATOR, "*") || jinja_next_is(p, TOKEN_OPERATOR, "**")) {
            n->kind = template_is(p->token++->value, "*") ? NODE_LIST : NODE_DICT;
        } else if (has_name) {
            n->value = p->token->value;
            p->token += 2;
        } else if (named) {
            jinja_unexpected(p, "an argument with a name");
        }
        named = has_name;
        n->kids[0] = jinja_expression(p);
        *end = n;
        end = &n->next;
    }
    return first;
}

/* Parses what stands in the [ ] of a subscript. */
static inline JinjaNode* jinja_subscript(JinjaParser* p, JinjaNode* of) {
    JinjaNode* n = jinja_node(p, NODE_ITEM, template_none(), of, NULL);
    for (int part = 1; part < 4; part++) {
        const bool absent = jinja_next_is(p, TOKEN_OPERATOR, ":") || jinja_next_is(p, TOKEN_OPERATOR, "]");
        n->kids[part] = absent ? NULL : part == 1 ? jinja_tuple(p, ITEMS_ANY) : jinja_expression(p);
        if (!jinja_skip_operator(p, ":")) { break; }
        n->kind = NODE_SLICE;
    }
    if (n->kind == NODE_ITEM && !n->kids[1]) { n->kids[1] = jinja_node(p, NODE_TUPLE, template_none(), NULL, NULL); }
    jinja_expect(p, TOKEN_OPERATOR, "]", "\"]\"");
    return n;
}

static inline JinjaNode* jinja_parse_filter(JinjaParser* p, JinjaNode* of) {
    JinjaNode* n = jinja_node(p, NODE_FILTER, template_none(), of, NULL);
    n->value = jinja_expect_name(p, "the name of a filter");
    if (jinja_skip_operator(p, "(")) { n->kids[1] = jinja_arguments(p); }
    return n;
}

/* Parses a test, after its "is". An argument may stand without brackets: x is divisibleby 3. */
static inline JinjaNode* jinja_parse_test(JinjaParser* p, JinjaNode* of) {
    const bool negated = jinja_skip_word(p, "not");
    JinjaNode* n = jinja_node(p, NODE_TEST, template_none(), of, NULL);
    n->value = jinja_expect_name(p, "the name of a test");
    const bool ends =
        jinja_next_is(p, TOKEN_NAME, "else") || jinja_next_is(p, TOKEN_NAME, "or") || jinja_next_is(p, TOKEN_NAME, "and");
    const bool bare = (p->token->type == TOKEN_NAME && !ends) || p->token->type == TOKEN_CONSTANT ||
                      jinja_next_is(p, TOKEN_OPERATOR, "[") || jinja_next_is(p, TOKEN_OPERATOR, "{");
    if (jinja_skip_operator(p, "(")) {
        n->kids[1] = jinja_arguments(p);
    } else if (bare) {
        if (jinja_next_is(p, TOKEN_NAME, "is")) { jinja_unexpected(p, "one test: they do not chain"); }
        n->kids[1] = jinja_node(p, NODE_ARGUMENT, template_none(), NULL, NULL);
        n->kids[1]->kids[0] = jinja_postfix(p, jinja_primary(p), false);
    }
    return negated ? jinja_node(p, NODE_NOT, template_none(), n, NULL) : n;
}

/* Parses the members, subscripts and calls that follow an expression, and its filters and tests, which only calls follow. */
static inline JinjaNode* jinja_postfix(JinjaParser* p, JinjaNode* n, bool with_filters) {
    for (bool filtered = false;; jinja_spend(p->j, 0)) {
        if (!filtered && jinja_skip_operator(p, ".")) {
            n = jinja_node(p, NODE_ATTRIBUTE, p->token->value, n, NULL);
            jinja_expect_name(p, "a member's name");
        } else if (!filtered && jinja_skip_operator(p, "[")) {
            n = jinja_subscript(p, n);
        } else if (jinja_skip_operator(p, "(")) {
            n = jinja_node(p, NODE_CALL, template_none(), n, NULL);
            n->kids[1] = jinja_arguments(p);
        } else if (with_filters && (jinja_next_is(p, TOKEN_OPERATOR, "|") || jinja_next_is(p, TOKEN_NAME, "is"))) {
            n = p->token++->type == TOKEN_NAME ? jinja_parse_test(p, n) : jinja_parse_filter(p, n);
            filtered = true;
        } else {
            return n;
        }
    }
}

static inline JinjaNode* jinja_unary(JinjaParser* p, bool with_filters) {
    jinja_enter(p->j);
    const bool has_sign = jinja_next_is(p, TOKEN_OPERATOR, "-") || jinja_next_is(p, TOKEN_OPERATOR, "+");
    JinjaNode* sign = has_sign ? jinja_node(p, NODE_SIGN, p->token++->value, NULL, NULL) : NULL;
    JinjaNode* n = has_sign ? jinja_unary(p, false) : jinja_primary(p);
    if (has_sign) { sign->kids[0] = n; }
    n = jinja_postfix(p, has_sign ? sign : n, with_filters);
    p->j->depth--;
    return n;
}

// The operators with two sides, a level each, the loosest first. "not" has one side, but the place of a level.
static const char* const jinja_levels[] = {"or", "and", "not", "== != < <= > >= in not", "+ -", "~", "* / // %"};
enum { LEVEL_NOT = 2, LEVEL_COMPARISONS, JINJA_LEVELS = sizeof jinja_levels / sizeof *jinja_levels };

/* Parses the operators of a level and of those after it. */
static inline JinjaNode* jinja_level(JinjaParser* p, size_t level) {
    if (level == JINJA_LEVELS) { return jinja_unary(p, true); }
    if (level == LEVEL_NOT && jinja_next_is(p, TOKEN_NAME, "not")) {
        JinjaNode* n = jinja_node(p, NODE_NOT, template_none(), NULL, NULL);
        jinja_enter(p->j);
        p->token++;
        n->kids[0] = jinja_level(p, level);
        p->j->depth--;
        return n;
    }
    JinjaNode* a = jinja_level(p, level + 1);
    for (int count = 0; level != LEVEL_NOT; count++) {
        const JinjaToken* t = p->token;
        const bool not_in = t->type == TOKEN_NAME && template_is(t->value, "not");
        const bool listed = (t->type == TOKEN_NAME || t->type == TOKEN_OPERATOR) && jinja_listed(jinja_levels[level], t->value);
        if (!listed || (not_in && !(t[1].type == TOKEN_NAME && template_is(t[1].value, "in")))) { break; }
        if (level == LEVEL_COMPARISONS && count > 0) { jinja_unexpected(p, "one comparison: chains of them are not known"); }
        a = jinja_node(p, NODE_BINARY, t->value, a, NULL);
        p->token += not_in ? 2 : 1;
        a->kids[1] = jinja_level(p, level + 1);
    }
    return a;
}

static inline JinjaNode* jinja_expression(JinjaParser* p) {
    jinja_enter(p->j);
    JinjaNode* a = jinja_level(p, 0);
    while (jinja_skip_word(p, "if")) {
        JinjaNode* condition = jinja_level(p, 0);
        a = jinja_node(p, NODE_CHOICE, template_none(), condition, a);
        if (jinja_skip_word(p, "else")) { a->kids[2] = jinja_expression(p); }
    }
    p->j->depth--;
    return a;
}

/* Parses `first, second ...` as a tuple, and one item alone as itself. */
static inline JinjaNode* jinja_tuple(JinjaParser* p, JinjaItems items) {
    JinjaNode *first = NULL, **end = &first;
    for (bool comma = false;; end = &(*end)->next) {
        const bool ends = p->token->type == TOKEN_OUTPUT_END || p->token->type == TOKEN_TAG_END ||
                          (p->token->type == TOKEN_OPERATOR && jinja_listed(") ] =", p->token->value)) ||
                          jinja_next_is(p, TOKEN_NAME, "in");
        if (comma && ends) { break; }
        *end = items == ITEMS_ANY     ? jinja_expression(p)
               : items == ITEMS_PLAIN ? jinja_level(p, 0)
                                      : jinja_postfix(p, jinja_primary(p), false);
        if (!comma && !jinja_next_is(p, TOKEN_OPERATOR, ",")) { return first; }
        comma = true;
        if (!jinja_skip_operator(p, ",")) { break; }
    }
    return jinja_node(p, NODE_TUPLE, template_none(), first, NULL);
}

// ---------------------------------------------------------------------------------------------------------------------
// statements

static inline JinjaNode* jinja_statements(JinjaParser* p, const char* ends);

/* Parses the rest of a tag, a body, and the name of the tag that ends it. */
static inline JinjaNode* jinja_body(JinjaParser* p, const char* ends) {
    jinja_skip_operator(p, ":");
    jinja_expect(p, TOKEN_TAG_END, NULL, "%}");
    return jinja_statements(p, ends);
}

/* Fails unless a node can be set: a name, with `members` a namespace's member, or several of them. */
static inline void jinja_check_target(JinjaParser* p, const JinjaNode* n, bool members) {
    const bool is_name = n->kind == NODE_NAME && !(p->loops && template_is(n->value, "loop"));
    const bool is_member = members && n->kind == NODE_ATTRIBUTE && n->kids[0]->kind == NODE_NAME;
    const JinjaNode* items = n->kind == NODE_TUPLE ? n->kids[0] : NULL;
    p->j->at = n->at;
    if (!is_name && !is_member && !items) { jinja_fail(p->j, "this cannot be set, wanted a name"); }
    for (; items; items = items->next) { jinja_check_target(p, items, members); }
}

/* Parses what is set. */
static inline JinjaNode* jinja_target(JinjaParser* p, bool members) {
    JinjaNode* n = jinja_tuple(p, ITEMS_TARGETS);
    jinja_check_target(p, n, members);
    return n;
}

static inline void jinja_parse_for(JinjaParser* p, JinjaNode* n) {
    n->kind = NODE_FOR;
    p->loops++;
    n->kids[0] = jinja_target(p, false);
    p->loops--;
    jinja_expect(p, TOKEN_NAME, "in", "\"in\"");
    n->kids[1] = jinja_tuple(p, ITEMS_PLAIN);
    if (jinja_skip_word(p, "if")) { n->kids[4] = jinja_expression(p); }
    if (jinja_next_is(p, TOKEN_NAME, "recursive")) { jinja_unexpected(p, "%}: loops that are recursive are not known"); }
    p->loops++;
    n->kids[2] = jinja_body(p, "else endfor");
    p->loops--;
    if (template_is(p->token[-1].value, "else")) { n->kids[3] = jinja_body(p, "endfor"); }
}

static inline void jinja_parse_if(JinjaParser* p, JinjaNode* n) {
    for (;;) {
        n->kind = NODE_IF;
        n->kids[0] = jinja_tuple(p, ITEMS_PLAIN);
        n->kids[1] = jinja_body(p, "elif else endif");
        if (!template_is(p->token[-1].value, "elif")) { break; }
        n->kids[3] = jinja_node(p, NODE_IF, template_none(), NULL, NULL);
        n = n->kids[3];
    }
    if (template_is(p->token[-1].value, "else")) { n->kids[2] = jinja_body(p, "endif"); }
}

static inline void jinja_parse_set(JinjaParser* p, JinjaNode* n) {
    n->kind = NODE_SET;
    n->kids[0] = jinja_target(p, true);
    if (jinja_skip_operator(p, "=")) {
        n->kids[1] = jinja_tuple(p, ITEMS_ANY);
        return;
    }
    n->kind = NODE_SET_BLOCK;
    while (jinja_skip_operator(p, "|")) { n->kids[1] = jinja_parse_filter(p, n->kids[1]); }
    n->kids[2] = jinja_body(p, "endset");
}

static inline void jinja_parse_macro(JinjaParser* p, JinjaNode* n) {
    const int loops = p->loops;
    JinjaNode** end = &n->kids[0];
    n->kind = NODE_MACRO;
    n->value = jinja_expect_name(p, "the macro's name");
    jinja_expect(p, TOKEN_OPERATOR, "(", "\"(\"");
    while (!jinja_skip_operator(p, ")")) {
        if (n->kids[0]) { jinja_expect(p, TOKEN_OPERATOR, ",", "a comma or \")\""); }
        *end = jinja_node(p, NODE_ARGUMENT, p->token->value, NULL, NULL);
        jinja_expect_name(p, "a parameter's name");
        if (jinja_skip_operator(p, "=")) { (*end)->kids[0] = jinja_expression(p); }
        end = &(*end)->next;
    }
    p->loops = 0;
    n->kids[1] = jinja_body(p, "endmacro");
    p->loops = loops;
}

/* Parses a tag, after its {%. */
static inline JinjaNode* jinja_statement(JinjaParser* p) {
    const TemplateValue name = jinja_expect_name(p, "the name of a tag");
    JinjaNode* n = jinja_node(p, NODE_GENERATION, name, NULL, NULL);
    n->at = p->token[-1].at;
    if (template_is(name, "for")) {
        jinja_parse_for(p, n);
    } else if (template_is(name, "if")) {
        jinja_parse_if(p, n);
    } else if (template_is(name, "set")) {
        jinja_parse_set(p, n);
    } else if (template_is(name, "macro")) {
        jinja_parse_macro(p, n);
    } else if (template_is(name, "generation")) {
        const int loops = p->loops;
        p->has_generation = true;
        p->loops = 0;
        n->kids[0] = jinja_body(p, "endgeneration");
        p->loops = loops;
    } else if (template_is(name, "filter")) {
        n->kind = NODE_FILTER_BLOCK;
        do { n->kids[1] = jinja_parse_filter(p, n->kids[1]); } while (jinja_skip_operator(p, "|"));
        n->kids[2] = jinja_body(p, "endfilter");
    } else if (p->loops && (template_is(name, "break") || template_is(name, "continue"))) {
        n->kind = template_is(name, "break") ? NODE_BREAK : NODE_CONTINUE;
    } else {
        p->token--;
        jinja_unexpected(p,
                         "one of the tags for, if, set, macro, filter, generation, in loops break and continue, or "
                         "the end of a tag");
    }
    jinja_expect(p, TOKEN_TAG_END, NULL, "%}");
    return n;
}

/* Parses up to a tag whose name is in `ends`, and moves past that name; "": up to the end of the template. */
static inline JinjaNode* jinja_statements(JinjaParser* p, const char* ends) {
    JinjaNode *first = NULL, **end = &first;
    jinja_enter(p->j);
    for (;; end = *end ? &(*end)->next : end) {
        if (jinja_skip(p, TOKEN_OUTPUT, NULL)) {
            *end = jinja_node(p, NODE_OUTPUT, template_none(), NULL, NULL);
            (*end)->kids[0] = jinja_tuple(p, ITEMS_ANY);
            jinja_expect(p, TOKEN_OUTPUT_END, NULL, "}}");
        } else if (jinja_next_is(p, TOKEN_TEXT, NULL)) {
            *end = jinja_node(p, NODE_TEXT, p->token->value, NULL, NULL);
            p->token++;
        } else if (jinja_skip(p, TOKEN_TAG, NULL)) {
            if (p->token->type == TOKEN_NAME && jinja_listed(ends, p->token->value)) {
                p->token++;
                break;
            }
            *end = jinja_statement(p);
        } else if (*ends) {
            jinja_unexpected(p, ends);
        } else {
            break;
        }
    }
    p->j->depth--;
    return first;
}

#endif
