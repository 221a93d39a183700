/* conversation.h -- reads a conversation from JSON, and writes its tokens; for ./tokenize --chat also their mask.
 *
 *   {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
 *   {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}       ShareGPT's
 *   {"prompt": "Hi", "completion": "Hello."}                                                        a question, an answer
 *
 * A content may be an array of texts, {"type": "text", "text": ...}, which are joined. OpenAI's "weight": 0 beside an answer
 * takes it out of training. Some members would make a template write more than the texts of the messages: they are refused, and
 * so are other roles. So a model is trained in the form in which it will be asked. All other members are ignored.
 *
 * text/chat.h makes the ids; a name of a special token in a text is text. The text of each answer is trained, with its
 * <|eot_id|>. The header of an answer is not: it is given when the model is asked.
 */
#ifndef LLMC_CONVERSATION_H
#define LLMC_CONVERSATION_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/files/json.h"  // defines: Json, json_get, json_string, json_first, json_next, json_wanted, json_is_off
#include "llmc/text/chat.h"   // defines: ChatFormat, chat_begin, chat_message, chat_text_start

// ---------------------------------------------------------------------------------------------------------------------
// reading

typedef struct {
    const char* role;  // the template's
    char* text;
    size_t len;
    bool trained;
} ChatMessage;

typedef struct {
    ChatMessage* items;
    size_t count, cap;
} ChatMessages;

static inline void chat_messages_free(ChatMessages* m) {
    for (size_t i = 0; i < m->count; i++) { free(m->items[i].text); }
    free(m->items);
    memset(m, 0, sizeof *m);
}

static inline void chat_messages_add(ChatMessages* m, const char* role, char* text, size_t len, bool trained) {
    m->items = (ChatMessage*)xgrow(m->items, m->count, &m->cap, sizeof *m->items);
    const ChatMessage message = {role, text, len, trained && strcmp(role, "assistant") == 0};
    m->items[m->count++] = message;
}

// the names of a message's members and roles
typedef struct {
    const char *list, *role, *text;
    const char* roles[6][2];  // in the file, in the template
    const char* wanted;
} ChatSpelling;

static const ChatSpelling chat_spellings[] = {
    {"messages",
     "role",
     "content",
     {{"system", "system"}, {"user", "user"}, {"assistant", "assistant"}},
     "\"system\", \"user\" or \"assistant\""},
    {"conversations",
     "from",
     "value",
     {{"system", "system"}, {"human", "user"}, {"gpt", "assistant"}, {"user", "user"}, {"assistant", "assistant"}},
     "\"system\", \"human\" or \"gpt\""},
};

/* Fails if an object has one of these members, and it is not empty. */
static inline bool chat_check_absent(const Json* j, const JsonNode* object, const char* const* names, Error* e) {
    for (; *names; names++) {
        const JsonNode* n = json_get(j, object, *names);
        const bool empty = n && (n->type == JSON_ARRAY || n->type == JSON_OBJECT) && !json_first(j, n);
        if (empty || json_is_off(j, object, *names)) { continue; }
        return json_wanted(j, object, *names, e, "none: a conversation is made of the texts of its messages alone");
    }
    return true;
}

/* Writes a member's text: a string, or an array of texts. */
static inline bool chat_write_text(FILE* f, const Json* j, const JsonNode* object, const char* key, Error* e) {
    const JsonNode* n = json_get(j, object, key);
    size_t len = 0;
    if (n && n->type == JSON_STRING) {
        const char* text = json_string(j, n, &len);
        fwrite(text, 1, len, f);
        return true;
    }
    if (!n || n->type != JSON_ARRAY) { return json_wanted(j, object, key, e, "a string"); }
    for (const JsonNode* part = json_first(j, n); part; part = json_next(j, part)) {
        if (!json_is_string(j, json_get(j, part, "type"), "text")) {
            return json_wanted(j, part, "type", e, "\"text\", since texts alone are taken");
        }
        const char* text = json_string(j, json_get(j, part, "text"), &len);
        if (!text) { return json_wanted(j, part, "text", e, "a string"); }
        fwrite(text, 1, len, f);
    }
    return true;
}

/* Reads a member's text and appends it as a message. */
static inline bool chat_read_text(ChatMessages* m, const Json* j, const JsonNode* object, const char* key, const char* role,
                                  bool trained, Error* e) {
    char* text = NULL;
    size_t len = 0;
    FILE* f = xopen_memory(&text, &len);
    const bool ok = chat_write_text(f, j, object, key, e);
    xclose_memory(f, &text);
    chat_messages_add(m, role, text, len, trained);
    return ok;
}

/* Reads an object of a list and appends it as a message. */
static inline bool chat_read_message(ChatMessages* m, const Json* j, const JsonNode* object, const ChatSpelling* s, Error* e) {
    static const char* const refused[] = {"tool_calls", "function_call", "images", "image", "audio", NULL};
    const JsonNode* name = json_get(j, object, s->role);
    const char* role = NULL;
    double weight = 1;
    for (int i = 0; i < 6 && s->roles[i][0]; i++) { role = json_is_string(j, name, s->roles[i][0]) ? s->roles[i][1] : role; }
    if (!role) { return json_wanted(j, object, s->role, e, "%s", s->wanted); }
    return chat_check_absent(j, object, refused, e) && json_double_or(j, object, "weight", 0, 1, &weight, e) &&
           (weight == 0 || weight == 1 || json_wanted(j, object, "weight", e, "0 or 1")) &&
           chat_read_text(m, j, object, s->text, role, weight > 0, e);
}

/* Reads the messages of the list that the root has under one of its names. */
static inline bool chat_read_list(ChatMessages* m, const Json* j, const ChatSpelling* s, Error* e) {
    const JsonNode* list = json_get(j, json_root(j), s->list);
    if (!list || list->type != JSON_ARRAY) { return json_wanted(j, json_root(j), s->list, e, "an array"); }
    for (const JsonNode* n = json_first(j, list); n; n = json_next(j, n)) {
        if (!chat_read_message(m, j, n, s, e)) { return false; }
    }
    return true;
}

/* Reads a conversation to train on from a line. Errors begin with the Json's path: file and line. */
static inline bool chat_read(ChatMessages* m, const Json* j, Error* e) {
    static const char* const refused[] = {"tools", "functions", "images", "image", "videos", "audios", "system", NULL};
    const JsonNode* root = json_root(j);
    const ChatSpelling* s = chat_spellings;
    if (root->type != JSON_OBJECT) { return fail(e, "%s: the line is not an object, wanted {\"messages\": [...]}", j->path); }
    if (!json_get(j, root, "messages") && json_get(j, root, "conversations")) { s++; }
    if (!chat_check_absent(j, root, refused, e)) { return false; }
    if (!json_get(j, root, s->list)) {
        if (!json_get(j, root, "prompt")) {
            return json_wanted(j, root, s->list, e, "it, or conversations, or prompt and completion");
        }
        return chat_read_text(m, j, root, "prompt", "user", false, e) &&
               chat_read_text(m, j, root, "completion", "assistant", true, e);
    }
    if (!chat_read_list(m, j, s, e)) { return false; }
    for (size_t i = 0; i < m->count; i++) {
        if (m->items[i].trained) { return true; }
    }
    return fail(e, "%s: no message is of the assistant, wanted one: nothing would be trained", j->path);
}

// ---------------------------------------------------------------------------------------------------------------------
// writing

/* The mask of a list of tokens: which are trained. All zeros is an empty list. */
typedef struct {
    uint8_t* trained;  // 1 or 0
    size_t count, cap;
} ChatMask;

/* Lengthens the mask to `count` tokens; `trained` holds for the new ones. */
static inline void chat_mask_extend(ChatMask* m, size_t count, bool trained) {
    if (count > m->cap) {
        m->cap = count + count / 2 + 256;
        m->trained = (uint8_t*)xrealloc(m->trained, m->cap);
    }
    memset(m->trained + m->count, trained, count - m->count);
    m->count = count;
}

/* Appends the tokens of a conversation; `mask` may be NULL. */
static inline void chat_write(TokenList* l, ChatMask* mask, const ChatMessages* m, const ChatFormat* c, const Tokenizer* t) {
    // Llama 3.1's format begins with a system message of its own, which takes in a system message at the start
    const bool system = c->date && strcmp(m->items[0].role, "system") == 0;
    chat_begin(l, c, t, system ? m->items[0].text : "", system ? m->items[0].len : 0);
    for (size_t i = system; i < m->count; i++) {
        const ChatMessage* message = &m->items[i];
        const size_t from = l->count;
        chat_message(l, c, t, message->role, message->text, message->len);
        if (!mask) { continue; }
        chat_mask_extend(mask, message->trained ? chat_text_start(l, c, t, from) : l->count, false);
        chat_mask_extend(mask, l->count, true);
    }
}

#endif
