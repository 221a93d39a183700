/* progress.h -- counts what has passed of a long piece of work, and shows its share, size, speed, and the time that is left.
 *
 *   scan      5.1 % of 4.00 GB, 523.7 MB/s, 0:08 left
 *   read    12.3 MB, 30.1 MB/s                           of a stream, whose size is not known
 *   timing  0:12                                         of what cannot be counted
 *
 * At a terminal it is one line, written again every second and wiped away at the end; in a file it is a line every ten seconds.
 * Work that is done within two seconds shows none. Progress is no error, so it goes to stdout; a job whose stdout carries data
 * gives NULL for the screen, and stays silent.
 */
#ifndef LLMC_PROGRESS_H
#define LLMC_PROGRESS_H

#include "llmc/base/utils.h"
#include "llmc/base/text.h"  // defines: text_clock, text_count

typedef struct {
    FILE* screen;          // NULL: silent
    const char* what;      // first word of the line
    const char* unit;      // of `done` and `total`: "B", or what is counted
    uint64_t done, total;  // total 0: unknown
    double start, shown;   // now_seconds(); shown 0: no line yet
    bool terminal;
    int width;  // of the line at the terminal
} Progress;

enum { PROGRESS_CAP = 256 };  // bytes of a line

static inline Progress progress_begin(FILE* screen, const char* what, uint64_t total, const char* unit) {
    const Progress p = {screen, what, unit, 0, total, now_seconds(), 0, screen && isatty(fileno(screen)), 0};
    return p;
}

/* Writes an amount: "4.00 GB", "12.3 MB", "1,204 rows", "0.05 rows". */
static inline const char* progress_amount(char* out, size_t cap, double amount, const char* unit) {
    char count[32];
    if (strcmp(unit, "B") == 0) {
        const bool large = amount >= 1e9;
        snprintf(out, cap, large ? "%.2f GB" : "%.1f MB", amount * (large ? 1e-9 : 1e-6));
    } else if (amount < 10 && amount != (double)(int)amount) {
        snprintf(out, cap, "%.2g %s", amount, unit);
    } else {
        snprintf(out, cap, "%s %s", text_count((uint64_t)(amount + 0.5), count, sizeof count), unit);
    }
    return out;
}

/* Writes the line for work that has taken `seconds` so far. */
static inline void progress_text(const Progress* p, double seconds, char line[PROGRESS_CAP]) {
    char share[32] = "", amount[48], speed[64], left[48] = "", clock[32];
    const double done = (double)p->done, total = (double)p->total, rate = done / seconds;
    if (p->total) { snprintf(share, sizeof share, "%5.1f %% of ", 100.0 * done / total); }
    progress_amount(amount, sizeof amount, p->total ? total : done, p->unit);
    if (p->done == 0) {  // no speed yet: the time so far
        snprintf(speed, sizeof speed, "%s", text_clock(seconds, clock, sizeof clock));
    } else {
        progress_amount(speed, sizeof speed - 2, rate, p->unit);
        strcat(speed, "/s");
    }
    if (p->done && p->done < p->total) {
        snprintf(left, sizeof left, ", %s left", text_clock((total - done) / rate, clock, sizeof clock));
    }
    const bool counts = p->total || p->done;
    snprintf(line, PROGRESS_CAP, "%-7s %s%s%s%s%s", p->what, share, counts ? amount : "", counts ? ", " : "", speed, left);
}

/* Adds to what is done, and writes a line if one is due. NULL: nobody counts. */
static inline void progress_add(Progress* p, uint64_t n) {
    if (!p) { return; }
    const double now = now_seconds(), since = now - (p->shown > 0 ? p->shown : p->start);
    char line[PROGRESS_CAP];
    p->done += n;
    if (!p->screen || since < (!p->terminal ? 10 : p->shown > 0 ? 1 : 2)) { return; }
    p->shown = now;
    progress_text(p, now - p->start, line);
    if (p->terminal) {
        fprintf(p->screen, "\r%-*s", p->width, line);
        p->width = (int)strlen(line);
    } else {
        fprintf(p->screen, "%s\n", line);
    }
    fflush(p->screen);
}

/* Wipes the line at a terminal, so that a result or an error can take its place. */
static inline void progress_end(Progress* p) {
    if (p->width > 0) { fprintf(p->screen, "\r%*s\r", p->width, ""); }
    p->width = 0;
}

#endif
