/* run.h -- what a run shows and what surrounds it, the same for both trainers: signals, the machine's memory, the tables
 * of model, memory and plan, the line of each step, the number of steps for --minutes, the default data.
 *
 * Before anything is allocated a trainer prints the model, what each part of memory needs, and the plan; what does not fit
 * is refused with the shortfall and the flags that fit, found by asking the trainer's own measure again (MemoryNeed).
 * Widths, numbers and order of the step line are those of train_llama3.py, too. Nothing here touches the model.
 */
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include "utils.h"
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include "config.h"
#include "generate.h"
#include "mfu.h"
#include "options.h"

// ---------------------------------------------------------------------------------------------------------------------
// signals

static volatile sig_atomic_t run_signal;  // the first SIGINT or SIGTERM; a handler can only speak through a global

LLMC_UNUSED static void run_on_signal(int signal_number) {
    if (run_signal == SIGINT || run_signal == SIGTERM) { _exit(130); }  // the second one ends at once
    run_signal = signal_number;
}

/* The screen is gone: `run | tee log` lost its tee to the same Ctrl-C, or the terminal was closed. */
LLMC_UNUSED static void run_on_lost_screen(int signal_number) {
    if (!run_signal) { run_signal = signal_number; }
}

/* From now on SIGINT and SIGTERM only set a flag: the step is finished, a checkpoint written, and the run ends with 0. So does
 * a run that nobody reads any longer (SIGPIPE, SIGHUP), unless it was started to go on all the same (nohup). */
LLMC_UNUSED static void run_catch_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = run_on_signal;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;  // reads and writes of files go on
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    action.sa_handler = run_on_lost_screen;
    static const int lost[] = {SIGPIPE, SIGHUP};
    for (int i = 0; i < 2; i++) {
        struct sigaction before;
        if (sigaction(lost[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN) { sigaction(lost[i], &action, NULL); }
    }
}

LLMC_UNUSED static bool run_stop_requested(void) { return run_signal != 0; }

// ---------------------------------------------------------------------------------------------------------------------
// numbers as texts

/* "12,345,678". */
LLMC_UNUSED static const char* text_count(uint64_t n, char* out, size_t cap) {
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
    size_t used = 0;
    for (int i = 0; i < len && used + 2 < cap; i++) {
        if (i > 0 && (len - i) % 3 == 0) { out[used++] = ','; }
        out[used++] = digits[i];
    }
    out[used] = 0;
    return out;
}

/* "640 KiB", "12.5 MiB", "1.25 GiB". */
LLMC_UNUSED static const char* text_bytes(uint64_t bytes, char* out, size_t cap) {
    double b = (double)bytes;
    if (b < 1024.0 * 1024.0) {
        snprintf(out, cap, "%.0f KiB", b / 1024.0);
    } else if (b < 1024.0 * 1024.0 * 1024.0) {
        snprintf(out, cap, "%.1f MiB", b / (1024.0 * 1024.0));
    } else {
        snprintf(out, cap, "%.2f GiB", b / (1024.0 * 1024.0 * 1024.0));
    }
    return out;
}

/* "0:07", "12:55", "3:04:05". */
LLMC_UNUSED static const char* text_clock(double seconds, char* out, size_t cap) {
    if (!(seconds >= 0 && seconds < 3.6e9)) {
        snprintf(out, cap, "-");
        return out;
    }
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600) {
        snprintf(out, cap, "%lld:%02d:%02d", s / 3600, (int)(s / 60 % 60), (int)(s % 60));
    } else {
        snprintf(out, cap, "%d:%02d", (int)(s / 60), (int)(s % 60));
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// the machine

/* The number in a file of one number ("max" and a missing file: UINT64_MAX). */
LLMC_UNUSED static uint64_t read_number(const char* path) {
    unsigned long long value = 0;
    FILE* f = fopen(path, "r");
    if (!f) { return UINT64_MAX; }
    bool ok = fscanf(f, "%llu", &value) == 1;
    fclose(f);
    return ok ? (uint64_t)value : UINT64_MAX;
}

/* The number behind `key` in a file of "key number" or "key: number kB" lines; UINT64_MAX where it is missing. */
LLMC_UNUSED static uint64_t read_field(const char* path, const char* key) {
    char line[256];
    uint64_t found = UINT64_MAX;
    FILE* f = fopen(path, "r");
    if (!f) { return UINT64_MAX; }
    while (found == UINT64_MAX && fgets(line, sizeof line, f)) {
        size_t n = strlen(key);
        unsigned long long value;
        if (strncmp(line, key, n) == 0 && (line[n] == ' ' || line[n] == ':') && sscanf(line + n + 1, "%llu", &value) == 1) {
            found = (uint64_t)value * (strstr(line, "kB") ? 1024 : 1);
        }
    }
    fclose(f);
    return found;
}

/* What a control group leaves of its limit; UINT64_MAX where there is none. Its page cache can be had back. */
LLMC_UNUSED static uint64_t cgroup_available(const char* dir, const char* limit_name, const char* usage_name,
                                             const char* cache) {
    char path[PATH_CAP];
    Error e;
    e.msg[0] = 0;
    if (!path_join(path, dir, limit_name, &e)) { return UINT64_MAX; }
    uint64_t limit = read_number(path);
    if (!path_join(path, dir, usage_name, &e)) { return UINT64_MAX; }
    uint64_t usage = read_number(path);
    if (limit >= (uint64_t)1 << 60 || usage == UINT64_MAX || !path_join(path, dir, "memory.stat", &e)) { return UINT64_MAX; }
    uint64_t reclaimable = read_field(path, cache);
    if (reclaimable != UINT64_MAX) { usage -= reclaimable < usage ? reclaimable : usage; }
    return limit > usage ? limit - usage : 0;
}

/* Bytes of main memory that can be had now: what the system says is available, within the limits of this process's control
 * groups (containers, Slurm) and of ulimit -v. 0: unknown. */
LLMC_UNUSED static uint64_t host_memory_available(void) {
    uint64_t have = read_field("/proc/meminfo", "MemAvailable");
    if (have == UINT64_MAX) {
        long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
        have = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : UINT64_MAX;
    }
    // inside a container the group is mounted as the root; outside of it every ancestor of our own group has a say
    char line[PATH_CAP / 2], dir[PATH_CAP];
    FILE* f = fopen("/proc/self/cgroup", "r");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char* own = strncmp(line, "0::", 3) == 0 ? line + 3 : strstr(line, ":memory:");
        const bool v1 = own && own != line + 3;
        if (v1) { own += 8; }
        while (own) {
            snprintf(dir, sizeof dir, "/sys/fs/cgroup%s%s", v1 ? "/memory" : "", strcmp(own, "/") == 0 ? "" : own);
            uint64_t left = v1 ? cgroup_available(dir, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                               : cgroup_available(dir, "memory.max", "memory.current", "inactive_file");
            if (left < have) { have = left; }
            char* slash = strrchr(own, '/');
            if (!slash || !*own) { break; }
            *slash = 0;  // "/a/b" -> "/a" -> ""
        }
    }
    if (f) { fclose(f); }
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        uint64_t used = read_field("/proc/self/status", "VmSize");
        uint64_t cap = (uint64_t)limit.rlim_cur;
        if (used != UINT64_MAX) { cap -= used < cap ? used : cap; }
        if (cap < have) { have = cap; }
    }
    return have == UINT64_MAX ? 0 : have;
}

/* The largest resident size of this process so far, in bytes. Linux's ru_maxrss also counts what the process was before its
 * exec: a large parent. VmHWM does not. */
LLMC_UNUSED static uint64_t host_memory_peak(void) {
    struct rusage usage;
    const uint64_t peak = read_field("/proc/self/status", "VmHWM");
    if (peak != UINT64_MAX) { return peak; }
    getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
    return (uint64_t)usage.ru_maxrss;
#else
    return (uint64_t)usage.ru_maxrss * 1024;
#endif
}

/* "Intel(R) Xeon(R) Platinum 8480, 2 cores, 2 threads", for the screen and the log; with a GPU's name that in front. */
LLMC_UNUSED static const char* run_machine(const char* gpu, int threads, char* out, size_t cap) {
    char line[256], cpu[128] = "CPU";
    FILE* f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        const char* colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            line[strcspn(line, "\n")] = 0;
            snprintf(cpu, sizeof cpu, "%.120s", colon + 1 + strspn(colon + 1, " "));
            break;
        }
    }
    if (f) { fclose(f); }
    snprintf(out, cap, "%s%s%s, %ld cores, %d thread%s", gpu ? gpu : "", gpu ? ", " : "", cpu, sysconf(_SC_NPROCESSORS_ONLN),
             threads, threads == 1 ? "" : "s");
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// the model

LLMC_UNUSED static void print_model(FILE* f, const char* name, const ModelConfig* c, const ParamTable* t,
                                    const char* precision) {
    char count[32];
    fprintf(f, "model   %s: %s parameters, vocabulary %d, width %d, %d layers, %d heads, %d kv heads of %d, ffn %d, %s, %s\n",
            name, text_count(t->num_params, count, sizeof count), c->vocab_size, c->hidden_size, c->num_layers, c->num_heads,
            c->num_kv_heads, c->head_dim, c->intermediate_size, c->tied ? "tied" : "untied", precision);
}

// ---------------------------------------------------------------------------------------------------------------------
// memory

enum { MEMORY_ROWS = 16 };

typedef struct {
    const char* names[MEMORY_ROWS];
    uint64_t bytes[MEMORY_ROWS];
    int count;
} MemoryTable;

LLMC_UNUSED static void memory_add(MemoryTable* m, const char* name, uint64_t bytes) {
    if (m->count < MEMORY_ROWS) {
        m->names[m->count] = name;
        m->bytes[m->count++] = bytes;
    }
}

LLMC_UNUSED static uint64_t memory_total(const MemoryTable* m) {
    uint64_t sum = 0;
    for (int i = 0; i < m->count; i++) { sum += m->bytes[i]; }
    return sum;
}

/* The table, rows of zero bytes left out; `have` 0: unknown. */
LLMC_UNUSED static void print_memory(FILE* f, const MemoryTable* m, uint64_t have) {
    char text[32];
    for (int i = 0; i < m->count; i++) {
        if (m->bytes[i] == 0) { continue; }
        fprintf(f, "memory  %-22s %12s\n", m->names[i], text_bytes(m->bytes[i], text, sizeof text));
    }
    fprintf(f, "memory  %-22s %12s", "need", text_bytes(memory_total(m), text, sizeof text));
    fprintf(f, " of %s\n", have ? text_bytes(have, text, sizeof text) : "an unknown size");
}

/* Bytes that a run with these options needs; the trainer measures its arenas as for the real run. */
typedef uint64_t (*MemoryNeed)(void* ctx, const Options* o);

/* Writes the change of flags that fits into `have` to `hint`: on a GPU recomputation first, which keeps the results, then a
 * smaller micro-batch with the tokens of a step kept, then smaller optimizer state, then shorter rows. False: none does. */
LLMC_UNUSED static bool memory_find_fit(char* hint, size_t cap, const Options* options, int ranks, uint64_t have,
                                        MemoryNeed need, void* ctx) {
    const bool gpu = options->trainer == ON_GPU;
    const int64_t total = options->total_batch ? options->total_batch : (int64_t)options->batch * options->seq * ranks;
    for (int seq = options->seq; seq >= 1; seq /= 2) {
        for (int state = 0; state < (gpu ? 4 : 1); state++) {  // bit 0: bf16 moments, bit 1: split master
            for (int batch = options->batch; batch >= 1; batch--) {
                if (total % ((int64_t)batch * seq * ranks) != 0) { continue; }
                for (int level = options->recompute; level <= (gpu ? (int)RECOMPUTE_BLOCK : options->recompute); level++) {
                    Options o = *options;
                    o.seq = seq;
                    o.batch = batch;
                    o.recompute = level;
                    if (state & 1) { o.moments = MOMENTS_BF16; }
                    if (state & 2) { o.master = MASTER_OPTION_SPLIT; }
                    if (need(ctx, &o) > have) { continue; }
                    int n = snprintf(hint, cap, "these flags fit:");
                    char word[OPTION_TEXT];
                    const int changed[] = {OPT_recompute, OPT_batch, OPT_moments, OPT_master, OPT_seq};
                    for (int i = 0; i < 5; i++) {
                        char before[OPTION_TEXT], after[OPTION_TEXT];
                        const char* now = option_text(&o, changed[i], after);
                        if (strcmp(now, option_text(options, changed[i], before)) == 0) { continue; }
                        n += snprintf(hint + n, cap - (size_t)n, " %s %s", option_flag(changed[i], word), now);
                    }
                    if ((batch != options->batch || seq != options->seq) && !options->total_batch) {
                        snprintf(hint + n, cap - (size_t)n, " --total-batch %lld", (long long)total);
                    }
                    return true;
                }
            }
        }
    }
    return false;
}

/* Refuses a run that does not fit into `have` bytes (0: unknown, and nothing is refused). */
LLMC_UNUSED static bool memory_check(const MemoryTable* m, uint64_t have, const char* where, const Options* o, int ranks,
                                     MemoryNeed need, void* ctx, Error* e) {
    const uint64_t total = memory_total(m);
    char a[32], b[32], c[32], hint[256];
    if (have == 0 || total <= have) { return true; }
    if (!memory_find_fit(hint, sizeof hint, o, ranks, have, need, ctx)) {
        snprintf(hint, sizeof hint, "no --batch or --seq fits: the model itself is too large, try a smaller --model");
    }
    return fail(e, "%s: the run needs %s and %s can be had, %s too little\n  hint: %s", where, text_bytes(total, a, sizeof a),
                text_bytes(have, b, sizeof b), text_bytes(total - have, c, sizeof c), hint);
}

// ---------------------------------------------------------------------------------------------------------------------
// the plan

typedef struct {
    int64_t steps;            // of the whole schedule
    int64_t stop;             // where this run ends: steps, or --stop-after
    int64_t tokens_per_step;  // over all ranks
    int accumulate;           // micro-steps of a step
    double epochs;            // of the whole schedule
} Plan;

/* Plans a run of `ranks` processes over data of rows_per_epoch rows of --seq tokens. Where --minutes is given, o->steps is
 * not known yet: call steps_for_minutes first, and again here. */
LLMC_UNUSED static bool plan_make(Plan* p, const Options* o, int ranks, uint64_t rows_per_epoch, Error* e) {
    memset(p, 0, sizeof *p);
    const int64_t micro = (int64_t)o->batch * o->seq * ranks;
    p->tokens_per_step = o->total_batch ? o->total_batch : micro;
    if (p->tokens_per_step % micro != 0) {
        return fail(e, "--total-batch: is %lld, wanted a multiple of batch * seq * processes = %d * %d * %d = %lld",
                    (long long)p->tokens_per_step, o->batch, o->seq, ranks, (long long)micro);
    }
    if (p->tokens_per_step / micro > INT32_MAX) {
        return fail(e, "--total-batch: is %lld, wanted at most 2^31 micro-steps of %lld tokens", (long long)p->tokens_per_step,
                    (long long)micro);
    }
    p->accumulate = (int)(p->tokens_per_step / micro);
    const uint64_t rows_per_step = (uint64_t)(p->tokens_per_step / o->seq);
    p->steps = o->steps;
    if (p->steps < 0) {
        p->steps = (int64_t)(rows_per_epoch / rows_per_step);
        if (p->steps == 0) {
            return fail(e,
                        "--train: one epoch has %llu rows of %d tokens, but a step takes %llu\n"
                        "  hint: --steps N trains on, a smaller --batch, --seq or --total-batch makes smaller steps",
                        (unsigned long long)rows_per_epoch, o->seq, (unsigned long long)rows_per_step);
        }
    }
    p->stop = o->stop_after > 0 && o->stop_after < p->steps ? o->stop_after : p->steps;
    p->epochs = rows_per_epoch ? (double)p->steps * (double)rows_per_step / (double)rows_per_epoch : 0.0;
    return true;
}

LLMC_UNUSED static void print_plan(FILE* f, const Plan* p, const Options* o, int ranks, uint64_t num_tokens) {
    char a[32], b[32], c[32], by_ranks[32] = "";
    if (ranks > 1) { snprintf(by_ranks, sizeof by_ranks, " x %d processes", ranks); }
    fprintf(f, "plan    %s steps of %s tokens (%d x %d x %d%s), %.2f epochs of %s tokens\n",
            text_count((uint64_t)p->steps, a, sizeof a), text_count((uint64_t)p->tokens_per_step, b, sizeof b), p->accumulate,
            o->batch, o->seq, by_ranks, p->epochs, text_count(num_tokens, c, sizeof c));
}

enum { MINUTES_MEASURE = 3 };  // steps that are timed for --minutes, the fastest counts

/* The number of steps that --minutes stands for. The trainer measures before step 0: it runs MINUTES_MEASURE steps with
 * learning rate 0 and wipes their traces (m, v, gradients, data position), so that the run is the very one that --steps
 * with this number makes; then it sets o->steps, which the log and the checkpoints record and a resumed run keeps.
 * `elapsed` is the time since the program started. A tenth is left for validation, samples and checkpoints. Never below
 * 10 steps, and two digits are kept. */
LLMC_UNUSED static int64_t steps_for_minutes(double minutes, double elapsed, double step_seconds) {
    double steps = 0.9 * (minutes * 60.0 - elapsed) / (step_seconds > 1e-9 ? step_seconds : 1e-9);
    if (!(steps >= 10.0)) { return 10; }
    if (steps > 2e9) { steps = 2e9; }
    int64_t n = (int64_t)steps, unit = 1;
    while (n / unit >= 100) { unit *= 10; }
    return n / unit * unit;
}

// ---------------------------------------------------------------------------------------------------------------------
// the line of a step

typedef struct {
    int64_t steps;
    double tokens_per_step, flops_per_token;
    double peak_flops;  // of all devices; 0: unknown, or a CPU
    int lines;          // since the header
    double started, last_time;
    double interval;  // smoothed seconds from step to step, what lies between them included
    int64_t intervals;
    double step_seconds;  // sum over all steps, for the summary
    int64_t first_step, last_step;
    double last_loss, last_val;
} StepLines;

enum { STEP_HEADER_EVERY = 40 };

/* `first_step` steps are done already. */
LLMC_UNUSED static void step_lines_init(StepLines* s, const Plan* p, int64_t first_step, double flops_per_token,
                                        double peak_flops) {
    memset(s, 0, sizeof *s);
    s->steps = p->steps;
    s->tokens_per_step = (double)p->tokens_per_step;
    s->flops_per_token = flops_per_token;
    s->peak_flops = peak_flops;
    s->first_step = s->last_step = first_step;
    s->started = s->last_time = now_seconds();
    s->last_loss = s->last_val = NAN;
}

/* Prints one step: `step` counts from 1, ms is its time, memory the peak in bytes; `note` (or NULL) ends the line, such as
 * "skipped: loss z 7.1". Returns tokens per second. The time left counts what lies between steps, too. */
LLMC_UNUSED static double step_line(FILE* f, StepLines* s, int64_t step, int64_t stop, double loss, double gnorm, double lr,
                                    double ms, uint64_t memory, const char* note) {
    char width_text[32], number[32], mfu[16], eta[32];
    const int width = snprintf(width_text, sizeof width_text, "%lld", (long long)s->steps);
    const double now = now_seconds(), tok_s = ms > 0 ? s->tokens_per_step / ms * 1e3 : 0.0;
    // an average over about the last 50 intervals, without the first one, in which caches are cold
    if (s->intervals > 0) {
        double weight = 1.0 / (double)(s->intervals < 50 ? s->intervals : 50);
        s->interval += weight * (now - s->last_time - s->interval);
    }
    const double interval = s->intervals > 0 ? s->interval : ms * 1e-3;
    s->intervals++;
    s->last_time = now;
    s->last_step = step;
    s->last_loss = loss;
    s->step_seconds += ms * 1e-3;
    if (s->lines % STEP_HEADER_EVERY == 0) {
        fprintf(f, "%*s %9s %8s %9s %8s %9s %6s %7s %8s\n", 2 * width + 1, "step", "loss", "gnorm", "lr", "ms", "tok/s", "MFU",
                "mem", "eta");
    }
    s->lines++;
    // neither is negative; fabs() takes the sign off a nan
    fprintf(f, "%*lld/%s %9.4f %8.3f %9.2e %8.1f %9s %6s %6.2fG %8s%s%s\n", width, (long long)step, width_text, fabs(loss),
            fabs(gnorm), lr, ms, text_count((uint64_t)(tok_s + 0.5), number, sizeof number),
            mfu_text(tok_s * s->flops_per_token, s->peak_flops, mfu, sizeof mfu), (double)memory / (1 << 30),
            text_clock((double)(stop - step) * interval, eta, sizeof eta), note ? "  " : "", note ? note : "");
    fflush(f);
    return tok_s;
}

LLMC_UNUSED static void print_validation(FILE* f, StepLines* s, int64_t step, double loss) {
    s->last_val = loss;
    fprintf(f, "validation loss %.4f at step %lld\n", loss, (long long)step);
    fflush(f);
}

/* The end of a run: what was done, how fast, where it lies and how to go on from there. `checkpoint` may be NULL. */
LLMC_UNUSED static void print_summary(FILE* f, const StepLines* s, const char* program, const char* checkpoint,
                                      uint64_t memory) {
    const int64_t steps = s->last_step - s->first_step;
    char clock[32], tokens[32], bytes[32];
    fprintf(f, "done    %lld steps in %s", (long long)steps, text_clock(now_seconds() - s->started, clock, sizeof clock));
    if (steps > 0) { fprintf(f, ", loss %.4f", s->last_loss); }
    if (!isnan(s->last_val)) { fprintf(f, ", validation %.4f", s->last_val); }
    if (steps > 0 && s->step_seconds > 0) {
        fprintf(f, ", %.1f ms a step, %s tokens/s", s->step_seconds / (double)steps * 1e3,
                text_count((uint64_t)(s->tokens_per_step * (double)steps / s->step_seconds + 0.5), tokens, sizeof tokens));
    }
    fprintf(f, ", peak memory %s\n", text_bytes(memory, bytes, sizeof bytes));
    if (!checkpoint) { return; }
    fprintf(f, "saved   %s\n", checkpoint);
    fprintf(f, "next    %s --model %s --generate \"Once upon a time\"\n", program, checkpoint);
    if (s->last_step < s->steps) { fprintf(f, "        and to train on: the same command with --resume\n"); }
}

// ---------------------------------------------------------------------------------------------------------------------
// the default data

#define DEFAULT_DATA "dev/data/tinytales/"

/* Fills in the data of a run without --train (or of --eval without --val): tinytales, if it has been made; and for a new
 * model without --tokenizer its tokenizer. */
LLMC_UNUSED static bool default_data(Options* o, Error* e) {
    const bool wanted = o->eval ? !o->val : !o->train;
    if (!wanted) { return true; }
    const char* missing = o->eval ? DEFAULT_DATA "tinytales_val.bin" : DEFAULT_DATA "tinytales_train.bin";
    if (!file_exists(missing)) {
        return fail(e, "%s: is not given, and the default %s has not been made\n  hint: make %s", o->eval ? "--val" : "--train",
                    missing, DEFAULT_DATA "tinytales_train.bin");
    }
    if (!o->train) { o->train = DEFAULT_DATA "tinytales_train.bin"; }
    if (!o->val && file_exists(DEFAULT_DATA "tinytales_val.bin")) { o->val = DEFAULT_DATA "tinytales_val.bin"; }
    if (!o->tokenizer && !is_directory(o->model)) { o->tokenizer = DEFAULT_DATA "tokenizer.json"; }
    return true;
}

#endif
