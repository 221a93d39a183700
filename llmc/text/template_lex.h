/* template_lex.h -- cuts the text of a chat template (text/template.h) into tokens: pieces of text, and between {{ }} and {% %}
 * names, strings, numbers and operators. White space around tags goes as in jinja2 with trim_blocks and lstrip_blocks: the
 * newline after a {% %} or {# #}, and the blanks before one at the start of a line; with "-" all of it, with "+" none.
 */
#ifndef LLMC_TEMPLATE_LEX_H
#define LLMC_TEMPLATE_LEX_H

#include "llmc/text/template_value.h"  // defines: Jinja, JinjaText, TemplateValue, jinja_fail, jinja_alloc, jinja_append
#include "llmc/text/unicode.h"         // defines: unicode_is_stripped

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

/* Returns the bytes of the white space that stands at a place, or 0. */
static inline size_t jinja_blank(const JinjaLexer* l, size_t at) {
    uint32_t c;
    const int n = at < l->end ? utf8_decode((const uint8_t*)l->s + at, l->end - at, &c) : 0;
    return n && unicode_is_stripped(c) ? (size_t)n : 0;
}
static inline size_t jinja_skip_blanks(const JinjaLexer* l, size_t at) {
    for (size_t n; (n = jinja_blank(l, at)) > 0;) { at += n; }
    return at;
}

/* Moves past the end of a tag, its sign and `end`, and past the white space that goes with it. */
static inline void jinja_skip_end(JinjaLexer* l, const char* end) {
    const char sign = l->s[l->at];
    l->at += (sign == '-' || sign == '+') + strlen(end);
    if (sign == '-') {
        l->at = jinja_skip_blanks(l, l->at);
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
    for (size_t at = to; at > from && (sign == '-' || l->s[at - 1] != '\n'); cut = at) {
        do { at--; } while (at > from && (l->s[at] & 0xC0) == 0x80);
        if (!jinja_blank(l, at)) { break; }
    }
    const bool whole_line = cut > from ? l->s[cut - 1] == '\n' : l->line_start;
    if (sign != '-' && (!lstrip || sign == '+' || !whole_line)) { cut = to; }
    if (cut > from) { jinja_token(l, TOKEN_TEXT, from, template_string(l->j->arena, l->s + from, cut - from, true)); }
}

/* Appends what a backslash in a string stands for. */
static inline void jinja_add_escape(JinjaLexer* l, JinjaText* t) {
    static const char names[] = "nrtabfv\\'\"", bytes[] = "\n\r\t\a\b\f\v\\'\"";
    const char c = l->s[l->at + 1];
    const char* known = c ? strchr(names, c) : NULL;
    const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    char out[8], hex[9] = "";
    l->at += 2;
    if (known) {
        jinja_append(l->j, t, &bytes[known - names], 1, NULL, 1);
    } else if (digits) {
        for (size_t n = 0; n < digits && isxdigit((unsigned char)l->s[l->at]); n++) { hex[n] = l->s[l->at++]; }
        const unsigned long code = strtoul(hex, NULL, 16);
        if (strlen(hex) < digits || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
            jinja_fail(l->j, "the escape \\%c is not a character", c);
        }
        jinja_append(l->j, t, out, utf8_encode(out, (int)code), NULL, 1);
    } else if (c == 'N' || isdigit((unsigned char)c)) {
        jinja_fail(l->j, "the escape \\%c is not known here", c);
    } else if (c != '\n') {  // a backslash at the end joins lines; Python keeps other unknown escapes
        jinja_append(l->j, t, "\\", 1, NULL, 1);
        l->at--;
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
    const char* digits = l->s + l->at;
    char* end = NULL;
    errno = 0;
    const int64_t i = strtoll(digits, &end, 10);
    const bool exponent = *end == 'e' || *end == 'E', sign = exponent && (end[1] == '+' || end[1] == '-');
    const bool whole = !(exponent || *end == '.') || !isdigit((unsigned char)end[1 + sign]);
    if (whole && errno) { jinja_fail(l->j, "%.*s has more than 64 bits", (int)size_min((size_t)(end - digits), 64), digits); }
    const double d = whole ? 0 : strtod(digits, &end);
    jinja_token(l, TOKEN_CONSTANT, l->at, whole ? template_int(i) : template_float(d));
    l->at += (size_t)(end - digits);
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
        if (jinja_blank(l, at)) {
            l->at = jinja_skip_blanks(l, at);
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
        l->j->at = at;
        jinja_add_piece(l, from, at, sign, kind != '{');
        l->at = at + 2 + (sign == '-' || (sign == '+' && kind != '{'));
        if (kind == '#') {
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

#endif
