/* json_edit.h -- changes one member of a JSON object in its text and keeps every other byte.
 *
 * json_parse() must have accepted the text as an object: nothing is checked again here. Only top-level members are found,
 * by a key without escapes.
 */
#ifndef LLMC_JSON_EDIT_H
#define LLMC_JSON_EDIT_H

#include "llmc/base/utils.h"  // defines: xmalloc

/* Returns the end of the string that starts at s, past its closing quote. */
static inline const char* json_skip_string(const char* s) {
    for (s++; *s != '"'; s++) { s += *s == '\\'; }
    return s + 1;
}

static inline const char* json_skip_blank(const char* s) { return s + strspn(s, " \t\r\n"); }

/* Finds the value of the top-level member `key` in the text of a JSON object, from *from up to *to; false if there is none. */
static inline bool json_find_member(const char* text, const char* key, const char** from, const char** to) {
    const char* s = json_skip_blank(text) + 1;
    const size_t key_len = strlen(key);
    while (*(s = json_skip_blank(s)) == '"') {
        const bool found = strncmp(s + 1, key, key_len) == 0 && s[key_len + 1] == '"';
        *from = s = json_skip_blank(json_skip_blank(json_skip_string(s)) + 1);
        for (int depth = 0; depth > 0 || (*s != ',' && *s != '}');) {
            depth += (*s == '{' || *s == '[') - (*s == '}' || *s == ']');
            s = *s == '"' ? json_skip_string(s) : s + 1;
        }
        *to = s;
        if (found) { return true; }
        s += *s == ',';
    }
    return false;
}

/* Returns the text with the value of `key` replaced, or with the member added in front if it is absent. Release it with
 * free(). */
static inline char* json_with_member(const char* text, const char* key, const char* value) {
    const char *from = NULL, *to = NULL;
    const bool there = json_find_member(text, key, &from, &to);
    const size_t size = strlen(text) + strlen(key) + strlen(value) + 16;
    char* out = (char*)xmalloc(size);
    if (!there) { from = to = json_skip_blank(text) + 1; }
    const size_t head = (size_t)(from - text);
    memcpy(out, text, head);
    if (there) {
        snprintf(out + head, size - head, "%s%s", value, to);
    } else {
        const char* comma = *json_skip_blank(to) == '}' ? "" : ",";
        snprintf(out + head, size - head, "\n  \"%s\": %s%s%s", key, value, comma, to);
    }
    return out;
}

/* Replaces *text by its json_with_member(); frees the old text. */
static inline void json_set_member(char** text, const char* key, const char* value) {
    char* changed = json_with_member(*text, key, value);
    free(*text);
    *text = changed;
}

#endif
