/* test_json.c -- the JSON reader accepts exactly RFC 8259, names the place of an error, and takes linear time in large
 * objects. */
#include "llmc/files/json.h"

#include "dev/test/test.h"

static Error error;

/* Parses a copy of a text that may hold NULs. */
static bool parse_bytes(Json* j, const char* text, size_t len) {
    char* copy = (char*)xmalloc(len + 1);
    memcpy(copy, text, len);
    copy[len] = 0;
    memset(&error, 0, sizeof error);
    return json_parse(j, copy, len, "t.json", &error);
}

static bool parse(Json* j, const char* text) { return parse_bytes(j, text, strlen(text)); }

TEST(values_of_every_kind_are_read) {
    Json j;
    CHECK(parse(&j, " {\"a\": [1, -2.5e-3, true, false, null, \"x\\u00e9\\ud83d\\ude00\\n\"], \"b\": {}, \"\": []} "), "%s",
          error.msg);
    const JsonNode* a = json_get(&j, json_root(&j), "a");
    CHECK(a && a->type == JSON_ARRAY && json_length(a) == 6, "array of 6");
    int64_t number = 0;
    double value = 0;
    const JsonNode* n = json_first(&j, a);
    CHECK(json_node_int(&j, n, &number) && number == 1, "1");
    n = json_next(&j, n);
    CHECK(!json_node_int(&j, n, &number) && json_node_double(&j, n, &value) && value == -2.5e-3, "-2.5e-3");
    n = json_next(&j, n);
    CHECK(n->type == JSON_TRUE, "true");
    n = json_next(&j, n);
    CHECK(n->type == JSON_FALSE, "false");
    n = json_next(&j, n);
    CHECK(n->type == JSON_NULL, "null");
    n = json_next(&j, n);
    size_t len = 0;
    const char* s = json_string(&j, n, &len);
    CHECK(s && len == 8 && strcmp(s, "x\xC3\xA9\xF0\x9F\x98\x80\n") == 0, "string of %zu bytes", len);
    CHECK(!json_next(&j, n), "end of the array");
    const JsonNode* b = json_next(&j, a);
    CHECK(b && strcmp(json_key(&j, b, &len), "b") == 0 && len == 1 && b->type == JSON_OBJECT && !json_first(&j, b), "b");
    CHECK(json_get(&j, json_root(&j), "") && !json_get(&j, json_root(&j), "c"), "empty key, absent key");
    json_free(&j);
}

TEST(null_is_absent_but_can_be_asked_for) {
    Json j;
    CHECK(parse(&j, "{\"a\": null}"), "%s", error.msg);
    CHECK(!json_get(&j, json_root(&j), "a") && json_get_any(&j, json_root(&j), "a"), "null");
    json_free(&j);
}

TEST(what_rfc_8259_does_not_have_is_refused) {
    const char* bad =
        "| |{|}|[|]|[1,]|[,1]|[1 2]|[1]]|{\"a\":1,}|{\"a\" 1}|{a:1}|{\"a\":}|{1:2}|{} {}|1 1|"  // brackets and commas
        "'a'|\"a|\"\\x\"|\"\\u12g4\"|\"\\u123\"|\"\\ud800\"|\"\\udc00\"|\"\\ud800\\u0041\"|\"\\ud800\\|\"a\nb\"|\"\t\"|"
        "01|-|-a|+1|.5|1.|1.e5|1e|1e+|0x10|tru|truex|nul|-NaN|NaNs|nan|Inf|+Infinity|-infinity|"          // numbers and words
        "\"\x80\"|\"\xC0\x80\"|\"\xC3\"|\"\xED\xA0\x80\"|\"\xF4\x90\x80\x80\"|\"\xF8\x88\x80\x80\x80\"|"  // no UTF-8
        "\xEF\xBB\xBF{}|// c\n1|/* c */1|\f1|\302\2401|"                                                  // what is no blank
        "{\"a\":1,\"a\":2}|{\"a\":1,\"\\u0061\":2}";
    for (const char* text; (text = test_next(&bad, '|')) != NULL;) {
        Json j;
        const bool ok = parse(&j, text);
        CHECK(!ok && contains(error.msg, "t.json:"), "accepted: %s", text);
        CHECK(!strchr(error.msg, '\n'), "message of several lines: %s", error.msg);
        if (ok) { json_free(&j); }
    }
    Json j;
    CHECK(!parse_bytes(&j, "[1]\0", 4) && !parse_bytes(&j, "\"a\0b\"", 5) && !parse_bytes(&j, "\0", 1), "a NUL was accepted");
}

// VowpalWabbit/vowpal_wabbit#3738: Python's json writes and reads these words
TEST(numbers_that_are_not_finite_are_read_but_no_field_takes_them) {
    Json j;
    double value[3];
    CHECK(parse(&j, "{\"a\": NaN, \"b\": Infinity, \"c\":-Infinity}"), "%s", error.msg);
    for (int i = 0; i < 3; i++) {
        const char key[] = {"abc"[i], 0};
        int64_t number;
        CHECK(json_node_double(&j, json_get(&j, json_root(&j), key), &value[i]), "%s is no number", key);
        Error e = NO_ERROR;
        FAILS(&e, json_double(&j, json_root(&j), key, -INFINITY, INFINITY, &value[i], &e), ", wanted a number");
        CHECK(!json_int(&j, json_root(&j), key, 0, 9, &number, &e), "a field took %s as an integer", key);
    }
    json_free(&j);
    CHECK(parse(&j, "NaN"), "%s", error.msg);  // the text's first byte
    CHECK(isnan(value[0]) && value[1] == INFINITY && value[2] == -INFINITY, "%g %g %g", value[0], value[1], value[2]);
    json_free(&j);
}

TEST(what_rfc_8259_has_is_accepted) {
    const char* good =
        "0|-0|1E5|1e-5|1.25E+10|\"\"|\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"|\"\\u0000\"|\"\x7F\"|\"\xF4\x8F\xBF\xBF\"|[]|{}|[[]]|"
        "\r\n\t [ ] \r\n|{\"a\":{\"a\":{\"a\":1}}}|[1,1]|\"\xEF\xBF\xBF\"|123456789012345678901234567890";
    for (const char* text; (text = test_next(&good, '|')) != NULL;) {
        Json j;
        const bool ok = parse(&j, text);
        CHECK(ok, "refused: %s: %s", text, error.msg);
        if (ok) { json_free(&j); }
    }
}

TEST(an_error_names_line_and_column) {
    Json j;
    FAILS(&error, parse(&j, "{\n  \"a\": 1,\n  \"b\": x\n}"), "t.json:3:8: found 'x', wanted a value");
    // escapes shrink in place; they must not shift the column
    CHECK(!parse(&j, "[\"\\n\\n\\n\", x]") && contains(error.msg, "t.json:1:12:"), "%s", error.msg);
    CHECK(!parse(&j, "{\"a\": 1") && contains(error.msg, "the text ends here, wanted ',' or '}'"), "%s", error.msg);
    CHECK(!parse(&j, "[\x01]") && contains(error.msg, "found byte 0x01"), "%s", error.msg);
}

TEST(nesting_is_limited) {
    char text[JSON_MAX_DEPTH * 2 + 8] = "";
    Json j;
    for (int depth = JSON_MAX_DEPTH; depth <= JSON_MAX_DEPTH + 1; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        text[2 * depth] = 0;
        const bool ok = parse(&j, text);
        CHECK(ok == (depth == JSON_MAX_DEPTH), "depth %d: %s", depth, error.msg);
        if (ok) { json_free(&j); }
    }
}

TEST(typed_fields_name_path_found_and_wanted) {
    Json j;
    int64_t i = 0;
    uint64_t u = 0;
    double d = 0;
    bool b = false;
    const char* s = NULL;
    CHECK(
        parse(&j,
              "{\"n\": 7, \"big\": 18446744073709551615, \"neg\": -9223372036854775808, \"f\": 2.5, \"e\": 1e999, \"t\": true, "
              "\"s\": \"x\\ny\", \"nul\": \"a\\u0000b\", \"o\": {\"p\": [{\"q\": []}]}, \"z\": null}"),
        "%s", error.msg);
    const JsonNode* r = json_root(&j);
    CHECK(json_int(&j, r, "n", 0, 7, &i, &error) && i == 7, "n");
    CHECK(json_int(&j, r, "neg", INT64_MIN, 0, &i, &error) && i == INT64_MIN, "neg");
    CHECK(json_u64(&j, r, "big", &u, &error) && u == UINT64_MAX, "big");
    CHECK(json_double(&j, r, "f", 0, 3, &d, &error) && d == 2.5, "f");
    CHECK(json_double(&j, r, "n", 0, 8, &d, &error) && d == 7, "an integer is a number");
    CHECK(json_bool(&j, r, "t", &b, &error) && b, "t");
    CHECK(json_text(&j, r, "s", &s, &error) && strcmp(s, "x\ny") == 0, "s");
    i = 5, b = true, d = 9;
    CHECK(json_int_or(&j, r, "z", 0, 1, &i, &error) && i == 5, "null leaves the value");
    CHECK(json_bool_or(&j, r, "absent", &b, &error) && b, "an absent member leaves the value");
    CHECK(json_double_or(&j, r, "absent", 0, 1, &d, &error) && d == 9, "an absent member leaves the value");
    CHECK(json_u64_or(&j, r, "absent", &u, &error), "an absent member is no error");
    CHECK(!error.msg[0], "%s", error.msg);

#define REFUSED(call, part)                                                    \
    do {                                                                       \
        memset(&error, 0, sizeof error);                                       \
        CHECK(!(call) && contains(error.msg, part), "message: %s", error.msg); \
    } while (0)
    REFUSED(json_int(&j, r, "n", 8, 9, &i, &error), "t.json: n is 7, wanted an integer from 8 to 9");
    REFUSED(json_int(&j, r, "big", 0, INT64_MAX, &i, &error), "big is 18446744073709551615, wanted");
    REFUSED(json_int(&j, r, "f", 0, 9, &i, &error), "f is 2.5, wanted an integer");
    REFUSED(json_int(&j, r, "s", 0, 9, &i, &error), "s is \"x?y\", wanted an integer");
    REFUSED(json_int(&j, r, "z", 0, 9, &i, &error), "z is null, wanted");
    REFUSED(json_int(&j, r, "absent", 0, 9, &i, &error), "absent is missing, wanted");
    REFUSED(json_int_or(&j, r, "t", 0, 9, &i, &error), "t is true, wanted");
    REFUSED(json_u64(&j, r, "neg", &u, &error), "neg is -9223372036854775808, wanted");
    REFUSED(json_double(&j, r, "e", 0, 9, &d, &error), "e is 1e999, wanted a number");
    REFUSED(json_bool(&j, r, "n", &b, &error), "n is 7, wanted true or false");
    REFUSED(json_text(&j, r, "nul", &s, &error), "nul is \"a?b\", wanted a string");
    const JsonNode* p = json_get(&j, json_get(&j, r, "o"), "p");
    REFUSED(json_int(&j, json_first(&j, p), "q", 0, 1, &i, &error), "t.json: o.p.0.q is an array, wanted");
    json_free(&j);
}

TEST(large_objects_take_linear_time_and_show_duplicates) {
    enum { KEYS = 300000 };
    char* text = NULL;
    size_t len = 0;
    for (int twice = 0; twice < 2; twice++) {
        FILE* f = open_memstream(&text, &len);
        fputs("{", f);
        for (int i = 0; i < KEYS; i++) { fprintf(f, "%s\"key%d\":%d", i ? "," : "", i, i); }
        fprintf(f, "%s}", twice ? ",\"key777\":1" : "");
        fclose(f);
        Json j;
        memset(&error, 0, sizeof error);
        const double start = now_seconds();
        const bool ok = json_parse(&j, text, len, "t.json", &error);
        CHECK(ok == !twice, "%s", error.msg);
        CHECK(!twice || contains(error.msg, "\"key777\" twice"), "%s", error.msg);
        CHECK(now_seconds() - start < 5, "took %.1f s", now_seconds() - start);
        if (ok) { json_free(&j); }
    }
}

TEST(what_is_written_is_read_back) {
    static const double doubles[] = {0,       -0.0,          1,    -1,   0.1,  1e-5, 5e-324, 1.7976931348623157e308, 500000,
                                     1.0 / 3, 123456789.125, 1e15, 1e16, 1e22, 3e-7};
    char* text = NULL;
    size_t len = 0;
    for (size_t i = 0; i < sizeof doubles / sizeof *doubles; i++) {
        FILE* f = open_memstream(&text, &len);
        json_write_double(f, doubles[i]);
        fclose(f);
        Json j;
        double back = 0;
        int64_t whole = 0;
        memset(&error, 0, sizeof error);
        CHECK(json_parse(&j, text, len, "t.json", &error), "%s", error.msg);
        CHECK(json_node_double(&j, json_root(&j), &back) && memcmp(&back, &doubles[i], sizeof back) == 0, "%g became %s",
              doubles[i], j.text);
        CHECK(!json_node_int(&j, json_root(&j), &whole), "%s looks like an integer", j.text);
        json_free(&j);
    }
    static const float floats[] = {1e-5f, 1e-6f, 0.1f, 3.4028235e38f, 1e-45f, 16777216.0f};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        FILE* f = open_memstream(&text, &len);
        json_write_float(f, floats[i]);
        fclose(f);
        CHECK(strtof(text, NULL) == floats[i] && len < 16, "%g became %s", (double)floats[i], text);
        free(text);
    }
    char bytes[256];
    for (int i = 0; i < 256; i++) { bytes[i] = (char)i; }
    FILE* f = open_memstream(&text, &len);
    json_write_string(f, bytes, 256);
    fclose(f);
    Json j;
    memset(&error, 0, sizeof error);
    CHECK(json_parse(&j, text, len, "t.json", &error), "%s", error.msg);
    const char* s = json_string(&j, json_root(&j), &len);
    CHECK(s && len == 128 + 128 * 3 && memcmp(s, bytes, 128) == 0 && memcmp(s + len - 3, "\xEF\xBF\xBD", 3) == 0, "%zu bytes",
          len);
    json_free(&j);
    f = open_memstream(&text, &len);
    json_write_text(f, "\x1B\x7F\xC2\x9B\xC2\xA0");
    fclose(f);
    CHECK(strcmp(text, "\"\\u001b\\u007f\\u009b\xC2\xA0\"") == 0, "no control character stays as it is: %s", text);
    free(text);
}

/* Compares the result of json_with_member() byte for byte. */
static bool edits_to(const char* text, const char* key, const char* value, const char* want) {
    char* got = json_with_member(text, key, value);
    const bool same = strcmp(got, want) == 0;
    if (!same) { printf("    %s\n    gave %s\n", text, got); }
    free(got);
    return same;
}

TEST(an_edit_changes_one_member_and_no_other_byte) {
    CHECK(edits_to("{\"a\" : 1, \"b\":[2 ,3]}\n", "b", "null", "{\"a\" : 1, \"b\":null}\n"), "an array");
    CHECK(edits_to("{\"a\":{\"b\":1},\"b\":2}", "b", "3", "{\"a\":{\"b\":1},\"b\":3}"), "a member of a member is not it");
    CHECK(edits_to("{\"a\":\"\\\"}, \\\\\",\"b\":2}", "b", "3", "{\"a\":\"\\\"}, \\\\\",\"b\":3}"), "brackets in a string");
    CHECK(edits_to("{\"ab\":1,\"b\":2}", "a", "0", "{\n  \"a\": 0,\"ab\":1,\"b\":2}"), "a longer key is not it");
    CHECK(edits_to(" { }", "a", "0", " {\n  \"a\": 0 }"), "an empty object");
    const char *from, *to;
    CHECK(!json_find_member("{\"a\":1}", "b", &from, &to), "what is absent is not found");
}

TEST(a_wrong_kind_of_file_is_named) {
    static const struct {
        const char* start;
        size_t len;
        const char* what;
    } kinds[] = {
        {"GGUF\3\0\0\0", 8, "GGUF"},
        {"PK\3\4....", 8, "zip"},
        {"\200\2}q", 4, "pickle"},
        {"<!DOCTYPE html>", 15, "HTML"},
        {"version https://git-lfs.github.com/spec/v1\n", 43, "Git LFS"},
        {"\037\213\010", 3, "gzip"},
        {"\x88\xD8\x34\x01", 4, "token file"},
        {"\xA1\xD9\x34\x01", 4, "token file"},
        {"IQ== 0\n", 7, "tiktoken"},
        {"\x40\0\0\0\0\0\0\0{\"a\"", 12, "safetensors"},
        {"", 0, "an empty file"},
    };
    const char* path = test_file("f");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        test_write(path, kinds[i].start, kinds[i].len);
        Json j;
        memset(&error, 0, sizeof error);
        CHECK(!json_read_file(&j, path, 1000, &error) && contains(error.msg, kinds[i].what) && contains(error.msg, path), "%s",
              error.msg);
    }
    Json j;
    memset(&error, 0, sizeof error);
    CHECK(!json_read_file(&j, test_here(), 1000, &error) && contains(error.msg, "folder"), "%s", error.msg);
    test_put(path, "{\"a\": 1}");
    memset(&error, 0, sizeof error);
    CHECK(!json_read_file(&j, path, 7, &error) && contains(error.msg, "8 bytes long, wanted at most 7"), "%s", error.msg);
}

TEST(a_text_that_is_not_utf_8_is_read_back_byte_for_byte) {
    char all[256];
    for (int i = 0; i < 255; i++) { all[i] = (char)(i + 1); }
    all[255] = 0;
    const char* const texts[] = {"", "plain", "\xC3\xA9", "x\x9By.bin", "\xC3", all};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char *text = NULL, *back = NULL;
        size_t size = 0;
        FILE* f = xopen_memory(&text, &size);
        fputs("{\"a\": ", f);
        json_write_bytes(f, texts[i]);
        fputc('}', f);
        xclose_memory(f, &text);
        Json j;
        memset(&error, 0, sizeof error);
        CHECK(json_parse(&j, text, size, "f", &error) && json_bytes(&j, json_root(&j), "a", &back, &error), "text %zu: %s", i,
              error.msg);
        CHECK(back && strcmp(back, texts[i]) == 0, "text %zu: %s", i, back);
        free(back);
        json_free(&j);
    }
    static const char* const bad[] = {"{\"a\": 1}", "{\"a\": \"x\\u0000\"}", "{\"a\": \"\\u0000\\u0100\"}",
                                      "{\"a\": \"\\u0000\\u0000\"}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char* back = NULL;
        Json j;
        memset(&error, 0, sizeof error);
        CHECK(json_parse(&j, xstrdup(bad[i]), strlen(bad[i]), "f", &error), "%s", error.msg);
        CHECK(!json_bytes(&j, json_root(&j), "a", &back, &error) && !back, "%s is read", bad[i]);
        json_free(&j);
    }
}

int main(void) { return test_all(); }
