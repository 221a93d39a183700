/* kernel_test.cuh -- shared by the tests of kernels: memory on the device, random values, comparisons. */
#ifndef TEST_KERNELS_KERNEL_TEST_CUH
#define TEST_KERNELS_KERNEL_TEST_CUH

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "llmc/base/rand.h"
#include "llmc/cuda/cuda_common.cuh"
#include "dev/test/test.h"

typedef std::vector<float> Floats;

#if defined(PRECISION_FP32)
static const float ulp = 1e-5f;
#elif defined(PRECISION_BF16)
static const float ulp = 1.0f / 256;
#else
static const float ulp = 1.0f / 2048;
#endif

// whether this is the emulated card: it computes at most 16 blocks at a time, and slowly, so some shapes are smaller there
#ifdef EMULATED_ARCH
static constexpr bool emulated = true;
#else
static constexpr bool emulated = false;
#endif
#ifdef EMULATED_SANITIZE  // which looks at each access: shapes are smaller still, and one run shows them all
static constexpr bool sanitized = true;
#else
static constexpr bool sanitized = false;
#endif

/* Returns how many of a shape's N rows a test computes. Shapes of 80 rows and more only need more rows than a card computes at
 * a time. */
static size_t rows_of_shape(size_t N) { return emulated && N >= 80 ? std::min(N / 8, sanitized ? (size_t)40 : N) : N; }

// ---------------------------------------------------------------------------------------------------------------------
// device memory: poisoned, guarded, freed at the end of each test

#ifdef EMULATED_SANITIZE  // it knows what was written, and where an allocation ends
enum { GUARD = 0 };
#else
enum { GUARD = 512 };
#endif
struct Allocation {
    char* p;
    size_t bytes;
    std::string name;
};
static std::vector<Allocation> allocations;

template <typename T>
static T* device_alloc(size_t n) {
    char* p = NULL;
    const size_t bytes = n * sizeof(T);
    CUDA_CHECK(cudaMalloc(&p, bytes + GUARD));
    if (GUARD) { CUDA_CHECK(cudaMemset(p, 0xff, bytes + GUARD)); }
    allocations.push_back({p, bytes, "allocation " + std::to_string(allocations.size())});
    return (T*)p;
}

static void device_free_all() {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (const Allocation& a : allocations) {
        unsigned char guard[GUARD + 1];
        CUDA_CHECK(cudaMemcpy(guard, a.p + a.bytes, GUARD, cudaMemcpyDeviceToHost));
        bool intact = true;
        for (int k = 0; k < GUARD; k++) { intact = intact && guard[k] == 0xff; }
        CHECK(intact, "a kernel wrote past the end of %s, %zu bytes", a.name.c_str(), a.bytes);
        CUDA_CHECK(cudaFree(a.p));
    }
    allocations.clear();
}

template <typename T>
static T* upload(const std::vector<T>& x) {
    T* p = device_alloc<T>(x.size());
    CUDA_CHECK(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

/* Uploads x (rows, width) as T in rows of `pitch`; the padding is NaN. */
template <typename T>
static T* upload_rows(const Floats& x, size_t rows, size_t width, size_t pitch) {
    std::vector<T> h(rows * pitch);
    memset((void*)h.data(), 0xff, h.size() * sizeof(T));
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < width; c++) { h[r * pitch + c] = from_float<T>(x[r * width + c]); }
    }
    return upload(h);
}

template <typename T>
static std::vector<T> download(const T* p, size_t n) {
    std::vector<T> h(n);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy((void*)h.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return h;
}

/* Does the opposite of upload_rows() and checks that the padding is untouched. */
template <typename T>
static Floats download_rows(const T* p, size_t rows, size_t width, size_t pitch) {
    std::vector<T> h = download(p, rows * pitch);
    Floats x(rows * width);
    bool padding = true;
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < width; c++) { x[r * width + c] = to_float(h[r * pitch + c]); }
        const unsigned char* bytes = (const unsigned char*)(h.data() + r * pitch + width);
        for (size_t k = 0; k < (pitch - width) * sizeof(T); k++) { padding = padding && bytes[k] == 0xff; }
    }
    CHECK(padding, "the padding of rows of %zu was overwritten", width);
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// values and comparison

static uint32_t next_stream = 1;

/* Returns n normals of deviation `scale`, rounded to T. */
template <typename T>
static Floats random_values(size_t n, float scale) {
    Floats x(n);
    rand_normal(x.data(), 0, n, scale, 1234, next_stream++);
    for (size_t i = 0; i < n; i++) { x[i] = to_float(from_float<T>(x[i])); }
    return x;
}

static std::vector<int32_t> random_tokens(size_t n, int V) {
    std::vector<int32_t> t(n);
    const uint32_t stream = next_stream++;
    for (size_t i = 0; i < n; i++) { t[i] = (int32_t)philox_below(99, RAND_INIT, stream, i, (uint64_t)V); }
    return t;
}

/* Checks |got - want| <= rel |want| + max(rest max |want|, least) for every element; NaN never passes. */
static void compare(const char* what, const Floats& got, const Floats& want, float rel, float rest, float least = 0) {
    float largest = 0, worst = 0;
    size_t at = 0;
    CHECK(got.size() == want.size(), "%s: %zu elements, wanted %zu", what, got.size(), want.size());
    for (size_t i = 0; i < want.size(); i++) { largest = fmaxf(largest, fabsf(want[i])); }
    for (size_t i = 0; i < want.size(); i++) {
        const float excess = fabsf(got[i] - want[i]) - rel * fabsf(want[i]) - fmaxf(rest * largest, least);
        if (!(excess <= 0) && !(worst > excess)) {
            worst = excess;
            at = i;
        }
    }
    CHECK(worst == 0, "%s: element %zu is %.8g, wanted %.8g (largest %.3g)", what, at, (double)got[at], (double)want[at],
          (double)largest);
}

static void compare(const char* what, const Floats& got, const Floats& want) { compare(what, got, want, ulp, 1e-6f); }

/* Runs a launch twice and returns its output; both runs must agree in every bit. */
static Floats twice(const char* what, const std::function<Floats()>& launch) {
    const Floats a = launch(), b = sanitized ? a : launch();
    CHECK(a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0, "%s: two runs differ", what);
    return a;
}

/* Returns whether two arrays (n) on the device have the same bytes. */
static bool same_bytes(const floatX* a, const floatX* b, size_t n) {
    return memcmp(download(a, n).data(), download(b, n).data(), n * sizeof *a) == 0;
}

static size_t padded(size_t width) { return row_pitch<floatX>(width) + VECTOR<floatX>; }

#endif
