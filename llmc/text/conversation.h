/* conversation.h -- reads messages from JSON: of a line of ./tokenize --chat (dev/data/answers.h), or of a question
 * (question.h).
 *
 *   {"role": "user", "content": "Hi"}
 *
 * Data sets spell the names in many ways and mix the spellings. So each is looked up by itself in the tables below: a role's
 * and a text's member, and the roles. A text may be an array of texts, {"type": "text", "text": ...}, which are joined. Members
 * that take an answer out of training are heeded. Tools, images and whatever else would make a template write more than the
 * texts are refused. The template gets all other members of a message (chat.h).
 */
#ifndef LLMC_CONVERSATION_H
#define LLMC_CONVERSATION_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/files/json.h"  // defines: Json, json_get, json_get_any, json_string, json_first, json_wanted, json_is_off

static const char* const chat_role_names[] = {"role", "from", NULL};
static const char* const chat_text_names[] = {"content", "value", "text", NULL};

// a role in the file, and its name in templates
static const char* const chat_roles[][2] = {
    {"system", "system"}, {"user", "user"},           {"assistant", "assistant"}, {"human", "user"},
    {"gpt", "assistant"}, {"developer", "developer"}, {"bot", "assistant"},       {"model", "assistant"},
};

// members of a message that say whether it is trained
static const struct {
    const char* name;
    bool trains;  // what true means
} chat_switches[] = {{"weight", true}, {"train", true},   {"training", true},  {"trainable", true},
                     {"loss", true},   {"trained", true}, {"loss_mask", true}, {"masked", false}};

typedef struct {
    const JsonNode* object;  // in the file, with all its members; NULL: none
    const char* role;        // the template's
    char* text;
    size_t len;
    bool trained;
} ChatMessage;

typedef struct {
    ChatMessage* items;
    size_t count, cap;
    const Json* json;  // of the objects, borrowed
} ChatMessages;

static inline void chat_messages_free(ChatMessages* m) {
    for (size_t i = 0; i < m->count; i++) { free(m->items[i].text); }
    free(m->items);
    memset(m, 0, sizeof *m);
}

/* Appends a message, which owns `text`. An answer may be trained, another message never is. */
static inline void chat_messages_add(ChatMessages* m, const JsonNode* object, const char* role, char* text, size_t len,
                                     bool trained) {
    m->items = (ChatMessage*)xgrow(m->items, m->count, &m->cap, sizeof *m->items);
    const ChatMessage message = {object, role, text, len, trained && strcmp(role, "assistant") == 0};
    m->items[m->count++] = message;
}

static inline bool chat_is_answer(const ChatMessage* m) { return strcmp(m->role, "assistant") == 0; }

// ---------------------------------------------------------------------------------------------------------------------
// members

/* Fails if an object has one of these members, and it is not empty. */
static inline bool chat_check_absent(const Json* j, const JsonNode* object, const char* const* names, Error* e) {
    for (; *names; names++) {
        if (!json_is_off(j, object, *names) && !json_is_string(j, json_get(j, object, *names), "[]")) {
            return json_wanted(j, object, *names, e, "none: a conversation is made of the texts of its messages alone");
        }
    }
    return true;
}

/* Returns the first of the names that an object has; NULL if it has none. */
static inline const char* chat_name(const Json* j, const JsonNode* object, const char* const* names) {
    while (*names && !json_get(j, object, *names)) { names++; }
    return *names;
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

/* Reads a member's text and appends it as a message; `more` (or NULL): a second member, which follows on a line of its own. */
static inline bool chat_read_text(ChatMessages* m, const JsonNode* object, const char* key, const char* more, const char* role,
                                  bool trained, Error* e) {
    const Json* j = m->json;
    char* text = NULL;
    size_t len = 0;
    FILE* f = xopen_memory(&text, &len);
    bool ok = chat_write_text(f, j, object, key, e);
    if (ok && more && !json_is_off(j, object, more)) {
        fputc('\n', f);
        ok = chat_write_text(f, j, object, more, e);
    }
    xclose_memory(f, &text);
    chat_messages_add(m, object == json_root(j) ? NULL : object, role, text, len, trained);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// messages

/* Reads the members that say whether a message is trained: one that says no is enough. */
static inline bool chat_read_trained(const Json* j, const JsonNode* object, bool answer, bool* trained, Error* e) {
    for (size_t i = 0; i < sizeof chat_switches / sizeof *chat_switches; i++) {
        const char* name = chat_switches[i].name;
        const JsonNode* n = json_get(j, object, name);
        double value = n && n->type == JSON_TRUE;
        if (!n) { continue; }
        if (n->type != JSON_TRUE && n->type != JSON_FALSE && (!json_node_double(j, n, &value) || (value != 0 && value != 1))) {
            return json_wanted(j, object, name, e, "true, false, 0 or 1");
        }
        const bool trains = (value == 1) == chat_switches[i].trains;
        if (trains && !answer) {
            return json_wanted(j, object, name, e, "%s: answers alone are trained", value == 1 ? "false" : "true");
        }
        *trained = *trained && trains;
    }
    return true;
}

/* Reads an object of a list and appends it as a message. */
static inline bool chat_read_message(ChatMessages* m, const JsonNode* object, bool trained, Error* e) {
    static const char* const refused[] = {"tool_calls", "function_call", "images", "image",        "audio",
                                          "video",      "videos",        "mask",   "train_detail", NULL};
    const Json* j = m->json;
    const char *key = chat_name(j, object, chat_role_names), *text = chat_name(j, object, chat_text_names), *role = NULL;
    const JsonNode* name = key ? json_get(j, object, key) : NULL;
    for (size_t i = 0; i < sizeof chat_roles / sizeof *chat_roles; i++) {
        role = json_is_string(j, name, chat_roles[i][0]) ? chat_roles[i][1] : role;
    }
    if (!role) {
        return json_wanted(j, object, key ? key : "role", e,
                           "\"system\", \"user\" or \"assistant\" (also \"human\", \"gpt\"), and none of a tool");
    }
    for (const char* const* null = chat_text_names; !text && *null; null++) {
        text = json_get_any(j, object, *null) ? *null : NULL;  // the error names the member that is there
    }
    return chat_check_absent(j, object, refused, e) &&
           chat_read_trained(j, object, strcmp(role, "assistant") == 0, &trained, e) &&
           chat_read_text(m, object, text ? text : "content", NULL, role, trained, e);
}

/* Reads the messages of a list. */
static inline bool chat_read_list(ChatMessages* m, const JsonNode* list, bool trained, Error* e) {
    for (const JsonNode* n = json_first(m->json, list); n; n = json_next(m->json, n)) {
        if (!chat_read_message(m, n, trained, e)) { return false; }
    }
    return true;
}

#endif
