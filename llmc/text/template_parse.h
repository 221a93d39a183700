/* template_parse.h -- parses a chat template (text/template.h) into a tree: jinja2's lexer and grammar, as transformers sets
 * them: trim_blocks, lstrip_blocks, no newline at the end, the tags generation, break and continue.
 *
 * White space, as in jinja2: the newline behind a tag {% %} or a comment goes, and so do blanks between the start of a line and
 * the tag. A minus sign inside a tag's brackets takes all white space at that side; a plus sign keeps it.
 *
 * Trees are bounded: at most JINJA_MAX_HEIGHT nodes lie between the root and a leaf, so that whoever walks one may recurse.
 */
#ifndef LLMC_TEMPLATE_PARSE_H
#define LLMC_TEMPLATE_PARSE_H

#include "llmc/text/template_value.h"  // defines: Jinja, TemplateValue, jinja_fail, jinja_alloc, jinja_append

enum { TEMPLATE_MAX_BYTES = 1 << 20 };  // of a template's text

// ---------------------------------------------------------------------------------------------------------------------
// the lexer

typedef enum {
    TOKEN_END,        // of the template
    TOKEN_TEXT,       // between the tags
    TOKEN_PRINT,      // {{
    TOKEN_PRINT_END,  // }}
    TOKEN_TAG,        // {%
    TOKEN_TAG_END,    // %}
    TOKEN_NAME,
    TOKEN_STRING,
    TOKEN_NUMBER,
    TOKEN_OPERATOR
} JinjaTokenType;

typedef struct {
    uint32_t type;        // JinjaTokenType
    uint32_t at;          // its first byte in the template
    TemplateValue value;  // text, name, string, number; operator: its characters
} JinjaToken;

typedef struct {
    Jinja* j;
    const char* s;  // the template, with newlines \n alone and a NUL behind it
    size_t len, at;
    JinjaToken* tokens;
    size_t count, cap;
    char open[JINJA_MAX_HEIGHT];  // brackets that are open inside a tag
    int num_open;
} JinjaLexer;

static inline TemplateValue jinja_literal(JinjaLexer* l, size_t from, size_t to) {
    jinja_alloc(l->j, to - from);
    return template_string(l->j->arena, l->s + from, to - from, true);
}

static inline void jinja_token(JinjaLexer* l, JinjaTokenType type, size_t at, TemplateValue value) {
    const JinjaToken token = {(uint32_t)type, (uint32_t)at, value};
    if (l->count == l->cap) { jinja_alloc(l->j, 0); }
    l->tokens = (JinjaToken*)template_grow(l->j->arena, l->tokens, l->count, &l->cap, sizeof token);
    l->tokens[l->count++] = token;
}

/* Returns the byte behind the white space at `at`. */
static inline size_t jinja_skip_space(const JinjaLexer* l, size_t at) {
    uint32_t c;
    for (int n; at < l->len && (n = utf8_decode((const uint8_t*)l->s + at, l->len - at, &c)) && unicode_is_stripped(c);) {
        at += (size_t)n;
    }
    return at;
}

/* Returns the byte at which the white space before `to` starts, but not one before `from`. */
static inline size_t jinja_back_space(const JinjaLexer* l, size_t from, size_t to) {
    for (size_t start = to; start > from;) {
        uint32_t c;
        do { start--; } while (start > from && ((uint8_t)l->s[start] & 0xC0) == 0x80);
        utf8_decode((const uint8_t*)l->s + start, l->len - start, &c);
        if (!unicode_is_stripped(c)) { break; }
        to = start;
    }
    return to;
}

static inline bool jinja_looking_at(const JinjaLexer* l, size_t at, const char* s) {
    return strncmp(l->s + at, s, strlen(s)) == 0;
}

/* Returns the byte behind a tag's end, such as "%}", at `at`, and behind the white space it takes; 0 if it is not there. */
static inline size_t jinja_close(const JinjaLexer* l, size_t at, const char* end) {
    const bool minus = l->s[at] == '-', plus = l->s[at] == '+' && *end != '}';
    if (!jinja_looking_at(l, at + (minus || plus), end)) { return 0; }
    at += (size_t)(minus || plus) + 2;
    if (minus) { return jinja_skip_space(l, at); }
    return at + (!plus && *end != '}' && l->s[at] == '\n');
}

/* Returns the byte behind "{% raw %}" at `at`, or 0. A newline behind it stays. */
static inline size_t jinja_raw_begin(const JinjaLexer* l, size_t at) {
    at += 2;
    at = jinja_skip_space(l, at + (l->s[at] == '-' || l->s[at] == '+'));
    if (!jinja_looking_at(l, at, "raw")) { return 0; }
    at = jinja_skip_space(l, at + 3);
    if (jinja_looking_at(l, at, "%}")) { return at + 2; }
    return jinja_looking_at(l, at, "-%}") ? jinja_skip_space(l, at + 3) : 0;
}

/* Adds the text before a tag, whose brackets start at `to`, without the white space that the tag takes. */
static inline void jinja_add_text(JinjaLexer* l, size_t from, size_t to) {
    const char sign = to < l->len ? l->s[to + 2] : '+';
    size_t end = to;
    if (sign == '-') {
        end = jinja_back_space(l, from, to);
    } else if (sign != '+' && l->s[to + 1] != '{') {
        const char* newline = to > from ? (const char*)memrchr(l->s + from, '\n', to - from) : NULL;
        const size_t line = newline ? (size_t)(newline - l->s) + 1 : from;
        if ((newline || from == 0 || l->s[from - 1] == '\n') && jinja_back_space(l, line, to) == line) { end = line; }
    }
    if (end > from) { jinja_token(l, TOKEN_TEXT, from, jinja_literal(l, from, end)); }
}

/* Adds the text up to the tag "{% endraw %}". */
static inline void jinja_add_raw(JinjaLexer* l) {
    for (size_t at = l->at; at + 1 < l->len; at++) {
        if (!jinja_looking_at(l, at, "{%")) { continue; }
        size_t in = at + 2;
        in = jinja_skip_space(l, in + (l->s[in] == '-' || l->s[in] == '+'));
        if (!jinja_looking_at(l, in, "endraw")) { continue; }
        const size_t end = jinja_close(l, jinja_skip_space(l, in + 6), "%}");
        if (!end) { continue; }
        jinja_add_text(l, l->at, at);
        l->at = end;
        return;
    }
    jinja_fail(l->j, "the tag raw has no end, wanted {%% endraw %%}");
}

/* Appends the character of the escape at s->at (a backslash) in a string, as Python's "unicode-escape" reads it. */
static inline void jinja_add_escape(JinjaLexer* l, JinjaText* t, size_t end) {
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char c = l->s[l->at + 1];
    const char* plain = strchr(from, c);
    char text[16], digits[9] = "";
    uint32_t code = 0;
    if (plain) {
        jinja_append(l->j, t, to + (plain - from), NULL, 1, 1);
        l->at += 2;
    } else if (c == '\n') {
        l->at += 2;
    } else if (c >= '0' && c <= '7') {
        l->at++;
        for (int i = 0; i < 3 && l->s[l->at] >= '0' && l->s[l->at] <= '7'; i++) {
            code = code * 8 + (uint32_t)(l->s[l->at++] - '0');
        }
        jinja_append(l->j, t, text, NULL, 1, utf8_encode(text, (int)code));
    } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t want = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        for (size_t i = 0; i < want && l->at + 2 + i < end && strchr("0123456789abcdefABCDEF", l->s[l->at + 2 + i]); i++) {
            digits[i] = l->s[l->at + 2 + i];
        }
        code = (uint32_t)strtoul(digits, NULL, 16);
        if (strlen(digits) != want || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
            jinja_fail(l->j, "the escape \\%c%s is no character, wanted %zu hexadecimal digits of one", c, digits, want);
        }
        jinja_append(l->j, t, text, NULL, 1, utf8_encode(text, (int)code));
        l->at += 2 + want;
    } else if (c == 'N') {
        jinja_fail(l->j, "the escape \\N is not known, wanted \\u and four hexadecimal digits");
    } else if ((uint8_t)c < 0x80) {  // no escape: the backslash stays
        jinja_append(l->j, t, l->s + l->at, NULL, 1, 2);
        l->at += 2;
    } else {  // jinja2 turns the character into its escape first, and its backslash is then escaped
        const int n = utf8_decode((const uint8_t*)l->s + l->at + 1, end - l->at - 1, &code);
        snprintf(text, sizeof text, code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x", code);
        jinja_append_text(l->j, t, text, 1);
        l->at += 1 + (size_t)n;
    }
}

static inline void jinja_add_string(JinjaLexer* l) {
    const size_t start = l->at;
    const char quote = l->s[start];
    size_t end = start + 1;
    while (end < l->len && l->s[end] != quote) { end += 1 + (l->s[end] == '\\'); }
    if (end >= l->len) { jinja_fail(l->j, "the string that starts here has no end"); }
    JinjaText t = {NULL, NULL, 0, 0};
    for (l->at++; l->at < end;) {
        const char* escape = (const char*)memchr(l->s + l->at, '\\', end - l->at);
        const size_t to = escape ? (size_t)(escape - l->s) : end;
        jinja_append(l->j, &t, l->s + l->at, NULL, 1, to - l->at);
        l->at = to;
        if (escape) { jinja_add_escape(l, &t, end); }
    }
    l->at = end + 1;
    jinja_token(l, TOKEN_STRING, start, jinja_string(&t));
}

/* Copies digits of a base to `out`, without single underscores between them; returns how many. */
static inline size_t jinja_scan_digits(JinjaLexer* l, char* out, size_t used, size_t cap, int base) {
    const size_t before = used;
    for (;; l->at++) {
        const size_t at = l->at + (l->s[l->at] == '_' && (used > before || base != 10));
        const int c = l->s[at] | 0x20;
        const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 99;
        if (digit >= base || l->s[at] == 0x10) { break; }
        if (used + 1 >= cap) { jinja_fail(l->j, "the number that starts here is too long"); }
        out[used++] = l->s[at];
        l->at = at;
    }
    out[used] = 0;
    return used - before;
}

static inline void jinja_add_number(JinjaLexer* l, bool after_point) {
    char text[400];
    const size_t start = l->at;
    const int letter = l->s[start] == '0' ? l->s[start + 1] | 0x20 : 0;
    const int base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
    TemplateValue v = template_int(0);
    if (base != 10) { l->at += 2; }
    size_t used = jinja_scan_digits(l, text, 0, sizeof text, base);
    if (base != 10 && used == 0) {  // "0x" is the number 0 and a name
        l->at = start + 1;
        snprintf(text, sizeof text, "0");
    }
    if (base == 10 && !after_point) {
        const size_t whole = l->at, whole_used = used;
        bool real = false;
        if (l->s[l->at] == '.' && l->s[l->at + 1] >= '0' && l->s[l->at + 1] <= '9') {
            text[used++] = '.';
            l->at++;
            used += jinja_scan_digits(l, text, used, sizeof text, 10);
            real = true;
        }
        if ((l->s[l->at] | 0x20) == 'e') {
            const size_t mark = l->at, mark_used = used;
            text[used++] = 'e';
            l->at++;
            if (l->s[l->at] == '+' || l->s[l->at] == '-') { text[used++] = l->s[l->at++]; }
            const size_t digits = jinja_scan_digits(l, text, used, sizeof text, 10);
            if (digits == 0) { l->at = mark; }
            used = digits ? used + digits : mark_used;
            real |= digits > 0;
        }
        if (real) {
            text[used] = 0;
            jinja_token(l, TOKEN_NUMBER, start, template_float(strtod(text, NULL)));
            return;
        }
        l->at = whole;
        text[whole_used] = 0;
    }
    if (base == 10 && text[0] == '0' && strspn(text, "0") < strlen(text)) {  // "012" is two numbers, which no grammar takes
        jinja_fail(l->j, "the number %.20s starts with a zero, wanted 0o before octal digits", text);
    }
    errno = 0;
    v.as.i = strtoll(text, NULL, base);
    if (errno) { jinja_fail(l->j, "the number %.40s needs more than 64 bits", text); }
    jinja_token(l, TOKEN_NUMBER, start, v);
}

/* Returns the length of the character of a name at `at`; 0: there is none. */
static inline size_t jinja_name_char(const JinjaLexer* l, size_t at) {
    uint32_t c;
    const uint8_t b = (uint8_t)l->s[at];
    if (b < 0x80) { return b == '_' || (b >= '0' && b <= '9') || ((b | 0x20) >= 'a' && (b | 0x20) <= 'z'); }
    const int n = utf8_decode((const uint8_t*)l->s + at, l->len - at, &c);
    return unicode_class(c) == UNICODE_LETTER || unicode_class(c) == UNICODE_NUMBER ? (size_t)n : 0;
}

/* Adds an operator, and keeps the account of brackets: inside them "}}" and "%}" do not end a tag. */
static inline void jinja_add_operator(JinjaLexer* l) {
    static const char* const two[] = {"//", "**", "==", "!=", ">=", "<=", NULL};
    const char c = l->s[l->at];
    const char* close = c ? strchr(")]}", c) : NULL;
    size_t n = 1;
    for (int i = 0; two[i]; i++) { n = jinja_looking_at(l, l->at, two[i]) ? 2 : n; }
    if (n == 1 && !(c && strchr("+-/*%~[](){}><=.:|,;", c))) {
        char shown[16];
        show_text(shown, sizeof shown, l->s + l->at,
                  size_min(l->len - l->at, jinja_char(jinja_literal(l, l->at, l->len), 0, NULL)));
        jinja_fail(l->j, "found \"%s\", wanted an expression of Jinja", shown);
    }
    if (n == 1 && strchr("([{", c)) {
        if (l->num_open == JINJA_MAX_HEIGHT) { jinja_fail(l->j, "more than %d brackets are open", JINJA_MAX_HEIGHT); }
        l->open[l->num_open++] = c;
    } else if (close && (l->num_open == 0 || l->open[--l->num_open] != "([{"[close - ")]}"])) {
        jinja_fail(l->j, "found \"%c\", which closes no bracket", c);
    }
    jinja_token(l, TOKEN_OPERATOR, l->at, jinja_literal(l, l->at, l->at + n));
    l->at += n;
}

/* Adds the tokens of a tag from behind its opening brackets to its end. */
static inline void jinja_add_tag(JinjaLexer* l, JinjaTokenType end_type, const char* end) {
    const size_t start = l->at;
    for (l->num_open = 0;;) {
        const size_t close = l->num_open == 0 ? jinja_close(l, l->at, end) : 0;
        l->j->at = l->at;
        if (close) {
            jinja_token(l, end_type, l->at, template_none());
            l->at = close;
            return;
        }
        const size_t space = jinja_skip_space(l, l->at);
        const char c = l->s[l->at];
        if (space > l->at) {
            l->at = space;
        } else if (l->at == l->len) {
            l->j->at = start;
            jinja_fail(l->j, "the tag that starts here has no end, wanted %s", end);
        } else if (c >= '0' && c <= '9') {
            jinja_add_number(l, l->at > 0 && l->s[l->at - 1] == '.');
        } else if (jinja_name_char(l, l->at)) {
            size_t to = l->at;
            for (size_t n; (n = jinja_name_char(l, to)) > 0;) { to += n; }
            jinja_token(l, TOKEN_NAME, l->at, jinja_literal(l, l->at, to));
            l->at = to;
        } else if (c == '\'' || c == '"') {
            jinja_add_string(l);
        } else {
            jinja_add_operator(l);
        }
    }
}

/* Cuts the whole template into tokens. */
static inline void jinja_lex(JinjaLexer* l) {
    while (l->at < l->len) {
        size_t tag = l->at;
        while (tag + 1 < l->len && !(l->s[tag] == '{' && strchr("{%#", l->s[tag + 1]))) { tag++; }
        if (tag + 1 >= l->len) { tag = l->len; }
        const size_t raw = tag < l->len && l->s[tag + 1] == '%' ? jinja_raw_begin(l, tag) : 0;
        l->j->at = tag;
        jinja_add_text(l, l->at, tag);
        if (tag == l->len) { break; }
        l->at = tag + 2;
        if (raw) {
            l->at = raw;
            jinja_add_raw(l);
            continue;
        }
        l->at += l->s[l->at] == '-' || l->s[l->at] == '+';
        if (l->s[tag + 1] == '#') {
            size_t end = 0;
            while (l->at < l->len && !(end = jinja_close(l, l->at, "#}"))) { l->at++; }
            if (!end) { jinja_fail(l->j, "the comment that starts here has no end, wanted #}"); }
            l->at = end;
        } else if (l->s[tag + 1] == '{') {
            jinja_token(l, TOKEN_PRINT, tag, template_none());
            jinja_add_tag(l, TOKEN_PRINT_END, "}}");
        } else {
            jinja_token(l, TOKEN_TAG, tag, template_none());
            jinja_add_tag(l, TOKEN_TAG_END, "%}");
        }
    }
    jinja_token(l, TOKEN_END, l->len, template_none());
}

// ---------------------------------------------------------------------------------------------------------------------
// the tree

typedef enum {
    // expressions
    NODE_CONSTANT,   // value
    NODE_NAME,       // value
    NODE_LIST,       // a: items
    NODE_TUPLE,      // a: items
    NODE_DICT,       // a: key, value, key, value ...
    NODE_ATTRIBUTE,  // a . value
    NODE_ITEM,       // a [ b ]
    NODE_SLICE,      // a [ b : c : d ], each may be NULL
    NODE_CALL,       // a ( b: arguments )
    NODE_FILTER,     // a | value ( b: arguments ); a NULL: of a block
    NODE_TEST,       // a is value ( b: arguments )
    NODE_NOT,        // a
    NODE_SIGN,       // op a
    NODE_AND,        // a, b
    NODE_OR,         // a, b
    NODE_COMPARE,    // a, then b: operands
    NODE_OPERAND,    // op a
    NODE_BINARY,     // a op b
    NODE_CONCAT,     // a: parts
    NODE_CHOICE,     // a if b else c; c may be NULL
    NODE_KEYWORD,    // value = a, an argument or a default; op '*' or 'p' (for **): the items of a are arguments
    NODE_MEMBER,     // value . b->value, where set may store
    // statements
    NODE_TEXT,          // value
    NODE_PRINT,         // a
    NODE_FOR,           // for a in b if c: d, else e
    NODE_IF,            // a: branches
    NODE_BRANCH,        // if a: d; a NULL: else
    NODE_SET,           // a = b
    NODE_SET_BLOCK,     // a = d, through the filters b
    NODE_MACRO,         // macro value ( a: parameters ): d
    NODE_CALL_BLOCK,    // call ( a: parameters ) b: d
    NODE_FILTER_BLOCK,  // b: filters, d
    NODE_WITH,          // a: KEYWORDs whose b is the target, d
    NODE_GENERATION,    // d
    NODE_BREAK,
    NODE_CONTINUE
} JinjaNodeKind;

enum { JINJA_USES_CALLER = 1, JINJA_USES_KWARGS = 2, JINJA_USES_VARARGS = 4 };  // what a macro's body names

typedef struct JinjaNode {
    uint8_t kind;     // JinjaNodeKind
    uint8_t op;       // of an operator: its first character; "//": 'f', "**": 'p', "==": 'e', "!=": 'n', ">=": 'g', "<=": 'l',
                      // in: 'i', not in: 'x'. Of a macro: JINJA_USES_*
    uint16_t height;  // levels below
    uint32_t at;
    struct JinjaNode *a, *b, *c, *d, *e;
    struct JinjaNode* next;  // in a list
    TemplateValue value;
    const struct JinjaFunction* function;  // of a filter or test; NULL: not known, an error if it is asked
} JinjaNode;

typedef struct {
    Jinja* j;
    const JinjaToken* t;       // the next token
    bool soft;                 // inside an if: an unknown filter is an error only if it is asked
    const JinjaNode* unknown;  // the first unknown filter or test outside of them
    int loops;                 // around this statement and in the same macro
    int uses;                  // JINJA_USES_* since the macro's start
} JinjaParser;

static inline const struct JinjaFunction* jinja_filter_named(TemplateValue name);
static inline const struct JinjaFunction* jinja_test_named(TemplateValue name);

static inline JinjaNode* jinja_node(JinjaParser* p, JinjaNodeKind kind, size_t at) {
    JinjaNode* n = (JinjaNode*)memset(jinja_alloc(p->j, sizeof(JinjaNode)), 0, sizeof(JinjaNode));
    n->kind = (uint8_t)kind;
    n->at = (uint32_t)at;
    return n;
}

/* Returns n, whose child is `child` now too: keeps the account of heights. */
static inline JinjaNode* jinja_above(JinjaParser* p, JinjaNode* n, const JinjaNode* child) {
    if (child && child->height >= n->height) { n->height = (uint16_t)(child->height + 1); }
    if (n->height >= JINJA_MAX_HEIGHT) { jinja_fail(p->j, "the template is nested more than %d deep", JINJA_MAX_HEIGHT); }
    return n;
}

static inline JinjaNode* jinja_node2(JinjaParser* p, JinjaNodeKind kind, size_t at, int op, JinjaNode* a, JinjaNode* b) {
    JinjaNode* n = jinja_node(p, kind, at);
    n->op = (uint8_t)op;
    n->a = a;
    n->b = b;
    return jinja_above(p, jinja_above(p, n, a), b);
}

static inline bool jinja_at_name(const JinjaToken* t, const char* name) {
    return t->type == TOKEN_NAME && jinja_is(t->value, name);
}
static inline bool jinja_at(const JinjaToken* t, const char* op) { return t->type == TOKEN_OPERATOR && jinja_is(t->value, op); }

/* Fails with "found X, wanted Y" at the next token. */
LLMC_NORETURN static inline void jinja_unexpected(JinjaParser* p, const char* wanted) {
    static const char* const names[] = {
        "the end of the template", "text", "{{", "}}", "{%", "%}", "", "a string", "a number", ""};
    char shown[64];
    p->j->at = p->t->at;
    if (p->t->type != TOKEN_NAME && p->t->type != TOKEN_OPERATOR) {
        jinja_fail(p->j, "found %s, wanted %s", names[p->t->type], wanted);
    }
    jinja_fail(p->j, "found \"%s\", wanted %s", show_text(shown, sizeof shown, p->t->value.as.s, p->t->value.len), wanted);
}

/* Steps over a name or operator if it is the next token. */
static inline bool jinja_skip_name(JinjaParser* p, const char* name) {
    if (!jinja_at_name(p->t, name)) { return false; }
    p->t++;
    return true;
}
static inline bool jinja_skip(JinjaParser* p, const char* op) {
    if (!jinja_at(p->t, op)) { return false; }
    p->t++;
    return true;
}
static inline void jinja_expect(JinjaParser* p, const char* op) {
    if (!jinja_skip(p, op)) { jinja_unexpected(p, op); }
}
static inline TemplateValue jinja_expect_name(JinjaParser* p, const char* wanted) {
    if (p->t->type != TOKEN_NAME) { jinja_unexpected(p, wanted); }
    return p->t++->value;
}

// ---------------------------------------------------------------------------------------------------------------------
// expressions, in jinja2's order of precedence: choice, or, and, not, comparison, + -, ~, * / // %, **, sign, filter

typedef struct {
    JinjaNode *first, *last;
} JinjaNodes;

static inline void jinja_push(JinjaNodes* list, JinjaNode* n) {
    *(list->last ? &list->last->next : &list->first) = n;
    list->last = n;
}

static inline JinjaNode* jinja_expression(JinjaParser* p, bool with_choice);
static inline JinjaNode* jinja_tuple(JinjaParser* p, bool targets, bool with_choice, const char* end, bool brackets);

/* Parses the items of a list or dict up to its closing bracket. */
static inline JinjaNode* jinja_items(JinjaParser* p, JinjaNodeKind kind, const char* close) {
    JinjaNode* n = jinja_node(p, kind, p->t++->at);
    JinjaNodes list = {NULL, NULL};
    while (!jinja_at(p->t, close)) {
        if (list.first) { jinja_expect(p, ","); }
        if (jinja_at(p->t, close)) { break; }
        jinja_push(&list, jinja_expression(p, true));
        jinja_above(p, n, list.last);
        if (kind != NODE_DICT) { continue; }
        jinja_expect(p, ":");
        jinja_push(&list, jinja_expression(p, true));
        jinja_above(p, n, list.last);
    }
    p->t++;
    n->a = list.first;
    return n;
}

/* Parses a name or a literal; with_member: also NAME.NAME, a place where set may store. */
static inline JinjaNode* jinja_primary(JinjaParser* p, bool with_member) {
    static const char* const constants[] = {"true", "True", "false", "False", "none", "None"};
    const JinjaToken* t = p->t;
    if (jinja_at(t, "[")) { return jinja_items(p, NODE_LIST, "]"); }
    if (jinja_at(t, "{")) { return jinja_items(p, NODE_DICT, "}"); }
    if (jinja_skip(p, "(")) {
        JinjaNode* n = jinja_tuple(p, false, true, NULL, true);
        jinja_expect(p, ")");
        return n;
    }
    if (t->type != TOKEN_NAME && t->type != TOKEN_STRING && t->type != TOKEN_NUMBER) { jinja_unexpected(p, "an expression"); }
    JinjaNode* n = jinja_node(p, t->type == TOKEN_NAME ? NODE_NAME : NODE_CONSTANT, t->at);
    n->value = p->t++->value;
    if (t->type == TOKEN_STRING && p->t->type == TOKEN_STRING) {
        JinjaText all = {NULL, NULL, 0, 0};
        jinja_append_string(p->j, &all, n->value);
        while (p->t->type == TOKEN_STRING) { jinja_append_string(p->j, &all, p->t++->value); }
        n->value = jinja_string(&all);
    }
    if (t->type != TOKEN_NAME) { return n; }
    for (int i = 0; i < 6; i++) {
        if (!jinja_is(t->value, constants[i])) { continue; }
        n->kind = NODE_CONSTANT;
        n->value = i < 4 ? template_bool(i < 2) : template_none();
        return n;
    }
    p->uses |= jinja_is(n->value, "caller")    ? JINJA_USES_CALLER
               : jinja_is(n->value, "kwargs")  ? JINJA_USES_KWARGS
               : jinja_is(n->value, "varargs") ? JINJA_USES_VARARGS
                                               : 0;
    if (with_member && jinja_skip(p, ".")) {
        JinjaNode* name = jinja_node(p, NODE_NAME, p->t->at);
        name->value = jinja_expect_name(p, "a name");
        n->kind = NODE_MEMBER;
        n->b = name;
    }
    return n;
}

/* Parses expressions with commas between them: a tuple, or the expression alone if there is no comma. `end` is a name that
 * also ends it. */
static inline JinjaNode* jinja_tuple(JinjaParser* p, bool targets, bool with_choice, const char* end, bool brackets) {
    JinjaNode* n = jinja_node(p, NODE_TUPLE, p->t->at);
    JinjaNodes list = {NULL, NULL};
    bool comma = false;
    for (;; comma = true) {
        if (list.first && !jinja_skip(p, ",")) { break; }
        if (p->t->type == TOKEN_PRINT_END || p->t->type == TOKEN_TAG_END || jinja_at(p->t, ")")) { break; }
        if (end && jinja_at_name(p->t, end)) { break; }
        jinja_push(&list, targets ? jinja_primary(p, strcmp(end ? end : "", "in") != 0) : jinja_expression(p, with_choice));
        jinja_above(p, n, list.last);
        if (!jinja_at(p->t, ",")) { break; }
    }
    comma |= list.first && p->t[-1].type == TOKEN_OPERATOR && jinja_at(p->t - 1, ",");
    if (!comma && list.first) { return list.first; }
    if (!comma && !brackets) { jinja_unexpected(p, "an expression"); }
    n->a = list.first;
    return n;
}

/* Parses "(...)" of a call. */
static inline JinjaNode* jinja_arguments(JinjaParser* p) {
    JinjaNodes list = {NULL, NULL};
    bool named = false, star = false, stars = false;
    jinja_expect(p, "(");
    while (!jinja_at(p->t, ")")) {
        if (list.first) { jinja_expect(p, ","); }
        if (jinja_at(p->t, ")")) { break; }
        const JinjaToken* t = p->t;
        const bool is_star = jinja_at(t, "*"), is_stars = jinja_at(t, "**");
        const bool is_named = t->type == TOKEN_NAME && jinja_at(t + 1, "=");
        if (stars || (star && !is_named && !is_stars) || (named && !is_named && !is_star && !is_stars)) {
            jinja_unexpected(p, "an argument with a name behind the others");
        }
        JinjaNode* n = jinja_node(p, NODE_KEYWORD, t->at);
        n->op = is_star ? '*' : is_stars ? 'p' : 0;
        n->value = t->value;
        for (const JinjaNode* other = list.first; other && is_named; other = other->next) {
            if (other->kind == NODE_KEYWORD && !other->op && jinja_equal(p->j, other->value, n->value)) {
                jinja_unexpected(p, "each argument once");
            }
        }
        p->t += is_named ? 2 : is_star || is_stars;
        n->a = jinja_expression(p, true);
        jinja_above(p, n, n->a);
        jinja_push(&list, is_named || is_star || is_stars ? n : n->a);
        named |= is_named;
        star |= is_star;
        stars |= is_stars;
    }
    p->t++;
    return list.first;
}

static inline JinjaNode* jinja_above_all(JinjaParser* p, JinjaNode* n, const JinjaNode* list) {
    for (; list; list = list->next) { jinja_above(p, n, list); }
    return n;
}

static inline JinjaNode* jinja_parse_call(JinjaParser* p, JinjaNode* callee) {
    JinjaNode* n = jinja_node(p, NODE_CALL, p->t->at);
    n->a = callee;
    n->b = jinja_arguments(p);
    return jinja_above_all(p, jinja_above(p, n, callee), n->b);
}

/* Parses the name of a filter or test, which may have dots. */
static inline TemplateValue jinja_function_name(JinjaParser* p, const char* wanted) {
    TemplateValue name = jinja_expect_name(p, wanted);
    while (jinja_skip(p, ".")) {
        const TemplateValue more = jinja_expect_name(p, wanted);
        name.len = (uint32_t)(more.as.s + more.len - name.as.s);
    }
    return name;
}

/* Notes an unknown filter or test, unless it stands inside an if. */
static inline void jinja_check_known(JinjaParser* p, const JinjaNode* n) {
    if (!n->function && !p->soft && !p->unknown) { p->unknown = n; }
}

/* Parses a filter behind its "|". */
static inline JinjaNode* jinja_parse_filter(JinjaParser* p, JinjaNode* of) {
    JinjaNode* n = jinja_node(p, NODE_FILTER, p->t->at);
    n->value = jinja_function_name(p, "the name of a filter");
    n->function = jinja_filter_named(n->value);
    n->a = of;
    jinja_check_known(p, n);
    if (jinja_at(p->t, "(")) { n->b = jinja_arguments(p); }
    return jinja_above_all(p, jinja_above(p, n, of), n->b);
}

static inline JinjaNode* jinja_postfix(JinjaParser* p, JinjaNode* n);

/* Parses a test behind its "is". */
static inline JinjaNode* jinja_parse_test(JinjaParser* p, JinjaNode* of) {
    const bool negated = jinja_skip_name(p, "not");
    JinjaNode* n = jinja_node(p, NODE_TEST, p->t->at);
    n->value = jinja_function_name(p, "the name of a test");
    n->function = jinja_test_named(n->value);
    n->a = of;
    jinja_check_known(p, n);
    const bool word =
        p->t->type == TOKEN_NAME && !jinja_at_name(p->t, "else") && !jinja_at_name(p->t, "or") && !jinja_at_name(p->t, "and");
    if (jinja_at(p->t, "(")) {
        n->b = jinja_arguments(p);
    } else if (word || p->t->type == TOKEN_STRING || p->t->type == TOKEN_NUMBER || jinja_at(p->t, "[") || jinja_at(p->t, "{")) {
        if (jinja_at_name(p->t, "is")) { jinja_unexpected(p, "one test: tests cannot be chained"); }
        n->b = jinja_postfix(p, jinja_primary(p, false));
    }
    jinja_above_all(p, jinja_above(p, n, of), n->b);
    return negated ? jinja_node2(p, NODE_NOT, n->at, 0, n, NULL) : n;
}

/* Parses "[...]" behind an expression: an item or a slice. */
static inline JinjaNode* jinja_subscript(JinjaParser* p, JinjaNode* of) {
    JinjaNode* n = jinja_node2(p, NODE_ITEM, p->t++->at, 0, of, NULL);
    JinjaNode** part[] = {&n->b, &n->c, &n->d};
    int colons = 0;
    if (jinja_at(p->t, "]")) {  // an empty tuple
        n->b = jinja_node(p, NODE_TUPLE, p->t->at);
    }
    while (!jinja_at(p->t, "]")) {
        if (jinja_at(p->t, ",") && colons == 0) {  // a tuple
            JinjaNodes list = {n->b, n->b};
            while (jinja_skip(p, ",")) { jinja_push(&list, jinja_expression(p, true)); }
            n->b = jinja_node(p, NODE_TUPLE, n->at);
            n->b->a = list.first;
            jinja_above_all(p, n->b, list.first);
            break;
        }
        if (jinja_at(p->t, ":") && colons < 2) {
            p->t++;
            colons++;
            n->kind = NODE_SLICE;
        } else if (!*part[colons]) {
            *part[colons] = jinja_expression(p, true);
        } else {
            jinja_unexpected(p, "]");
        }
        jinja_above(p, n, *part[colons]);
    }
    jinja_expect(p, "]");
    return jinja_above(p, n, n->b);
}

/* Parses what follows a primary: ".name", ".0", "[...]", "(...)". */
static inline JinjaNode* jinja_postfix(JinjaParser* p, JinjaNode* n) {
    for (;;) {
        if (jinja_at(p->t, "[")) {
            n = jinja_subscript(p, n);
        } else if (jinja_at(p->t, "(")) {
            n = jinja_parse_call(p, n);
        } else if (jinja_at(p->t, ".")) {
            const JinjaToken* t = ++p->t;
            const bool number = t->type == TOKEN_NUMBER && t->value.type == TEMPLATE_INT;
            if (t->type != TOKEN_NAME && !number) { jinja_unexpected(p, "a name or number"); }
            n = jinja_node2(p, number ? NODE_ITEM : NODE_ATTRIBUTE, t->at, 0, n, NULL);
            n->value = t->value;
            if (number) { n->b = jinja_primary(p, false); }
            p->t += !number;
        } else {
            return n;
        }
    }
}

/* Parses an expression with its sign, and behind it filters and tests. */
static inline JinjaNode* jinja_unary(JinjaParser* p, bool with_filters) {
    JinjaNode* n;
    const JinjaToken* t = p->t;
    jinja_descend(p->j);
    if (jinja_skip(p, "-") || jinja_skip(p, "+")) {
        n = jinja_unary(p, false);
        n = jinja_node2(p, NODE_SIGN, t->at, t->value.as.s[0], n, NULL);
    } else {
        n = jinja_primary(p, false);
    }
    n = jinja_postfix(p, n);
    while (with_filters) {
        if (jinja_skip(p, "|")) {
            n = jinja_parse_filter(p, n);
        } else if (jinja_skip_name(p, "is")) {
            n = jinja_parse_test(p, n);
        } else if (jinja_at(p->t, "(")) {
            n = jinja_parse_call(p, n);
        } else {
            break;
        }
    }
    p->j->depth--;
    return n;
}

/* Returns the letter of JinjaNode.op for an operator. */
static inline int jinja_op(const JinjaToken* t) {
    static const char* const two[] = {"//f", "**p", "==e", "!=n", ">=g", "<=l"};
    if (t->type != TOKEN_OPERATOR) { return 0; }
    for (int i = 0; i < 6 && t->value.len == 2; i++) {
        if (memcmp(two[i], t->value.as.s, 2) == 0) { return two[i][2]; }
    }
    return t->value.as.s[0];
}

/* The levels of operators between "or" and the sign. */
enum { LEVEL_OR, LEVEL_AND, LEVEL_NOT, LEVEL_COMPARE, LEVEL_SUM, LEVEL_CONCAT, LEVEL_PRODUCT, LEVEL_POWER, LEVEL_UNARY };

static inline JinjaNode* jinja_level(JinjaParser* p, int level);

/* Parses "a < b in c ...": a comparison of each with the next. */
static inline JinjaNode* jinja_compare(JinjaParser* p) {
    JinjaNode* n = jinja_level(p, LEVEL_SUM);
    JinjaNodes list = {NULL, NULL};
    for (;;) {
        const JinjaToken* t = p->t;
        int op = jinja_op(t);
        if (op && strchr("en<>gl", op)) {
            p->t++;
        } else if (jinja_skip_name(p, "in")) {
            op = 'i';
        } else if (jinja_at_name(t, "not") && jinja_at_name(t + 1, "in")) {
            p->t += 2;
            op = 'x';
        } else {
            break;
        }
        jinja_push(&list, jinja_node2(p, NODE_OPERAND, t->at, op, jinja_level(p, LEVEL_SUM), NULL));
    }
    return list.first ? jinja_above_all(p, jinja_node2(p, NODE_COMPARE, n->at, 0, n, list.first), list.first) : n;
}

/* Parses the operators of a level and of those that bind tighter. */
static inline JinjaNode* jinja_level(JinjaParser* p, int level) {
    static const char* const ops[] = {"", "", "", "", "+-", "~", "*/f%", "p"};
    if (level == LEVEL_UNARY) { return jinja_unary(p, true); }
    if (level == LEVEL_COMPARE) { return jinja_compare(p); }
    if (level == LEVEL_NOT) {
        const size_t at = p->t->at;
        if (!jinja_at_name(p->t, "not")) { return jinja_compare(p); }
        jinja_descend(p->j);
        p->t++;
        JinjaNode* n = jinja_node2(p, NODE_NOT, at, 0, jinja_level(p, LEVEL_NOT), NULL);
        p->j->depth--;
        return n;
    }
    JinjaNode* n = jinja_level(p, level + 1);
    JinjaNodes parts = {n, n};
    for (;;) {
        const JinjaToken* t = p->t;
        const int op = jinja_op(t);
        if (level == LEVEL_OR || level == LEVEL_AND) {
            if (!jinja_skip_name(p, level == LEVEL_OR ? "or" : "and")) { return n; }
            n = jinja_node2(p, level == LEVEL_OR ? NODE_OR : NODE_AND, t->at, 0, n, jinja_level(p, level + 1));
        } else if (!op || !strchr(ops[level], op)) {
            break;
        } else if (level == LEVEL_CONCAT) {
            p->t++;
            jinja_push(&parts, jinja_level(p, level + 1));
        } else {
            p->t++;
            n = jinja_node2(p, NODE_BINARY, t->at, op, n, jinja_level(p, level + 1));
        }
    }
    if (parts.first == parts.last) { return n; }
    return jinja_above_all(p, jinja_node2(p, NODE_CONCAT, n->at, 0, parts.first, NULL), parts.first);
}

static inline JinjaNode* jinja_expression(JinjaParser* p, bool with_choice) {
    const JinjaNode* unknown = p->unknown;
    jinja_descend(p->j);
    JinjaNode* n = jinja_level(p, LEVEL_OR);
    while (with_choice && jinja_at_name(p->t, "if")) {
        JinjaNode* choice = jinja_node(p, NODE_CHOICE, p->t++->at);
        choice->a = n;
        choice->b = jinja_level(p, LEVEL_OR);
        choice->c = jinja_skip_name(p, "else") ? jinja_expression(p, true) : NULL;
        n = jinja_above(p, jinja_above(p, jinja_above(p, choice, choice->a), choice->b), choice->c);
        p->unknown = unknown;
    }
    p->j->depth--;
    return n;
}

// ---------------------------------------------------------------------------------------------------------------------
// statements

/* Fails unless n is what may be assigned to: a name, a member of a namespace, or a tuple of them. */
static inline JinjaNode* jinja_check_target(JinjaParser* p, JinjaNode* n) {
    p->j->at = n->at;
    if (n->kind == NODE_TUPLE) {
        for (JinjaNode* item = n->a; item; item = item->next) { jinja_check_target(p, item); }
    } else if (n->kind != NODE_NAME && n->kind != NODE_MEMBER) {
        jinja_fail(p->j, "cannot assign to this, wanted a name");
    } else if (p->loops && n->kind == NODE_NAME && jinja_is(n->value, "loop")) {
        jinja_fail(p->j, "cannot assign to loop inside a loop");
    }
    return n;
}

/* Parses statements up to a tag with one of these names, with spaces around each; stops at its name, inside the tag. */
static inline JinjaNode* jinja_statements(JinjaParser* p, JinjaNode* above, const char* ends);

/* Parses the body of a statement behind its tag: steps over the tag's end first. */
static inline JinjaNode* jinja_body(JinjaParser* p, JinjaNode* n, const char* ends) {
    jinja_skip(p, ":");
    if (p->t->type != TOKEN_TAG_END) { jinja_unexpected(p, "%}"); }
    p->t++;
    return jinja_statements(p, n, ends);
}

/* Parses a body that has variables of its own, up to and with its end tag. */
static inline JinjaNode* jinja_own_body(JinjaParser* p, JinjaNode* n, const char* ends, bool keeps_loop) {
    const bool soft = p->soft;
    const int loops = p->loops;
    p->soft = false;
    p->loops = keeps_loop ? loops : 0;
    JinjaNode* body = jinja_body(p, n, ends);
    p->soft = soft;
    p->loops = loops;
    return body;
}

static inline JinjaNode* jinja_parse_for(JinjaParser* p, JinjaNode* n) {
    const bool soft = p->soft;
    p->loops++;
    n->a = jinja_check_target(p, jinja_tuple(p, true, true, "in", false));
    if (!jinja_skip_name(p, "in")) { jinja_unexpected(p, "in"); }
    n->b = jinja_tuple(p, false, false, "recursive", false);
    p->soft = false;
    if (jinja_skip_name(p, "if")) { n->c = jinja_expression(p, true); }
    p->soft = soft;
    if (jinja_at_name(p->t, "recursive")) { jinja_unexpected(p, "a loop that is not recursive"); }
    n->d = jinja_own_body(p, n, " endfor else ", true);
    p->loops--;
    if (!jinja_at_name(p->t++, "endfor")) {
        n->e = jinja_own_body(p, n, " endfor ", true);
        p->t++;
    }
    return jinja_above(p, jinja_above(p, jinja_above(p, n, n->a), n->b), n->c);
}

static inline JinjaNode* jinja_parse_if(JinjaParser* p, JinjaNode* n) {
    const bool soft = p->soft;
    JinjaNodes branches = {NULL, NULL};
    p->soft = true;
    for (bool more = true, test = true; more;) {
        JinjaNode* branch = jinja_node(p, NODE_BRANCH, p->t->at);
        if (test) { branch->a = jinja_tuple(p, false, false, NULL, false); }
        branch->d = jinja_body(p, branch, test ? " elif else endif " : " endif ");
        jinja_above(p, branch, branch->a);
        jinja_above(p, n, branch);
        jinja_push(&branches, branch);
        more = !jinja_at_name(p->t, "endif");
        test = !jinja_at_name(p->t++, "else");
    }
    n->a = branches.first;
    p->soft = soft;
    return n;
}

static inline JinjaNode* jinja_parse_set(JinjaParser* p, JinjaNode* n) {
    n->a = jinja_check_target(p, jinja_tuple(p, true, true, NULL, false));
    if (jinja_skip(p, "=")) {
        n->b = jinja_tuple(p, false, true, NULL, false);
        return jinja_above(p, jinja_above(p, n, n->a), n->b);
    }
    const bool soft = p->soft;
    p->soft = false;
    while (jinja_skip(p, "|")) { n->b = jinja_parse_filter(p, n->b); }
    p->soft = soft;
    n->kind = NODE_SET_BLOCK;
    n->d = jinja_own_body(p, n, " endset ", true);
    p->t++;
    return jinja_above(p, jinja_above(p, n, n->a), n->b);
}

/* Parses "(a, b=1)" of a macro. */
static inline void jinja_parameters(JinjaParser* p, JinjaNode* n) {
    JinjaNodes list = {NULL, NULL};
    jinja_expect(p, "(");
    while (!jinja_at(p->t, ")")) {
        if (list.first) { jinja_expect(p, ","); }
        JinjaNode* parameter = jinja_node(p, NODE_KEYWORD, p->t->at);
        for (const JinjaNode* other = list.first; other && p->t->type == TOKEN_NAME; other = other->next) {
            if (jinja_equal(p->j, other->value, p->t->value)) { jinja_unexpected(p, "each parameter once"); }
        }
        parameter->value = jinja_expect_name(p, "the name of a parameter");
        if (jinja_skip(p, "=")) {
            parameter->a = jinja_expression(p, true);
        } else if (list.last && list.last->a) {
            jinja_unexpected(p, "\"=\": the parameter before this one has a default");
        }
        jinja_push(&list, jinja_above(p, parameter, parameter->a));
        jinja_above(p, n, parameter);
    }
    p->t++;
    n->a = list.first;
}

/* Parses a macro, or a call block, whose body is a macro too. */
static inline JinjaNode* jinja_parse_macro(JinjaParser* p, JinjaNode* n, const char* end) {
    const int uses = p->uses;
    if (n->kind == NODE_MACRO) { n->value = jinja_expect_name(p, "the name of the macro"); }
    if (n->kind == NODE_MACRO || jinja_at(p->t, "(")) { jinja_parameters(p, n); }
    if (n->kind == NODE_CALL_BLOCK) {
        n->b = jinja_expression(p, true);
        if (n->b->kind != NODE_CALL) { jinja_unexpected(p, "a call of a macro"); }
    }
    p->uses = 0;
    n->d = jinja_own_body(p, n, end, false);
    p->t++;
    n->op = (uint8_t)p->uses;
    p->uses |= uses;
    return jinja_above(p, n, n->b);
}

static inline JinjaNode* jinja_parse_with(JinjaParser* p, JinjaNode* n) {
    JinjaNodes list = {NULL, NULL};
    while (p->t->type != TOKEN_TAG_END) {
        if (list.first) { jinja_expect(p, ","); }
        JinjaNode* one = jinja_node(p, NODE_KEYWORD, p->t->at);
        one->b = jinja_check_target(p, jinja_tuple(p, true, true, "in", false));
        jinja_expect(p, "=");
        one->a = jinja_expression(p, true);
        jinja_push(&list, jinja_above(p, jinja_above(p, one, one->a), one->b));
        jinja_above(p, n, one);
    }
    n->a = list.first;
    n->d = jinja_own_body(p, n, " endwith ", true);
    p->t++;
    return n;
}

/* Parses a tag behind its "{%"; stops before its "%}". */
static inline JinjaNode* jinja_statement(JinjaParser* p) {
    static const struct {
        const char* name;
        JinjaNodeKind kind;
    } tags[] = {{"for", NODE_FOR},
                {"if", NODE_IF},
                {"set", NODE_SET},
                {"macro", NODE_MACRO},
                {"with", NODE_WITH},
                {"filter", NODE_FILTER_BLOCK},
                {"print", NODE_PRINT},
                {"break", NODE_BREAK},
                {"generation", NODE_GENERATION},
                {"call", NODE_CALL_BLOCK},
                {"continue", NODE_CONTINUE}};
    size_t i = 0;
    if (p->t->type != TOKEN_NAME) { jinja_unexpected(p, "the name of a tag"); }
    while (i < sizeof tags / sizeof *tags && !jinja_is(p->t->value, tags[i].name)) { i++; }
    if (i == sizeof tags / sizeof *tags) {
        char shown[64];
        p->j->at = p->t->at;
        jinja_fail(p->j,
                   "the tag \"%s\" is not known here, wanted for, if, set, macro, call, filter, with, generation, break, "
                   "continue, or the end of the innermost of them",
                   show_text(shown, sizeof shown, p->t->value.as.s, p->t->value.len));
    }
    JinjaNode* n = jinja_node(p, tags[i].kind, p->t->at);
    if ((n->kind == NODE_BREAK || n->kind == NODE_CONTINUE) && !p->loops) { jinja_unexpected(p, "a loop around it"); }
    p->t++;
    switch (n->kind) {
        case NODE_FOR: return jinja_parse_for(p, n);
        case NODE_IF: return jinja_parse_if(p, n);
        case NODE_SET: return jinja_parse_set(p, n);
        case NODE_MACRO: return jinja_parse_macro(p, n, " endmacro ");
        case NODE_CALL_BLOCK: return jinja_parse_macro(p, n, " endcall ");
        case NODE_WITH: return jinja_parse_with(p, n);
        case NODE_FILTER_BLOCK:
            n->b = jinja_parse_filter(p, NULL);
            while (jinja_skip(p, "|")) { n->b = jinja_parse_filter(p, n->b); }
            jinja_above(p, n, n->b);
            n->d = jinja_own_body(p, n, " endfilter ", true);
            p->t++;
            return n;
        case NODE_GENERATION:
            n->d = jinja_own_body(p, n, " endgeneration ", false);
            p->t++;
            return n;
        case NODE_PRINT: n->a = jinja_tuple(p, false, true, NULL, false); return jinja_above(p, n, n->a);
        default: return n;
    }
}

static inline JinjaNode* jinja_statements(JinjaParser* p, JinjaNode* above, const char* ends) {
    JinjaNodes list = {NULL, NULL};
    jinja_descend(p->j);
    for (;; p->t++) {
        const JinjaToken* t = p->t;
        char word[32];
        if (t->type == TOKEN_END) {
            if (!ends) { break; }
            p->j->at = above->at;
            jinja_fail(p->j, "the tag has no end, wanted one of:%s", ends);
        }
        if (t->type == TOKEN_TEXT) {
            JinjaNode* n = jinja_node(p, NODE_TEXT, t->at);
            n->value = t->value;
            jinja_push(&list, n);
            continue;
        }
        p->t++;
        if (t->type == TOKEN_PRINT) {
            JinjaNode* n = jinja_node(p, NODE_PRINT, t->at);
            n->a = jinja_tuple(p, false, true, NULL, false);
            jinja_push(&list, jinja_above(p, n, n->a));
            if (p->t->type != TOKEN_PRINT_END) { jinja_unexpected(p, "}}"); }
        } else {
            snprintf(word, sizeof word, " %.*s ", (int)size_min(p->t->type == TOKEN_NAME ? p->t->value.len : 0, 20),
                     p->t->value.as.s);
            if (ends && strstr(ends, word) && word[1] != ' ') { break; }
            jinja_push(&list, jinja_statement(p));
            if (p->t->type != TOKEN_TAG_END) { jinja_unexpected(p, "%}"); }
        }
        if (above) { jinja_above(p, above, list.last); }
    }
    p->j->depth--;
    return list.first;
}

#endif
