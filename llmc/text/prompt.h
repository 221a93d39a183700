/* prompt.h -- the tokens of --prompt and --generate.
 */
#ifndef LLMC_PROMPT_H
#define LLMC_PROMPT_H

#include "llmc/base/utils.h"      // defines: fail
#include "llmc/config.h"          // defines: ModelConfig
#include "llmc/text/tokenizer.h"  // defines: Tokenizer, TokenList, tokenizer_encode

/* Appends the tokens of a prompt to *l: BOS (from the configuration, otherwise from the tokenizer) and the text. Without a
 * tokenizer the text is a list of ids. Without BOS and text, *l gets token 0. Fails on an id outside the vocabulary. */
static inline bool prompt_tokens(TokenList* l, const char* text, const ModelConfig* c, const Tokenizer* t, Error* e) {
    const int V = c->vocab_size;
    const int bos = c->bos_id >= 0 && c->bos_id < V ? c->bos_id : t ? t->bos_id : -1;
    if (bos >= 0 && bos < V) { token_list_add(l, bos); }
    if (t) {
        tokenizer_encode(t, text, strlen(text), false, l);
    } else {
        for (const char* p = text + strspn(text, " "); *p; p += strspn(p, " ")) {
            char* end = NULL;
            long id = *p >= '0' && *p <= '9' ? strtol(p, &end, 10) : -1;
            if (id < 0 || id >= V || (*end && *end != ' ')) {
                return fail(e,
                            "the prompt is \"%.100s\", wanted ids from 0 to %d, since the model has no tokenizer\n"
                            "  hint: give one with --tokenizer",
                            text, V - 1);
            }
            token_list_add(l, (int32_t)id);
            p = end;
        }
    }
    if (l->count == 0) { token_list_add(l, 0); }
    for (size_t i = 0; i < l->count; i++) {
        if (l->ids[i] >= V) {
            return fail(e,
                        "token %zu of the prompt is %d, wanted an id below the model's vocabulary of %d\n"
                        "  hint: use the model's own tokenizer",
                        i, l->ids[i], V);
        }
    }
    return true;
}

#endif
