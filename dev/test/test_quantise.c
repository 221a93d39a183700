/* test_quantise.c -- tests the 8-bit rows of fp8 products (llmc/quantise.h).
 *
 *   build/test_quantise [--table]      --table prints what every bfloat16 becomes, for test_quantise.py
 *
 * The reference of a conversion is the table of all values of the format, from its definition: the nearest one wins, of two the
 * one with an even mantissa.
 */
#include "llmc/quantise.h"
#include "llmc/base/rand.h"
#include "test.h"

#include <math.h>

/* Returns the value of e4m3 bits by the definition; bits below 0x7F. */
static double value_of(int bits) {
    const int exponent = bits >> 3, mantissa = bits & 7;
    return exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
}

/* Returns the bits of the value nearest to |x|, of two the even one; above the largest value that one. */
static int nearest(double x) {
    int best = 0;
    for (int bits = 1; bits < E4M3_NAN; bits++) {
        const double here = fabs(value_of(bits) - x), before = fabs(value_of(best) - x);
        if (here < before || (here == before && bits % 2 == 0)) { best = bits; }
    }
    return best;
}

static void every_bfloat16_becomes_the_nearest_value(void) {
    for (int h = 0; h < 1 << 16; h++) {
        const float x = f32_from_bf16((uint16_t)h);
        const int want = (isnan(x) ? E4M3_NAN : nearest(fabs((double)x))) | (h >> 8 & 0x80);
        CHECK(e4m3_from_f32(x) == want, "bfloat16 0x%04X (%g) became 0x%02X, wanted 0x%02X", (unsigned)h, (double)x,
              (unsigned)e4m3_from_f32(x), (unsigned)want);
    }
}

static void floats_between_two_values_become_the_nearer(void) {
    for (int bits = 0; bits < 0x7E; bits++) {
        const float middle = (float)(0.5 * (value_of(bits) + value_of(bits + 1)));
        const int even = bits + (bits & 1);
        CHECK(e4m3_from_f32(middle) == even, "a tie above 0x%02X", (unsigned)bits);
        CHECK(e4m3_from_f32(nextafterf(middle, 0)) == bits, "just below the middle above 0x%02X", (unsigned)bits);
        CHECK(e4m3_from_f32(-nextafterf(middle, 1000)) == (0x80 | (bits + 1)), "just above the middle above 0x%02X",
              (unsigned)bits);
    }
}

static void every_value_comes_back(void) {
    for (int bits = 0; bits < 256; bits++) {
        const float x = f32_from_e4m3((uint8_t)bits);
        CHECK(e4m3_from_f32(x) == bits, "0x%02X came back as 0x%02X", (unsigned)bits, (unsigned)e4m3_from_f32(x));
        if ((bits & 0x7F) == E4M3_NAN) { continue; }
        CHECK((double)x == (bits & 0x80 ? -1 : 1) * value_of(bits & 0x7F), "0x%02X is %g", (unsigned)bits, (double)x);
    }
}

/* For each positive bfloat16 as a row's largest value: the row fits into the scale, and not into the next smaller one. */
static void a_scale_is_the_smallest_that_fits(void) {
    for (int h = 1; h < 0x7F80; h++) {
        const float x = f32_from_bf16((uint16_t)h), scale = quantise_scale(float_bits(x));
        int k;
        const float half = frexpf(scale, &k);
        CHECK(half == 0.5f && k - 1 >= -126, "%g has the scale %g", (double)x, (double)scale);
        CHECK((double)x / scale <= 448 && (k - 1 == -126 || (double)x / scale > 224), "%g has the scale %g", (double)x,
              (double)scale);
        CHECK((double)quantise_factor(scale) * scale == 1, "the factor of %g is %g", (double)scale,
              (double)quantise_factor(scale));
    }
    CHECK(quantise_scale(0) == 1 && quantise_factor(1) == 1, "a row of zeros has the scale %g", (double)quantise_scale(0));
    CHECK(quantise_scale(float_bits(448)) == 1 && quantise_scale(float_bits(nextafterf(448, 500))) == 2, "at 448");
}

static void rows_that_are_not_finite_are_nan(void) {
    const float bad[] = {INFINITY, -INFINITY, NAN, -NAN};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const float x[2][4] = {{1, 2, bad[i], 0}, {1, 2, 3, 4}};
        uint8_t rows[8], columns[8];
        float row_scale[2], column_scale[4];
        quantise_rows(rows, row_scale, x[0], 2, 4);
        quantise_columns(columns, column_scale, x[0], 2, 4);
        for (int c = 0; c < 4; c++) {
            CHECK(rows[c] == E4M3_NAN && rows[4 + c] != E4M3_NAN, "%g: column %d", (double)bad[i], c);
        }
        for (int c = 0; c < 4; c++) {
            const bool nan = columns[2 * c] == E4M3_NAN && columns[2 * c + 1] == E4M3_NAN;
            CHECK(nan == (c == 2), "%g: column %d of the transpose", (double)bad[i], c);
        }
        CHECK(isnan(row_scale[0]) && isnan(column_scale[2]), "scales %g and %g", (double)row_scale[0], (double)column_scale[2]);
        CHECK(row_scale[1] == 0x1p-6f && !isnan(column_scale[0]), "scales %g and %g", (double)row_scale[1],
              (double)column_scale[0]);
    }
}

static void columns_are_the_rows_of_the_transpose(void) {
    enum { R = 37, C = 53 };
    static float x[R * C], t[C * R];
    static uint8_t columns[C * R], rows[C * R];
    float column_scale[C], row_scale[C];
    rand_normal(x, 0, R * C, 1.0f, 7, 1);
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) { t[c * R + r] = x[r * C + c] *= ldexpf(1, c % 7 - r % 5); }
    }
    quantise_columns(columns, column_scale, x, R, C);
    quantise_rows(rows, row_scale, t, C, R);
    CHECK(memcmp(columns, rows, sizeof rows) == 0 && memcmp(column_scale, row_scale, sizeof row_scale) == 0, "they differ");
}

/* Fills x (R, C) with values of rows of very different sizes, down to 2^-24 of others; every fifth is a row of zeros, whose
 * scale of 1 is above all others. */
static void fill_uneven(float* x, int R, int C) {
    rand_normal(x, 0, (size_t)R * C, 1.0f, 7, 2);
    for (int i = 0; i < R * C; i++) { x[i] = i / C % 5 == 3 ? 0 : ldexpf(x[i], -12 - i / C % 7 * 4); }
}

static void a_transpose_has_the_scale_of_its_largest_value(void) {
    enum { R = 37, C = 53 };
    static float x[R * C];
    static uint8_t all[R * C], q[C * R];
    fill_uneven(x, R, C);
    const float want = quantise_values(all, x, R * C, 1), scale = quantise_transposed(q, x, R, C);
    CHECK(scale == want && scale < 0x1p-12f, "the scale is %g, wanted %g", (double)scale, (double)want);
    for (int i = 0; i < R * C; i++) { CHECK(q[i % C * R + i / C] == all[i], "row %d, column %d", i / C, i % C); }
}

/* The reference is the nearest value to what the 8-bit row stands for. Most rows shift exactly, some only in part. */
static void shifted_rows_become_the_nearest_values(void) {
    enum { R = 37, C = 53 };
    static float x[R * C];
    static uint8_t rows[R * C], q[C * R];
    float row_scale[R];
    int exact = 0, rounded = 0, flushed = 0;
    fill_uneven(x, R, C);
    quantise_rows(rows, row_scale, x, R, C);
    const float scale = quantise_scale(quantise_largest(x, R * C, 1));
    quantise_shifted(q, rows, row_scale, scale, R, C);
    for (int i = 0; i < R * C; i++) {
        const double row = value_of(rows[i] & 0x7F) * row_scale[i / C] / scale;
        const uint8_t got = q[i % C * R + i / C];
        CHECK(row <= 448, "row %d, column %d saturates", i / C, i % C);
        CHECK(got == (nearest(row) | (rows[i] & 0x80)), "row %d, column %d: 0x%02X became 0x%02X", i / C, i % C, rows[i], got);
        exact += value_of(got & 0x7F) == row;
        rounded += (got & 0x7F) > 0 && value_of(got & 0x7F) != row;
        flushed += (got & 0x7F) == 0 && row > 0;
    }
    CHECK(exact > R * C / 2 && rounded > 50 && flushed > 50, "%d exact, %d rounded, %d flushed", exact, rounded, flushed);
}

static void a_transpose_that_is_not_finite_is_nan(void) {
    float x[2][4] = {{1, 2, INFINITY, 0}, {1, 2, 3, 4}}, row_scale[2];
    uint8_t rows[8], shifted[8], q[8];
    const float scale = quantise_transposed(q, x[0], 2, 4);
    quantise_rows(rows, row_scale, x[0], 2, 4);
    quantise_shifted(shifted, rows, row_scale, scale, 2, 4);
    CHECK(isnan(scale), "the scale is %g", (double)scale);
    for (int i = 0; i < 8; i++) { CHECK(q[i] == E4M3_NAN && shifted[i] == E4M3_NAN, "element %d", i); }
}

/* Of a row whose largest value is 448, that is of scale 1. */
static void what_is_lost_is_counted(void) {
    const float x[] = {448, 0, -0.0f, 0x1p-10f, -0x1p-10f, 0x1.8p-10f, 0x1p-9f, 0x1.bp-7f, 0x1.fp-7f, 0x1p-6f, -3};
    enum { COUNT = sizeof x / sizeof *x };
    uint8_t q[COUNT];
    QuantiseCounts counts = {0, 0, 0};
    CHECK(quantise_values(q, x, COUNT, 1) == 1, "the scale");
    quantise_count(&counts, q, x, COUNT);
    CHECK(counts.values == COUNT && counts.flushed == 2 && counts.subnormal == 3, "%llu values, %llu flushed, %llu subnormal",
          (unsigned long long)counts.values, (unsigned long long)counts.flushed, (unsigned long long)counts.subnormal);
    CHECK(q[2] == 0x80 && q[4] == 0x80, "the sign of a zero is lost");
}

/* A normal row loses little: the format's own error is at most 1/16 of a value, 2.7 % as a root mean square here. */
static void normal_rows_have_the_format_s_error(void) {
    enum { N = 65536 };
    static float x[N];
    static uint8_t q[N];
    rand_normal(x, 0, N, 0.02f, 3, 1);
    const float scale = quantise_values(q, x, N, 1);
    double error = 0, sum = 0, worst = 0;
    for (int i = 0; i < N; i++) {
        const double d = (double)f32_from_e4m3(q[i]) * scale - x[i];
        error += d * d;
        sum += (double)x[i] * x[i];
        if ((q[i] & 0x7F) >= E4M3_LEAST_NORMAL) { worst = fmax(worst, fabs(d) / fabs((double)x[i])); }
    }
    CHECK(sqrt(error / sum) > 0.02 && sqrt(error / sum) < 0.03, "relative L2 error %g", sqrt(error / sum));
    CHECK(worst <= 1.0 / 16, "a normal value is off by %g of itself", worst);
}

/* Prints for every bfloat16 what it becomes as it is, and in a row of its own: there the bits and the scale. */
static int print_table(void) {
    for (int h = 0; h < 1 << 16; h++) {
        const float x = f32_from_bf16((uint16_t)h);
        uint8_t q;
        const float scale = quantise_values(&q, &x, 1, 1);
        printf("%d %d %.9g\n", e4m3_from_f32(x), q, (double)scale);
    }
    return 0;
}

int main(int argc, char** argv) {
    if (argc > 1 && strcmp(argv[1], "--table") == 0) { return print_table(); }
    RUN(every_bfloat16_becomes_the_nearest_value);
    RUN(floats_between_two_values_become_the_nearer);
    RUN(every_value_comes_back);
    RUN(a_scale_is_the_smallest_that_fits);
    RUN(rows_that_are_not_finite_are_nan);
    RUN(columns_are_the_rows_of_the_transpose);
    RUN(a_transpose_has_the_scale_of_its_largest_value);
    RUN(shifted_rows_become_the_nearest_values);
    RUN(a_transpose_that_is_not_finite_is_nan);
    RUN(what_is_lost_is_counted);
    RUN(normal_rows_have_the_format_s_error);
    return test_summary();
}
