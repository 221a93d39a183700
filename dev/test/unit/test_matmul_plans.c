/* test_matmul_plans.c -- plan files: the reader returns the written plans. It refuses any other file in one line that names the
 * file, the field, what it found and what it wanted. */
#include "llmc/files/matmul_plans.h"
#include "dev/test/test.h"

enum { MAX_CHOICES = 3 };

static const MatmulSetup setup = {"NVIDIA H200", 132, 130000, 33554432, 68};
static const char* path;

TEST(choices_survive_a_file) {
    MatmulChoice choices[2], read[MAX_CHOICES];
    Error e = NO_ERROR;
    int count = 0;
    bool elsewhere = true;
    memset(choices, 0, sizeof choices);
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < NUM_KEY_FIELDS; k++) { choices[i].key.v[k] = (int64_t)1 << (2 * k + i); }
        for (int k = 0; k < MATMUL_ALGO_WORDS; k++) { choices[i].algo[k] = 0xfedcba9876543210u >> (4 * k + i); }
    }
    CHECK(matmul_plans_write(path, &setup, choices, 2, &e), "%s", e.msg);
    CHECK(matmul_plans_read(path, &setup, read, MAX_CHOICES, &count, &elsewhere, &e), "%s", e.msg);
    CHECK(count == 2 && memcmp(choices, read, sizeof choices) == 0, "%d choices, or other ones, came back", count);
    MatmulSetup smaller = setup;
    smaller.sms = 114;
    Error other = NO_ERROR;
    CHECK(!matmul_plans_read(path, &smaller, read, MAX_CHOICES, &count, &elsewhere, &other) && elsewhere,
          "a card of 114 takes it");
    CHECK(!matmul_plans_read(path, &setup, read, 1, &count, &elsewhere, &e) && count == 0, "2 choices fit into 1");
    CHECK(strstr(e.msg, "plans is an array, wanted an array of at most 1"), "%s", e.msg);
}

/* Writes `text` and checks that reading it as a plan file fails with `wanted` after the file's name, in one line.
 * made_elsewhere: it is a plan file, of another setup */
static void refused_as(bool made_elsewhere, const char* text, const char* wanted) {
    MatmulChoice read[MAX_CHOICES];
    Error e = NO_ERROR;
    int count = 7;
    bool elsewhere = !made_elsewhere;
    FILE* f = fopen(path, "w");
    CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0, "%s: cannot be written", path);
    const bool ok = matmul_plans_read(path, &setup, read, MAX_CHOICES, &count, &elsewhere, &e);
    CHECK(!ok && count == 0, "taken: %s", text);
    CHECK(elsewhere == made_elsewhere, "made elsewhere: %d, wanted %d: %s", elsewhere, made_elsewhere, text);
    CHECK(strncmp(e.msg, path, strlen(path)) == 0 && strstr(e.msg, wanted) && !strchr(e.msg, '\n'), "%s, wanted '%s'", e.msg,
          wanted);
}

static void refused(const char* text, const char* wanted) { refused_as(false, text, wanted); }

TEST(other_files_are_refused) {
    refused("", "is an empty file, wanted JSON text");
    refused("GGUF\003", "is a GGUF file, wanted JSON text");
    refused("once upon a time\n", ":1:1: found 'o', wanted a value");
    refused("[1]", "format is missing, wanted \"llama3.c matmul plans\"");
    refused("{\"model_type\": \"llama\"}", "format is missing, wanted \"llama3.c matmul plans\"");
    refused("{\"format\": \"pt\"}", "format is \"pt\", wanted \"llama3.c matmul plans\"");
    refused("{\"format\": 1}", "format is 1, wanted \"llama3.c matmul plans\"");
}

#define HEAD "{\"format\": \"llama3.c matmul plans\", "
#define HERE HEAD "\"gpu\": \"NVIDIA H200\", \"cublaslt\": 130000, \"workspace\": 33554432, \"compute\": 68, "

TEST(files_of_another_machine_are_refused) {
    refused(HEAD "\"cublaslt\": 130000}", "gpu is missing, wanted a string");
    refused_as(true, HEAD "\"gpu\": \"T4\", \"cublaslt\": 130000, \"workspace\": 33554432, \"compute\": 68, \"plans\": []}",
               "gpu is \"T4\", wanted \"NVIDIA H200\"");
    refused_as(true, HEAD "\"gpu\": \"NVIDIA H200\", \"cublaslt\": 7, \"workspace\": 33554432, \"compute\": 68, \"plans\": []}",
               "cublaslt is 7, wanted 130000");
    refused_as(true, HEAD "\"gpu\": \"NVIDIA H200\", \"cublaslt\": 130000, \"workspace\": 1, \"compute\": 68, \"plans\": []}",
               "workspace is 1, wanted 33554432 bytes");
    refused_as(true,
               HEAD "\"gpu\": \"NVIDIA H200\", \"cublaslt\": 130000, \"workspace\": 33554432, \"compute\": 77, \"plans\": []}",
               "compute is 77, wanted 68");
    refused_as(true, HERE "\"sms\": 114, \"plans\": []}", "sms is 114, wanted 132, those of this GPU");
    refused(HERE "\"sms\": \"many\", \"plans\": []}", "sms is \"many\", wanted an integer");
}

/* Files of older versions lack the number of multiprocessors. */
TEST(older_files_are_read) {
    MatmulChoice read[MAX_CHOICES];
    Error e = NO_ERROR;
    int count = 7;
    bool elsewhere = true;
    FILE* f = fopen(path, "w");
    CHECK(f && fputs(HERE "\"plans\": []}", f) >= 0 && fclose(f) == 0, "%s: cannot be written", path);
    CHECK(matmul_plans_read(path, &setup, read, MAX_CHOICES, &count, &elsewhere, &e) && count == 0 && !elsewhere, "%s", e.msg);
}

TEST(damaged_entries_are_refused) {
    refused(HERE "\"cut\": 1}", "plans is missing, wanted an array of at most 3");
    refused(HERE "\"plans\": {}}", "plans is an object, wanted an array of at most 3");
    refused(HERE "\"plans\": [1]}", "m is missing, wanted an integer");
    MatmulChoice choice;
    Error e = NO_ERROR;
    memset(&choice, 0, sizeof choice);
    CHECK(matmul_plans_write(path, &setup, &choice, 1, &e), "%s", e.msg);
    size_t size = 0;
    char* text = read_file(path, &size, 1 << 20, &e);
    char* digits = text ? strstr(text, "\"algo\": \"") : NULL;
    CHECK(digits, "no algorithm in the file: %s", e.msg);
    if (digits) {
        digits[10] = 'x';
        refused(text, "plans.0.algo is ");
        digits[10] = '0';
        memcpy(strstr(text, "align_d"), "align_x", 7);
        refused(text, "plans.0.align_d is missing, wanted an integer");
    }
    free(text);
}

TEST(equal_times_compare_as_equal) {
    const float x = 1.5f, y = 2.5f;
    CHECK(compare_floats(&x, &y) < 0 && compare_floats(&y, &x) > 0, "not in ascending order");
    CHECK(compare_floats(&x, &x) == 0, "a number differs from itself, which qsort does not allow");
}

int main(void) {
    path = test_path(test_folder(), "plan.json");
    return test_all();
}
