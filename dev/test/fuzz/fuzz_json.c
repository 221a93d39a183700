/* fuzz_json.c -- reads the bytes as JSON. An accepted text is walked and written; the written text must be read and written
 * unchanged. */
#include "fuzz.h"
#include "llmc/files/json.h"

static void write_node(FILE* f, const Json* j, const JsonNode* n) {
    static const char* const words[] = {"null", "false", "true"};
    size_t len = 0;
    switch (n->type) {
        case JSON_NUMBER: fwrite(j->text + n->at, 1, n->length, f); break;
        case JSON_STRING: {
            const char* s = json_string(j, n, &len);
            REQUIRE(s[len] == 0);
            json_write_string(f, s, len);
            break;
        }
        case JSON_ARRAY:
        case JSON_OBJECT: {
            size_t count = 0;
            fputc(n->type == JSON_ARRAY ? '[' : '{', f);
            for (const JsonNode* c = json_first(j, n); c; c = json_next(j, c), count++) {
                if (count) { fputc(',', f); }
                if (n->type == JSON_OBJECT) {
                    const char* key = json_key(j, c, &len);
                    REQUIRE(strlen(key) != len || json_get_any(j, n, key));
                    json_write_string(f, key, len);
                    fputc(':', f);
                }
                write_node(f, j, c);
            }
            REQUIRE(count == json_length(n));
            fputc(n->type == JSON_ARRAY ? ']' : '}', f);
            break;
        }
        default: fputs(words[n->type], f);
    }
}

/* Parses a text (takes it over) and returns it written again; NULL if it is refused. */
static char* rewrite(char* text, size_t len, size_t* out_len) {
    Json j;
    Error e = NO_ERROR;
    const bool ok = json_parse(&j, text, len, "fuzz", &e);
    fuzz_check_error(ok, &e);
    if (!ok) { return NULL; }
    // typed access to any value
    int64_t i = 0;
    double d = 0;
    bool b = false;
    const char* s = NULL;
    uint64_t u = 0;
    Error ignored;
    for (const JsonNode* n = json_first(&j, json_root(&j)); n; n = json_next(&j, n)) {
        memset(&ignored, 0, sizeof ignored);
        json_int(&j, json_root(&j), json_key(&j, n, NULL), -5, 5, &i, &ignored);
        memset(&ignored, 0, sizeof ignored);
        REQUIRE(json_double(&j, n, "a", 0, 1, &d, &ignored) || strstr(ignored.msg, "wanted"));
        json_bool(&j, n, "b", &b, &ignored);
        json_text(&j, n, "c", &s, &ignored);
        json_u64(&j, n, "d", &u, &ignored);
    }
    char* out = NULL;
    FILE* f = open_memstream(&out, out_len);
    write_node(f, &j, json_root(&j));
    fclose(f);
    json_free(&j);
    return out;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    size_t len = 0, again_len = 0;
    char* out = rewrite(fuzz_text(data, size), size, &len);
    if (!out) { return 0; }
    char* again = rewrite(fuzz_text(out, len), len, &again_len);
    REQUIRE(again && again_len == len && memcmp(out, again, len) == 0);
    free(out);
    free(again);
    return 0;
}
