/* test_safetensors.c -- the safetensors reader, which accepts only what the format allows; the writer; the 16-bit floats and
 * the checksum that both use. */
#include "llmc/files/safetensors.h"

#include "dev/test/test.h"

static Error error;
static const char* file;

/* Writes a file of this header and `data` zero bytes. The length field is `length`; SIZE_MAX: the header's own length. */
static void put(const char* header, size_t length, size_t data) {
    FILE* f = fopen(file, "wb");
    const uint64_t n = length == SIZE_MAX ? strlen(header) : length;
    fwrite(&n, 1, 8, f);
    fputs(header, f);
    for (size_t i = 0; i < data; i++) { fputc(0, f); }
    fclose(f);
}

static bool opens(SafeTensors* st) {
    memset(&error, 0, sizeof error);
    return safetensors_open(st, file, &error);
}

#define REFUSED(part)                                                                                   \
    do {                                                                                                \
        SafeTensors st;                                                                                 \
        CHECK(!opens(&st) && contains(error.msg, part), "wanted \"%s\", message: %s", part, error.msg); \
        CHECK(contains(error.msg, file) && !strchr(error.msg, '\n'), "message: %s", error.msg);         \
        safetensors_close(&st);                                                                         \
    } while (0)

TEST(a_file_is_read_in_any_order_of_names) {
    put("{\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]},\"a\":{\"shape\":[4],\"data_offsets\":[0,8],"
        "\"dtype\":\"BF16\"},"
        "\"__metadata__\":{\"k\":\"v\"},\"e\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_offsets\":[8,8]},"
        "\"s\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[32,34]}}   ",
        SIZE_MAX, 34);
    SafeTensors st;
    CHECK(opens(&st), "%s", error.msg);
    CHECK(st.count == 4, "%zu tensors", st.count);
    const SafeTensor *a = safetensors_find(&st, "a"), *b = safetensors_find(&st, "b"), *e = safetensors_find(&st, "e"),
                     *s = safetensors_find(&st, "s");
    CHECK(a && a->dtype == SAFE_BF16 && a->ndim == 1 && a->count == 4, "a");
    CHECK(b && b->dtype == SAFE_F32 && b->ndim == 2 && b->shape[0] == 2 && b->shape[1] == 3 && b->begin == a->begin + 8, "b");
    CHECK(e && e->count == 0 && e->ndim == 2, "empty");
    CHECK(s && s->ndim == 0 && s->count == 1, "scalar");
    CHECK(!safetensors_find(&st, "c") && !safetensors_find(&st, "__metadata__"), "found what is not there");
    CHECK(safetensors_metadata(&st, "k") && strcmp(safetensors_metadata(&st, "k"), "v") == 0 && !safetensors_metadata(&st, "x"),
          "metadata");
    float x[6] = {1, 1, 1, 1, 1, 1};
    CHECK(safetensors_read_f32(&st, b, 1, 5, x, &error) && x[0] == 0 && x[4] == 0 && x[5] == 1, "%s", error.msg);
    CHECK(!safetensors_read_f32(&st, b, 2, 5, x, &error), "read past the end of a tensor");
    memset(&error, 0, sizeof error);
    CHECK(!safetensors_read_f32(&st, b, SIZE_MAX, 2, x, &error), "read past the end of a tensor");
    memset(&error, 0, sizeof error);
    CHECK(!safetensors_read_f32(&st, e, 0, 0, x, &error) && contains(error.msg, "I64"), "integers as floats: %s", error.msg);
    safetensors_close(&st);
}

TEST(a_file_without_tensors_is_valid) {
    SafeTensors st;
    put("{}", SIZE_MAX, 0);
    CHECK(opens(&st) && st.count == 0 && !safetensors_find(&st, "a"), "%s", error.msg);
    safetensors_close(&st);
}

TEST(hostile_headers_are_refused) {
#define ONE(fields, data) put("{\"t\":{" fields "}}", SIZE_MAX, data)
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]", 7);
    REFUSED("wanted a range within the 7 bytes");
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]", 9);
    REFUSED("the tensors end at byte");
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]", 12);
    REFUSED("leave a hole");
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]", 8);
    REFUSED("data_offsets are [8, 0]");
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-1,7]", 8);
    REFUSED("data_offsets is an array, wanted two byte offsets");
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]", 8);
    REFUSED("two byte offsets");
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0.0,8]", 8);
    REFUSED("two byte offsets");
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,18446744073709551615]", 8);
    REFUSED("wanted a range within");
    ONE("\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]", 8);
    REFUSED("span 8 bytes, wanted the 12");
    ONE("\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]", 8);
    REFUSED("t.shape");
    ONE("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]", 0);
    REFUSED("fits in 64 bits");
    ONE("\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]", 0);
    REFUSED("fits in 64 bits");
    ONE("\"dtype\":\"F32\",\"shape\":[18446744073709551616],\"data_offsets\":[0,0]", 0);
    REFUSED("fits in 64 bits");
    ONE("\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]", 4);
    REFUSED("at most 8 sizes");
    ONE("\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]", 8);
    REFUSED("t.shape is 2");
    ONE("\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]", 8);
    REFUSED("t.dtype is \"F31\"");
    ONE("\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]", 8);
    REFUSED("t.dtype is 7");
    ONE("\"shape\":[2],\"data_offsets\":[0,8]", 8);
    REFUSED("has 2 fields");
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"extra\":1", 8);
    REFUSED("has 4 fields");
    ONE("\"dtype\":\"F32\",\"shape\":[2],\"offsets\":[0,8]", 8);
    REFUSED("data_offsets is missing");
    put("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_"
        "offsets\":[4,12]}}",
        SIZE_MAX, 12);
    REFUSED("overlap");
    put("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":"
        "[2,4]}}",
        SIZE_MAX, 4);
    REFUSED("\"a\" twice");
    put("{\"t\":[]}", SIZE_MAX, 0);
    REFUSED("tensor \"t\" is not an object");
    put("{\"__metadata__\":{\"a\":{\"b\":1}}}", SIZE_MAX, 0);
    REFUSED("__metadata__ is an object, wanted an object of strings");
    put("{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", SIZE_MAX, 1);
    REFUSED("holds a NUL");
    put("{\"\x80\":{}}", SIZE_MAX, 0);
    REFUSED("not valid UTF-8");
    put("{} x", SIZE_MAX, 0);
    REFUSED("wanted the end of the text");
    put("[]", SIZE_MAX, 0);
    REFUSED("does not start with '{'");
    put(" {}", SIZE_MAX, 0);
    REFUSED("does not start with '{'");
    put("{}", 1, 0);
    REFUSED("does not start with '{'");
    put("{}", 3, 0);
    REFUSED("length is 3, wanted at most 2");
    put("{}", 100000001, 0);
    REFUSED("length is 100000001");
    put("{}", SIZE_MAX - 1, 0);
    REFUSED("header's length is");
#undef ONE
}

TEST(another_kind_of_file_is_named) {
    test_put(file, "PK\3\4whatever it holds");
    REFUSED("zip archive");
    test_put(file, "{\"model_type\": \"llama\"}");
    REFUSED("JSON text");
    test_put(file, "");
    REFUSED("an empty file");
    test_put(file, "abc");
    REFUSED("is 3 bytes long");
    unlink(file);
    REFUSED("cannot open");
    if (mkfifo(file, 0600) == 0) {
        REFUSED("is a pipe");
        unlink(file);
    }
    if (mkdir(file, 0700) == 0) {
        REFUSED("a folder");
        rmdir(file);
    }
}

/* Writes four tensors and returns the size of the file. */
static size_t write_sample(float* values /* 100000 */) {
    for (int i = 0; i < 100000; i++) { values[i] = (float)sin(i) * (float)(i % 13 == 0 ? 1e-6 : 1); }
    SafeTensor t[4];
    memset(t, 0, sizeof t);
    static const char* const names[4] = {"w\"\\x\n", "half", "brain", "scalar"};
    static const SafeDtype dtypes[4] = {SAFE_F32, SAFE_F16, SAFE_BF16, SAFE_F32};
    for (int i = 0; i < 4; i++) {
        t[i].name = names[i];
        t[i].dtype = dtypes[i];
        t[i].ndim = i == 3 ? 0 : 2;
        t[i].shape[0] = 50;
        t[i].shape[1] = 2000;
    }
    SafeWriter w;
    memset(&error, 0, sizeof error);
    CHECK(safewriter_open(&w, file, t, 4, &error), "%s", error.msg);
    for (int i = 0; i < 4; i++) {
        const size_t n = i == 3 ? 1 : 100000;
        CHECK(safewriter_f32(&w, dtypes[i], values, n / 3, &error) &&
                  safewriter_f32(&w, dtypes[i], values + n / 3, n - n / 3, &error),
              "%s", error.msg);
    }
    CHECK(safewriter_finish(&w, &error), "%s", error.msg);
    size_t size = 0;
    char* bytes = read_file(file, &size, 1 << 30, &error);
    CHECK(size == w.total && crc_of(bytes, size) == crc_end(&w.crc), "the writer's checksum is not the file's");
    uint64_t header;
    memcpy(&header, bytes, 8);
    CHECK(header % 8 == 0, "the header has %d bytes", (int)header);
    free(bytes);
    return size;
}

TEST(what_is_written_is_read_back_and_rounded_to_nearest_even) {
    float* values = (float*)xmalloc(100000 * sizeof(float));
    float* back = (float*)xmalloc(100000 * sizeof(float));
    write_sample(values);
    SafeTensors st;
    CHECK(opens(&st) && st.count == 4, "%s", error.msg);
    const SafeTensor *w = safetensors_find(&st, "w\"\\x\n"), *half = safetensors_find(&st, "half"),
                     *brain = safetensors_find(&st, "brain");
    CHECK(w && half && brain && safetensors_find(&st, "scalar"), "names");
    CHECK(strcmp(safetensors_metadata(&st, "format"), "pt") == 0, "metadata");
    CHECK(safetensors_read_f32(&st, w, 0, 100000, back, &error) && memcmp(values, back, 400000) == 0, "F32 %s", error.msg);
    bool same = safetensors_read_f32(&st, half, 0, 100000, back, &error);
    for (int i = 0; i < 100000; i++) {
        same = same && float_bits(back[i]) == float_bits(f32_from_f16(f16_from_f32(values[i])));
    }
    CHECK(same, "F16 %s", error.msg);
    same = safetensors_read_f32(&st, brain, 30000, 60000, back, &error);
    for (int i = 0; i < 60000; i++) {
        same = same && float_bits(back[i]) == float_bits(f32_from_bf16(bf16_from_f32(values[30000 + i])));
    }
    CHECK(same, "BF16 %s", error.msg);
    safetensors_close(&st);
    free(values);
    free(back);
}

TEST(a_file_that_is_cut_or_lengthened_anywhere_is_refused) {
    float* values = (float*)xmalloc(100000 * sizeof(float));
    const size_t size = write_sample(values);
    free(values);
    size_t bytes = 0;
    char* text = read_file(file, &bytes, 1 << 30, &error);
    uint64_t header;
    memcpy(&header, text, 8);
    const size_t cuts[] = {0,
                           1,
                           7,
                           8,
                           9,
                           8 + (size_t)header / 2,
                           7 + (size_t)header,
                           8 + (size_t)header,
                           9 + (size_t)header,
                           size / 2,
                           size - 1,
                           size + 1,
                           size + 4096};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        SafeTensors st;
        CHECK(truncate(file, (off_t)cuts[i]) == 0, "truncate");
        CHECK(!opens(&st) && contains(error.msg, file), "%zu of %zu bytes were accepted", cuts[i], size);
        safetensors_close(&st);
        FILE* f = fopen(file, "wb");
        fwrite(text, 1, size, f);
        fclose(f);
    }
    free(text);
}

TEST(a_flipped_bit_in_a_header_is_refused_or_only_renames) {
    const char* header =
        "{\"__metadata__\":{\"format\":\"pt\"},\"ab\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
        "\"cd\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[8,16]}}";
    const size_t n = strlen(header);
    int accepted = 0;
    for (size_t bit = 0; bit < (8 + n) * 8; bit++) {
        put(header, SIZE_MAX, 16);
        FILE* f = fopen(file, "r+b");
        fseek(f, (long)(bit / 8), SEEK_SET);
        const int c = fgetc(f);
        fseek(f, (long)(bit / 8), SEEK_SET);
        fputc(c ^ 1 << bit % 8, f);
        fclose(f);
        SafeTensors st;
        if (opens(&st)) {
            accepted++;
            for (size_t i = 0; i < st.count; i++) {
                const SafeTensor* t = &st.tensors[i];
                CHECK(t->begin + safe_bytes(t) <= 8 + n + 16, "bit %zu: a tensor outside of the file", bit);
            }
        } else {
            CHECK(contains(error.msg, file), "message: %s", error.msg);
        }
        safetensors_close(&st);
    }
    CHECK(accepted > 0 && accepted < 200, "%d accepted", accepted);
}

TEST(a_hundred_thousand_tensors_open_within_a_second) {
    FILE* f = fopen(file, "wb");
    char* text = NULL;
    size_t length = 0;
    FILE* header = open_memstream(&text, &length);
    fputc('{', header);
    for (int i = 0; i < 100000; i++) {
        fprintf(header, "%s\"t%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}", i ? "," : "", i, 99999 - i,
                100000 - i);
    }
    fputc('}', header);
    fclose(header);
    const uint64_t n = length;
    fwrite(&n, 1, 8, f);
    fwrite(text, 1, length, f);
    for (int i = 0; i < 100000; i++) { fputc(i & 255, f); }
    fclose(f);
    free(text);
    SafeTensors st;
    const double start = now_seconds();
    CHECK(opens(&st) && st.count == 100000, "%s", error.msg);
    CHECK(now_seconds() - start < 5, "took %.2f s", now_seconds() - start);
    const SafeTensor* t = safetensors_find(&st, "t99000");
    unsigned char byte = 0;
    CHECK(t && safetensors_read_raw(&st, t, 0, 1, &byte, &error) && byte == (999 & 255), "t99000 is %d", byte);
    safetensors_close(&st);
}

TEST(sixteen_bit_floats_survive_the_way_there_and_back) {
    int wrong = 0;
    for (uint32_t h = 0; h < 65536; h++) {
        const float b = f32_from_bf16((uint16_t)h), x = f32_from_f16((uint16_t)h);
        wrong += isnan(b) ? !isnan(f32_from_bf16(bf16_from_f32(b))) : bf16_from_f32(b) != h;
        wrong += isnan(x) ? !isnan(f32_from_f16(f16_from_f32(x))) : f16_from_f32(x) != h;
    }
    CHECK(wrong == 0, "%d values changed", wrong);
    // every value between two neighbours rounds to the nearer one, the middle to the even one
    for (uint32_t h = 0; h < 0x7BFF; h++) {
        const double a = (double)f32_from_f16((uint16_t)h), b = (double)f32_from_f16((uint16_t)(h + 1)), mid = (a + b) / 2;
        const uint32_t even = h % 2 ? h + 1 : h;
        wrong += f16_from_f32((float)mid) != even || f16_from_f32(nextafterf((float)mid, 0)) != h ||
                 f16_from_f32(nextafterf((float)mid, 1e30f)) != h + 1;
        wrong += f16_from_f32(-(float)mid) != (even | 0x8000);
    }
    for (uint32_t h = 0; h < 0x7F7F; h++) {
        const uint32_t mid = h << 16 | 0x8000, even = h % 2 ? h + 1 : h;
        wrong += bf16_from_f32(float_from_bits(mid)) != even || bf16_from_f32(float_from_bits(mid - 1)) != h ||
                 bf16_from_f32(float_from_bits(mid + 1)) != h + 1;
    }
    CHECK(wrong == 0, "%d values rounded the wrong way", wrong);
    CHECK(f16_from_f32(65504) == 0x7BFF && f16_from_f32(65519.996f) == 0x7BFF && f16_from_f32(65520) == 0x7C00 &&
              f16_from_f32(-1e30f) == 0xFC00,
          "f16 overflow");
    CHECK(f16_from_f32(1e-9f) == 0 && f16_from_f32(-1e-9f) == 0x8000 && f16_from_f32(5.9604645e-8f) == 1, "f16 underflow");
    CHECK(bf16_from_f32(3.4e38f) == 0x7F80 && bf16_from_f32(INFINITY) == 0x7F80 && f16_from_f32(INFINITY) == 0x7C00,
          "infinity");
    CHECK(isnan(f32_from_bf16(bf16_from_f32(float_from_bits(0x7F800001)))), "a NaN with small bits became infinity");
}

TEST(the_checksum_is_crc32c_in_any_pieces) {
    CHECK(crc_of("123456789", 9) == 0xE3069283u, "%08x", crc_of("123456789", 9));  // RFC 3720's check value
    unsigned char zeros[32] = {0};
    CHECK(crc_of(zeros, 32) == 0x8A9136AAu, "%08x", crc_of(zeros, 32));  // RFC 3720, B.4
    CHECK(crc_of("", 0) == 0, "empty");
    unsigned char data[1000];
    for (int i = 0; i < 1000; i++) { data[i] = (unsigned char)(i * 7 + i / 3); }
    for (size_t cut = 0; cut <= 1000; cut++) {
        Crc c;
        crc_begin(&c);
        crc_add(&c, data, cut);
        crc_add(&c, data + cut, 1000 - cut);
        CHECK(crc_end(&c) == crc_of(data, 1000), "cut at %zu", cut);
    }
}

TEST(checksums_of_parts_make_that_of_the_whole_in_any_order) {
    unsigned char bytes[1000];
    for (int i = 0; i < 1000; i++) { bytes[i] = (unsigned char)(i * i * 31 + i); }
    for (size_t cut = 0; cut <= 1000; cut += 37) {
        for (size_t second = cut; second <= 1000; second += 91) {
            uint32_t sum = crc_of(bytes + second, 1000 - second);
            sum ^= crc_shift(crc_of(bytes, cut), 1000 - cut);
            sum ^= crc_shift(crc_of(bytes + cut, second - cut), 1000 - second);
            CHECK(sum == crc_of(bytes, 1000), "cut at %zu and %zu", cut, second);
        }
    }
    // more bytes after a part than memory holds: shifting in two steps equals shifting in one
    const uint64_t far = (uint64_t)1 << 45;
    CHECK(crc_shift(crc_shift(0xE3069283u, far + 7), far - 9) == crc_shift(0xE3069283u, 2 * far - 2), "far shifts");
}

int main(void) {
    file = test_path(test_folder(), "f.safetensors");
    return test_all();
}
