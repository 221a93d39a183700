/* test_head_rows.c -- how many tokens' logits a GPU holds: by the model, the batch and the build alone. */
#include "llmc/run/head_rows.h"
#include "test.h"

static size_t rows(const char* preset, int lora, bool train, size_t tokens, size_t element) {
    ModelConfig c;
    if (!config_preset(&c, preset, 32768)) { die("%s is no preset", preset); }
    c.lora.rank = lora;
    return head_rows_below(8192, &c, train, tokens, element);
}

static void large_chunks_need_a_head_that_is_summed_up(void) {
    CHECK(rows("d12", 0, true, 65536, 2) == 8192, "126M");
    CHECK(rows("llama3.2-1b", 0, true, 32768, 2) == 8192, "1B");
    CHECK(rows("llama3.1-8b", 0, true, 8192, 2) == 8192, "8B");
    CHECK(rows("d12", 0, true, 4097, 2) == 8192, "two chunks of 4096");
    CHECK(rows("d12", 0, true, 4096, 2) == 4096, "one chunk of 4096");
    CHECK(rows("d12", 8, true, 65536, 2) == 4096, "a frozen head");
    CHECK(rows("d12", 0, false, 65536, 2) == 4096, "an evaluation");
}

static void logits_grow_by_no_more_than_the_head_takes(void) {
    CHECK(rows("d8", 0, true, 65536, 2) == 8192, "C = 512");
    CHECK(rows("d7", 0, true, 65536, 2) == 4096, "C = 448");
    CHECK(rows("d16", 0, true, 65536, 4) == 8192, "C = 1024 in fp32");
    CHECK(rows("d15", 0, true, 65536, 4) == 4096, "C = 960 in fp32");
}

static void a_build_without_the_flag_has_chunks_of_4096(void) {
    ModelConfig c;
    if (!config_preset(&c, "llama3.1-8b", 128256)) { die("llama3.1-8b is no preset"); }
    CHECK(head_rows(&c, true, 65536, 2) == LLMC_HEAD_ROWS && LLMC_HEAD_ROWS == 4096, "%d", LLMC_HEAD_ROWS);
}

int main(void) {
    RUN(large_chunks_need_a_head_that_is_summed_up);
    RUN(logits_grow_by_no_more_than_the_head_takes);
    RUN(a_build_without_the_flag_has_chunks_of_4096);
    return test_summary();
}
