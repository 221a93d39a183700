/* zoo.cuh -- what the files of the zoo share: each version of a kernel is checked, its time predicted and measured, and a row
 * printed. README.md says how to run a file and how to read a row.
 *
 * A file has ladders, such as forward and backward. A ladder lists the tensors of a shape, has an oracle from llmc/ *.h that
 * writes the wanted values, and has versions, a kernel with one idea each. A BOLD one is the trainer's, included from llmc/.
 * Each version runs twice, on fresh memory full of NaN. Inputs, padding and the memory behind each tensor must not change.
 */
#ifndef ZOO_CUH
#define ZOO_CUH

#include <string>
#include "dev/cuda/meter.cuh"
#include "dev/test/cuda/kernels/kernel_test.cuh"

/* Returns how many blocks a launch needs for n things, `each` a block. */
static unsigned blocks_for(size_t n, size_t each) { return (unsigned)ceil_div(n, each); }

// ---------------------------------------------------------------------------------------------------------------------
// tensors, versions, ladders

enum Role { READ, WRITE, ADD, CHANGE, SCRATCH };  // WRITE: every element; ADD: to a gradient; CHANGE: in place; SCRATCH: bytes
enum Type { TYPE_X, TYPE_F32, TYPE_I32, TYPE_BYTE };
template <typename T>
constexpr Type TYPE_OF = std::is_same<T, floatX>::value  ? TYPE_X
                         : sizeof(T) == 1                ? TYPE_BYTE
                         : std::is_same<T, float>::value ? TYPE_F32
                                                         : TYPE_I32;

struct Tensor {
    const char* name;  // a gradient's is "d" before the name of what it belongs to
    Role role;
    Type type;
    size_t rows, width, pitch;  // elements
    float scale;         // deviation of its normals; tokens are below it; timed numbers, too, if it is negative (bytes: -1)
    float floor;         // errors in 16 bits are relative to |want| + floor * rms(want); INFINITY: as in fp32
    float units;         // halves of a unit that 16 bits may be off: 1, or 2 where rounding is stochastic
    Floats start, host;  // (rows, width): before the kernel; for the oracle, which leaves the wanted values there
    Floats terms;        // (rows, width): the size of what the oracle added up to an element, if it may cancel
    std::vector<int32_t> ints;
    void* device;
    size_t bytes() const { return rows * pitch * (type == TYPE_X ? sizeof(floatX) : type == TYPE_BYTE ? 1 : 4); }
};

struct Case {
    const size_t* n;  // the sizes, as the ladder names them
    bool padded;      // rows of floatX have more padding than they need
    std::vector<Tensor> tensors;
    double bytes, flops;  // the least that a version must move; operations, if the ladder is one of products

    /* The elements from one row of floatX to the next. */
    size_t pitch(size_t width) const { return row_pitch<floatX>(width) + (padded ? VECTOR<floatX> : 0); }

    /* Appends a tensor (rows, width) of floatX, float, int32_t or char without padding, in the order of the file's enum. */
    template <typename T>
    Tensor& tensor(const char* name, Role role, size_t rows, size_t width, float scale = 1, float floor = 1e-3f) {
        tensors.push_back({name, role, TYPE_OF<T>, rows, width, width, scale, floor, 1, {}, {}, {}, {}, NULL});
        return tensors.back();
    }
    /* Appends a tensor of floatX with a pitch, as activations have it. */
    Tensor& rows(const char* name, Role role, size_t rows, size_t width, float scale = 1, float floor = 1e-3f) {
        Tensor& t = tensor<floatX>(name, role, rows, width, scale, floor);
        t.pitch = pitch(width);
        return t;
    }
    template <typename T>
    T* at(int i) const {  // on the device
        if (TYPE_OF<T> != tensors[i].type) { die("zoo: tensor %s has another type", tensors[i].name); }
        return (T*)tensors[i].device;
    }
    float* operator[](int i) { return tensors[i].host.data(); }  // for the oracle
    const int32_t* ints(int i) const { return tensors[i].ints.data(); }
};

typedef void Run(const Case&, cudaStream_t);
typedef void Oracle(Case&);

enum {
    BOLD = 1,       // the trainer's
    ATOMICS = 2,    // adds in no order
    REFERENCE = 4,  // version 0 of a ladder of products: cuBLASLt does as many operations; not checked
    ONLY_16 = 8,
    ONLY_FP32 = 16,
    ONLY_BF16 = 32,
    SM80 = 64,
    SM90 = 128,
    ON_HOST = 256,  // the host's calls are timed, too
};

struct Version {
    int number;
    const char* idea;
    unsigned flags;
    Run* run;
    Work (*predict)(const Case&);         // committed before the version was measured
    Work (*correct)(const Case&) = NULL;  // learnt from the measurement
    Oracle* oracle = NULL;                // of a variant (MINE)
};

struct Shape {
    size_t n[6];
    int first = 0, last = 99;  // versions that run at this shape, besides version 0; the table marks the others
    bool has(const Version& v) const { return v.number >= first && v.number <= last; }
};

struct Ladder {
    const char *name, *sizes;  // "forward", "N,C"
    Oracle *make, *values;     // lists the tensors; changes start values on the host, such as a table's, or is NULL
    Oracle* oracle;            // leaves the wanted values on the host
    std::vector<Shape> tests;  // odd, tail, padded
    std::vector<Shape> classic, large;
    std::vector<Version> versions;

    Ladder(const char* name, const char* sizes, Oracle* make, Oracle* values, Oracle* oracle, std::vector<Shape> tests,
           std::vector<Shape> classic, std::vector<Shape> large, std::vector<Version> versions)
        : name(name),
          sizes(sizes),
          make(make),
          values(values),
          oracle(oracle),
          tests(tests),
          classic(classic),
          large(large),
          versions(versions) {}
};

/* Returns the work of a version; without a prediction, the least that any version must do. */
static Work work_of(const Version& v, const Case& c) { return v.predict ? v.predict(c) : Work{c.bytes / 32, c.flops}; }

/* Returns "N,C=4096,1024". */
static std::string sizes_of(const Ladder& l, const Shape& s) {
    std::string sizes = std::string(l.sizes) + "=";
    for (int i = 0; i < 6 && s.n[i]; i++) { sizes += (i ? "," : "") + std::to_string(s.n[i]); }
    return sizes;
}

/* Queues the kernels of a version. If a launch is refused, the message names the version, so a version needs no check. */
static void launch(const Version& v, const Case& c, cudaStream_t stream) {
    v.run(c, stream);
    cuda_check(cudaGetLastError(), (std::string("launch of ") + v.idea).c_str(), __FILE__, __LINE__);
}

// ---------------------------------------------------------------------------------------------------------------------
// checks

/* Counts a failed check of the version that runs, and says why. */
static void fail(const std::string& why) {
    checks_failed++;
    printf("    %s\n", why.c_str());
}

/* Says which of 0 .. n - 1 are in a list that is sorted: "the last 3 columns". */
static std::string which(const std::vector<size_t>& list, size_t n, const std::string& of) {
    const size_t count = list.size(), first = list[0], last = list[count - 1], step = count > 1 ? list[1] - first : 1;
    const std::string s = "the %s " + std::to_string(count) + " " + of + "s";
    auto with = [&](const char* word) { return std::string(s).replace(s.find("%s"), 2, word); };
    if (count == n) { return n == 1 ? "the only " + of : "every " + of; }
    if (count == 1) { return of + " " + std::to_string(first); }
    for (size_t i = 1; i < count; i++) {
        if (list[i] - list[i - 1] != step) { return std::to_string(count) + " of the " + std::to_string(n) + " " + of + "s"; }
    }
    if (step == 1 && last == n - 1) { return with("last"); }
    const std::string range = std::to_string(first) + " to " + std::to_string(last);
    return step == 1 ? first == 0 ? with("first") : of + "s " + range
                     : "every " + std::to_string(step) + "th " + of + ", " + range;
}

/* Returns "3 of 100 elements are wrong: the last 3 columns of row 7" for the elements of a tensor that `is` names. */
template <typename Is>
static std::string pattern(const Tensor& t, const Is& is) {
    std::vector<size_t> rows, columns;
    size_t count = 0;
    for (size_t r = 0; r < t.rows; r++) {
        std::vector<size_t> here;
        for (size_t c = 0; c < t.width; c++) {
            if (is(r * t.width + c)) { here.push_back(c); }
        }
        count += here.size();
        if (here.empty()) { continue; }
        rows.push_back(r);
        for (const size_t c : here) {
            if (!std::binary_search(columns.begin(), columns.end(), c)) {
                columns.insert(std::upper_bound(columns.begin(), columns.end(), c), c);
            }
        }
    }
    const std::string number = std::to_string(count) + " of " + std::to_string(t.rows * t.width);
    if (count == t.rows * t.width) { return "all " + std::to_string(count); }
    if (count < rows.size() * columns.size()) {
        return number + ", among " + which(columns, t.width, "column") + " of " + which(rows, t.rows, "row");
    }
    return number + ": " + which(columns, t.width, "column") + " of " + which(rows, t.rows, "row");
}

/* Returns "out, row 3, column 5". */
static std::string place(const Tensor& t, size_t i) {
    return std::string(t.name) + ", row " + std::to_string(i / t.width) + ", column " + std::to_string(i % t.width);
}

static std::string number(double x) {
    char text[32];
    snprintf(text, sizeof text, "%.8g", x);
    return text;
}

/* Makes a case with values on the host. */
static Case make_case(const Ladder& l, const Shape& s, bool padded) {
    Case c = {s.n, padded, {}, 0, 0};
    l.make(c);
    for (Tensor& t : c.tensors) {
        const size_t n = t.rows * t.width;
        if (t.type == TYPE_I32) { t.ints = random_tokens(n, (int)t.scale); }
        if (t.type == TYPE_X) { t.start = random_values<floatX>(n, t.scale); }
        if (t.type == TYPE_F32) { t.start = random_values<float>(n, t.scale); }
        if (t.type == TYPE_BYTE && t.role == WRITE) { t.start.resize(n); }  // numbers from 0 to 255
    }
    if (l.values) { l.values(c); }
    for (Tensor& t : c.tensors) { t.host = t.start; }
    return c;
}

/* Runs a version on fresh memory and returns all tensors after it. */
static std::vector<Floats> results(const Version& v, Case& c) {
    for (Tensor& t : c.tensors) {
        if (t.role == WRITE || t.role == SCRATCH) {
            t.device = device_alloc<char>(t.bytes());
            if (t.scale < 0) { CUDA_CHECK(cudaMemset(t.device, 0xff, t.bytes())); }
        } else if (t.type == TYPE_X) {
            t.device = upload_rows<floatX>(t.start, t.rows, t.width, t.pitch);
        } else {
            t.device = t.type == TYPE_I32 ? (void*)upload(t.ints) : (void*)upload(t.start);
        }
        allocations.back().name = t.name;
#ifdef EMULATED_SANITIZE
        shadow_name(t.device, t.name, t.rows, t.width, t.pitch, t.bytes() / (t.rows * t.pitch), t.role == READ);
#endif
    }
    launch(v, c, 0);
    std::vector<Floats> out(c.tensors.size());
    for (size_t i = 0; i < out.size(); i++) {
        const Tensor& t = c.tensors[i];
        if (t.type == TYPE_X) { out[i] = download_rows((floatX*)t.device, t.rows, t.width, t.pitch); }
        if (t.type == TYPE_F32) { out[i] = download((float*)t.device, t.rows * t.width); }
        if (t.type == TYPE_BYTE && t.role == WRITE) {
            for (const uint8_t byte : download((uint8_t*)t.device, t.rows * t.width)) { out[i].push_back(byte); }
        }
    }
    device_free_all();
    return out;
}

struct Verdict {
    double error, allowed;  // of the tensor that comes closest to its limit
    bool same;              // both runs had the same bits
};

static void compare_with_oracle(const Tensor& t, const Floats& got, Verdict* verdict) {
    double square = 0, wrong = 0, worst = 0;
    size_t at = 0;
    for (const float want : t.host) { square += (double)want * (double)want; }
    const double floor = (double)t.floor * sqrt(square / (double)got.size()) + 1e-30;
    const double least = IS_FP16 ? 0x1p-14 : 0;  // the least normal number: all below it have its unit in the last place
    const bool rounded = t.type == TYPE_X && sizeof(floatX) == 2, each = rounded && std::isfinite(t.floor);
    const double allowed = rounded ? (double)(t.units * ulp) : 1e-5, rms = sqrt(square / (double)got.size()) + 1e-30;
    auto error_of = [&](size_t i) {  // of an element; relative to all, if the norm is judged
        const double off = fabs((double)got[i] - (double)t.host[i]), fp32 = t.terms.empty() ? 0 : 0x1p-19 * (double)t.terms[i];
        if (!each) { return off / rms; }
        return off <= fp32 ? 0 : (off - fp32) / (fmax(fabs((double)t.host[i]), least) + floor);
    };
    for (size_t i = 0; i < got.size(); i++) {
        const double relative = error_of(i);
        wrong += relative * relative;
        if (!(relative <= worst) && !std::isnan(worst)) { worst = relative, at = i; }  // NaN is the worst
    }
    const double error = each ? worst : sqrt(wrong / (double)got.size());
    if (!(error <= allowed)) {
        fail(place(t, at) + " is " + number(got[at]) + ", wanted " + number(t.host[at]));
        fail("wrong are " + pattern(t, [&](size_t i) { return !(error_of(i) <= allowed); }) + "; error " + number(error) +
             ", allowed " + number(allowed));
    }
    if (!(error / allowed <= verdict->error / verdict->allowed)) { verdict->error = error, verdict->allowed = allowed; }
}

/* Checks a version at a case in which the oracle has written the wanted values. */
static Verdict check_version(const Version& v, Case& c) {
#ifdef EMULATED_SANITIZE
    const unsigned faults = shadow_faults();
#endif
    const std::vector<Floats> a = results(v, c), b = results(v, c);
    Verdict verdict = {0, 1, true};
    for (size_t i = 0; i < a.size(); i++) {
        const Tensor& t = c.tensors[i];
        if (a[i].empty()) { continue; }
        auto differs = [&](size_t k) { return memcmp(&a[i][k], &b[i][k], sizeof(float)) != 0; };
        if (memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float))) {
            verdict.same = false;
            size_t k = 0;
            while (!differs(k)) { k++; }
            if (!(v.flags & ATOMICS)) {
                fail("two runs differ: " + place(t, k) + " is " + number(a[i][k]) + ", then " + number(b[i][k]));
                fail("different are " + pattern(t, differs) + "; a version that adds in no order has the flag ATOMICS");
            }
        }
        if (t.role == READ) {
            auto changed = [&](size_t k) { return memcmp(&a[i][k], &t.start[k], sizeof(float)) != 0; };
            if (memcmp(a[i].data(), t.start.data(), a[i].size() * sizeof(float))) {
                fail("the input " + std::string(t.name) + " has changed: " + pattern(t, changed));
            }
        } else {
            compare_with_oracle(t, a[i], &verdict);
        }
    }
#ifdef EMULATED_SANITIZE
    if (shadow_faults() > faults) { fail("the sanitizer found faults, see above"); }
#endif
    return verdict;
}

/* Checks the versions of a ladder at a shape; each is a test. Returns a verdict for each. */
static std::vector<Verdict> check(const Ladder& l, const std::vector<Version>& versions, const Shape& s, const char* which) {
    std::vector<Verdict> verdicts;
    Oracle* oracle = NULL;
    Case c = {};
    for (const Version& v : versions) {
        verdicts.push_back({0, 0, true});
        if (v.flags & REFERENCE || !(v.oracle || s.has(v))) { continue; }  // a variant runs at every shape
        if (oracle != (v.oracle ? v.oracle : l.oracle)) {
            c = make_case(l, s, !strcmp(which, "padded"));
            oracle = v.oracle ? v.oracle : l.oracle;
            oracle(c);
        }
        verdicts.back() = check_version(v, c);
        test_count((std::string(l.name) + " " + std::to_string(v.number) + ", " + which + ": " + v.idea).c_str());
    }
    return verdicts;
}

// ---------------------------------------------------------------------------------------------------------------------
// times

/* Times the versions of a ladder at a shape. Prints a row each, and writes it to `json` unless that is NULL. */
static void bench(const Ladder& l, const std::vector<Version>& versions, const Shape& s, bool large,
                  const std::vector<Verdict>& verdicts, const char* file, FILE* json) {
    if (std::none_of(versions.begin(), versions.end(), [&](const Version& v) { return !(v.flags & REFERENCE) && s.has(v); })) {
        return;
    }
    Case c = {s.n, false, {}, 0, 0};
    l.make(c);
    size_t bytes = 0;
    for (const Tensor& t : c.tensors) { bytes += t.bytes(); }
    std::vector<Case> cases(1 + 4 * (size_t)device_attribute(cudaDevAttrL2CacheSize) / bytes, c);
    for (Case& each : cases) {
        for (Tensor& t : each.tensors) {
            t.device = device_alloc<char>(t.bytes());
            const size_t n = t.rows * t.pitch;
            if (t.type == TYPE_X) { fill((floatX*)t.device, n, t.scale); }
            if (t.type == TYPE_F32) { fill((float*)t.device, n, t.scale); }
            if (t.type == TYPE_I32) { fill((int32_t*)t.device, n, t.scale); }
        }
    }
    const std::string sizes = sizes_of(l, s);
    const bool products = c.flops > 0;
    const int arch = compiled_arch(fill_kernel<float>);
    char gpu[256];
    device_name(gpu);
    printf("%s %s %s, %s, sm_%d, %s\n", file, l.name, sizes.c_str(), PRECISION_NAME, arch, gpu);
    printf("%-50s %8s %8s %4s %9s %9s %8s %6s %7s %6s\n", "", "error", "allowed", "same", "predicted", "ms",
           products ? "TFLOP/s" : "GB/s", "share", "joules", "times");
    double before = NAN;
    for (size_t i = 0; i < versions.size(); i++) {
        const Version& v = versions[i];
        const Verdict& is = verdicts[i];
        if (!(v.flags & REFERENCE || s.has(v))) { continue; }
        auto run = [&](int k, cudaStream_t stream) { launch(v, cases[(size_t)k % cases.size()], stream); };
        run(0, 0);                            // loads its code
        CUDA_CHECK(cudaDeviceSynchronize());  // the products of two streams would share cuBLASLt's workspace
        Turns t = in_turns(1, run, v.flags & ON_HOST);
        const int count = (int)fmin(fmax(20, (double)cases.size()), 20 / t.ms);
        if (count > 1) { t = in_turns(count, run, v.flags & ON_HOST); }
        const double rate = (products ? c.flops : c.bytes) / (1e-3 * t.ms);
        if (v.flags & REFERENCE) { card.product = rate; }
        card.copy = t.copy;
        const double share = rate / (products ? card.product : t.copy);
        const double predicted = 1e3 * seconds_of(work_of(v, c));
        const double corrected = v.correct ? 1e3 * seconds_of(v.correct(c)) : NAN;
        const double joules = large && t.ms < 1000 ? 1e-3 * t.ms * run_for(0.5, [&] { run(0, 0); }).watts : NAN;
        printf("%2d %-47.47s %8.1e %8.1e %4s %9.4f %9.4f %8.1f %6.3f %7.3f %6.2f\n", v.number, v.idea, is.error, is.allowed,
               is.same ? "yes" : "no", predicted, t.ms, rate * (products ? 1e-12 : 1e-9), share, joules, before / t.ms);
        fflush(stdout);
        before = t.ms;
        if (!json) { continue; }
        fprintf(json, "{\"gpu\": \"%s\", \"arch\": %d, \"precision\": \"%s\", \"file\": \"%s\", ", gpu, arch, PRECISION_NAME,
                file);
        fprintf(json, "\"ladder\": \"%s\", \"sizes\": \"%s\", \"large\": %d, \"version\": %d, \"bold\": %d, \"idea\": \"%s\", ",
                l.name, sizes.c_str(), large, v.number, v.flags & BOLD, v.idea);
        fprintf(json, "\"error\": %.2e, \"allowed\": %.2e, \"same\": %d, \"predicted\": %.5g, \"corrected\": %.5g, ", is.error,
                is.allowed, is.same, predicted, std::isfinite(corrected) ? corrected : 0);
        fprintf(json, "\"ms\": %.5g, \"products\": %d, \"rate\": %.5g, \"share\": %.4f, \"joules\": %.4g, \"copy\": %.5g}\n",
                t.ms, products, rate, share, std::isfinite(joules) ? joules : 0, t.copy);
        fflush(json);
    }
    device_free_all();
}

#endif
