/* encode_units.h -- cuts a batch of text into units, and encodes or decodes them in parallel.
 *
 * A unit is what one thread encodes at once: a line of a .jsonl, or a stretch of a text. A text is cut only where every split
 * pattern has a border (text_border()), so the units have the same tokens as the whole text. For --train-bpe, whose pattern is
 * Llama 3's, many more places are borders (piece_border()).
 * A batch is divided into runs of about equal bytes. Part k of a job gets run k and keeps its result: ids in its encoder, or
 * lines of JSON. So the results are in order for any number of threads.
 */
#ifndef DATA_ENCODE_UNITS_H
#define DATA_ENCODE_UNITS_H

#include "dev/data/tokenize_flags.h"
#include "dev/data/answers.h"        // defines: AnswerWriter, ChatMask, chat_list_names, chat_read, chat_write
#include "dev/data/bpe.h"            // defines: piece_border
#include "dev/data/train_bpe.h"      // defines: Counting, counting_add
#include "llmc/base/utf8.h"          // defines: utf8_char_length
#include "llmc/files/json.h"         // defines: json_parse_line, json_string, json_write_string
#include "llmc/text/chat.h"          // defines: ChatForm
#include "llmc/text/conversation.h"  // defines: ChatMessages, chat_name
#include "llmc/text/tokenizer.h"     // defines: Tokenizer, TokenEncoder, TokenDecoder, encoder_text, decoder_push

// ---------------------------------------------------------------------------------------------------------------------
// cutting

enum { UNIT_BYTES = 1 << 16 };                      // about the length of a text's units
enum { CUT_NOWHERE, CUT_AT_LINES, CUT_AT_PIECES };  // in a text: at no border, at a text_border(), at a piece_border()

typedef struct {
    const char* text;  // of a text: its bytes; of a .jsonl: the line without its newline
    size_t len;
    uint64_t line;  // of a .jsonl, from 1; 0: this is text
    bool starts_document;
} Unit;

typedef struct {
    Unit* units;
    size_t count, cap;
} UnitList;

static inline void unit_add(UnitList* list, const char* text, size_t len, uint64_t line, bool starts_document) {
    list->units = (Unit*)xgrow(list->units, list->count, &list->cap, sizeof(Unit));
    const Unit u = {text, len, line, starts_document};
    list->units[list->count++] = u;
}

/* Returns whether a text may be cut in front of s[i], 0 < i < length: both parts then encode to the ids of the whole. True
 * between a newline and a printable ASCII character: a newline ends every piece of white space or symbols that contains one,
 * and no piece starts with a newline and continues with such a character. Ask tokenizer_may_cut() first. */
static inline bool text_border(const char* s, size_t i) { return s[i - 1] == '\n' && s[i] > ' ' && s[i] < 0x7F; }

/* Returns whether texts may be cut at text_border(). Not if there is no splitting before merging, nor if an added token's name
 * has a newline before its last byte, or the token takes white space around it. */
static inline bool tokenizer_may_cut(const Tokenizer* t) {
    if (t->split == SPLIT_NONE && t->num_merges > 0) { return false; }
    for (int id = 0; id < t->vocab_size; id++) {
        const uint32_t len = t->at[id + 1] - t->at[id];
        if (t->flags[id] & (TOKEN_LSTRIP | TOKEN_RSTRIP)) { return false; }
        if ((t->flags[id] & TOKEN_ADDED) && len > 1 && memchr(t->bytes + t->at[id], '\n', len - 1)) { return false; }
    }
    return true;
}

/* Returns the last place in s[0 .. n) where a batch may end, or 0: after a newline if `lines`, else at a text_border(). */
static inline size_t last_cut(const char* s, size_t n, bool lines) {
    for (size_t i = n; i > 0; i--) {
        if (lines ? s[i - 1] == '\n' : i < n && text_border(s, i)) { return i; }
    }
    return 0;
}

static inline void cut_text(UnitList* list, const char* s, size_t n, bool first, int cuts) {
    size_t start = 0;
    for (size_t i = UNIT_BYTES; cuts != CUT_NOWHERE && i < n; i++) {
        if (!(cuts == CUT_AT_PIECES ? piece_border(s, i, n) : text_border(s, i))) { continue; }
        unit_add(list, s + start, i - start, 0, first && start == 0);
        start = i;
        i += UNIT_BYTES;
    }
    if (start < n || first) { unit_add(list, s + start, n - start, 0, first && start == 0); }
}

static inline void cut_lines(UnitList* list, const char* s, size_t n, uint64_t* line) {
    for (size_t start = 0; start < n;) {
        const char* newline = (const char*)memchr(s + start, '\n', n - start);
        const size_t len = (newline ? (size_t)(newline - s) : n) - start;
        unit_add(list, s + start, len, ++*line, true);
        start += len + 1;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the results

/* The result of one run of units: ids in the encoder, or lines of JSON. */
typedef struct {
    TokenEncoder encoder;
    TokenDecoder decoder;
    AnswerWriter writer;  // of --chat
    ChatMask mask;        // of --chat: which ids are trained, and which begin a conversation
    size_t left_out;      // answers that would be trained if the template did not change them
    int special;          // token whose name is plain text in this run, at special_line; -1: none
    uint64_t special_line;
    char* lines;  // the lines of JSON, from a memory stream
    size_t lines_len;
    uint64_t documents, text_bytes, text_tokens;
    uint64_t no_characters;  // bytes of this run's texts outside of UTF-8 characters
    Error error;
} Part;

typedef struct {
    const Tokenizer* t;
    const Args* args;
    const char* path;  // of the input, for messages
    int separator;     // id put in front of each document; -1: none
    TextRules rules;   // of --chat
    ChatForm form;
    bool told_of_names;  // that a text has names of special tokens
    Counting* counting;  // of --train-bpe; otherwise NULL
    Part* parts;
    int num_parts;
} Job;

// ---------------------------------------------------------------------------------------------------------------------
// one unit

/* Parses one line of JSON. An error names file, line and column. */
static inline bool parse_line(Json* j, const Unit* u, const char* path, Error* e) {
    char at[PATH_CAP + 32];
    snprintf(at, sizeof at, "%s:%llu", path, (unsigned long long)u->line);
    return json_parse_line(j, u->text, u->len, at, e);
}

/* Returns the hint for a line without the field: the first member with a text, or --chat, or "". */
static inline const char* other_field_hint(char* out, size_t cap, const Json* j) {
    if (chat_name(j, json_root(j), chat_list_names)) { return "a conversation is no text; --chat takes it as such"; }
    for (const JsonNode* n = json_first(j, json_root(j)); n; n = json_next(j, n)) {
        char name[64];
        if (n->type != JSON_STRING) { continue; }
        snprintf(out, cap, "--field %s, if that is the text", show_text(name, sizeof name, json_key(j, n, NULL), n->key_len));
        return out;
    }
    return "";
}

static inline bool line_member(Json* j, const JsonNode** member, const char* key, JsonType type, const Unit* u,
                               const char* path, Error* e) {
    *member = json_get_any(j, json_root(j), key);
    if (*member && (*member)->type == (uint32_t)type) { return true; }
    char found[64];
    const bool is_object = json_root(j)->type == JSON_OBJECT;
    char space[128];
    const bool text = is_object && type == JSON_STRING, null = *member && (*member)->type == JSON_NULL;
    const char* hint = text && !*member ? other_field_hint(space, sizeof space, j)
                       : text && null   ? "dev/data/hf.py --rows FILE leaves such lines out, and counts them"
                                        : "";
    const char* is = is_object ? json_show(found, sizeof found, j, *member) : "missing: the line is not an object";
    const char* wanted = type == JSON_STRING ? "a string" : "an array";
    if (!*hint) { return fail(e, "%s:%llu: %s is %s, wanted %s", path, (unsigned long long)u->line, key, is, wanted); }
    return fail(e, "%s:%llu: %s is %s, wanted %s\n  hint: %s", path, (unsigned long long)u->line, key, is, wanted, hint);
}

/* Notes the first name of a special token in a text, where it is plain text. */
static inline void find_special_name(Part* p, const char* text, size_t len, uint64_t line) {
    const Tokenizer* t = p->encoder.t;
    for (size_t i = 0; i < len && p->special < 0; i++) {
        for (int k = 0; k < 2 && t->added_first[(uint8_t)text[i]]; k++) {
            const AddedName* name = added_find(&t->added[k], text + i, text + len);
            if (name && (t->flags[name->id] & TOKEN_SPECIAL)) { p->special = name->id, p->special_line = line; }
        }
    }
}

/* Encodes a text; for --train-bpe, counts its pieces. `separated`: the separator stands before it, unless it begins with it. */
static inline void encode_counted(const Job* job, Part* p, const char* text, size_t len, bool separated, uint64_t line) {
    TokenList* out = &p->encoder.out;
    if (separated && job->separator >= 0) { token_list_add(out, job->separator); }
    const size_t before = out->count;
    if (job->counting) {
        counting_add(job->counting, text, len);
    } else {
        encoder_text(&p->encoder, text, len, job->args->specials);
    }
    if (!job->counting && !job->args->specials && !job->told_of_names) { find_special_name(p, text, len, line); }
    if (separated && job->separator >= 0 && out->count > before && out->ids[before] == job->separator) {
        out->count--;
        memmove(out->ids + before, out->ids + before + 1, (out->count - before) * sizeof *out->ids);
    }
    p->text_bytes += len;
    p->text_tokens += p->encoder.out.count - before;
}

/* Returns the place of the first byte outside of UTF-8 characters; n: none. Skips ASCII, which most bytes are, by eight. */
static inline size_t first_no_character(const char* s, size_t n) {
    uint64_t eight;
    size_t i = 0;
    while (i < n) {
        const bool ascii = i + 8 <= n && (memcpy(&eight, s + i, 8), (eight & UINT64_C(0x8080808080808080)) == 0);
        const size_t length = ascii ? 8 : utf8_char_length(s + i, n - i);
        if (length == 0) { return i; }
        i += length;
    }
    return n;
}

/* Counts the bytes outside of UTF-8 characters. */
static inline uint64_t count_no_characters(const char* s, size_t n) {
    uint64_t count = 0;
    for (size_t i = 0; (i += first_no_character(s + i, n - i)) < n; i++) { count++; }
    return count;
}

/* Encodes one unit of a file into p->encoder. */
static inline bool encode_unit(const Job* job, Part* p, const Unit* u) {
    if (u->line && strspn(u->text, " \t\r\n") >= u->len) { return true; }  // the text ends in a newline or a NUL
    p->documents += u->starts_document;
    if (!u->line) {
        p->no_characters += count_no_characters(u->text, u->len);
        encode_counted(job, p, u->text, u->len, u->starts_document, 0);
        return true;
    }
    Json j;
    const JsonNode* member;
    if (!parse_line(&j, u, job->path, &p->error)) { return false; }
    const bool ok = line_member(&j, &member, text_field(job->args), JSON_STRING, u, job->path, &p->error);
    if (ok) {
        size_t len = 0;
        const char* text = json_string(&j, member, &len);
        encode_counted(job, p, text, len, true, u->line);
    }
    json_free(&j);
    return ok;
}

/* Encodes a line's conversation into p->encoder and p->mask. */
static inline bool encode_chat(const Job* job, Part* p, const Unit* u) {
    char at[PATH_CAP + 32];
    Json j;
    Error why = NO_ERROR;
    ChatMessages messages = {NULL, 0, 0, NULL};
    if (strspn(u->text, " \t\r\n") >= u->len) { return true; }
    snprintf(at, sizeof at, "%s:%llu", job->path, (unsigned long long)u->line);
    if (!json_parse_line(&j, u->text, u->len, at, &p->error)) { return false; }
    bool ok = chat_read(&messages, &j, &p->error);
    if (ok && !chat_write(&p->writer, &p->mask, &messages, &p->left_out, &why)) { ok = fail(&p->error, "%s: %s", at, why.msg); }
    p->documents += ok;
    chat_messages_free(&messages);
    json_free(&j);
    return ok;
}

/* Encodes one line of stdin to a line of `out`. */
static inline bool answer_encode(const Job* job, Part* p, const Unit* u, FILE* out) {
    Json j;
    const JsonNode* member;
    if (!parse_line(&j, u, job->path, &p->error)) { return false; }
    const bool ok = line_member(&j, &member, text_field(job->args), JSON_STRING, u, job->path, &p->error);
    if (ok) {
        size_t len = 0;
        const char* text = json_string(&j, member, &len);
        p->encoder.out.count = 0;
        encode_counted(job, p, text, len, false, u->line);
        fputs("{\"ids\": [", out);
        for (size_t i = 0; i < p->encoder.out.count; i++) {
            char digits[16];
            int n = 16;
            for (uint32_t v = (uint32_t)p->encoder.out.ids[i]; n == 16 || v; v /= 10) { digits[--n] = (char)('0' + v % 10); }
            if (i) { fputs(", ", out); }
            fwrite(digits + n, 1, (size_t)(16 - n), out);
        }
        fputs("]}\n", out);
    }
    json_free(&j);
    return ok;
}

static inline bool answer_decode(const Job* job, Part* p, const Unit* u, FILE* out) {
    Json j;
    const JsonNode* member;
    if (!parse_line(&j, u, job->path, &p->error)) { return false; }
    bool ok = line_member(&j, &member, "ids", JSON_ARRAY, u, job->path, &p->error);
    char* text = NULL;
    size_t text_len = 0, len;
    FILE* whole = ok ? xopen_memory(&text, &text_len) : NULL;
    for (const JsonNode* n = ok ? json_first(&j, member) : NULL; ok && n; n = json_next(&j, n)) {
        int64_t id = -1;
        if (!json_node_int(&j, n, &id) || id < 0 || id >= job->t->vocab_size) {
            char found[64];
            ok = fail(&p->error, "%s:%llu: ids has %s, wanted numbers from 0 to %d", job->path, (unsigned long long)u->line,
                      json_show(found, sizeof found, &j, n), job->t->vocab_size - 1);
            break;
        }
        const char* piece = decoder_push(&p->decoder, (int)id, &len);
        fwrite(piece, 1, len, whole);
    }
    if (whole) {
        const char* rest = decoder_flush(&p->decoder, &len);
        fwrite(rest, 1, len, whole);
        xclose_memory(whole, &text);
    }
    if (ok) {
        fputs("{\"text\": ", out);
        json_write_string(out, text, text_len);
        fputs("}\n", out);
    }
    free(text);
    json_free(&j);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// all units of a batch

static inline void run_part(const Job* job, Part* p, const Unit* units, size_t count) {
    bool ok = true;
    if (job->args->jsonl || job->args->decode) {
        FILE* out = xopen_memory(&p->lines, &p->lines_len);
        for (size_t i = 0; ok && i < count; i++) {
            ok = job->args->jsonl ? answer_encode(job, p, &units[i], out) : answer_decode(job, p, &units[i], out);
        }
        xclose_memory(out, &p->lines);
        return;
    }
    p->encoder.out.count = 0;
    p->no_characters = 0;
    p->special = -1;
    p->mask.count = 0;
    for (size_t i = 0; ok && i < count; i++) {
        ok = job->args->chat ? encode_chat(job, p, &units[i]) : encode_unit(job, p, &units[i]);
    }
}

/* Encodes or decodes the units in parallel: part k gets the k-th run of about equal bytes. Returns the number of parts used. */
static inline int run_units(Job* job, const UnitList* list) {
    if (list->count == 0) { return 0; }
    size_t* first = (size_t*)xcalloc((size_t)job->num_parts + 1, sizeof(size_t));
    size_t bytes = 0, done = 0, unit = 0;
    for (size_t i = 0; i < list->count; i++) { bytes += list->units[i].len + 1; }
    const int parts = bytes < UNIT_BYTES ? 1 : job->num_parts;  // for a few lines, threads cost more than they save
    for (int k = 0; k < parts; k++) {
        first[k] = unit;
        for (; unit < list->count && done < bytes / (size_t)parts * (size_t)(k + 1); unit++) {
            done += list->units[unit].len + 1;
        }
    }
    first[parts] = list->count;
#pragma omp parallel for schedule(dynamic, 1) if (parts > 1)
    for (int k = 0; k < parts; k++) { run_part(job, &job->parts[k], list->units + first[k], first[k + 1] - first[k]); }
    free(first);
    return parts;
}

#endif
