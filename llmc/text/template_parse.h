/* template_parse.h -- reads the text of a chat template (text/template.h) into a tree of nodes.
 *
 * The text becomes tokens first: pieces of text, and between {{ }} and {% %} names, strings, numbers and operators. White space
 * around tags goes as in jinja2 with trim_blocks and lstrip_blocks: the newline behind a {% %} or {# #}, and the blanks before one
 * at the start of a line; with "-" all of it, with "+" none.
 *
 * Expressions, loosest first:
 *   a if b else c | or | and | not | == != < <= > >= in, not in | + - | ~ | * / // % | - + | x.y x[y] x[a:b] x(y) | x|filter, x is test
 */
#ifndef LLMC_TEMPLATE_PARSE_H
#define LLMC_TEMPLATE_PARSE_H

#include "llmc/text/template_value.h"  // defines: Jinja, JinjaText, TemplateValue, jinja_fail, jinja_alloc, jinja_append

#include <ctype.h>

// ---------------------------------------------------------------------------------------------------------------------
// tokens

typedef enum {
    TOKEN_TEXT,
    TOKEN_OUTPUT,      // {{
    TOKEN_OUTPUT_END,  // }}
    TOKEN_TAG,         // {%
    TOKEN_TAG_END,     // %}
    TOKEN_NAME,
    TOKEN_CONSTANT,  // a string or number
    TOKEN_OPERATOR,
    TOKEN_END
} JinjaTokenType;

typedef struct {
    JinjaTokenType type;
    size_t at;            // its place in the text
    TemplateValue value;  // name and operator: their text
} JinjaToken;

typedef struct {
    Jinja* j;
    const char* s;  // the text, with its NUL at `end`
    size_t at, end;
    JinjaToken* tokens;
    size_t count, cap;
    bool line_start;  // what comes next begins a line
} JinjaLexer;

static inline void jinja_token(JinjaLexer* l, JinjaTokenType type, size_t at, TemplateValue value) {
    const JinjaToken token = {type, at, value};
    jinja_alloc(l->j, 0);  // asks whether it is too much
    l->tokens = (JinjaToken*)template_grow(l->j->arena, l->tokens, l->count, &l->cap, sizeof token);
    l->tokens[l->count++] = token;
}

static inline bool jinja_sees(const JinjaLexer* l, size_t at, const char* s) { return strncmp(l->s + at, s, strlen(s)) == 0; }
static inline bool jinja_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

/* Moves past the end of a tag, `end` behind its sign, and past the white space that goes with it. */
static inline void jinja_skip_end(JinjaLexer* l, const char* end) {
    const char sign = l->s[l->at];
    l->at += (sign == '-' || sign == '+') + strlen(end);
    if (sign == '-') {
        while (jinja_blank(l->s[l->at])) { l->at++; }
    } else if (sign != '+' && end[0] != '}') {
        l->at += l->s[l->at] == '\n';
    }
    l->line_start = l->s[l->at - 1] == '\n';
}

/* Returns whether a tag ends here: `end`, or a sign and `end`. */
static inline bool jinja_ends(const JinjaLexer* l, const char* end) {
    return jinja_sees(l, l->at, end) || (l->s[l->at] == '-' && jinja_sees(l, l->at + 1, end)) ||
           (l->s[l->at] == '+' && end[0] != '}' && jinja_sees(l, l->at + 1, end));
}

/* Adds the text [from, to), which ends at a tag whose sign is `sign`; `lstrip`: blanks at the start of its last line go. */
static inline void jinja_add_piece(JinjaLexer* l, size_t from, size_t to, char sign, bool lstrip) {
    size_t cut = to;
    while (cut > from && jinja_blank(l->s[cut - 1]) && (sign == '-' || l->s[cut - 1] != '\n')) { cut--; }
    const bool whole_line = cut > from ? l->s[cut - 1] == '\n' : l->line_start;
    if (sign != '-' && (!lstrip || sign == '+' || !whole_line)) { cut = to; }
    if (cut > from) { jinja_token(l, TOKEN_TEXT, from, template_string(l->j->arena, l->s + from, cut - from, true)); }
}

/* Returns the end of a {% NAME %} at a place, and its text's end sign in *l; 0: another tag. */
static inline size_t jinja_bare_tag(const JinjaLexer* l, size_t at, const char* name) {
    at += 2 + (l->s[at + 2] == '-' || l->s[at + 2] == '+');
    while (jinja_blank(l->s[at])) { at++; }
    if (!jinja_sees(l, at, name)) { return 0; }
    at += strlen(name);
    while (jinja_blank(l->s[at])) { at++; }
    return jinja_sees(l, at, "%}") || ((l->s[at] == '-' || l->s[at] == '+') && jinja_sees(l, at + 1, "%}")) ? at : 0;
}

/* Adds the text between {% raw %} and {% endraw %}. */
static inline void jinja_add_raw(JinjaLexer* l, size_t tag) {
    l->at = tag;
    const bool strip = l->s[tag] == '-';
    l->at += l->s[tag] == '%' ? 2 : 3;
    while (strip && jinja_blank(l->s[l->at])) { l->at++; }
    l->line_start = l->s[l->at - 1] == '\n';
    for (size_t from = l->at, at = from; at < l->end; at++) {
        const size_t end = jinja_sees(l, at, "{%") ? jinja_bare_tag(l, at, "endraw") : 0;
        if (!end) { continue; }
        jinja_add_piece(l, from, at, l->s[at + 2], true);
        l->at = end;
        jinja_skip_end(l, "%}");
        return;
    }
    jinja_fail(l->j, "{%% raw %%} has no {%% endraw %%}");
}

/* Appends what a backslash in a string stands for. */
static inline void jinja_add_escape(JinjaLexer* l, JinjaText* t) {
    static const char names[] = "n\nt\tr\r\\\\'\'\"\"a\ab\bf\fv\v0";
    const char c = l->s[l->at + 1];
    const char* known = c && c != '0' ? strchr(names, c) : NULL;
    const int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    char out[8], hex[9] = "";
    if (c == '\n') {  // a line that goes on
        l->at += 2;
    } else if (known && (known - names) % 2 == 0) {
        jinja_append(l->j, t, known + 1, 1, NULL, 1);
        l->at += 2;
    } else if (digits || (c >= '0' && c <= '7')) {
        const size_t from = l->at + 1 + (digits > 0), most = digits ? (size_t)digits : 3;
        size_t n = 0;
        while (n < most && isxdigit((unsigned char)l->s[from + n]) && (digits || l->s[from + n] < '8')) { n++; }
        memcpy(hex, l->s + from, n);
        const unsigned long code = strtoul(hex, NULL, digits ? 16 : 8);
        if ((digits && n < most) || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
            jinja_fail(l->j, "the escape \\%c is not a character", c);
        }
        jinja_append(l->j, t, out, utf8_encode(out, (int)code), NULL, 1);
        l->at = from + n;
    } else {  // Python keeps what it does not know
        jinja_append(l->j, t, "\\", 1, NULL, 1);
        l->at++;
    }
}

static inline void jinja_add_string(JinjaLexer* l) {
    JinjaText t = {NULL, NULL, 0, 0};
    const size_t from = l->at;
    const char quote = l->s[l->at++];
    while (l->s[l->at] != quote) {
        if (l->at >= l->end) { jinja_fail(l->j, "a string has no end"); }
        if (l->s[l->at] == '\\') {
            jinja_add_escape(l, &t);
        } else {
            jinja_append(l->j, &t, l->s + l->at++, 1, NULL, 1);
        }
    }
    l->at++;
    jinja_token(l, TOKEN_CONSTANT, from, jinja_string(&t));
}

static inline void jinja_add_number(JinjaLexer* l) {
    char digits[64];
    size_t n = 0, from = l->at;
    bool whole = true;
    for (; n < sizeof digits - 1; l->at++) {
        const char c = l->s[l->at], next = l->s[l->at + 1];
        const bool exponent = (c == 'e' || c == 'E') && (isdigit((unsigned char)next) || next == '-' || next == '+');
        const bool sign = (c == '+' || c == '-') && n > 0 && (digits[n - 1] == 'e' || digits[n - 1] == 'E');
        const bool point = c == '.' && whole && isdigit((unsigned char)next);
        if (c == '_' && isdigit((unsigned char)next)) { continue; }
        if (!isdigit((unsigned char)c) && !exponent && !sign && !point) { break; }
        whole = whole && isdigit((unsigned char)c);
        digits[n++] = c;
    }
    digits[n] = 0;
    errno = 0;
    const int64_t i = strtoll(digits, NULL, 10);
    if (whole && errno) { jinja_fail(l->j, "%s has more than 64 bits", digits); }
    jinja_token(l, TOKEN_CONSTANT, from, whole ? template_int(i) : template_float(strtod(digits, NULL)));
}

/* Adds the tokens of a tag, up to its `end`. Within brackets the end does not count: {{ {'a': {}} }}. */
static inline void jinja_add_tag(JinjaLexer* l, JinjaTokenType end_type, const char* end) {
    static const char* const pairs[] = {"//", "**", "==", "!=", ">=", "<="};
    char open[JINJA_MAX_DEPTH];
    size_t depth = 0;
    for (;;) {
        const size_t at = l->at;
        const char c = l->s[at];
        l->j->at = at;
        if (at >= l->end) { jinja_fail(l->j, "a tag has no end, wanted %s", end); }
        if (depth == 0 && jinja_ends(l, end)) { break; }
        size_t n = 0;
        if (jinja_blank(c)) {
            l->at++;
        } else if (c == '"' || c == '\'') {
            jinja_add_string(l);
        } else if (isdigit((unsigned char)c)) {
            jinja_add_number(l);
        } else if (isalpha((unsigned char)c) || c == '_') {
            while (isalnum((unsigned char)l->s[at + n]) || l->s[at + n] == '_') { n++; }
            jinja_token(l, TOKEN_NAME, at, template_string(l->j->arena, l->s + at, n, true));
        } else if (strchr("+-/*%~()[]{}.:|,;=<>!", c)) {
            n = 1;
            for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) { n = jinja_sees(l, at, pairs[i]) ? 2 : n; }
            if (strchr("([{", c) && depth == JINJA_MAX_DEPTH) {
                jinja_fail(l->j, "is nested more than %d deep", JINJA_MAX_DEPTH);
            }
            if (strchr("([{", c)) { open[depth++] = c == '(' ? ')' : c == '[' ? ']' : '}'; }
            if (strchr(")]}", c) && (depth == 0 || open[--depth] != c)) { jinja_fail(l->j, "'%c' closes nothing", c); }
            jinja_token(l, TOKEN_OPERATOR, at, template_string(l->j->arena, l->s + at, n, true));
        } else {
            jinja_fail(l->j, "the character '%c' is not expected here", c);
        }
        l->at += n;
    }
    jinja_token(l, end_type, l->at, template_none());
    jinja_skip_end(l, end);
}

/* Turns the text into tokens. */
static inline void jinja_lex(JinjaLexer* l) {
    l->line_start = true;
    for (size_t from = 0; from < l->end; from = l->at) {
        size_t at = from;
        while (at < l->end && !(l->s[at] == '{' && l->s[at + 1] && strchr("{%#", l->s[at + 1]))) { at++; }
        if (at == l->end) {
            jinja_token(l, TOKEN_TEXT, from, template_string(l->j->arena, l->s + from, at - from, true));
            break;
        }
        const char kind = l->s[at + 1], sign = l->s[at + 2];
        const size_t raw = kind == '%' ? jinja_bare_tag(l, at, "raw") : 0;
        l->j->at = at;
        jinja_add_piece(l, from, at, sign, kind != '{');
        l->at = at + 2 + (sign == '-' || (sign == '+' && kind != '{'));
        if (raw) {
            jinja_add_raw(l, raw);
        } else if (kind == '#') {
            while (l->at < l->end && !jinja_ends(l, "#}")) { l->at++; }
            if (l->at == l->end) { jinja_fail(l->j, "a comment has no end, wanted #}"); }
            jinja_skip_end(l, "#}");
        } else {
            jinja_token(l, kind == '{' ? TOKEN_OUTPUT : TOKEN_TAG, at, template_none());
            jinja_add_tag(l, kind == '{' ? TOKEN_OUTPUT_END : TOKEN_TAG_END, kind == '{' ? "}}" : "%}");
        }
    }
    jinja_token(l, TOKEN_END, l->end, template_none());
}

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
    NODE_TEXT,        // value
    NODE_OUTPUT,      // expression
    NODE_IF,          // condition, body, else, elif (a NODE_IF)
    NODE_FOR,         // target, items, body, else, condition
    NODE_SET,         // target, expression
    NODE_SET_BLOCK,   // target (NULL: the text is written), filters, body
    NODE_MACRO,       // parameters (NODE_ARGUMENTs with their default), body; value: the name
    NODE_GENERATION,  // body
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

static inline JinjaNode* jinja_expression(JinjaParser* p);
static inline JinjaNode* jinja_or(JinjaParser* p);
static inline JinjaNode* jinja_postfix(JinjaParser* p, JinjaNode* n);

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
                          jinja_next_is(p, TOKEN_OUTPUT_END, NULL) || jinja_next_is(p, TOKEN_TAG_END, NULL);
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

/* Parses the arguments of a call behind its "(". */
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
        n->kids[part] = absent ? NULL : jinja_expression(p);
        if (!jinja_skip_operator(p, ":")) { break; }
        n->kind = NODE_SLICE;
    }
    if (n->kind == NODE_ITEM && !n->kids[1]) { jinja_unexpected(p, "a key"); }
    jinja_expect(p, TOKEN_OPERATOR, "]", "\"]\"");
    return n;
}

static inline JinjaNode* jinja_parse_filter(JinjaParser* p, JinjaNode* of) {
    JinjaNode* n = jinja_node(p, NODE_FILTER, template_none(), of, NULL);
    n->value = jinja_expect_name(p, "the name of a filter");
    if (jinja_skip_operator(p, "(")) { n->kids[1] = jinja_arguments(p); }
    return n;
}

/* Parses a test behind its "is". An argument may stand without brackets: x is divisibleby 3. */
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
        n->kids[1]->kids[0] = jinja_postfix(p, jinja_primary(p));
    }
    return negated ? jinja_node(p, NODE_NOT, template_none(), n, NULL) : n;
}

/* Parses members, subscripts and calls behind an expression. */
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

/* Parses filters, tests and calls behind an expression. */
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
        a->kids[1] = level == 2 ? jinja_unary(p, true) : jinja_binary_level(p, level + 1);
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

static inline JinjaNode* jinja_and(JinjaParser* p) {
    JinjaNode* a = jinja_not(p);
    while (jinja_skip_word(p, "and")) {
        a = jinja_node(p, NODE_AND, template_none(), a, NULL);
        a->kids[1] = jinja_not(p);
    }
    return a;
}

static inline JinjaNode* jinja_or(JinjaParser* p) {
    JinjaNode* a = jinja_and(p);
    while (jinja_skip_word(p, "or")) {
        a = jinja_node(p, NODE_OR, template_none(), a, NULL);
        a->kids[1] = jinja_and(p);
    }
    return a;
}

static inline JinjaNode* jinja_expression(JinjaParser* p) {
    jinja_enter(p->j);
    JinjaNode* a = jinja_or(p);
    while (jinja_skip_word(p, "if")) {
        JinjaNode* condition = jinja_or(p);
        JinjaNode* choice = jinja_node(p, NODE_CHOICE, template_none(), condition, a);
        if (jinja_skip_word(p, "else")) { choice->kids[2] = jinja_expression(p); }
        a = choice;
    }
    p->j->depth--;
    return a;
}

// ---------------------------------------------------------------------------------------------------------------------
// statements

static inline JinjaNode* jinja_statements(JinjaParser* p, const char* ends);

/* Returns whether a name is one of the words of a text. */
static inline bool jinja_listed(const char* words, TemplateValue name) {
    for (const char* w = words; *w; w += strspn(w, " ")) {
        const size_t n = strcspn(w, " ");
        if (n == name.len && memcmp(w, name.as.s, n) == 0) { return true; }
        w += n;
    }
    return false;
}

/* Parses the rest of a tag, a body, and one of the tags that may end it: its token, which is left behind the name. */
static inline JinjaNode* jinja_body(JinjaParser* p, const char* ends) {
    jinja_expect(p, TOKEN_TAG_END, NULL, "%}");
    return jinja_statements(p, ends);
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
            if (jinja_listed("true True false False none None in not and or if else is", jinja_expect_name(p, "a name"))) {
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
    n->kids[0] = jinja_target(p, false);
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
    for (;;) {
        n->kind = NODE_IF;
        n->kids[0] = jinja_tuple(p, false);
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
        n->kids[1] = jinja_tuple(p, true);
        return;
    }
    n->kind = NODE_SET_BLOCK;
    while (jinja_skip_operator(p, "|")) { n->kids[1] = jinja_parse_filter(p, n->kids[1]); }
    n->kids[2] = jinja_body(p, "endset");
}

static inline void jinja_parse_filter_block(JinjaParser* p, JinjaNode* n) {
    n->kind = NODE_SET_BLOCK;
    do { n->kids[1] = jinja_parse_filter(p, n->kids[1]); } while (jinja_skip_operator(p, "|"));
    n->kids[2] = jinja_body(p, "endfilter");
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

/* Parses a tag behind its {% and name. */
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
    } else if (template_is(name, "filter")) {
        jinja_parse_filter_block(p, n);
    } else if (template_is(name, "macro")) {
        jinja_parse_macro(p, n);
    } else if (template_is(name, "generation")) {
        n->kids[0] = jinja_body(p, "endgeneration");
    } else if (p->loops && (template_is(name, "break") || template_is(name, "continue"))) {
        n->kind = template_is(name, "break") ? NODE_BREAK : NODE_CONTINUE;
    } else {
        p->token--;
        jinja_unexpected(
            p,
            "one of the tags for, if, set, macro, filter, generation, raw, in loops break and continue, or the end of a tag");
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
