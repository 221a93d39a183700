/* conversation.h -- reads a conversation from JSON: a line for ./tokenize --chat, or the messages of a question.
 *
 *   {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
 *   {"system": "Be brief.", "prompt": "Hi", "completion": "Hello."}
 *
 * Data sets spell both in many ways and mix the spellings. So each name is looked up by itself in the tables below: the list's,
 * a role's and a text's member, the roles, the question's and the answer's member. A prompt and a completion may also be lists
 * of messages, as in trl; then the completion alone is trained. A line may be the list itself.
 *
 * A text may be an array of texts, {"type": "text", "text": ...}, which are joined. Members that take an answer out of training
 * are heeded. Tools, images and whatever else would make a template write more than the texts are refused. The template gets
 * all other members of a message (chat.h).
 */
#ifndef LLMC_CONVERSATION_H
#define LLMC_CONVERSATION_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11

#include "llmc/files/json.h"  // defines: Json, json_get, json_string, json_first, json_next, json_wanted, json_is_off

static const char* const chat_list_names[] = {"messages", "conversations", "conversation", "chat", "turns", "dialogue", NULL};
static const char* const chat_role_names[] = {"role", "from", NULL};
static const char* const chat_text_names[] = {"content", "value", "text", NULL};
static const char* const chat_question_names[] = {"prompt", "instruction", "question", "query", NULL};
static const char* const chat_answer_names[] = {"completion", "response", "output", "answer", NULL};
static const char* const chat_system_names[] = {"system", "system_prompt", NULL};

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
        if (!json_is_off(j, object, *names)) {
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

/* Sets *name to the only one of the names that an object has, NULL for none. Fails if it has two. */
static inline bool chat_one_name(const char** name, const Json* j, const JsonNode* object, const char* const* names, Error* e) {
    *name = chat_name(j, object, names);
    while (*name && *names++ != *name) {}
    const char* other = *name ? chat_name(j, object, names) : NULL;
    return !other || json_wanted(j, object, other, e, "none beside %s: which of them counts is not known", *name);
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

/* Reads a member of the root: a list of messages, or the text of one; `more`: see chat_read_text(). */
static inline bool chat_read_side(ChatMessages* m, const char* key, const char* more, const char* role, bool trained,
                                  Error* e) {
    const Json* j = m->json;
    const JsonNode* n = json_get(j, json_root(j), key);
    const JsonNode* first = n && n->type == JSON_ARRAY ? json_first(j, n) : NULL;
    if (first && !json_get(j, first, "type")) { return chat_read_list(m, n, trained, e); }
    return chat_read_text(m, json_root(j), key, more, role, trained, e);
}

/* Reads a question and its answer, which the root has as members. */
static inline bool chat_read_pair(ChatMessages* m, Error* e) {
    const Json* j = m->json;
    const JsonNode* root = json_root(j);
    const char *question = NULL, *answer = NULL;
    if (!chat_one_name(&question, j, root, chat_question_names, e) || !chat_one_name(&answer, j, root, chat_answer_names, e)) {
        return false;
    }
    const char* input = json_get(j, root, "input") ? "input" : NULL;
    if (!question && answer) { question = input, input = NULL; }
    if (!question) { return json_wanted(j, root, "messages", e, "it or another list, or a prompt and a completion"); }
    if (!answer) { return json_wanted(j, root, "completion", e, "it beside %s, or response, output or answer", question); }
    return chat_read_side(m, question, input, "user", false, e) && chat_read_side(m, answer, NULL, "assistant", true, e);
}

/* Reads what the root has: a system message, and a list of messages or a pair. */
static inline bool chat_read_root(ChatMessages* m, Error* e) {
    static const char* const refused[] = {"tools",
                                          "functions",
                                          "documents",
                                          "images",
                                          "image",
                                          "video",
                                          "videos",
                                          "audio",
                                          "audios",
                                          "loss_scale",
                                          "chat_template_kwargs",
                                          "history",
                                          NULL};
    const Json* j = m->json;
    const JsonNode* root = json_root(j);
    const char *name = chat_name(j, root, chat_list_names), *system = NULL;
    const JsonNode* list = name ? json_get(j, root, name) : root;
    if (root->type == JSON_ARRAY) { return chat_read_list(m, root, true, e); }
    if (root->type != JSON_OBJECT) { return fail(e, "%s: the line is not an object, wanted {\"messages\": [...]}", j->path); }
    if (!chat_check_absent(j, root, refused, e) || !chat_one_name(&system, j, root, chat_system_names, e)) { return false; }
    if (system && !json_is_off(j, root, system) && !chat_read_text(m, root, system, NULL, "system", false, e)) { return false; }
    const size_t before = m->count;
    if (name && list->type != JSON_ARRAY) { return json_wanted(j, root, name, e, "an array"); }
    if (!(name ? chat_read_list(m, list, true, e) : chat_read_pair(m, e))) { return false; }
    return !before || m->count == before || strcmp(m->items[before].role, "system") != 0 ||
           json_wanted(j, root, system, e, "none: the messages begin with a system message");
}

/* Reads a conversation to train on from a line, into *m, which is empty. Errors begin with the Json's path: file and line. */
static inline bool chat_read(ChatMessages* m, const Json* j, Error* e) {
    m->json = j;
    if (!chat_read_root(m, e)) { return false; }
    size_t answers = 0, trained = 0;
    for (size_t i = 0; i < m->count; i++) {
        answers += chat_is_answer(&m->items[i]);
        trained += m->items[i].trained;
    }
    if (trained > 0) { return true; }
    if (answers > 0) {
        return fail(e, "%s: no answer is trained: members such as \"weight\": 0 take them out, or they stand in the prompt",
                    j->path);
    }
    return fail(e, "%s: no message is of the assistant, wanted one: nothing would be trained", j->path);
}

#endif
