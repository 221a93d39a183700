/* tokenizer_read.h -- reads a Tokenizer from a file of one of two kinds, told apart by content:
 *   tokenizer.json   of Hugging Face: a BPE model over bytes (as GPT-2's printable stand-ins), split by Llama 3's or GPT-2's
 *                    pattern, optionally by Digits before that (SmolLM). Anything that would split or merge in another way
 *                    (normalizers, other pre-tokenizers, models, prefixes, dropout) is refused by name.
 *   tokenizer.model  of tiktoken: lines "base64-of-the-bytes rank". It holds no special tokens; Llama 3.1's 256 are added
 *                    after the last rank.
 * An error names the field or line and leaves the Tokenizer all zeros.
 */
#ifndef LLMC_TOKENIZER_READ_H
#define LLMC_TOKENIZER_READ_H

#include "llmc/base/utils.h"      // defines: fail, read_file, path_join, file_exists, is_directory
#include "llmc/files/filekind.h"  // defines: file_looks_like
#include "llmc/files/folder.h"    // defines: folder_below, folder_has, folder_of, file_name
#include "llmc/files/json.h"      // defines: json_parse, json_get, json_wanted, json_is_off, json_is_string
#include "llmc/base/text.h"       // defines: is_hub_name, show_text, text_starts
#include "llmc/text/tokenizer.h"  // defines: Tokenizer, tokenizer_index, token_table_add, merge_add, merge_piece

enum { TOKEN_FILE_MAX = 1 << 29 };  // most bytes in a tokenizer file

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer.model

static inline int base64_value(char c) {
    if (c >= 'A' && c <= 'Z') { return c - 'A'; }
    if (c >= 'a' && c <= 'z') { return c - 'a' + 26; }
    if (c >= '0' && c <= '9') { return c - '0' + 52; }
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decodes n characters to out, which has room for n / 4 * 3 bytes; false if they are not padded base64. */
static inline bool base64_decode(char* out, size_t* out_len, const char* s, size_t n) {
    if (n == 0 || n % 4 != 0) { return false; }
    size_t pad = s[n - 1] != '=' ? 0 : s[n - 2] != '=' ? 1 : 2, len = 0;
    for (size_t i = 0; i < n; i += 4) {
        uint32_t bits = 0;
        for (size_t k = 0; k < 4; k++) {
            int v = i + k >= n - pad ? 0 : base64_value(s[i + k]);
            if (v < 0) { return false; }
            bits = bits << 6 | (uint32_t)v;
        }
        for (int shift = 16; shift >= 0; shift -= 8) { out[len++] = (char)(bits >> shift); }
    }
    *out_len = len - pad;
    return true;
}

// Llama 3.1's special tokens that have a name of their own (the list of models/llama3/tokenizer.py in llama-models)
// clang-format off
static const struct { int k; const char* name; } llama3_named[] = {
    {0, "begin_of_text"}, {1, "end_of_text"}, {4, "finetune_right_pad_id"}, {6, "start_header_id"}, {7, "end_header_id"},
    {8, "eom_id"}, {9, "eot_id"}, {10, "python_tag"},
};
// clang-format on

/* Writes the name of Llama 3.1's k-th special token, 0 <= k < 256. */
static inline void llama3_special(char* out /* (40) */, int k) {
    int before = 0;  // tokens below k that have a name of their own
    for (size_t i = 0; i < sizeof llama3_named / sizeof *llama3_named; i++) {
        if (llama3_named[i].k == k) {
            snprintf(out, 40, "<|%s|>", llama3_named[i].name);
            return;
        }
        before += llama3_named[i].k < k;
    }
    snprintf(out, 40, "<|reserved_special_token_%d|>", k - before);
}

/* Reads one line of tokenizer.model and moves *s past it. Writes the token to `out`, which has room for the line's length. */
static inline bool tiktoken_line(const char** s, const char* end, char* out, size_t* out_len, int64_t* rank, size_t line,
                                 const char* path, Error* e) {
    const char* p = *s;
    const char* newline = (const char*)memchr(p, '\n', (size_t)(end - p));
    const char* stop = newline ? newline : end;
    const char* space = (const char*)memchr(p, ' ', (size_t)(stop - p));
    *s = newline ? newline + 1 : end;
    if (!space || !base64_decode(out, out_len, p, (size_t)(space - p))) {
        return fail(e, "%s:%zu: wanted a line \"BASE64 RANK\" of a tiktoken vocabulary", path, line);
    }
    if (*out_len > TOKEN_LEN_MAX) {
        return fail(e, "%s:%zu: token is %zu bytes long, wanted at most %d", path, line, *out_len, TOKEN_LEN_MAX);
    }
    int64_t value = 0;
    const char* digit = space + 1;
    for (; digit < stop && *digit >= '0' && *digit <= '9' && value < INT32_MAX; digit++) {
        value = value * 10 + (*digit - '0');
    }
    if (digit == space + 1 || digit != stop) {
        char shown[40];
        return fail(e, "%s:%zu: rank is \"%s\", wanted a number", path, line,
                    show_text(shown, sizeof shown, space + 1, (size_t)(stop - space - 1)));
    }
    *rank = value;
    return true;
}

/* Builds the merge table by tiktoken's rule: two neighbours merge if together they are a token, whose rank they get. */
static inline void tiktoken_merges(Tokenizer* t, int num_ranks) {
    uint64_t splits[TOKEN_LEN_MAX], *all = NULL;                         // left id << 32 | right id
    size_t* end = (size_t*)xmalloc((size_t)num_ranks * sizeof(size_t));  // end of each token's splits in `all`
    size_t count = 0, cap = 0;
    for (int id = 0; id < num_ranks; id++) {
        const size_t n = token_splits(t, id, NULL, splits);
        all = (uint64_t*)xreserve(all, count, n, &cap, sizeof(uint64_t));
        if (n > 0) { memcpy(all + count, splits, n * sizeof(uint64_t)); }
        end[id] = count += n;
    }
    merges_init(t, count);
    for (int id = 0; id < num_ranks; id++) {
        for (size_t i = id ? end[id - 1] : 0; i < end[id]; i++) { merge_add(t, all[i], (uint32_t)id, id); }
    }
    free(all);
    free(end);
}

/* Reads the lines of a tokenizer.model into tokens, whose ranks count from 0, and adds Llama 3.1's special tokens. */
static inline bool tokenizer_parse_tiktoken(Tokenizer* t, const char* text, size_t len, const char* path, Error* e) {
    const char *s = text, *end = text + len;
    int num_ranks = 0, id = 0;
    for (const char* p = text; p < end; p++) { num_ranks += *p != '\n' && (p == text || p[-1] == '\n'); }
    tokenizer_allocate(t, num_ranks + 256, len + 256 * 40);
    for (size_t line = 1; s < end; line++) {
        char* out = t->bytes + t->at[id];
        size_t n = 0;
        int64_t rank = 0;
        if (*s == '\n') {
            s++;
            continue;
        }
        if (!tiktoken_line(&s, end, out, &n, &rank, line, path, e)) { return false; }
        if (rank != id) {
            return fail(e, "%s:%zu: rank is %lld, wanted %d: ranks count from 0", path, line, (long long)rank, id);
        }
        const int32_t twin = token_table_find(&t->pieces, out, n);
        if (twin >= 0) { return fail(e, "%s: ranks %d and %d are the same bytes", path, twin, id); }
        t->at[id + 1] = t->at[id] + (uint32_t)n;
        token_table_add(&t->pieces, id++, n);
    }
    for (int b = 0; b < 256; b++) {
        const char byte = (char)b;
        t->byte_ids[b] = token_table_find(&t->pieces, &byte, 1);
        if (t->byte_ids[b] < 0) {
            return fail(e, "%s: has no token for the single byte 0x%02x, wanted all 256 bytes", path, b);
        }
    }
    for (int k = 0; k < 256; k++, id++) {
        llama3_special(t->bytes + t->at[id], k);
        t->at[id + 1] = t->at[id] + (uint32_t)strlen(t->bytes + t->at[id]);
        t->flags[id] = TOKEN_ADDED | TOKEN_SPECIAL;
    }
    t->split = SPLIT_LLAMA3;
    t->max_digits = 3;
    tiktoken_merges(t, num_ranks);
    tokenizer_index(t);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer.json

/* Lists GPT-2's printable stand-in for each byte: the byte itself if it is printable, otherwise the next character from
 * U+0100 on. */
static inline void byte_stand_ins(uint16_t* code /* (256) */, int16_t* byte_of /* (512), -1: none */) {
    int extra = 0x100;
    for (int i = 0; i < 512; i++) { byte_of[i] = -1; }
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        code[b] = (uint16_t)(printable ? b : extra++);
        byte_of[code[b]] = (int16_t)b;
    }
}

/* Turns n bytes of stand-ins into the bytes they stand for. A string with any other character is copied as it is: no piece
 * can be such a token. Returns the number of bytes; *plain says whether all characters were stand-ins. */
static inline size_t bytes_from_stand_ins(char* out, const char* s, size_t n, const int16_t* byte_of, bool* plain) {
    size_t len = 0;
    for (size_t i = 0; i < n;) {
        uint32_t c;
        int used = utf8_decode((const uint8_t*)s + i, n - i, &c);
        if (used == 0 || c >= 512 || byte_of[c] < 0) {
            memcpy(out, s, n);
            *plain = false;
            return n;
        }
        out[len++] = (char)byte_of[c];
        i += (size_t)used;
    }
    *plain = true;
    return len;
}

// Llama 3's split pattern; `digits` is its part for numbers
#define LLAMA3_PATTERN(digits)                                           \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"                     \
    "\\s+(?!\\S)|\\s+"

/* Reads a Split step, which must have one of the known patterns. */
static inline bool parse_split(Tokenizer* t, const Json* j, const JsonNode* step, Error* e) {
    // clang-format off
    static const struct { const char* pattern; int split, max_digits; } known[] = {
        {LLAMA3_PATTERN("\\p{N}{1,3}"), SPLIT_LLAMA3, 3},
        {LLAMA3_PATTERN("\\p{N}{1,2}"), SPLIT_LLAMA3, 2},
        {LLAMA3_PATTERN("\\p{N}"), SPLIT_LLAMA3, 1},
        {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", SPLIT_GPT2, 0},
    };
    // clang-format on
    const JsonNode* pattern = json_get(j, step, "pattern");
    const JsonNode* regex = json_get(j, pattern, "Regex");
    if (!regex) { return json_wanted(j, step, "pattern", e, "{\"Regex\": the split pattern of Llama 3 or GPT-2}"); }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (!json_is_string(j, regex, known[i].pattern)) { continue; }
        // the patterns match every character, so isolating the matches and removing what is between them are the same
        bool invert = !json_is_off(j, step, "invert");
        if (!json_is_string(j, json_get(j, step, "behavior"), invert ? "Removed" : "Isolated")) {
            return json_wanted(j, step, "behavior", e, "\"%s\"", invert ? "Removed" : "Isolated");
        }
        t->split = known[i].split;
        t->max_digits = known[i].max_digits;
        return true;
    }
    return json_wanted(j, pattern, "Regex", e, "the split pattern of Llama 3 or GPT-2");
}

/* Reads one step of the pre-tokenizer. *stage is 0 at the start, 1 after Digits, 2 after Split, 3 after ByteLevel. */
static inline bool parse_pre_tokenizer_step(Tokenizer* t, const Json* j, const JsonNode* step, int* stage, Error* e) {
    const JsonNode* type = json_get(j, step, "type");
    if (json_is_string(j, type, "Digits") && *stage < 1) {
        t->digits = json_is_off(j, step, "individual_digits") ? DIGITS_RUNS : DIGITS_EACH;
        *stage = 1;
        return true;
    }
    if (json_is_string(j, type, "Split") && *stage < 2) {
        *stage = 2;
        return parse_split(t, j, step, e);
    }
    if (!json_is_string(j, type, "ByteLevel") || *stage == 3) {
        return json_wanted(j, step, "type", e, "Digits, Split and ByteLevel, each at most once and in this order");
    }
    if (!json_is_off(j, step, "add_prefix_space")) {
        return json_wanted(j, step, "add_prefix_space", e, "false: else decoding would not give the text back");
    }
    bool use_regex = true;  // the default of `tokenizers`
    if (!json_bool_or(j, step, "use_regex", &use_regex, e)) { return false; }
    if (use_regex && *stage == 2) { return json_wanted(j, step, "use_regex", e, "false after a Split"); }
    if (use_regex) { t->split = SPLIT_GPT2; }
    *stage = 3;
    return true;
}

static inline bool parse_pre_tokenizer(Tokenizer* t, const Json* j, Error* e) {
    const JsonNode* node = json_get(j, json_root(j), "pre_tokenizer");
    int stage = 0;
    t->split = SPLIT_NONE;
    if (!node) { return json_wanted(j, json_root(j), "pre_tokenizer", e, "one that ends in ByteLevel (byte-level BPE)"); }
    if (json_is_string(j, json_get(j, node, "type"), "Sequence")) {
        const JsonNode* steps = json_get(j, node, "pretokenizers");
        if (!steps || steps->type != JSON_ARRAY) { return json_wanted(j, node, "pretokenizers", e, "an array"); }
        for (const JsonNode* step = json_first(j, steps); step; step = json_next(j, step)) {
            if (!parse_pre_tokenizer_step(t, j, step, &stage, e)) { return false; }
        }
        return stage == 3 || json_wanted(j, node, "pretokenizers", e, "ByteLevel as its last step (byte-level BPE)");
    }
    if (!parse_pre_tokenizer_step(t, j, node, &stage, e)) { return false; }
    return stage == 3 || json_wanted(j, node, "type", e, "ByteLevel, or a Sequence that ends in it (byte-level BPE)");
}

/* Checks that everything `tokenizers` could do beyond splitting and merging is off. */
static inline bool parse_refusals(const Json* j, const JsonNode* model, Error* e) {
    const JsonNode* root = json_root(j);
    const JsonNode* normalizer = json_get(j, root, "normalizer");
    if (normalizer) {
        const JsonNode* steps = json_get(j, normalizer, "normalizers");
        if (!json_is_string(j, json_get(j, normalizer, "type"), "Sequence") || !steps || steps->length > 0) {
            return json_wanted(j, normalizer, "type", e, "no normalizer at all: it would change the text");
        }
    }
    const JsonNode* decoder = json_get(j, root, "decoder");
    if (decoder && !json_is_string(j, json_get(j, decoder, "type"), "ByteLevel")) {
        return json_wanted(j, decoder, "type", e, "ByteLevel");
    }
    if (json_get(j, model, "type") && !json_is_string(j, json_get(j, model, "type"), "BPE")) {
        return json_wanted(j, model, "type", e, "BPE");
    }
    static const char* const off[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 3; i++) {
        if (!json_is_off(j, model, off[i])) { return json_wanted(j, model, off[i], e, "null"); }
    }
    return true;
}

/* The names in a tokenizer.json and their ids, while it is read. */
typedef struct {
    Tokenizer* t;
    const Json* j;
    const JsonNode *model, *vocab, *merges, *added;
    uint32_t* name_at;   // (vocab_size) where the name of each id starts in j->text
    uint32_t* name_len;  // (vocab_size) bytes of the name; UINT32_MAX: no name yet
    int num_names;       // ids that have a name
    bool renumbered;     // an id of added_tokens was not its token's
    TokenTable names;    // names in model.vocab
    int16_t byte_of[512];
} VocabReader;

/* Gives an id its name, the `len` bytes at `at` of the text. */
static inline void give_name(VocabReader* r, int64_t id, uint32_t at, uint32_t len) {
    r->name_at[id] = at;
    r->name_len[id] = len;
    r->num_names++;
}

/* Reads the names of model.vocab, whose ids must be below `most`. */
static inline bool parse_vocab_names(VocabReader* r, int64_t most, Error* e) {
    const Json* j = r->j;
    for (const JsonNode* n = json_first(j, r->vocab); n; n = json_next(j, n)) {
        int64_t id = 0;
        if (!json_node_int(j, n, &id) || id < 0 || id >= most || r->name_len[id] != UINT32_MAX) {
            char shown[64], found[64];
            return fail(e, "%s: model.vocab gives \"%s\" the id %s, wanted each of 0 to %lld once", j->path,
                        show_text(shown, sizeof shown, j->text + n->key, n->key_len), json_show(found, sizeof found, j, n),
                        (long long)most - 1);
        }
        give_name(r, id, n->key, n->key_len);
        token_table_add(&r->names, (int32_t)id, n->key_len);
    }
    return true;
}

/* Reads the flags of an added token. */
static inline bool read_added_flags(const Json* j, const JsonNode* n, uint8_t* flags, Error* e) {
    static const char* const names[] = {"special", "normalized", "lstrip", "rstrip"};  // TOKEN_SPECIAL and so on
    *flags = TOKEN_ADDED;
    if (!json_is_off(j, n, "single_word")) { return json_wanted(j, n, "single_word", e, "false"); }
    for (int i = 0; i < 4; i++) {
        bool on = i == 1 && !(*flags & TOKEN_SPECIAL);
        if (!json_bool_or(j, n, names[i], &on, e)) { return false; }
        *flags |= (uint8_t)(on ? TOKEN_SPECIAL << i : 0);
    }
    return true;
}

/* Reads one of added_tokens: its flags, and its name if model.vocab has not got it. As `tokenizers` does, numbers the new names
 * in the order of the list, whatever their ids say. */
static inline bool parse_added_token(VocabReader* r, const JsonNode* n, Error* e) {
    const Json* j = r->j;
    const JsonNode* content = json_get(j, n, "content");
    char shown[64];
    int64_t given = 0;
    uint8_t flags = 0;
    if (!content || content->type != JSON_STRING || content->length == 0) {
        return json_wanted(j, n, "content", e, "the text of the token");
    }
    if (content->length > TOKEN_LEN_MAX) {  // a text may compare each of its bytes with this many
        return json_wanted(j, n, "content", e, "at most %d bytes", TOKEN_LEN_MAX);
    }
    if (!json_int(j, n, "id", 0, INT32_MAX, &given, e) || !read_added_flags(j, n, &flags, e)) { return false; }
    const int32_t listed = token_table_find(&r->names, j->text + content->at, content->length);
    const int64_t id = listed >= 0 ? listed : r->num_names;
    const bool fresh = listed < 0;
    show_text(shown, sizeof shown, j->text + content->at, content->length);
    if (fresh && r->name_len[id] != UINT32_MAX) {
        return fail(e, "%s: added_tokens numbers \"%s\" %lld, but model.vocab has that id", j->path, shown, (long long)id);
    }
    if (id != given && !r->renumbered) {
        warn("%s: added_tokens says that \"%s\" is %lld, but its place makes it %lld, as in tokenizers", j->path, shown,
             (long long)given, (long long)id);
    }
    r->renumbered |= id != given;
    if (r->t->flags[id] & TOKEN_ADDED) { return json_wanted(j, n, "id", e, "an id of its own"); }
    if (fresh) { give_name(r, id, content->at, content->length); }
    r->t->flags[id] = flags;
    return true;
}

/* Gives every id its name, from model.vocab and added_tokens: ids 0 .. n-1, each once. */
static inline bool parse_names(VocabReader* r, Error* e) {
    const Json* j = r->j;
    const int64_t most = (int64_t)r->vocab->length + (r->added ? r->added->length : 0);
    if (most == 0 || most > INT32_MAX) { return json_wanted(j, r->model, "vocab", e, "1 to 2^31 - 1 tokens"); }
    r->name_at = (uint32_t*)xcalloc((size_t)most, sizeof(uint32_t));
    r->name_len = (uint32_t*)xmalloc((size_t)most * sizeof(uint32_t));
    r->t->flags = (uint8_t*)xcalloc((size_t)most, 1);
    for (int64_t i = 0; i < most; i++) { r->name_len[i] = UINT32_MAX; }
    token_table_init(&r->names, r->vocab->length, j->text, r->name_at, r->t->seed);
    if (!parse_vocab_names(r, most, e)) { return false; }
    for (const JsonNode* n = r->added ? json_first(j, r->added) : NULL; n; n = json_next(j, n)) {
        if (!parse_added_token(r, n, e)) { return false; }
    }
    for (int i = 0; i < r->num_names; i++) {
        if (r->name_len[i] == UINT32_MAX) { return fail(e, "%s: no token has the id %d", j->path, i); }
    }
    r->t->vocab_size = r->num_names;
    return true;
}

/* Fills the bytes of every token, and the table of tokens that a piece may be. */
static inline void parse_bytes(VocabReader* r) {
    Tokenizer* t = r->t;
    size_t total = 0;
    for (int i = 0; i < t->vocab_size; i++) { total += r->name_len[i]; }
    tokenizer_allocate(t, t->vocab_size, total);
    for (int i = 0; i < t->vocab_size; i++) {
        const char* name = r->j->text + r->name_at[i];
        size_t n = r->name_len[i];
        bool plain = false;
        char* out = t->bytes + t->at[i];
        size_t len = bytes_from_stand_ins(out, name, n, r->byte_of, &plain);
        if (t->flags[i] & TOKEN_ADDED) {  // its name is text, and may be a piece only if model.vocab has it unchanged
            plain = plain && len == n && memcmp(out, name, n) == 0 && token_table_find(&r->names, name, n) == i;
            memcpy(out, name, n);
        } else {
            n = len;
        }
        t->at[i + 1] = t->at[i] + (uint32_t)n;
        if (plain) { token_table_add(&t->pieces, i, n); }
    }
}

/* Reads one merge, the index-th of model.merges. *joined is a buffer of *cap bytes that grows. */
static inline bool parse_merge(VocabReader* r, const JsonNode* n, size_t index, uint32_t rank, char** joined, size_t* cap,
                               Error* e) {
    const char *a = NULL, *b = NULL;
    size_t a_len = 0, b_len = 0;
    if (n->type == JSON_STRING) {
        a = r->j->text + n->at;
        const char* space = (const char*)memchr(a, ' ', n->length);
        a_len = space ? (size_t)(space - a) : 0;
        b_len = space ? n->length - a_len - 1 : 0;
        b = space && !memchr(space + 1, ' ', b_len) ? space + 1 : NULL;
    } else if (n->type == JSON_ARRAY && n->length == 2) {
        a = json_string(r->j, json_first(r->j, n), &a_len);
        b = json_string(r->j, json_next(r->j, json_first(r->j, n)), &b_len);
    }
    if (!a || !b) { return fail(e, "%s: model.merges.%zu is not a pair, wanted \"a b\" or [\"a\", \"b\"]", r->j->path, index); }
    *joined = (char*)xreserve(*joined, 0, a_len + b_len + 1, cap, 1);
    memcpy(*joined, a, a_len);
    memcpy(*joined + a_len, b, b_len);
    const char* const names[3] = {a, b, *joined};
    const size_t lengths[3] = {a_len, b_len, a_len + b_len};
    int32_t ids[3];
    for (int i = 0; i < 3; i++) {
        ids[i] = token_table_find(&r->names, names[i], lengths[i]);
        if (ids[i] >= 0) { continue; }
        char shown[64];
        return fail(e, "%s: model.merges.%zu needs the token \"%s\", which model.vocab does not have", r->j->path, index,
                    show_text(shown, sizeof shown, names[i], lengths[i]));
    }
    merge_add(r->t, (uint64_t)ids[0] << 32 | (uint32_t)ids[1], rank, ids[2]);
    return true;
}

static inline bool parse_merges(VocabReader* r, Error* e) {
    char* joined = NULL;
    size_t cap = 0, index = 0;
    uint32_t rank = 0;
    bool ok = true;
    merges_init(r->t, r->merges->length);
    for (const JsonNode* n = json_first(r->j, r->merges); ok && n; n = json_next(r->j, n), index++) {
        const char* s = json_string(r->j, n, NULL);
        if (s && text_starts(s, "#version")) { continue; }  // the first line of GPT-2's merges.txt
        ok = parse_merge(r, n, index, rank++, &joined, &cap, e);
    }
    free(joined);
    return ok;
}

/* Finds the id of each single byte. A byte that the vocabulary lacks becomes `unk_token`, or is dropped if there is none. */
static inline bool parse_byte_ids(VocabReader* r, Error* e) {
    const char* unk_name = NULL;
    size_t unk_len = 0;
    int32_t unk = -1;
    if (!json_is_off(r->j, r->model, "unk_token")) {
        unk_name = json_string(r->j, json_get(r->j, r->model, "unk_token"), &unk_len);
        if (!unk_name) { return json_wanted(r->j, r->model, "unk_token", e, "null or the name of a token"); }
        unk = token_table_find(&r->names, unk_name, unk_len);
    }
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        int32_t id = token_table_find(&r->t->pieces, &byte, 1);
        // bytes 0xC0, 0xC1 and from 0xF5 on do not occur in UTF-8, and trained vocabularies often lack them
        bool in_utf8 = b != 0xC0 && b != 0xC1 && b < 0xF5;
        if (id < 0 && in_utf8 &&
            (!json_is_off(r->j, r->model, "byte_fallback") || (unk >= 0 && !json_is_off(r->j, r->model, "fuse_unk")))) {
            return fail(e, "%s: model.vocab lacks byte 0x%02x, wanted all bytes where byte_fallback or fuse_unk is true",
                        r->j->path, b);
        }
        r->t->byte_ids[b] = id >= 0 ? id : unk;
    }
    return true;
}

/* Keeps in t->pieces only the tokens that merging their own bytes gives: what a piece becomes without ignore_merges. */
static inline void keep_reachable_pieces(Tokenizer* t) {
    TokenEncoder enc;
    TokenSlot* old = t->pieces.slots;
    const size_t slots = t->pieces.mask + 1;
    encoder_init(&enc, t);
    t->pieces.slots = (TokenSlot*)xcalloc(slots, sizeof(TokenSlot));
    for (size_t i = 0; i < slots; i++) {
        if (old[i].len == 0) { continue; }
        const int32_t id = old[i].id;
        enc.out.count = 0;
        merge_piece(&enc, (const uint8_t*)t->bytes + t->at[id], old[i].len);
        if (enc.out.count == 1 && enc.out.ids[0] == id) { token_table_add(&t->pieces, id, old[i].len); }
    }
    free(old);
    encoder_free(&enc);
}

static inline bool tokenizer_parse_json(Tokenizer* t, const Json* j, Error* e) {
    VocabReader r;
    uint16_t code[256];
    memset(&r, 0, sizeof r);
    byte_stand_ins(code, r.byte_of);
    r.t = t;
    r.j = j;
    const JsonNode* root = json_root(j);
    r.model = json_get(j, root, "model");
    r.vocab = json_get(j, r.model, "vocab");
    r.merges = json_get(j, r.model, "merges");
    r.added = json_get(j, root, "added_tokens");
    if (!r.model || r.model->type != JSON_OBJECT) {
        return json_wanted(j, root, "model", e, "an object: is this a tokenizer.json?");
    }
    if (!parse_refusals(j, r.model, e)) { return false; }
    if (!r.vocab || r.vocab->type != JSON_OBJECT) { return json_wanted(j, r.model, "vocab", e, "an object of token: id"); }
    if (!r.merges || r.merges->type != JSON_ARRAY) { return json_wanted(j, r.model, "merges", e, "an array of pairs"); }
    if (r.added && r.added->type != JSON_ARRAY) { return json_wanted(j, root, "added_tokens", e, "an array"); }
    if (!parse_pre_tokenizer(t, j, e)) { return false; }
    bool ignore_merges = false;
    bool ok = json_bool_or(j, r.model, "ignore_merges", &ignore_merges, e) && parse_names(&r, e);
    if (ok) {
        parse_bytes(&r);
        ok = parse_byte_ids(&r, e) && parse_merges(&r, e);
    }
    if (ok) {
        tokenizer_index(t);
        if (!ignore_merges) { keep_reachable_pieces(t); }
    }
    free(r.name_at);
    free(r.name_len);
    free(r.names.slots);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// loading

/* Reads a tokenizer of either kind from `len` bytes of text; `path` names it in messages. */
static inline bool tokenizer_parse_seeded(Tokenizer* t, const char* text, size_t len, const char* path, HashSeed seed,
                                          Error* e) {
    memset(t, 0, sizeof *t);
    t->seed = seed;
    const char* kind = file_looks_like(text, len);
    bool ok;
    if (kind && strcmp(kind, "JSON text") == 0) {
        Json j;
        ok = json_parse(&j, xcopy_text(text, len), len, path, e);
        if (ok) {
            ok = tokenizer_parse_json(t, &j, e);
            json_free(&j);
        }
        if (ok) { t->source = xcopy_text(text, len); }
    } else {
        const char* line_end = (const char*)memchr(text, '\n', len);
        const char* space = (const char*)memchr(text, ' ', line_end ? (size_t)(line_end - text) : len);
        char first[TOKEN_LEN_MAX];
        size_t n = space ? (size_t)(space - text) : 0, got;
        if (n == 0 || n > sizeof first || !base64_decode(first, &got, text, n)) {
            static const char unk[] = "\x0A\x0E\x0A\x05<unk>";
            if (len >= strlen(unk) && memcmp(text, unk, strlen(unk)) == 0) { kind = "a SentencePiece model (Llama 2's kind)"; }
            return fail(e, "%s: is %s, wanted a tokenizer.json or tiktoken's tokenizer.model", path,
                        kind ? kind : "not a known kind of tokenizer");
        }
        ok = tokenizer_parse_tiktoken(t, text, len, path, e);
    }
    if (!ok) { tokenizer_free(t); }
    return ok;
}

static inline bool tokenizer_parse(Tokenizer* t, const char* text, size_t len, const char* path, Error* e) {
    return tokenizer_parse_seeded(t, text, len, path, hash_seed(), e);
}

/* Returns what a file calls a token, as text or as {"content": text}; NULL if it is neither. */
static inline const char* config_text(const Json* j, const JsonNode* n) {
    return json_string(j, n->type == JSON_OBJECT ? json_get(j, n, "content") : n, NULL);
}

/* Reads a name from a parsed tokenizer_config.json or special_tokens_map.json. null and "" name none; an absent member leaves
 * *name as it is. */
static inline void config_name(const Json* j, const char* key, char** name) {
    const JsonNode* n = json_get_any(j, json_root(j), key);
    if (!n) { return; }
    const char* text = config_text(j, n);
    free(*name);
    *name = text && *text ? xstrdup(text) : NULL;
}

/* Notes the first name that the tokenizer has no token for. */
static inline void config_note_missing(const Tokenizer* t, const char* text, char name[64]) {
    if (!text || !*text || name[0] || tokenizer_find_any(t, text) >= 0) { return; }
    show_text(name, 64, text, strlen(text));
}

/* Takes the flags of added tokens from added_tokens_decoder of tokenizer_config.json, as `transformers` does. Warns of tokens
 * that the file lists or names and tokenizer.json lacks: `transformers` adds them, we do not. All members of added_tokens.json
 * are such tokens. */
static inline bool config_read_added(Tokenizer* t, const Json* j, Error* e) {
    static const char* const lists[] = {"added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"};
    const JsonNode* root = json_root(j);
    const bool is_list = strcmp(file_name(j->path), "added_tokens.json") == 0;
    char name[64] = "";
    bool changed = false;
    for (int i = 0; i < 3; i++) {
        const JsonNode* list = json_get_any(j, root, lists[i]);
        for (const JsonNode* n = list && json_is_container(list) ? json_first(j, list) : NULL; n; n = json_next(j, n)) {
            const char* text = config_text(j, n);
            const int id = text ? tokenizer_find_any(t, text) : -1;
            uint8_t flags = 0;
            config_note_missing(t, text, name);
            if (i > 0 || id < 0 || !(t->flags[id] & TOKEN_ADDED)) { continue; }
            if (!read_added_flags(j, n, &flags, e)) { return false; }
            changed = changed || t->flags[id] != flags;
            t->flags[id] = flags;
        }
    }
    for (const JsonNode* n = json_first(j, root); n; n = json_next(j, n)) {
        const char* key = json_key(j, n, NULL);
        if (is_list || text_ends(key, "_token")) { config_note_missing(t, is_list ? key : config_text(j, n), name); }
    }
    if (changed) { tokenizer_index(t); }
    if (!name[0]) { return true; }
    warn(
        "%s: tokenizer.json has no token \"%s\", which transformers adds: here it stays text\n"
        "  hint: AutoTokenizer.from_pretrained() and save_pretrained() of transformers write one that has it",
        j->path, name);
    return true;
}

/* Warns of members of tokenizer_config.json by which transformers makes other ids. Only some classes heed add_prefix_space. */
static inline void tokenizer_warn_of_members(const Json* j) {
    static const char* const names[] = {"split_special_tokens", "add_prefix_space"};
    static const char classes[] = " GPT2 Qwen2 Roberta CodeGen GPTNeoX ";
    const char* kind = json_string(j, json_get(j, json_root(j), "tokenizer_class"), NULL);
    const char* end = kind ? strstr(kind, "Tokenizer") : NULL;
    char word[32] = " ";
    if (end) { snprintf(word + 1, sizeof word - 1, "%.*s ", (int)(end - kind), kind); }
    for (int i = 0; i <= (word[1] && strstr(classes, word)); i++) {
        const JsonNode* n = json_get(j, json_root(j), names[i]);
        if (n && n->type == JSON_TRUE) { warn("%s: %s is true: transformers makes other ids by it", j->path, names[i]); }
    }
}

/* Reads one of the files, if it is there. *text (or NULL) becomes its text. *has_added: it has added_tokens_decoder. */
static inline bool tokenizer_read_names(Tokenizer* t, const char* folder, const char* file, char** text, bool* has_added,
                                        Error* e) {
    char path[PATH_CAP];
    size_t len = 0;
    Json j;
    if (!path_join(path, folder, file, e)) { return false; }
    if (!file_exists(path)) { return true; }
    char* read = read_file(path, &len, 16 << 20, e);
    if (!read || !json_parse(&j, xcopy_text(read, len), len, path, e)) {
        free(read);
        return false;
    }
    config_name(&j, "bos_token", &t->bos_name);
    config_name(&j, "eos_token", &t->eos_name);
    config_name(&j, "pad_token", &t->pad_name);
    const bool ok =
        json_root(&j)->type != JSON_OBJECT ? fail(e, "%s: is not a JSON object", path) : config_read_added(t, &j, e);
    tokenizer_warn_of_members(&j);
    *has_added = json_get_any(&j, json_root(&j), "added_tokens_decoder") != NULL;
    json_free(&j);
    if (!text) { free(read); }
    if (text) { *text = read; }
    return ok;
}

/* Reads the names of BOS, EOS and pad from the folder's tokenizer_config.json. special_tokens_map.json wins, unless the other
 * has added_tokens_decoder: so do the versions 4 and 5 of `transformers`. A name that is no token is no error. */
static inline bool tokenizer_read_config(Tokenizer* t, const char* folder, Error* e) {
    bool has_added = false, ignored;
    if (!tokenizer_read_names(t, folder, "tokenizer_config.json", &t->config, &has_added, e)) { return false; }
    if (!has_added && !tokenizer_read_names(t, folder, "special_tokens_map.json", NULL, &ignored, e)) { return false; }
    if (!has_added && !tokenizer_read_names(t, folder, "added_tokens.json", NULL, &ignored, e)) { return false; }
    const int bos = tokenizer_find_any(t, t->bos_name), eos = tokenizer_find_any(t, t->eos_name);
    if (bos >= 0) { t->bos_id = bos; }
    if (eos >= 0) { t->eos_id = eos; }
    return true;
}

/* Returns whether the folder `dir` has a tokenizer of either kind. */
static inline bool folder_has_tokenizer(const char* dir) {
    return folder_has(dir, "tokenizer.json") || folder_has(dir, "tokenizer.model");
}

/* Loads a tokenizer from a file of either kind, or from the tokenizer.json (else tokenizer.model) of a folder. BOS and EOS
 * are the tokens that the folder names, otherwise tokens with a usual name (<|begin_of_text|>, <|endoftext|> ...), otherwise
 * -1. */
static inline bool tokenizer_load(Tokenizer* t, const char* path, Error* e) {
    static const char* const names[] = {"tokenizer.json", "tokenizer.model", NULL};
    char file[PATH_CAP], folder[PATH_CAP];
    memset(t, 0, sizeof *t);
    if (is_directory(path)) {
        if (!path_join(file, path, "tokenizer.json", e)) { return false; }
        if (!file_exists(file) && !path_join(file, path, "tokenizer.model", e)) { return false; }
        if (!file_exists(file) && folder_has(path, "vocab.json")) {
            return fail(e,
                        "%s: holds a vocab.json, wanted tokenizer.json or tokenizer.model\n"
                        "  hint: AutoTokenizer of transformers reads it, and save_pretrained() writes a tokenizer.json",
                        path);
        }
        if (!file_exists(file) && folder_below(path, names, 2, folder) > 0) {
            return fail(e, "%s: holds neither tokenizer.json nor tokenizer.model\n  hint: did you mean %s?", path, folder);
        }
        if (!file_exists(file)) { return fail(e, "%s: holds neither tokenizer.json nor tokenizer.model", path); }
    } else {
        if (strlen(path) >= sizeof file) { return fail(e, "%.200s...: the path is too long", path); }
        strcpy(file, path);
    }
    if (is_hub_name(path) && access(file, F_OK) != 0 && errno == ENOENT) {
        return fail(
            e, "%s: cannot open: No such file or directory\n  hint: python3 dev/data/model.py %s downloads it from the hub",
            path, path);
    }
    size_t len = 0;
    char* text = read_file(file, &len, TOKEN_FILE_MAX, e);
    if (!text) { return false; }
    bool ok = tokenizer_parse(t, text, len, file, e);
    free(text);
    if (!ok) { return false; }
    t->path = xstrdup(file);
    folder_of(file, folder);
    const char* name = file_name(file);
    if (strcmp(name, "tokenizer.json") == 0 || strcmp(name, "tokenizer.model") == 0) {
        ok = tokenizer_read_config(t, folder, e);
    }
    if (!ok) { tokenizer_free(t); }
    return ok;
}

#endif
