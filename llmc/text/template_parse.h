/* template_parse.h -- makes a tree of nodes from the tokens of a chat template (text/template.h).
 *
 * Expressions, loosest first:
 *   a if b else c | or | and | not | == != < <= > >= in, not in | + - | ~ | * / // % | - + |
 *   x.y x[y] x[a:b] x(y) | x|filter, x is test
 */
#ifndef LLMC_TEMPLATE_PARSE_H
#define LLMC_TEMPLATE_PARSE_H

#include "llmc/text/template_functions.h"  // defines: jinja_named, jinja_filters_known, jinja_tests_known
#include "llmc/text/template_lex.h"        // defines: JinjaToken, JinjaTokenType
#include "llmc/text/template_value.h"      // defines: Jinja, JinjaText, TemplateValue, jinja_fail

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
    NODE_MINUS,      // a
    NODE_PLUS,       // a
    NODE_BINARY,     // a, b; value: the operator
    NODE_AND,        // a, b
    NODE_OR,         // a, b
    NODE_COMPARE,    // a, then its NODE_OPERANDs
    NODE_OPERAND,    // b; value: the operator
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
    const JinjaToken* token;   // the next one
    int loops;                 // within which the parser is
    bool soft;                 // within an if: a filter that is not known is an error only where it is asked
    const JinjaNode* unknown;  // the first one outside
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

static inline JinjaNode* jinja_expression(JinjaParser* p);
static inline JinjaNode* jinja_or(JinjaParser* p);
static inline JinjaNode* jinja_postfix(JinjaParser* p, JinjaNode* n);
static inline JinjaNode* jinja_tuple(JinjaParser* p, bool with_choice);

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

/* Parses `first, second ...` as a tuple, and one expression alone as itself. `with_choice`: "if" belongs to the expression. */
static inline JinjaNode* jinja_tuple(JinjaParser* p, bool with_choice) {
    JinjaNode* first = with_choice ? jinja_expression(p) : jinja_or(p);
    if (!jinja_next_is(p, TOKEN_OPERATOR, ",")) { return first; }
    JinjaNode* tuple = jinja_node(p, NODE_TUPLE, template_none(), first, NULL);
    for (JinjaNode** end = &first->next; jinja_skip_operator(p, ","); end = &(*end)->next) {
        const bool ends = jinja_next_is(p, TOKEN_OPERATOR, ")") || jinja_next_is(p, TOKEN_OPERATOR, "=") ||
                          jinja_next_is(p, TOKEN_OPERATOR, "]") || jinja_next_is(p, TOKEN_OUTPUT_END, NULL) ||
                          jinja_next_is(p, TOKEN_TAG_END, NULL);
        if (ends) { break; }
        *end = with_choice ? jinja_expression(p) : jinja_or(p);
    }
    return tuple;
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
        JinjaNode* n = jinja_tuple(p, true);
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
        n->kids[part] = absent ? NULL : part == 1 ? jinja_tuple(p, true) : jinja_expression(p);
        if (!jinja_skip_operator(p, ":")) { break; }
        n->kind = NODE_SLICE;
    }
    if (n->kind == NODE_ITEM && !n->kids[1]) { n->kids[1] = jinja_node(p, NODE_TUPLE, template_none(), NULL, NULL); }
    jinja_expect(p, TOKEN_OPERATOR, "]", "\"]\"");
    return n;
}

/* Reads the name of a filter or test; a name with points is one, too. */
static inline TemplateValue jinja_function_name(JinjaParser* p, const char* wanted) {
    TemplateValue name = jinja_expect_name(p, wanted);
    while (jinja_skip_operator(p, ".")) {
        const TemplateValue more = jinja_expect_name(p, wanted);
        name = template_string(p->j->arena, name.as.s, (size_t)(more.as.s - name.as.s) + more.len, true);
    }
    return name;
}

static inline JinjaNode* jinja_parse_filter(JinjaParser* p, JinjaNode* of) {
    JinjaNode* n = jinja_node(p, NODE_FILTER, template_none(), of, NULL);
    n->value = jinja_function_name(p, "the name of a filter");
    if (!p->soft && !p->unknown && !jinja_named(jinja_filters_known, n->value)) { p->unknown = n; }
    if (jinja_skip_operator(p, "(")) { n->kids[1] = jinja_arguments(p); }
    return n;
}

/* Parses a test, after its "is". An argument may stand without brackets: x is divisibleby 3. */
static inline JinjaNode* jinja_parse_test(JinjaParser* p, JinjaNode* of) {
    const bool negated = jinja_skip_word(p, "not");
    JinjaNode* n = jinja_node(p, NODE_TEST, template_none(), of, NULL);
    n->value = jinja_function_name(p, "the name of a test");
    if (!p->soft && !p->unknown && !jinja_listed(jinja_tests_known, n->value)) { p->unknown = n; }
    const bool ends =
        jinja_next_is(p, TOKEN_NAME, "else") || jinja_next_is(p, TOKEN_NAME, "or") || jinja_next_is(p, TOKEN_NAME, "and");
    const bool bare = (p->token->type == TOKEN_NAME && !ends) || p->token->type == TOKEN_CONSTANT ||
                      jinja_next_is(p, TOKEN_OPERATOR, "[") || jinja_next_is(p, TOKEN_OPERATOR, "{");
    if (jinja_skip_operator(p, "(")) {
        n->kids[1] = jinja_arguments(p);
    } else if (bare) {
        if (jinja_next_is(p, TOKEN_NAME, "is")) { jinja_unexpected(p, "one test: they do not chain"); }
        n->kids[1] = jinja_node(p, NODE_ARGUMENT, template_none(), NULL, NULL);
        n->kids[1]->kids[0] = jinja_postfix(p, jinja_primary(p));
    }
    return negated ? jinja_node(p, NODE_NOT, template_none(), n, NULL) : n;
}

/* Parses the members, subscripts and calls that follow an expression. */
static inline JinjaNode* jinja_postfix(JinjaParser* p, JinjaNode* n) {
    for (;; jinja_spend(p->j, 0)) {
        if (jinja_skip_operator(p, ".")) {
            JinjaNode* member = jinja_node(p, NODE_ATTRIBUTE, p->token->value, n, NULL);
            if (p->token->type == TOKEN_CONSTANT && p->token->value.type == TEMPLATE_INT) {  // x.0
                member->kind = NODE_ITEM;
                member->kids[1] = jinja_primary(p);
            } else {
                jinja_expect_name(p, "a member's name");
            }
            n = member;
        } else if (jinja_skip_operator(p, "[")) {
            n = jinja_subscript(p, n);
        } else if (jinja_skip_operator(p, "(")) {
            n = jinja_node(p, NODE_CALL, template_none(), n, NULL);
            n->kids[1] = jinja_arguments(p);
        } else {
            return n;
        }
    }
}

/* Parses the filters, tests and calls that follow an expression. */
static inline JinjaNode* jinja_filters(JinjaParser* p, JinjaNode* n) {
    for (;;) {
        if (jinja_skip_operator(p, "|")) {
            n = jinja_parse_filter(p, n);
        } else if (jinja_skip_word(p, "is")) {
            n = jinja_parse_test(p, n);
        } else if (jinja_next_is(p, TOKEN_OPERATOR, "(")) {
            n = jinja_postfix(p, n);
        } else {
            return n;
        }
    }
}

static inline JinjaNode* jinja_unary(JinjaParser* p, bool with_filters) {
    jinja_enter(p->j);
    const bool minus = jinja_next_is(p, TOKEN_OPERATOR, "-"), plus = jinja_next_is(p, TOKEN_OPERATOR, "+");
    JinjaNode* n = NULL;
    if (minus || plus) {
        p->token++;
        n = jinja_node(p, minus ? NODE_MINUS : NODE_PLUS, template_none(), NULL, NULL);
        n->kids[0] = jinja_unary(p, false);
    } else {
        n = jinja_primary(p);
    }
    n = jinja_postfix(p, n);
    p->j->depth--;
    return with_filters ? jinja_filters(p, n) : n;
}

/* Parses operators of one level, from the left: 0: + -, 1: ~, 2: * / // %. */
static inline JinjaNode* jinja_binary_level(JinjaParser* p, int level) {
    static const char* const levels[3][5] = {{"+", "-"}, {"~"}, {"*", "/", "//", "%"}};
    JinjaNode* a = level == 3 ? jinja_unary(p, true) : jinja_binary_level(p, level + 1);
    for (int i = 0; level < 3 && i < 5 && levels[level][i];) {
        if (!jinja_next_is(p, TOKEN_OPERATOR, levels[level][i])) {
            i++;
            continue;
        }
        a = jinja_node(p, NODE_BINARY, p->token->value, a, NULL);
        p->token++;
        a->kids[1] = jinja_binary_level(p, level + 1);
        i = 0;
    }
    return a;
}

static inline JinjaNode* jinja_compare(JinjaParser* p) {
    static const char* const operators[] = {"==", "!=", "<", "<=", ">", ">="};
    JinjaNode *a = jinja_binary_level(p, 0), *compare = NULL, **end = NULL;
    for (;;) {
        const bool not_in =
            jinja_next_is(p, TOKEN_NAME, "not") && p->token[1].type == TOKEN_NAME && template_is(p->token[1].value, "in");
        bool found = not_in || jinja_next_is(p, TOKEN_NAME, "in");
        for (int i = 0; i < 6; i++) { found = found || jinja_next_is(p, TOKEN_OPERATOR, operators[i]); }
        if (!found) { return compare ? compare : a; }
        JinjaNode* operand = jinja_node(p, NODE_OPERAND, p->token->value, NULL, NULL);
        p->token += not_in ? 2 : 1;
        operand->kids[0] = jinja_binary_level(p, 0);
        if (!compare) {
            compare = jinja_node(p, NODE_COMPARE, template_none(), a, NULL);
            end = &compare->kids[1];
        }
        *end = operand;
        end = &operand->next;
    }
}

static inline JinjaNode* jinja_not(JinjaParser* p) {
    int count = 0;
    while (jinja_next_is(p, TOKEN_NAME, "not")) { p->token++, count++; }
    JinjaNode* n = jinja_compare(p);
    for (int i = 0; i < (count > 1 ? 2 - count % 2 : count); i++) { n = jinja_node(p, NODE_NOT, template_none(), n, NULL); }
    return n;
}

/* Parses "or" between expressions with "and", and with `kind` NODE_AND these. */
static inline JinjaNode* jinja_logic(JinjaParser* p, JinjaKind kind) {
    JinjaNode* a = kind == NODE_OR ? jinja_logic(p, NODE_AND) : jinja_not(p);
    while (jinja_skip_word(p, kind == NODE_OR ? "or" : "and")) {
        a = jinja_node(p, kind, template_none(), a, NULL);
        a->kids[1] = kind == NODE_OR ? jinja_logic(p, NODE_AND) : jinja_not(p);
    }
    return a;
}
static inline JinjaNode* jinja_or(JinjaParser* p) { return jinja_logic(p, NODE_OR); }

static inline JinjaNode* jinja_expression(JinjaParser* p) {
    const JinjaNode* unknown = p->unknown;
    jinja_enter(p->j);
    JinjaNode* a = jinja_or(p);
    while (jinja_skip_word(p, "if")) {
        JinjaNode* condition = jinja_or(p);
        JinjaNode* choice = jinja_node(p, NODE_CHOICE, template_none(), condition, a);
        if (jinja_skip_word(p, "else")) { choice->kids[2] = jinja_expression(p); }
        a = choice;
        p->unknown = unknown;  // in a choice, too, only where it is asked
    }
    p->j->depth--;
    return a;
}

// ---------------------------------------------------------------------------------------------------------------------
// statements

static inline JinjaNode* jinja_statements(JinjaParser* p, const char* ends);

/* Parses the rest of a tag, a body, and the name of the tag that ends it. */
static inline JinjaNode* jinja_body(JinjaParser* p, const char* ends) {
    const bool soft = p->soft;
    jinja_skip_operator(p, ":");
    jinja_expect(p, TOKEN_TAG_END, NULL, "%}");
    p->soft = soft && strstr(ends, "endif");  // other bodies have variables of their own, and jinja2 is strict in them
    JinjaNode* body = jinja_statements(p, ends);
    p->soft = soft;
    return body;
}

/* Parses what is set: a name, a namespace's member, or several. */
static inline JinjaNode* jinja_target(JinjaParser* p, bool with_members) {
    JinjaNode *first = NULL, **end = &first;
    const size_t at = p->token->at;
    const bool brackets = jinja_skip_operator(p, "(");
    bool several = false;
    do {
        if (first && !jinja_next_is(p, TOKEN_NAME, NULL) && !jinja_next_is(p, TOKEN_OPERATOR, "(")) { break; }
        if (jinja_next_is(p, TOKEN_OPERATOR, "(")) {
            jinja_enter(p->j);
            *end = jinja_target(p, with_members);
            p->j->depth--;
        } else {
            *end = jinja_node(p, NODE_NAME, p->token->value, NULL, NULL);
            if (jinja_listed(p->loops ? "loop true True false False none None" : "true True false False none None",
                             jinja_expect_name(p, "a name"))) {
                p->token--;
                jinja_unexpected(p, "a name");
            }
            if (with_members && jinja_skip_operator(p, ".")) {
                *end = jinja_node(p, NODE_ATTRIBUTE, p->token->value, *end, NULL);
                jinja_expect_name(p, "a member's name");
            }
        }
        end = &(*end)->next;
        several = several || jinja_next_is(p, TOKEN_OPERATOR, ",");
    } while (jinja_skip_operator(p, ","));
    if (brackets) { jinja_expect(p, TOKEN_OPERATOR, ")", "\")\""); }
    if (!several) { return first; }
    JinjaNode* tuple = jinja_node(p, NODE_TUPLE, template_none(), first, NULL);
    tuple->at = at;
    return tuple;
}

static inline void jinja_parse_for(JinjaParser* p, JinjaNode* n) {
    n->kind = NODE_FOR;
    p->loops++;
    n->kids[0] = jinja_target(p, false);
    p->loops--;
    jinja_expect(p, TOKEN_NAME, "in", "\"in\"");
    n->kids[1] = jinja_tuple(p, false);
    if (jinja_skip_word(p, "if")) { n->kids[4] = jinja_expression(p); }
    if (jinja_next_is(p, TOKEN_NAME, "recursive")) { jinja_unexpected(p, "%}: loops that are recursive are not known"); }
    p->loops++;
    n->kids[2] = jinja_body(p, "else endfor");
    p->loops--;
    if (template_is(p->token[-1].value, "else")) { n->kids[3] = jinja_body(p, "endfor"); }
}

static inline void jinja_parse_if(JinjaParser* p, JinjaNode* n) {
    const bool soft = p->soft;
    p->soft = true;
    for (;;) {
        n->kind = NODE_IF;
        n->kids[0] = jinja_tuple(p, false);
        n->kids[1] = jinja_body(p, "elif else endif");
        if (!template_is(p->token[-1].value, "elif")) { break; }
        n->kids[3] = jinja_node(p, NODE_IF, template_none(), NULL, NULL);
        n = n->kids[3];
    }
    if (template_is(p->token[-1].value, "else")) { n->kids[2] = jinja_body(p, "endif"); }
    p->soft = soft;
}

static inline void jinja_parse_set(JinjaParser* p, JinjaNode* n) {
    n->kind = NODE_SET;
    n->kids[0] = jinja_target(p, true);
    if (jinja_skip_operator(p, "=")) {
        n->kids[1] = jinja_tuple(p, true);
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
                         "one of the tags for, if, set, macro, filter, generation, raw, in loops break and continue, or "
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
            (*end)->kids[0] = jinja_tuple(p, true);
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
