/* test_tokenizer.c -- the tokenizer without data files: the built-in bytes, small tokenizers of both kinds with ids worked out
 * by hand, files that must be refused, and saved files read again. test_tokenizer.py tests real vocabularies. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <stdio.h>

static FILE* (*memory_stream)(char** text, size_t* length) = open_memstream;  // a test replaces it by one that fails
#define open_memstream memory_stream

#include "dev/test/test.h"

#include <sys/wait.h>

#include "llmc/text/tokenizer_read.h"
#include "llmc/text/tokenizer_write.h"

static void put(const char* name, const char* text) { test_put(test_file(name), text); }

/* Returns whether a text encodes to these ids (ended by -1). */
static bool encodes(const Tokenizer* t, const char* text, size_t len, bool specials, const int* want) {
    TokenList l = {NULL, 0, 0};
    tokenizer_encode(t, text, len, specials, &l);
    size_t n = l.count, i = 0;
    while (i < n && want[i] >= 0 && l.ids[i] == want[i]) { i++; }
    bool same = i == n && want[i] == -1;
    if (!same) {
        printf("    \"%.40s\" gave", text);
        for (i = 0; i < n; i++) { printf(" %d", l.ids[i]); }
        printf("\n");
    }
    token_list_free(&l);
    return same;
}

/* Returns whether the tokens of a text join to the same bytes. */
static bool round_trips(const Tokenizer* t, const char* text, size_t len) {
    TokenList l = {NULL, 0, 0};
    tokenizer_encode(t, text, len, false, &l);
    size_t n = l.count, at = 0;
    bool same = true;
    for (size_t i = 0; i < n && same; i++) {
        size_t token_len;
        const char* token = tokenizer_token(t, l.ids[i], &token_len);
        same = at + token_len <= len && memcmp(text + at, token, token_len) == 0;
        at += token_len;
    }
    token_list_free(&l);
    return same && at == len;
}

// ---------------------------------------------------------------------------------------------------------------------
// small tokenizers

/* Makes the text of a small tokenizer.json: the stand-ins of all bytes as `"X":id,` with id = byte, then more members. */
static char* small_json(const char* pre_tokenizer, bool ignore_merges, const char* more_vocab, const char* merges,
                        const char* added) {
    char* text = NULL;
    size_t size = 0;
    uint16_t code[256];
    int16_t byte_of[512];
    FILE* f = open_memstream(&text, &size);
    byte_stand_ins(code, byte_of);
    fprintf(f, "{\"version\":\"1.0\",\"added_tokens\":[%s],\"normalizer\":null,\"pre_tokenizer\":%s,", added, pre_tokenizer);
    fprintf(f, "\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"dropout\":null,");
    fprintf(f, "\"unk_token\":null,\"ignore_merges\":%s,\"vocab\":{", ignore_merges ? "true" : "false");
    for (int b = 0; b < 256; b++) {
        char c = (char)b;
        write_stand_ins(f, code, &c, 1);
        fprintf(f, ":%d%s", b, b < 255 ? "," : "");
    }
    fprintf(f, "%s},\"merges\":[%s]}}", more_vocab, merges);
    fclose(f);
    return text;
}

#define GPT2_SPLIT "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true}"
#define BYTES_ONLY "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}"
#define SMOLLM_SPLIT \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":true}," GPT2_SPLIT "]}"
#define LLAMA3_REGEX                                                                       \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| " \
    "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|"                                             \
    "\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define LLAMA3_SPLIT                                                                                       \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" LLAMA3_REGEX \
    "\"},\"behavior\":\"Isolated\",\"invert\":false}," BYTES_ONLY "]}"
#define EOT(id) "{\"id\":" #id ",\"content\":\"<|endoftext|>\",\"special\":true}"

static bool parse_small(Tokenizer* t, const char* pre, bool ignore, const char* vocab, const char* merges, const char* added,
                        Error* e) {
    char* text = small_json(pre, ignore, vocab, merges, added);
    bool ok = tokenizer_parse(t, text, strlen(text), "small.json", e);
    free(text);
    return ok;
}

/* Returns the pieces that a pattern makes of a text, joined by '|'. */
static const char* pieces_of(bool llama3, const char* text) {
    static char out[512];
    const uint8_t *s = (const uint8_t*)text, *end = s + strlen(text), *p;
    size_t n = 0;
    for (; s < end; s = p) {
        p = llama3 ? scan_llama3(s, end, 3) : scan_gpt2(s, end);
        n += (size_t)snprintf(out + n, sizeof out - n, "%s%.*s", n ? "|" : "", (int)(p - s), (const char*)s);
    }
    return out;
}

TEST(bytes_are_their_own_ids_and_bos_is_256) {
    Tokenizer t;
    tokenizer_bytes(&t);
    const int want[] = {'h', 0, 0xC3, 0xA9, 0xFF, -1}, with_bos[] = {256, 'a', -1}, as_text[] = {'<', '|', 'b', -1};
    CHECK(t.vocab_size == 257 && t.bos_id == 256 && t.eos_id == -1, "V %d bos %d", t.vocab_size, t.bos_id);
    CHECK(encodes(&t, "h\0\xC3\xA9\xFF", 5, false, want), "bytes");
    CHECK(encodes(&t, "<|begin_of_text|>a", 18, true, with_bos), "a special name where allowed");
    CHECK(encodes(&t, "<|b", 3, true, as_text), "the beginning of a name is text");
    CHECK(tokenizer_find(&t, "<|begin_of_text|>") == 256 && tokenizer_find(&t, "<|eot_id|>") == -1, "by name");
    CHECK(t.fingerprint != 0, "fingerprint");
    tokenizer_free(&t);
}

TEST(llama3_pattern_splits_as_its_regex_says) {
    // clang-format off
    static const struct { const char *text, *want; } cases[] = {
        {"Hello world", "Hello| world"}, {"I'm we'LL 'sam", "I|'m| we|'LL| '|sam"}, {"'Sam", "'S|am"},
        {"'\xC5\xBF" "a", "'\xC5\xBF|a"},
        {"12345", "123|45"}, {" 1", " |1"}, {"a  b", "a| | b"}, {"a   ", "a|   "}, {"a \n\n b", "a| \n\n| b"},
        {"a\n \nb", "a|\n \n|b"},
        {"!!\n\nx", "!!\n\n|x"}, {" !?x", " !?|x"}, {"!x", "!x"}, {"\tx", "\tx"}, {"\nx", "\n|x"}, {"\t 1", "\t| |1"},
        {"x\xC2\xA0y", "x|\xC2\xA0y"},
        {"a\r\nb", "a|\r\n|b"}, {"a \xE3\x80\x80" "b", "a| |\xE3\x80\x80" "b"},
        {"\xE4\xB8\xAD\xE6\x96\x87!", "\xE4\xB8\xAD\xE6\x96\x87|!"},
        {"a\xFF" "b", "a|\xFF" "b"}, {"\xC3(", "\xC3("}, {"abcdefghijklmnop\xC3\xA9q r", "abcdefghijklmnop\xC3\xA9q| r"},
        {"' 't", "'| '|t"}, {"'r", "'r"}, {"'l", "'l"}, {"'", "'"}, {" ", " "},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char* got = pieces_of(true, cases[i].text);
        CHECK(strcmp(got, cases[i].want) == 0, "\"%s\" split as \"%s\", wanted \"%s\"", cases[i].text, got, cases[i].want);
    }
}

TEST(gpt2_pattern_splits_as_its_regex_says) {
    // clang-format off
    static const struct { const char *text, *want; } cases[] = {
        {"Hello world", "Hello| world"}, {"I'm we'LL", "I|'m| we|'|LL"}, {"12345 678", "12345| 678"},
        {"a  b", "a| | b"}, {"a   ", "a|   "},
        {"a \n\n b", "a| \n\n| b"}, {"!!\n\nx", "!!|\n|\n|x"}, {"\tx", "\t|x"}, {" !?x", " !?|x"}, {"a\n1", "a|\n|1"},
        {" 's", " '|s"},
        {"x\xC2\xA0y", "x|\xC2\xA0|y"}, {"a\xFF" "b", "a|\xFF|b"}, {"'", "'"}, {"a ", "a| "},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char* got = pieces_of(false, cases[i].text);
        CHECK(strcmp(got, cases[i].want) == 0, "\"%s\" split as \"%s\", wanted \"%s\"", cases[i].text, got, cases[i].want);
    }
}

TEST(merging_takes_the_lowest_rank_first_and_leftmost) {
    Tokenizer t;
    Error e = NO_ERROR;
    // b+c ranks before a+b, so "abc" is a, bc, although ab comes first in the text; "aaa" merges leftmost
    bool ok = parse_small(&t, GPT2_SPLIT, false, ",\"bc\":256,\"ab\":257,\"aa\":258", "\"b c\",[\"a\",\"b\"],\"a a\"", "", &e);
    CHECK(ok, "%s", e.msg);
    const int abc[] = {'a', 256, -1}, abb[] = {257, 'b', -1}, aaa[] = {258, 'a', -1}, aaaab[] = {258, 'a', 257, -1};
    CHECK(encodes(&t, "abc", 3, false, abc), "abc");
    CHECK(encodes(&t, "abb", 3, false, abb), "abb");
    CHECK(encodes(&t, "aaa", 3, false, aaa), "aaa");
    CHECK(encodes(&t, "aaaab", 5, false, aaaab), "aaaab");
    tokenizer_free(&t);
}

TEST(ignore_merges_makes_a_whole_piece_its_token) {
    Error e = NO_ERROR;
    const char* vocab = ",\"ab\":256,\"xyz\":257";  // no merge leads to xyz
    const int whole[] = {257, -1}, parts[] = {'x', 'y', 'z', -1}, longer[] = {'x', 'y', 'z', 'z', -1}, ab[] = {256, -1};
    for (int ignore = 0; ignore < 2; ignore++) {
        Tokenizer t;
        CHECK(parse_small(&t, GPT2_SPLIT, ignore, vocab, "\"a b\"", "", &e), "%s", e.msg);
        CHECK(encodes(&t, "xyz", 3, false, ignore ? whole : parts), "ignore_merges %d", ignore);
        CHECK(encodes(&t, "xyzz", 4, false, longer), "ignore_merges %d", ignore);
        CHECK(encodes(&t, "ab", 2, false, ab), "ignore_merges %d", ignore);
        tokenizer_free(&t);
    }
}

TEST(digits_are_cut_out_one_by_one) {
    Tokenizer t;
    Error e = NO_ERROR;
    // " 1" is a token, but Digits cuts between the space and the 1
    CHECK(parse_small(&t, SMOLLM_SPLIT, true,
                      ",\"\xC4\xA0"
                      "1\":256,\"12\":257",
                      "", "", &e),
          "%s", e.msg);
    const int want[] = {'a', ' ', '1', '2', -1};
    CHECK(encodes(&t, "a 12", 4, false, want), "a 12");
    tokenizer_free(&t);
}

TEST(short_and_long_pieces_merge_alike) {
    Tokenizer t;
    Error e = NO_ERROR;
    char text[4 * TOKEN_SHORT_PIECE];
    bool ok = parse_small(&t, LLAMA3_SPLIT, true, ",\"ab\":256,\"ba\":257,\"abab\":258,\"aa\":259,\"abaab\":260,\"bb\":261",
                          "\"b a\",\"a b\",\"ab ab\",\"a a\",\"a ba\",\"b b\",\"ab aab\"", "", &e);
    CHECK(!ok && strstr(e.msg, "aba"), "a merge whose result is no token must be refused: %s", e.msg);
    e.msg[0] = 0;
    ok = parse_small(&t, LLAMA3_SPLIT, true, ",\"ab\":256,\"ba\":257,\"abab\":258,\"aa\":259,\"bb\":260,\"aba\":261",
                     "\"b b\",\"a b\",\"ab ab\",\"b a\",\"ab a\",\"a a\"", "", &e);
    CHECK(ok, "%s", e.msg);
    if (!ok) { return; }
    uint32_t seed = 1;
    for (int round = 0; round < 2000; round++) {
        TokenEncoder a, b;
        size_t n = 1 + (size_t)round % TOKEN_SHORT_PIECE;
        for (size_t i = 0; i < n; i++) {
            seed = seed * 1664525 + 1013904223;
            text[i] = "abababc"[(seed >> 16) % 7];
        }
        encoder_init(&a, &t);
        encoder_init(&b, &t);
        t.num_ranks = round % 2 ? 1000 : 6;  // pieces with at least as many bytes as the tokenizer has ranks use a list for
                                             // each rank
        merge_short(&a, (const uint8_t*)text, n);
        merge_long(&b, (const uint8_t*)text, n);
        CHECK(a.out.count == b.out.count && memcmp(a.out.ids, b.out.ids, a.out.count * sizeof(int32_t)) == 0, "%.*s", (int)n,
              text);
        encoder_free(&a);
        encoder_free(&b);
    }
    tokenizer_free(&t);
}

TEST(a_piece_of_100_kb_takes_well_under_a_second) {
    Tokenizer t;
    Error e = NO_ERROR;
    const size_t n = 100000;
    CHECK(parse_small(&t, LLAMA3_SPLIT, true, ",\"aa\":256,\"aaaa\":257,\"ba\":258", "\"a a\",\"aa aa\",\"b a\"", "", &e), "%s",
          e.msg);
    char* text = (char*)xmalloc(n);
    for (size_t i = 0; i < n; i++) { text[i] = i % 97 ? 'a' : 'b'; }
    double start = now_seconds();
    CHECK(round_trips(&t, text, n), "100 kB");
    CHECK(now_seconds() - start < 1, "took %.2f s", now_seconds() - start);
    free(text);
    tokenizer_free(&t);
}

TEST(any_bytes_come_back) {
    Tokenizer t;
    Error e = NO_ERROR;
    CHECK(parse_small(&t, LLAMA3_SPLIT, true, ",\"ab\":256,\"\xC4\xA0\xC3\x83\":257", "\"a b\",\"\xC4\xA0 \xC3\x83\"", EOT(258),
                      &e),
          "%s", e.msg);
    uint32_t seed = 2;
    for (int round = 0; round < 3000; round++) {
        char text[80];
        size_t n = (size_t)round % sizeof text;
        for (size_t i = 0; i < n; i++) {
            seed = seed * 1664525 + 1013904223;
            text[i] = seed >> 31 ? (char)(seed >> 16) : "ab \n1'\xC3\xA9\xF0\x9F\x98\x80<|"[(seed >> 16) % 14];
        }
        CHECK(round_trips(&t, text, n), "round %d", round);
    }
    tokenizer_free(&t);
}

TEST(special_names_are_text_unless_asked_for) {
    Tokenizer t;
    Error e = NO_ERROR;
    const char* added = EOT(256) ",{\"id\":257,\"content\":\"<|endoftext|>x\",\"special\":true},"
                                 "{\"id\":258,\"content\":\"foo\",\"special\":false,\"normalized\":true},"
                                 "{\"id\":259,\"content\":\"end\",\"special\":false,\"normalized\":true}";
    CHECK(parse_small(&t, GPT2_SPLIT, false, "", "", added, &e), "%s", e.msg);
    const int special[] = {'a', 256, 'y', -1}, longest[] = {257, -1}, foo[] = {'a', 258, 'b', -1};
    CHECK(encodes(&t, "a<|endoftext|>y", 15, true, special), "special");
    CHECK(encodes(&t, "<|endoftext|>x", 14, true, longest), "the longest name wins");
    CHECK(encodes(&t, "afoob", 5, true, foo) && encodes(&t, "afoob", 5, false, foo),
          "an added token that is not special always holds");
    TokenList l = {NULL, 0, 0};
    tokenizer_encode(&t, "<|endoftext|>", 13, false, &l);
    // as in `tokenizers`: the first pass, for names that are not normalized, skips the special name; the second pass finds
    // `end`, which is normalized
    CHECK(l.count == 11 && l.ids[2] == 259, "plain text around `end`: %zu ids", l.count);
    token_list_free(&l);
    CHECK(t.bos_id == 256 && t.eos_id == 256, "bos %d eos %d", t.bos_id, t.eos_id);
    tokenizer_free(&t);
}

static char* tiktoken_text(const char* more) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char* text = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    for (int b = 0; b < 256; b++) { fprintf(f, "%c%c== %d\n", digits[b >> 2], digits[(b & 3) << 4], b); }
    fputs(more, f);
    fclose(f);
    return text;
}

/* Writes a token of tokenizer.model as base64. May read bytes after the token's end; the padding leaves them out. */
static void write_base64_line(FILE* f, const uint8_t* s, size_t n, int rank) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t bits = (uint32_t)s[i] << 16;
        if (i + 1 < n) { bits |= (uint32_t)s[i + 1] << 8; }
        if (i + 2 < n) { bits |= s[i + 2]; }
        for (size_t k = 0; k < 4; k++) { fputc(i + k > n ? '=' : digits[bits >> (18 - 6 * k) & 63], f); }
    }
    fprintf(f, " %d\n", rank);
}

/* Returns the processor time of this program: the machine may be busy with others. */
static double processor_seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

/* Loads a tokenizer.model of the 256 bytes and `count` tokens of n bytes each; returns the seconds it took. */
static double load_tokens(Tokenizer* t, size_t count, size_t n, void (*token)(uint8_t* out, size_t n, uint64_t i)) {
    char* text = NULL;
    size_t size = 0;
    uint8_t bytes[TOKEN_LEN_MAX];
    Error e = NO_ERROR;
    FILE* f = open_memstream(&text, &size);
    for (int b = 0; b < 256; b++) {
        const uint8_t byte = (uint8_t)b;
        write_base64_line(f, &byte, 1, b);
    }
    for (size_t i = 0; i < count; i++) {
        token(bytes, n, i + 1);
        write_base64_line(f, bytes, n, 256 + (int)i);
    }
    fclose(f);
    const double start = processor_seconds();
    CHECK(tokenizer_parse(t, text, size, "hostile", &e), "%s", e.msg);
    free(text);
    return processor_seconds() - start;
}

/* Makes the i-th of the 8-byte tokens that x * 0x9E3779B97F4A7C15, folded by x ^ x >> 32, all puts into slot 0. */
static void colliding_token(uint8_t* out, size_t n, uint64_t i) {
    uint64_t inverse = 1;
    for (int k = 0; k < 6; k++) { inverse *= 2 - 0x9E3779B97F4A7C15u * inverse; }  // Newton's iteration
    const uint64_t x = inverse * (i << 32 | i) - 8 * 0xD6E8FEB86659FD93u;
    memcpy(out, &x, n);
}

static void random_token(uint8_t* out, size_t n, uint64_t i) {
    for (size_t k = 0; k < n; k++) { out[k] = (uint8_t)((i * 1000 + k) * 0x9E3779B97F4A7C15u >> 40); }
}

TEST(hostile_vocabularies_load_in_less_than_two_seconds) {
    Tokenizer t;
    double seconds = load_tokens(&t, 40000, 8, colliding_token);
    CHECK(seconds < 2, "40,000 tokens that collide without a seed: %.2f s", seconds);
    tokenizer_free(&t);
    seconds = load_tokens(&t, 10000, 1004, random_token);
    CHECK(seconds < 2, "10,000 tokens of 1,004 bytes: %.2f s", seconds);
    tokenizer_free(&t);
    const HashSeed a = hash_seed(), b = hash_seed();
    CHECK(hash_mix(a, 1) != hash_mix(b, 1), "two processes must not share a seed");
}

TEST(ids_do_not_depend_on_the_seed) {
    size_t len = 0, text_len = 0;
    Error e = NO_ERROR;
    char* file = read_file("dev/data/tinytales/tokenizer.json", &len, 1 << 24, &e);
    char* text = read_file("README.md", &text_len, 1 << 24, &e);
    CHECK(file && text, "%s", e.msg);
    if (!file || !text) { return; }
    const HashSeed seeds[2] = {{1, 0x9E3779B97F4A7C15u}, {0xD6E8FEB86659FD93u, 0xCBF29CE484222325u}};
    Tokenizer t[2];
    TokenList ids[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    for (int i = 0; i < 2; i++) {
        CHECK(tokenizer_parse_seeded(&t[i], file, len, "tokenizer.json", seeds[i], &e), "%s", e.msg);
        tokenizer_encode(&t[i], text, text_len, true, &ids[i]);
    }
    CHECK(ids[0].count > 1000 && ids[0].count == ids[1].count, "%zu and %zu ids", ids[0].count, ids[1].count);
    CHECK(memcmp(ids[0].ids, ids[1].ids, ids[0].count * sizeof(int32_t)) == 0, "ids");
    CHECK(t[0].fingerprint == t[1].fingerprint, "fingerprint");
    for (int i = 0; i < 2; i++) {
        token_list_free(&ids[i]);
        tokenizer_free(&t[i]);
    }
    free(file);
    free(text);
}

/* Makes a tokenizer whose added tokens have these names, from id 256 on; every other one is special. */
static void parse_added(Tokenizer* t, char (*names)[TOKEN_LEN_MAX + 2], int count, Error* e) {
    char* added = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&added, &size);
    for (int i = 0; i < count; i++) {
        fprintf(f, "%s{\"id\":%d,\"content\":\"%s\",\"special\":%s}", i ? "," : "", 256 + i, names[i],
                i % 2 ? "true" : "false");
    }
    fclose(f);
    parse_small(t, GPT2_SPLIT, true, "", "", added, e);
    free(added);
}

static char names[1000][TOKEN_LEN_MAX + 2];

TEST(of_added_names_the_longest_is_found) {
    Tokenizer t;
    Error e = NO_ERROR;
    int count = 0;
    uint32_t seed = 7;
    while (count < 120) {
        const size_t n = 2 + (size_t)count % 6;
        bool twin = false;
        for (size_t i = 0; i < n; i++) {
            seed = seed * 1664525 + 1013904223;
            names[count][i] = "abc"[(seed >> 16) % 3];
        }
        names[count][n] = 0;
        for (int i = 0; i < count; i++) { twin = twin || strcmp(names[i], names[count]) == 0; }
        count += !twin || n == 2;  // if two tokens have one name, the first keeps it
    }
    parse_added(&t, names, count, &e);
    CHECK(e.msg[0] == 0, "%s", e.msg);
    for (int round = 0; round < 5000; round++) {
        char text[13] = "";
        for (size_t i = 0; i < 12; i++) {
            seed = seed * 1664525 + 1013904223;
            text[i] = "abc1"[(seed >> 16) % 4];
        }
        for (int normalized = 0; normalized < 2; normalized++) {
            int want = -1;
            for (int i = 0; i < count; i++) {
                const bool kind = ((t.flags[256 + i] & TOKEN_NORMALIZED) != 0) == normalized;
                const size_t n = strlen(names[i]);
                const bool first = tokenizer_find(&t, names[i]) == 256 + i;
                if (kind && first && strncmp(text, names[i], n) == 0 && (want < 0 || n > strlen(names[want]))) { want = i; }
            }
            const AddedName* got = added_find(&t.added[normalized], text, text + 12);
            CHECK((got ? got->id - 256 : -1) == want, "\"%s\": %d, wanted %d", text, got ? got->id - 256 : -1, want);
        }
    }
    for (int i = 0; i < count; i++) {
        int first = i;
        for (int k = i; k >= 0; k--) { first = strcmp(names[k], names[i]) == 0 ? k : first; }
        CHECK(tokenizer_find(&t, names[i]) == 256 + first, "\"%s\" by name", names[i]);
    }
    CHECK(tokenizer_find(&t, "abcabcabcabc") == -1 && tokenizer_find(&t, "") == -1, "no such name");
    tokenizer_free(&t);
}

TEST(a_thousand_added_names_with_one_start_take_less_than_two_seconds) {
    Tokenizer t;
    Error e = NO_ERROR;
    enum { COUNT = 1000, TEXT = 20000 };
    for (int i = 0; i < COUNT; i++) {
        memset(names[i], 'Z', (size_t)i + 3);
        memcpy(names[i] + i + 3, "Q", 2);
    }
    parse_added(&t, names, COUNT, &e);
    CHECK(e.msg[0] == 0, "%s", e.msg);
    char* text = (char*)xmalloc(TEXT);
    memset(text, 'Z', TEXT);
    const double start = processor_seconds();
    CHECK(round_trips(&t, text, TEXT), "20 kB of Z");
    CHECK(processor_seconds() - start < 2, "took %.2f s", processor_seconds() - start);
    free(text);
    tokenizer_free(&t);
    memset(names[0], 'Z', TOKEN_LEN_MAX + 1);
    parse_added(&t, names, 1, &e);
    CHECK(strstr(e.msg, "content") && strstr(e.msg, "at most 1024 bytes"), "a name of 1,025 bytes: %s", e.msg);
}

/* A byte written under an @ is a template's, each other byte is data. */
TEST(a_special_name_counts_only_where_all_of_it_is_ours) {
    static const char letters[] = "P?S?T?A?B";  // of <p>, <s>, <st>, ab and bc; <p> alone is not special
    static const struct {
        const char *text, *ours, *want;
    } cases[] = {
        {"<s>", "@@@", "S"},          {"<s>", "   ", "<s>"},        {"<s>", "@@ ", "<s>"},        {"<s>", " @@", "<s>"},
        {"<s><s>", "@@@   ", "S<s>"}, {"<s><s>", "   @@@", "<s>S"}, {"<<s>", " @@@", "<S"},       {"<st>", "@@@@", "T"},
        {"<st>x", "@@@ @", "<st>x"},  {"<p>", "   ", "P"},          {"<p><s>", "      ", "P<s>"}, {"s><s>", "  @@@", "s>S"},
        {"abc", " @@", "aB"},         {"abc", "@@ ", "Ac"},         {"abc", "   ", "abc"},
    };
    Tokenizer t;
    Error e = NO_ERROR;
    static const char* const added[] = {"<p>", "<s>", "q1", "<st>", "q2", "ab", "q3", "bc"};
    for (int i = 0; i < 8; i++) { strcpy(names[i], added[i]); }
    parse_added(&t, names, 8, &e);
    CHECK(e.msg[0] == 0, "%s", e.msg);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        TokenEncoder enc;
        uint8_t ours[8], control[512] = {0};
        char got[16] = "";
        const size_t n = strlen(cases[i].text);
        for (size_t k = 0; k < n; k++) { ours[k] = cases[i].ours[k] == '@'; }
        encoder_init(&enc, &t);
        encoder_marked(&enc, cases[i].text, ours, n, control);
        for (size_t k = 0; k < enc.out.count; k++) {
            const int32_t id = enc.out.ids[k];
            got[k] = id >= 256 ? letters[id == 256 ? 0 : id - 256 + 1] : (char)id;
        }
        CHECK(strcmp(got, cases[i].want) == 0, "\"%s\" with \"%s\": %s, wanted %s", cases[i].text, cases[i].ours, got,
              cases[i].want);
        encoder_free(&enc);
    }
    tokenizer_free(&t);
}

TEST(tiktoken_files_rank_by_the_merged_bytes_and_get_llama3_specials) {
    Tokenizer t;
    Error e = NO_ERROR;
    char* text = tiktoken_text("YmM= 256\nYWI= 257\nYWJj 258\n");  // bc, ab, abc
    CHECK(tokenizer_parse(&t, text, strlen(text), "tokenizer.model", &e), "%s", e.msg);
    free(text);
    const int abc[] = {258, -1}, abcd[] = {258, 'd', -1}, abb[] = {257, 'b', -1}, chat[] = {259 + 6, 'u', 259 + 7, -1};
    CHECK(t.vocab_size == 259 + 256 && t.bos_id == 259 && t.eos_id == 260, "V %d bos %d eos %d", t.vocab_size, t.bos_id,
          t.eos_id);
    CHECK(encodes(&t, "abc", 3, false, abc), "abc");
    CHECK(encodes(&t, "abcd", 4, false, abcd), "a, bc merge to abc");
    CHECK(encodes(&t, "abb", 3, false, abb), "abb");
    CHECK(encodes(&t, "<|start_header_id|>u<|end_header_id|>", 37, true, chat), "specials");
    CHECK(tokenizer_find(&t, "<|reserved_special_token_0|>") == 261 &&
              tokenizer_find(&t, "<|reserved_special_token_247|>") == 514 &&
              tokenizer_find(&t, "<|finetune_right_pad_id|>") == 263 &&
              tokenizer_find(&t, "<|reserved_special_token_2|>") == 264 && tokenizer_find(&t, "<|eot_id|>") == 268 &&
              tokenizer_find(&t, "<|python_tag|>") == 269,
          "names");
    tokenizer_free(&t);
}

/* Returns the text of a stream of ids, with '/' between the pushes that gave text. */
static void stream(const Tokenizer* t, const char* bytes, char* out, bool joined) {
    TokenDecoder d;
    size_t n = 0, len;
    decoder_init(&d, t);
    for (const char* p = bytes; *p; p++) {
        const char* s = decoder_push(&d, (uint8_t)*p, &len);
        n += (size_t)sprintf(out + n, "%.*s%s", (int)len, s, len && !joined ? "/" : "");
    }
    const char* s = decoder_flush(&d, &len);
    sprintf(out + n, "%.*s", (int)len, s);
    decoder_free(&d);
}

TEST(streaming_gives_whole_characters_only) {
    Tokenizer t;
    char out[256];
    tokenizer_bytes(&t);
    stream(&t, "a\xC3\xA9\xF0\x9F\x98\x80z", out, false);
    CHECK(strcmp(out, "a/\xC3\xA9/\xF0\x9F\x98\x80/z/") == 0, "%s", out);
#define R "\xEF\xBF\xBD"
    // clang-format off
    static const struct { const char *bytes, *want; } cases[] = {
        {"\xC3", R}, {"a\xFF" "b", "a" R "b"}, {"\xE2\x82", R}, {"\xE2\x82x", R "x"}, {"\xE2\x28\xA1", R "(" R},
        {"\xC0\xAF", R R},
        {"\xE0\x80\xAF", R R R}, {"\xED\xA0\x80", R R R}, {"\xF0\x9F\x98", R},
        {"\xF0\x9F\x98\xF0\x9F\x98\x80", R "\xF0\x9F\x98\x80"},
        {"\xF4\x90\x80\x80", R R R R}, {"\xF0\x80\x80", R R R}, {"\x80\x80", R R},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        stream(&t, cases[i].bytes, out, true);
        CHECK(strcmp(out, cases[i].want) == 0, "case %zu gave %s, wanted %s", i, out, cases[i].want);
    }
#undef R
    tokenizer_free(&t);
}

TEST(an_encoder_appends_and_its_cache_changes_nothing) {
    Tokenizer t;
    Error e = NO_ERROR;
    CHECK(parse_small(&t, LLAMA3_SPLIT, true, ",\"ab\":256", "\"a b\"", "", &e), "%s", e.msg);
    size_t n = 0;
    char text[4096];
    for (int i = 0; n + 16 < sizeof text; i++) {
        n += (size_t)sprintf(text + n, "%s", i % 3 ? " abab" : i % 2 ? " cab" : "xab\n");
    }
    TokenEncoder long_text, pieces;
    encoder_init(&long_text, &t);
    encoder_init(&pieces, &t);
    encoder_text(&long_text, text, n, false);
    encoder_text(&long_text, text, n, false);
    for (int twice = 0; twice < 2; twice++) {
        const uint8_t *s = (const uint8_t*)text, *end = s + n, *p;
        for (; s < end; s = p) {
            p = scan_llama3(s, end, 3);
            merge_piece(&pieces, s, (size_t)(p - s));
        }
    }
    CHECK(long_text.cache && long_text.out.count == pieces.out.count &&
              memcmp(long_text.out.ids, pieces.out.ids, pieces.out.count * sizeof(int32_t)) == 0,
          "%zu and %zu ids", long_text.out.count, pieces.out.count);
    encoder_free(&long_text);
    encoder_free(&pieces);
    tokenizer_free(&t);
}

TEST(the_fingerprint_tells_tokenizers_apart_and_not_their_files) {
    Tokenizer a, b, c;
    Error e = NO_ERROR;
    char* text = tiktoken_text("YWI= 256\n");
    CHECK(tokenizer_parse(&a, text, strlen(text), "tokenizer.model", &e), "%s", e.msg);
    const TokenizerExtras x = {false, NULL, 0};
    CHECK(tokenizer_save(&a, test_here(), &x, &e), "%s", e.msg);
    CHECK(tokenizer_load(&b, test_file("tokenizer.json"), &e), "%s", e.msg);
    CHECK(a.fingerprint == b.fingerprint && a.vocab_size == b.vocab_size, "the same tokenizer in another file");
    free(text);
    text = tiktoken_text("YWM= 256\n");
    CHECK(tokenizer_parse(&c, text, strlen(text), "tokenizer.model", &e), "%s", e.msg);
    CHECK(a.fingerprint != c.fingerprint, "another token");
    free(text);
    tokenizer_free(&a);
    tokenizer_free(&b);
    tokenizer_free(&c);
}

/* Returns what text_rules.h says of the tokens before a text: their number, or -1 if the first is not BOS. */
static int num_start(const Tokenizer* t) {
    TextRules r;
    text_rules_init(&r, t, NULL);
    return r.num_start == 0 || text_rules_begins_with_bos(&r) ? r.num_start : -1;
}

TEST(a_new_model_s_tokenizer_adds_bos_and_any_other_is_kept) {
    const TokenizerExtras fresh = {true, NULL, 64}, kept = {false, NULL, 64}, chats = {false, "{{ \"x\" }}", 64};
    Tokenizer a, b;
    Error e = NO_ERROR;
    tokenizer_bytes(&a);
    CHECK(tokenizer_save(&a, test_here(), &fresh, &e) && tokenizer_load(&b, test_here(), &e), "%s", e.msg);
    CHECK(a.fingerprint == b.fingerprint && b.bos_id == 256 && round_trips(&b, "ab\xFF\n\0c", 6), "the bytes");
    const char *saved = test_text(test_file("tokenizer.json")), *config = test_text(test_file("tokenizer_config.json"));
    CHECK(strstr(saved, "TemplateProcessing") && strstr(config, "\"model_max_length\": 64"), "%s", config);
    CHECK(tokenizer_save(&b, test_here(), &fresh, &e), "%s", e.msg);
    const char *again = test_text(test_file("tokenizer.json")), *config_again = test_text(test_file("tokenizer_config.json"));
    CHECK(strcmp(saved, again) == 0 && strcmp(config, config_again) == 0, "saving what was saved changes nothing");
    tokenizer_free(&a);
    tokenizer_free(&b);
    // a tokenizer.json whose post-processor adds no BOS, with its own tokenizer_config.json
    char* text = small_json(GPT2_SPLIT, false, "", "", EOT(256) ",{\"id\":257,\"content\":\"<s>\",\"special\":true}");
    put("tokenizer.json", text);
    put("tokenizer_config.json",
        "{\"bos_token\": {\"content\": \"<s>\"}, \"eos_token\": null, \"add_bos_token\": false,\n"
        " \"chat_template\": \"x}{\\\"\", \"tokenizer_class\": \"GPT2Tokenizer\"}");
    config = test_text(test_file("tokenizer_config.json"));
    CHECK(tokenizer_load(&a, test_here(), &e) && a.bos_id == 257 && a.eos_id == 256 && num_start(&a) == 0, "%s", e.msg);
    CHECK(tokenizer_save(&a, test_here(), &kept, &e), "%s", e.msg);
    saved = test_text(test_file("tokenizer.json"));
    config_again = test_text(test_file("tokenizer_config.json"));
    CHECK(strcmp(saved, text) == 0 && strcmp(config, config_again) == 0, "a model that exists: no byte changes");
    CHECK(tokenizer_save(&a, test_here(), &chats, &e), "%s", e.msg);
    config_again = test_text(test_file("tokenizer_config.json"));
    CHECK(strstr(config_again, "\"chat_template\": \"{{ \\\"x\\\" }}\"") && strstr(config_again, "\"eos_token\": null") &&
              strstr(config_again, "GPT2Tokenizer"),
          "a template that it has not: %s", config_again);
    CHECK(tokenizer_save(&a, test_here(), &fresh, &e) && tokenizer_load(&b, test_here(), &e) && b.bos_id == 257 &&
              b.eos_id == 256,
          "%s", e.msg);
    CHECK(num_start(&b) == 1, "the post-processor of what was saved");
    saved = test_text(test_file("tokenizer.json"));
    config = test_text(test_file("tokenizer_config.json"));
    CHECK(strstr(saved, "\"ids\":[257]"), "BOS in the template");
    CHECK(strstr(config, "\"chat_template\": \"x}{\\\"\"") && strstr(config, "\"add_bos_token\": true") &&
              strstr(config, "\"tokenizer_class\": \"PreTrainedTokenizerFast\"") &&
              strstr(config, "\"eos_token\": \"<|endoftext|>\""),
          "%s", config);
    free(text);
    tokenizer_free(&a);
    tokenizer_free(&b);
}

/* Checks that a small tokenizer.json with one text replaced by another is refused with a message that contains `says`. */
static void refused(const char* find, const char* put, const char* says) {
    char* text = small_json(GPT2_SPLIT, false, ",\"ab\":256", "\"a b\"", EOT(257));
    char* at = strstr(text, find);
    Tokenizer t;
    Error e = NO_ERROR;
    CHECK(at, "\"%s\" is not in the file", find);
    if (!at) { return; }
    char* changed = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&changed, &size);
    fprintf(f, "%.*s%s%s", (int)(at - text), text, put, at + strlen(find));
    fclose(f);
    CHECK(!tokenizer_parse(&t, changed, strlen(changed), "small.json", &e), "%s -> %s was accepted", find, put);
    CHECK(strncmp(e.msg, "small.json", 10) == 0 && strstr(e.msg, says), "%s -> %s: \"%s\" does not say %s", find, put, e.msg,
          says);
    CHECK(!strchr(e.msg, '\n') || strstr(e.msg, "\n  hint: "), "one line: %s", e.msg);
    free(changed);
    free(text);
}

static FILE* no_stream(char** text, size_t* length) {
    *text = NULL;
    *length = 0;
    return NULL;
}

/* What is written is lost, as where memory ends while the stream grows. */
static FILE* full_stream(char** text, size_t* length) {
    *text = NULL;
    *length = 0;
    return fopen("/dev/full", "w");
}

TEST(saving_without_memory_ends_with_an_error) {
    FILE* (*const streams[])(char**, size_t*) = {no_stream, full_stream};
    const char* folder = test_here();
    for (int from = 0; from < 2; from++) {
        for (int k = 0; k < 2; k++) {
            Tokenizer t;
            Error e = NO_ERROR;
            if (from == 0) {
                tokenizer_bytes(&t);
            } else {
                CHECK(parse_small(&t, GPT2_SPLIT, true, "", "", EOT(256), &e), "%s", e.msg);
            }
            fflush(stdout);
            const pid_t child = fork();
            if (child == 0) {
                memory_stream = streams[k];
                if (!freopen("/dev/null", "w", stderr)) { _exit(2); }
                const TokenizerExtras x = {true, NULL, 0};
                _exit(tokenizer_save(&t, folder, &x, &e) ? 0 : 2);
            }
            int status = 0;
            CHECK(child > 0 && waitpid(child, &status, 0) == child, "fork");
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1, "status %x, wanted exit 1", status);
            tokenizer_free(&t);
        }
    }
}

TEST(what_would_split_or_merge_otherwise_is_refused_by_name) {
    refused("\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}", "normalizer.type is \"NFC\"");
    refused(GPT2_SPLIT, "{\"type\":\"Metaspace\"}", "pre_tokenizer.type is \"Metaspace\"");
    refused(GPT2_SPLIT, "null", "pre_tokenizer is null");
    refused(GPT2_SPLIT, "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Whitespace\"}]}",
            "pretokenizers.0.type is \"Whitespace\"");
    refused(GPT2_SPLIT, "{\"type\":\"Sequence\",\"pretokenizers\":[]}", "pretokenizers");
    refused(GPT2_SPLIT, "{\"type\":\"Sequence\",\"pretokenizers\":[" GPT2_SPLIT "," GPT2_SPLIT "]}", "pretokenizers.1.type");
    refused(GPT2_SPLIT, "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"x+\"}}]}",
            "Regex is \"x+\"");
    refused("\"add_prefix_space\":false", "\"add_prefix_space\":true", "add_prefix_space is true");
    refused("\"decoder\":{\"type\":\"ByteLevel\"}", "\"decoder\":{\"type\":\"WordPiece\"}", "decoder.type is \"WordPiece\"");
    refused("\"type\":\"BPE\"", "\"type\":\"Unigram\"", "model.type is \"Unigram\"");
    refused("\"dropout\":null", "\"dropout\":0.1", "model.dropout is 0.1");
    refused("\"dropout\":null", "\"end_of_word_suffix\":\"</w>\"", "end_of_word_suffix is \"</w>\"");
    refused("\"dropout\":null", "\"continuing_subword_prefix\":\"##\"", "continuing_subword_prefix is \"##\"");
    refused("\"special\":true", "\"special\":true,\"single_word\":true", "added_tokens.0.single_word is true");
}

TEST(damaged_files_are_refused_by_field) {
    refused("\"id\":257", "\"id\":\"257\"", "added_tokens.0.id is \"257\"");
    refused("\"content\":\"<|endoftext|>\"", "\"content\":\"\"", "added_tokens.0.content");
    refused("\"ab\":256", "\"ab\":255", "\"ab\" the id 255");
    refused("\"ab\":256", "\"ab\":1e3", "\"ab\" the id 1e3");
    refused("\"ab\":256", "\"ab\":4000000000", "\"ab\" the id 4000000000");
    refused("\"ab\":256", "\"ab\":-1", "\"ab\" the id -1");
    refused("\"ab\":256", "\"a b\":256", "needs the token \"ab\"");
    refused("\"a b\"", "\"a bc\"", "needs the token \"bc\"");
    refused("\"a b\"", "\"ab\"", "model.merges.0 is not a pair");
    refused("\"a b\"", "\"a b c\"", "model.merges.0 is not a pair");
    refused("\"a b\"", "[\"a\"]", "model.merges.0 is not a pair");
    refused("\"a b\"", "[\"a\",3]", "model.merges.0 is not a pair");
    refused("\"a b\"", "7", "model.merges.0 is not a pair");
    refused("\"merges\":[", "\"merges\":{}, \"x\":[", "model.merges is an object");
    refused("\"vocab\":{", "\"vocab\":[],\"x\":{", "model.vocab is an array");
    refused("\"model\":{", "\"x\":{", "model is missing");
    refused("\"added_tokens\":[", "\"added_tokens\":3,\"x\":[", "added_tokens is 3");
    refused("\"ignore_merges\":false", "\"ignore_merges\":1", "ignore_merges is 1");
}

TEST(every_cut_of_a_file_is_refused_or_read) {
    char* texts[2] = {small_json(LLAMA3_SPLIT, true, ",\"ab\":256", "\"a b\"", EOT(257)), tiktoken_text("YWI= 256\n")};
    for (int kind = 0; kind < 2; kind++) {
        size_t len = strlen(texts[kind]);
        for (size_t n = 0; n < len; n++) {
            Tokenizer t;
            Error e = NO_ERROR;
            bool ok = tokenizer_parse(&t, texts[kind], n, "cut", &e);
            // a tokenizer.model without its last line, or without its last newline, is still valid
            bool whole_lines = kind == 1 && (n == len - 10 || n == len - 9 || n == len - 1);
            CHECK(ok == whole_lines && (ok || e.msg[0] != 0), "cut at %zu of %zu: %s", n, len,
                  ok ? "was accepted" : "no message");
            if (ok) { tokenizer_free(&t); }
        }
        free(texts[kind]);
    }
}

static void refused_model(const char* more, const char* says) {
    char* text = tiktoken_text(more);
    Tokenizer t;
    Error e = NO_ERROR;
    CHECK(!tokenizer_parse(&t, text, strlen(text), "tokenizer.model", &e), "%s was accepted", more);
    CHECK(strstr(e.msg, says), "%s: \"%s\" does not say %s", more, e.msg, says);
    free(text);
}

TEST(damaged_tiktoken_files_are_refused_by_line) {
    refused_model("YWI= 255\n", "tokenizer.model:257: rank is 255");
    refused_model("YWI= 257\n", "tokenizer.model:257: rank is 257");
    refused_model("YWI= -1\n", "tokenizer.model:257: rank is \"-1\"");
    refused_model("YWI= 99999999999999999999\n", "tokenizer.model:257: rank is");
    refused_model("YWI=\n", "tokenizer.model:257");
    refused_model("Y*I= 256\n", "tokenizer.model:257");
    refused_model("YWI 256\n", "tokenizer.model:257");
    refused_model("YQ== 256\n", "same bytes");
    refused_model("YWI= 256 \n", "tokenizer.model:257: rank is \"256 \"");
    Tokenizer t;
    Error e = NO_ERROR;
    CHECK(!tokenizer_parse(&t, "YQ== 0\n", 7, "tokenizer.model", &e) && strstr(e.msg, "0x00"), "%s", e.msg);
}

TEST(other_kinds_of_files_are_named) {
    // clang-format off
    static const struct { const char* text; size_t len; const char* says; } cases[] = {
        {"", 0, "an empty file"}, {"GGUF\3\0\0\0", 8, "GGUF"},
        {"\x0A\x0E\x0A\x05<unk>\x15\0\0\0\0\x18\x02", 16, "SentencePiece"}, {"hello world\n", 12, "not a known kind"},
        {"{}", 2, "model is missing"}, {"[1]", 3, "not a known kind"}, {"{\"a\":1} x", 9, "wanted"},
        {"version https://git-lfs.github.com", 34, "LFS"},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Tokenizer t;
        Error e = NO_ERROR;
        CHECK(!tokenizer_parse(&t, cases[i].text, cases[i].len, "f", &e), "case %zu was accepted", i);
        CHECK(strstr(e.msg, cases[i].says), "case %zu: \"%s\" does not say %s", i, e.msg, cases[i].says);
    }
    Tokenizer t;
    Error e = NO_ERROR;
    FAILS(&e, tokenizer_load(&t, test_file("missing"), &e), "cannot open");
    remove(test_file("tokenizer.json"));
    CHECK(!tokenizer_load(&t, test_here(), &e) && strstr(e.msg, "neither tokenizer.json"), "%s", e.msg);
}

/* ggml-org/llama.cpp#5040, unslothai/unsloth#237, ai-dynamo/dynamo#10811: transformers loads all of them. */
TEST(the_files_beside_a_tokenizer_name_bos_and_eos) {
    static const struct {
        const char *config, *map;
        int bos, eos;
        const char *bos_name, *eos_name;
    } cases[] = {
        {"{\"eos_token\": \"<b>\"}", NULL, 256, 257, NULL, "<b>"},
        {"{\"eos_token\": \"</s>\"}", NULL, 256, 256, NULL, "</s>"},  // no token: the usual name counts
        {"{\"bos_token\": \"\", \"eos_token\": null}", NULL, 256, 256, NULL, NULL},
        {"{\"bos_token\": \"!\", \"eos_token\": 5}", NULL, '!', 256, "!", NULL},  // of model.vocab alone
        {NULL, "{\"bos_token\": \"<b>\", \"eos_token\": {\"content\": \"<c>\"}}", 257, 258, "<b>", "<c>"},
        {"{\"bos_token\": \"<b>\"}", "{\"bos_token\": \"<c>\"}", 258, 256, "<c>", NULL},  // the map wins
        {"{\"bos_token\": \"<b>\"}", "{\"bos_token\": null}", 256, 256, NULL, NULL},
        {"{\"bos_token\": \"<b>\", \"added_tokens_decoder\": {}}", "{\"bos_token\": \"<c>\"}", 257, 256, "<b>", NULL},
    };
    char* text = small_json(GPT2_SPLIT, false, "", "",
                            EOT(256) ",{\"id\":257,\"content\":\"<b>\",\"special\":true}"
                                     ",{\"id\":258,\"content\":\"<c>\",\"special\":true}");
    put("tokenizer.json", text);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Tokenizer t;
        Error e = NO_ERROR;
        remove(test_file("tokenizer_config.json"));
        remove(test_file("special_tokens_map.json"));
        if (cases[i].config) { put("tokenizer_config.json", cases[i].config); }
        if (cases[i].map) { put("special_tokens_map.json", cases[i].map); }
        CHECK(tokenizer_load(&t, test_here(), &e), "%zu: %s", i, e.msg);
        CHECK(t.bos_id == cases[i].bos && t.eos_id == cases[i].eos, "%zu: bos %d, eos %d", i, t.bos_id, t.eos_id);
        const char *names[] = {t.bos_name, t.eos_name}, *want[] = {cases[i].bos_name, cases[i].eos_name};
        for (int k = 0; k < 2; k++) {
            CHECK(!names[k] == !want[k] && (!want[k] || strcmp(names[k], want[k]) == 0), "%zu: %s", i,
                  names[k] ? names[k] : "");
        }
        tokenizer_free(&t);
    }
    free(text);
}

int main(void) { return test_all(); }
