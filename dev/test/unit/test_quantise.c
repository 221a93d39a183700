/* test_quantise.c -- tests the 8-bit rows of fp8 products (llmc/quantise.h).
 *
 *   build/test_quantise [--table]      --table prints what every bfloat16 becomes, for test_quantise.py
 *
 * The reference of a conversion is the table of all values of the format, from the format's definition. It takes the nearest
 * value; if two are equally near, the value with an even mantissa.
 */
#include "llmc/quantise.h"
#include "llmc/base/rand.h"
#include "dev/test/test.h"

#include <math.h>

static const Fp8Format formats[] = {E4M3, E5M2};
static const char* const format_names[] = {"e4m3", "e5m2"};
static const int largest_bits[] = {0x7E, 0x7B};  // 448, 57344

/* Returns the value of `bits` by the definition of a format. `bits` is at most the largest value's. */
static double value_of(int bits, Fp8Format f) {
    const int e4m3 = f == E4M3, exponent = e4m3 ? bits >> 3 : bits >> 2, mantissa = e4m3 ? bits & 7 : bits & 3;
    if (exponent == 0) { return ldexp(mantissa, e4m3 ? -9 : -16); }
    return e4m3 ? ldexp(8 + mantissa, exponent - 10) : ldexp(4 + mantissa, exponent - 17);
}

/* Returns the bits of the value nearest to |x|; if two are equally near, the even one; above the largest value, the largest. */
static int nearest(double x, Fp8Format f) {
    int best = 0;
    if (x >= value_of(largest_bits[f], f)) { return largest_bits[f]; }
    for (int bits = 1; bits <= largest_bits[f]; bits++) {
        const double here = fabs(value_of(bits, f) - x), before = fabs(value_of(best, f) - x);
        if (here < before || (here == before && bits % 2 == 0)) { best = bits; }
    }
    return best;
}

TEST(every_bfloat16_becomes_the_nearest_value) {
    for (int i = 0; i < 1 << 17; i++) {
        const int h = i & 0xFFFF;
        const Fp8Format f = formats[i >> 16];
        const float x = f32_from_bf16((uint16_t)h);
        const int want = (isnan(x) ? FP8_NAN : nearest(fabs((double)x), f)) | (h >> 8 & 0x80);
        CHECK(fp8_from_f32(x, f) == want, "%s: bfloat16 0x%04X (%g) became 0x%02X, wanted 0x%02X", format_names[f], (unsigned)h,
              (double)x, (unsigned)fp8_from_f32(x, f), (unsigned)want);
    }
}

TEST(floats_between_two_values_become_the_nearer) {
    for (int i = 0; i < largest_bits[E4M3] + largest_bits[E5M2]; i++) {
        const Fp8Format f = i < largest_bits[E4M3] ? E4M3 : E5M2;
        const int bits = f == E4M3 ? i : i - largest_bits[E4M3], even = bits + (bits & 1);
        const float middle = (float)(0.5 * (value_of(bits, f) + value_of(bits + 1, f)));
        CHECK(fp8_from_f32(middle, f) == even, "%s: a tie above 0x%02X", format_names[f], (unsigned)bits);
        CHECK(fp8_from_f32(nextafterf(middle, 0), f) == bits, "%s: just below the middle above 0x%02X", format_names[f],
              (unsigned)bits);
        CHECK(fp8_from_f32(-nextafterf(middle, 1e6f), f) == (0x80 | (bits + 1)), "%s: just above the middle above 0x%02X",
              format_names[f], (unsigned)bits);
    }
}

TEST(every_value_comes_back) {
    for (int i = 0; i < 512; i++) {
        const Fp8Format f = formats[i / 256];
        const int bits = i % 256, magnitude = bits & 0x7F;
        const float x = f32_from_fp8((uint8_t)bits, f);
        if (magnitude > largest_bits[f] && magnitude != FP8_NAN) { continue; }  // never written
        CHECK(fp8_from_f32(x, f) == bits, "%s: 0x%02X came back as 0x%02X", format_names[f], (unsigned)bits,
              (unsigned)fp8_from_f32(x, f));
        if (magnitude == FP8_NAN) { continue; }
        CHECK((double)x == (bits & 0x80 ? -1 : 1) * value_of(magnitude, f), "%s: 0x%02X is %g", format_names[f], (unsigned)bits,
              (double)x);
    }
}

/* Takes each positive bfloat16 as a row's largest value: the row fits with its scale, and not with the next smaller scale. */
TEST(a_scale_is_the_smallest_that_fits) {
    for (int i = 2; i < 2 * 0x7F80; i++) {
        const Fp8Format f = formats[i % 2];
        const double most = value_of(largest_bits[f], f);
        const float x = f32_from_bf16((uint16_t)(i / 2)), scale = quantise_scale(float_bits(x), f);
        int k;
        const float half = frexpf(scale, &k);
        CHECK(half == 0.5f && k - 1 >= -126, "%s: %g has the scale %g", format_names[f], (double)x, (double)scale);
        CHECK((double)x / scale <= most && (k - 1 == -126 || (double)x / scale > most / 2), "%s: %g has the scale %g",
              format_names[f], (double)x, (double)scale);
        CHECK((double)quantise_factor(scale) * scale == 1, "the factor of %g is %g", (double)scale,
              (double)quantise_factor(scale));
    }
    for (int f = 0; f < 2; f++) {
        const float most = (float)value_of(largest_bits[f], formats[f]), zero = quantise_scale(0, formats[f]);
        CHECK(zero == 1 && quantise_factor(1) == 1, "a row of zeros has the scale %g", (double)zero);
        CHECK(quantise_scale(float_bits(most), formats[f]) == 1, "%g has another scale", (double)most);
        CHECK(quantise_scale(float_bits(nextafterf(most, 1e6f)), formats[f]) == 2, "just above %g", (double)most);
    }
}

TEST(rows_that_are_not_finite_are_nan) {
    const float bad[] = {INFINITY, -INFINITY, NAN, -NAN};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const float x[2][4] = {{1, 2, bad[i], 0}, {1, 2, 3, 4}};
        uint8_t rows[8], columns[8];
        float row_scale[2], column_scale[4];
        quantise_rows(rows, row_scale, x[0], 2, 4, E4M3);
        quantise_columns(columns, column_scale, x[0], 2, 4);
        for (int c = 0; c < 4; c++) { CHECK(rows[c] == FP8_NAN && rows[4 + c] != FP8_NAN, "%g: column %d", (double)bad[i], c); }
        for (int c = 0; c < 4; c++) {
            const bool nan = columns[2 * c] == FP8_NAN && columns[2 * c + 1] == FP8_NAN;
            CHECK(nan == (c == 2), "%g: column %d of the transpose", (double)bad[i], c);
        }
        CHECK(isnan(row_scale[0]) && isnan(column_scale[2]), "scales %g and %g", (double)row_scale[0], (double)column_scale[2]);
        CHECK(row_scale[1] == 0x1p-6f && !isnan(column_scale[0]), "scales %g and %g", (double)row_scale[1],
              (double)column_scale[0]);
    }
}

TEST(columns_are_the_rows_of_the_transpose) {
    enum { R = 37, C = 53 };
    static float x[R * C], t[C * R];
    static uint8_t columns[C * R], rows[C * R];
    float column_scale[C], row_scale[C];
    rand_normal(x, 0, R * C, 1.0f, 7, 1);
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) { t[c * R + r] = x[r * C + c] *= ldexpf(1, c % 7 - r % 5); }
    }
    quantise_columns(columns, column_scale, x, R, C);
    quantise_rows(rows, row_scale, t, C, R, E4M3);
    CHECK(memcmp(columns, rows, sizeof rows) == 0 && memcmp(column_scale, row_scale, sizeof row_scale) == 0, "they differ");
}

/* Fills x (R, C) with rows of very different sizes: some are 2^-24 of others. Every fifth row is zero; its scale of 1 is above
 * all others. */
static void fill_uneven(float* x, int R, int C) {
    rand_normal(x, 0, (size_t)R * C, 1.0f, 7, 2);
    for (int i = 0; i < R * C; i++) { x[i] = i / C % 5 == 3 ? 0 : ldexpf(x[i], -12 - i / C % 7 * 4); }
}

TEST(a_transpose_has_the_scale_of_its_largest_value) {
    enum { R = 37, C = 53 };
    static float x[R * C];
    static uint8_t all[R * C], q[C * R];
    fill_uneven(x, R, C);
    const float want = quantise_values(all, x, R * C, 1, E4M3), scale = quantise_transposed(q, x, R, C);
    CHECK(scale == want && scale < 0x1p-12f, "the scale is %g, wanted %g", (double)scale, (double)want);
    for (int i = 0; i < R * C; i++) { CHECK(q[i % C * R + i / C] == all[i], "row %d, column %d", i / C, i % C); }
}

/* Fills x (R, C) as fill_uneven(); for the format with twice the range the sizes of rows differ twice as much. The reference is
 * the value nearest to the one that the 8-bit row stands for. Most rows shift exactly, some only in part. */
TEST(shifted_rows_become_the_nearest_values) {
    enum { R = 37, C = 53 };
    static float x[R * C];
    static uint8_t rows[R * C], q[C * R];
    float row_scale[R];
    for (int f = 0; f < 2; f++) {
        const Fp8Format format = formats[f];
        int exact = 0, rounded = 0, flushed = 0;
        fill_uneven(x, R, C);
        for (int i = 0; format == E5M2 && i < R * C; i++) { x[i] = ldexpf(x[i], i / C % 7 * -3); }
        quantise_rows(rows, row_scale, x, R, C, format);
        const float scale = quantise_scale(quantise_largest(x, R * C, 1), format);
        quantise_shifted(q, rows, row_scale, scale, R, C, format);
        for (int i = 0; i < R * C; i++) {
            const double row = value_of(rows[i] & 0x7F, format) * row_scale[i / C] / scale;
            const uint8_t got = q[i % C * R + i / C];
            CHECK(row <= value_of(largest_bits[f], format), "%s: row %d, column %d saturates", format_names[f], i / C, i % C);
            CHECK(got == (nearest(row, format) | (rows[i] & 0x80)), "%s: row %d, column %d: 0x%02X became 0x%02X",
                  format_names[f], i / C, i % C, rows[i], got);
            exact += value_of(got & 0x7F, format) == row;
            rounded += (got & 0x7F) > 0 && value_of(got & 0x7F, format) != row;
            flushed += (got & 0x7F) == 0 && row > 0;
        }
        CHECK(exact > R * C / 2 && rounded > 50 && flushed > 50, "%s: %d exact, %d rounded, %d flushed", format_names[f], exact,
              rounded, flushed);
    }
}

TEST(a_transpose_that_is_not_finite_is_nan) {
    float x[2][4] = {{1, 2, INFINITY, 0}, {1, 2, 3, 4}}, row_scale[2];
    uint8_t rows[8], shifted[8], q[8];
    const float scale = quantise_transposed(q, x[0], 2, 4);
    quantise_rows(rows, row_scale, x[0], 2, 4, E4M3);
    quantise_shifted(shifted, rows, row_scale, scale, 2, 4, E4M3);
    CHECK(isnan(scale), "the scale is %g", (double)scale);
    for (int i = 0; i < 8; i++) { CHECK(q[i] == FP8_NAN && shifted[i] == FP8_NAN, "element %d", i); }
}

/* Checks a row whose largest value is 448, so that its scale is 1. */
TEST(what_is_lost_is_counted) {
    const float x[] = {448, 0, -0.0f, 0x1p-10f, -0x1p-10f, 0x1.8p-10f, 0x1p-9f, 0x1.bp-7f, 0x1.fp-7f, 0x1p-6f, -3};
    enum { COUNT = sizeof x / sizeof *x };
    uint8_t q[COUNT];
    QuantiseCounts counts = {0, 0, 0};
    CHECK(quantise_values(q, x, COUNT, 1, E4M3) == 1, "the scale");
    quantise_count(&counts, q, x, COUNT, E4M3);
    CHECK(counts.values == COUNT && counts.flushed == 2 && counts.subnormal == 3, "%llu values, %llu flushed, %llu subnormal",
          (unsigned long long)counts.values, (unsigned long long)counts.flushed, (unsigned long long)counts.subnormal);
    CHECK(q[2] == 0x80 && q[4] == 0x80, "the sign of a zero is lost");
}

/* A normal row loses little: the format's own error is at most 1/16 of a value, 2.7 % as a root mean square here. */
TEST(normal_rows_have_the_format_s_error) {
    enum { N = 65536 };
    static float x[N];
    static uint8_t q[N];
    rand_normal(x, 0, N, 0.02f, 3, 1);
    const float scale = quantise_values(q, x, N, 1, E4M3);
    double error = 0, sum = 0, worst = 0;
    for (int i = 0; i < N; i++) {
        const double d = (double)f32_from_fp8(q[i], E4M3) * scale - x[i];
        error += d * d;
        sum += (double)x[i] * x[i];
        if ((q[i] & 0x7F) >= fp8_least_normal(E4M3)) { worst = fmax(worst, fabs(d) / fabs((double)x[i])); }
    }
    CHECK(sqrt(error / sum) > 0.02 && sqrt(error / sum) < 0.03, "relative L2 error %g", sqrt(error / sum));
    CHECK(worst <= 1.0 / 16, "a normal value is off by %g of itself", worst);
}

/* Prints for every bfloat16 its bits in e4m3, then the bits and the scale of a row that holds it alone; then the same for
 * e5m2. */
static int print_table(void) {
    for (int h = 0; h < 1 << 16; h++) {
        const float x = f32_from_bf16((uint16_t)h);
        for (int f = 0; f < 2; f++) {
            uint8_t q;
            const float scale = quantise_values(&q, &x, 1, 1, formats[f]);
            printf("%d %d %.9g%c", fp8_from_f32(x, formats[f]), q, (double)scale, f == 0 ? ' ' : '\n');
        }
    }
    return 0;
}

/* The gradients of the logits of a token that was not expected: the probabilities of Llama 3's vocabulary, by Zipf's law, minus
 * one at the target. Under the row's scale e4m3 flushes most of the other tokens, which together hold no small part of the
 * probability. e5m2 flushes none. */
TEST(small_probabilities_outlive_e5m2) {
    enum { V = 128256 };
    static float x[V];
    static uint8_t q[V];
    double sum = 0;
    for (int i = 0; i < V; i++) { sum += 1.0 / (i + 1); }
    for (int i = 0; i < V; i++) { x[i] = (float)(1 / (sum * (i + 1))) - (i == 1000); }
    for (int f = 0; f < 2; f++) {
        double values = 0, held = 0;
        quantise_values(q, x, V, 1, formats[f]);
        for (int i = 0; i < V; i++) {
            const int flushed = (q[i] & 0x7F) == 0;
            values += flushed / (double)V;
            held += flushed * (double)x[i];
        }
        printf("     %s: %.1f %% of the values, %.1f %% of the probability\n", format_names[f], 100 * values, 100 * held);
        CHECK(f == E4M3 ? values > 0.5 && held > 0.1 : values == 0, "%s: %g and %g", format_names[f], values, held);
    }
}

int main(int argc, char** argv) {
    if (argc > 1 && strcmp(argv[1], "--table") == 0) { return print_table(); }
    return test_all();
}
