/* main.cuh -- the last include of each file of the zoo: the reader's own versions, and the command line. README.md shows how a
 * reader's file adds a version, or a variant with an oracle of its own.
 */
#ifndef ZOO_MAIN_CUH
#define ZOO_MAIN_CUH

#include "dev/cuda/zoo.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// the reader's own versions

struct Mine {
    const char *ladder, *idea;
    Run* run;
    Oracle* oracle;
    unsigned flags;
    Work (*predict)(const Case&);
    static std::vector<Mine>& all() {
        static std::vector<Mine> list;
        return list;
    }
    Mine(const char* l, const char* i, Run* r, Oracle* o = NULL, unsigned f = 0, Work (*p)(const Case&) = NULL)
        : ladder(l), idea(i), run(r), oracle(o), flags(f), predict(p) {
        all().push_back(*this);
    }
};

#if defined(MINE) && defined(EMULATED_ARCH)
#include "mine.cuh"  // its copy, in which launches are rewritten
#elif defined(MINE)
#include MINE
#endif

/* Returns the tensor or ladder of this name, or NULL. */
template <typename T>
static T* named(std::vector<T>& all, const std::string& name) {
    for (T& one : all) {
        if (name == one.name) { return &one; }
    }
    return NULL;
}

/* Returns "forward 1 2 3; backward 1 2". */
static std::string names_of(const std::vector<Ladder>& ladders) {
    std::string names;
    for (const Ladder& l : ladders) {
        names += (names.empty() ? "" : "; ") + std::string(l.name);
        for (const Version& v : l.versions) { names += " " + std::to_string(v.number); }
    }
    return names;
}

/* Returns the sum over forward's outputs of dout * out, where the tensors of `c` have their start values. */
static double loss_of(Case& c, Oracle* forward, Case& gradients) {
    double sum = 0;
    for (Tensor& t : c.tensors) { t.host = t.start; }
    forward(c);
    for (const Tensor& t : c.tensors) {
        const Tensor* d = t.role == WRITE || t.role == CHANGE ? named(gradients.tensors, std::string("d") + t.name) : NULL;
        for (size_t i = 0; d && i < t.host.size(); i++) { sum += (double)t.host[i] * (double)d->start[i]; }
    }
    return sum;
}

/* Checks 16 elements of each gradient that a variant's oracle writes, the largest among them, against central differences. */
static void check_gradient(const Ladder& f, Oracle* forward, const Ladder& b, Oracle* backward) {
    Case c = make_case(f, f.tests[0], false), g = make_case(b, f.tests[0], false);
    for (Tensor& t : c.tensors) {
        if (const Tensor* same = named(g.tensors, t.name)) { t.start = same->start, t.scale = same->scale; }
    }
    loss_of(c, forward, g);
    for (const Tensor& t : c.tensors) {  // what forward keeps for backward, such as rstd
        Tensor* kept = t.role == WRITE ? named(g.tensors, t.name) : NULL;
        if (kept) { kept->start = kept->host = t.host; }
    }
    backward(g);
    for (Tensor& t : c.tensors) {
        const Tensor* d = t.role == READ || t.role == CHANGE ? named(g.tensors, std::string("d") + t.name) : NULL;
        if (!d || d->role == READ || t.start.empty()) { continue; }
        auto got = [&](size_t i) { return (double)d->host[i] - (d->role == ADD ? (double)d->start[i] : 0); };
        size_t top = 0;
        for (size_t i = 0; i < d->host.size(); i++) { top = fabs(got(i)) > fabs(got(top)) ? i : top; }
        for (size_t k = 0; k < 16; k++) {
            const size_t i = k == 0 ? top : k * 7919 % t.start.size();
            const float x = t.start[i], above = x + 1e-2f * t.scale, below = x - 1e-2f * t.scale;
            t.start[i] = above;
            const double up = loss_of(c, forward, g);
            t.start[i] = below;
            const double slope = (up - loss_of(c, forward, g)) / ((double)above - (double)below);
            t.start[i] = x;
            CHECK(fabs(got(i) - slope) <= 5e-4 * fabs(got(top)), "%s: element %zu of the oracle is %.6g, by differences %.6g",
                  d->name, i, got(i), slope);
        }
    }
}

/* Appends the reader's versions to their ladders, and checks the gradients of variants. */
static void add_mine(std::vector<Ladder>& ladders, const char* file) {
#ifdef MINE
    if (Mine::all().empty()) {
        die("%s: it adds no version to a ladder, so nothing of it would run\n"
            "  hint: end it with: static const Mine mine(\"%s\", \"its idea\", RUN);\n"
            "  hint: RUN launches the kernels, as those of main() in dev/cuda/%s.cu do; ladders: %s",
            MINE, ladders[0].name, file, names_of(ladders).c_str());
    }
#endif
    for (const Mine& m : Mine::all()) {
        Ladder* l = named(ladders, m.ladder);
        if (!l) { die("MINE: there is no ladder '%s' in this file; there are %s", m.ladder, names_of(ladders).c_str()); }
        l->versions.push_back({l->versions.back().number + 1, m.idea, m.flags, m.run, m.predict, NULL, m.oracle});
    }
    for (const Mine& f : Mine::all()) {
        for (const Mine& b : Mine::all()) {
            if (!f.oracle || !b.oracle || strcmp(f.ladder, "forward") || strcmp(b.ladder, "backward")) { continue; }
            check_gradient(*named(ladders, f.ladder), f.oracle, *named(ladders, b.ladder), b.oracle);
            test_count("the gradient of forward, by differences");
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the command line

/* Returns why code for an architecture (75, 80, 90) in this precision lacks a version; NULL if it has it. */
static const char* lacks(const Version& v, int arch) {
    if (v.flags & ONLY_16 && sizeof(floatX) == 4) { return "is for 16 bits"; }
    if (v.flags & ONLY_FP32 && sizeof(floatX) < 4) { return "is for fp32"; }
    if (v.flags & ONLY_BF16 && !IS_BF16) { return "is for bf16"; }
    if (v.flags & SM90 && arch < 90) { return "needs sm_90"; }
    return v.flags & SM80 && arch < 80 ? "needs sm_80" : NULL;
}

#include "dev/cuda/predict.cuh"

/* Prints which versions this build lacks, and why. */
static void print_skips(const char* file, const std::vector<Ladder>& ladders) {
    const std::string archs = ZOO_ARCHS;
    for (size_t at = 0; at < archs.size(); at += 3) {
        const int arch = atoi(archs.c_str() + at);
        for (const Ladder& l : ladders) {
            for (const Version& v : l.versions) {
                const char* why = lacks(v, arch);
                if (why) {
                    printf("%s %s, sm_%d: no %s %d (%s): it %s\n", file, PRECISION_NAME, arch, l.name, v.number, v.idea, why);
                }
            }
        }
    }
}

/* Runs a file of the zoo: its main() is `return zoo(argc, argv, "rmsnorm", {ladders});`. */
static int zoo(int argc, char** argv, const char* file, std::vector<Ladder> ladders) {
    const char *path = NULL, *name = NULL, *shape = NULL, *predicted_card = NULL;
    std::vector<int> numbers;
#ifdef EMULATED_ARCH
    bool only_tests = true;
#else
    bool only_tests = false;
#endif
    Shape own = {};
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        const bool more = i + 1 < argc;
        if (word == "--skips") {
            print_skips(file, ladders);
            return 0;
        } else if (word == "--test") {
            only_tests = true;
        } else if (word == "--json" && more) {
            path = argv[++i];
        } else if (word == "--shape" && more) {
            shape = argv[++i];
            const bool is_whole = !*read_sizes(shape, &own) && own.n[0];
            if (!is_whole && strcmp(shape, "classic") != 0 && strcmp(shape, "large") != 0) {
                fprintf(stderr, "error: %s: --shape is %s, wanted classic, large or sizes such as 4096,1024\n", file, shape);
                return 2;
            }
        } else if (word == "--predict" && more) {
            predicted_card = argv[++i];
        } else if (isdigit(word[0])) {
            numbers.push_back(atoi(argv[i]));
        } else if (named(ladders, word)) {
            name = argv[i];
        } else {
            fprintf(stderr,
                    "error: %s: %s '%s'; ladders and versions are: %s\n"
                    "  hint: %s [LADDER] [N...] [--test] [--shape classic|large|N,C] [--json FILE] [--predict CARD]\n",
                    file,
                    word == "--json" || word == "--shape" || word == "--predict" ? "a value is missing behind" : "unknown word",
                    argv[i], names_of(ladders).c_str(), file);
            return 2;
        }
    }
    add_mine(ladders, file);
    for (int number : numbers) {
        bool known = false;
        for (const Ladder& l : ladders) {
            for (const Version& v : l.versions) { known |= v.number == number && (!name || !strcmp(name, l.name)); }
        }
        if (!known) { die("%s: there is no version %d; there are %s", file, number, names_of(ladders).c_str()); }
    }
    if (predicted_card) { return predict(predicted_card, file, ladders, name, numbers, shape, own); }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        die("%s: no GPU here; make -C dev/cuda test-emulated runs the tests without one", file);
    }
    if (shape && only_tests) { die("%s: --shape is for times: the tests have shapes of their own", file); }
    const int arch = compiled_arch(fill_kernel<float>);
    FILE* json = path ? fopen(path, "a") : NULL;
    if (path && !json) { die("%s: can't be opened: %s", path, strerror(errno)); }
    std::thread meter_thread;
    if (!only_tests) {
        measure_card();
        if (json) { write_rates(json, file, arch); }
        meter_thread = std::thread(meter);
    }
    for (const Ladder& l : ladders) {
        std::vector<Version> versions;
        for (const Version& v : l.versions) {
            const bool wanted = numbers.empty() || v.flags & REFERENCE || std::count(numbers.begin(), numbers.end(), v.number);
            if (wanted && !lacks(v, arch)) { versions.push_back(v); }
        }
        if ((name && strcmp(name, l.name)) || versions.empty()) { continue; }
        static const char* const kinds[3] = {"odd", "tail", "padded"};
        for (int k = 0; only_tests && k < 3; k++) { check(l, versions, l.tests[k], kinds[k]); }
        if (only_tests) { continue; }
        std::vector<Verdict> verdicts;
        const bool listed = !shape || !own.n[0];
        for (const Shape& s : listed ? l.classic : std::vector<Shape>(1, own)) {
            const std::vector<Verdict> checked = check(l, versions, s, "classic");
            if (verdicts.empty()) { verdicts = checked; }  // large shapes are not checked, but the first one here was
            if (!shape || strcmp(shape, "large")) { bench(l, versions, s, false, checked, file, json); }
        }
        verdicts.resize(versions.size());
        for (const Shape& s : listed && (!shape || !strcmp(shape, "large")) ? l.large : std::vector<Shape>()) {
            bench(l, versions, s, true, verdicts, file, json);
        }
    }
    if (json && fclose(json)) { die("%s: can't be written: %s", path, strerror(errno)); }
    metering = false;
    if (meter_thread.joinable()) { meter_thread.join(); }
    if (only_tests && tests_passed + tests_failed == 0) {
        die("%s: no test: no version that was asked for runs in %s on sm_%d", file, PRECISION_NAME, arch);
    }
    return test_summary();
}

#endif
