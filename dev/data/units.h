/* units.h -- cuts a batch of text into units: pieces that one thread of ./tokenize encodes at once.
 *
 * A unit is a line of a .jsonl, or a stretch of a text. A text is cut only where every split pattern has a border
 * (text_border()), so the units have the same tokens as the whole text. For --train-bpe, whose pattern is Llama 3's, many more
 * places are borders (piece_border()).
 */
#ifndef DATA_UNITS_H
#define DATA_UNITS_H

#include "llmc/base/utils.h"         // defines: xrealloc
#include "llmc/text/piece_counts.h"  // defines: piece_border
#include "llmc/text/tokenizer.h"     // defines: text_border

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
    if (list->count == list->cap) {
        list->cap = list->cap * 2 + 64;
        list->units = (Unit*)xrealloc(list->units, list->cap * sizeof(Unit));
    }
    const Unit u = {text, len, line, starts_document};
    list->units[list->count++] = u;
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

#endif
