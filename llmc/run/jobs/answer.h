/* answer.h -- --answer: answers the questions of another program. A line of JSON is
 *
 *   in    {"prompt": "Once"} ...           a question (text/question.h); where it is silent, the flags count
 *         {"stop": true}                   ends the running answer, as the end of the input does
 *   out   {"text": " upon"}                a piece of an answer, which does not repeat the prompt
 *         {"tokens": 9, "reason": "end"}   the end of an answer: the model ended it ("end"), it was stopped ("stop"), it has
 *                                          max_tokens ("length"), or it fills the context ("context")
 *         {"error": "question: ..."}       the end of an answer that failed, or of a line that is no question
 *
 * Questions are answered in turn, and none knows of another. The input is read between two tokens: no thread is needed.
 */
#ifndef LLMC_RUN_ANSWER_H
#define LLMC_RUN_ANSWER_H

#include "llmc/base/lines.h"         // defines: Lines, lines_read, lines_next
#include "llmc/run/loop/generate.h"  // defines: Generator, generate_from, generator_stops
#include "llmc/text/question.h"      // defines: Asked, Question, question_read, question_is_stop

typedef struct {
    NextLogits next;  // the trainer's, and its model
    void* model;
    Lines in;
    bool stopped;  // the answer
} Answers;

/* The generator's NextLogits, which looks at the input first. NULL without an error ends the answer. */
static inline const float* answers_next(void* answers, const int32_t* tokens, int count, int pos, Error* e) {
    Answers* a = (Answers*)answers;
    size_t n = 0;
    lines_read(&a->in, false);
    const char* line = lines_next(&a->in, &n);
    const bool stop = line && question_is_stop(line, n);
    if (stop) { a->in.at += n; }
    a->stopped = stop || a->in.ended;
    return a->stopped ? NULL : a->next(a->model, tokens, count, pos, e);
}

/* Answers a question; `end_of_turn` ends an answer to messages. */
static inline bool answers_write(const Answers* a, Generator* g, const Question* q, int end_of_turn, Error* e) {
    int pos = 0, last = -1;
    g->sampler->temperature = q->temperature, g->sampler->top_k = (int)q->top_k;
    g->sampler->top_p = q->top_p, g->sampler->seed = (uint64_t)q->seed;
    g->draws = g->text_len = g->decoder.num_in = 0;
    g->end_of_turn = q->chats ? end_of_turn : -1;
    const bool ok = generate_from(g, q->tokens.ids, (int)q->tokens.count, NULL, &pos, (int)q->max_tokens, &last, e);
    const bool ends = last >= 0 && generator_stops(g, last);
    const int64_t count = (int64_t)g->draws - ends;
    const char* reason = ends ? "end" : a->stopped ? "stop" : count == q->max_tokens ? "length" : "context";
    return ok && fprintf(g->out, "{\"tokens\": %" PRId64 ", \"reason\": \"%s\"}\n", count, reason) > 0;
}

/* Answers the questions of `fd` on g->out. *silent holds what counts where a question is silent. */
static inline void answer(Generator* g, Asked* asked, const Question* silent, int fd) {
    Answers a = {g->next, g->model, {fd, NULL, 0, 0, 0, false}, false};
    const char* line;
    size_t n = 0;
    g->next = answers_next, g->model = &a, g->json = true;
    for (; !ferror(g->out); fflush(g->out)) {
        while (!(line = lines_next(&a.in, &n)) && !a.in.ended) { lines_read(&a.in, true); }
        if (!line) { break; }
        Question q = *silent;
        Json j;
        Error e = NO_ERROR;
        const bool stop = question_is_stop(line, n), parsed = !stop && json_parse_line(&j, line, n - 1, "question", &e);
        a.in.at += n;
        if (parsed && question_read(&q, &j, asked, &e)) { answers_write(&a, g, &q, asked->form.end_of_turn, &e); }
        if (parsed) { json_free(&j); }
        token_list_free(&q.tokens);
        if (e.msg[0]) {
            fputs("{\"error\": ", g->out);
            json_write_text(g->out, e.msg);
            fputs("}\n", g->out);
        }
    }
    free(a.in.text);
}

#endif
