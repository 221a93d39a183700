/* fuzz_matmul_plans.c -- reads the bytes as a plan file of matrix products. Accepted plans must survive writing and reading,
 * and a second read into too small an array must be refused. */
#include "fuzz.h"
#include "llmc/files/matmul_plans.h"

enum { MOST = 16 };

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const MatmulSetup here = {"H", 132, 12, 64, 68};
    MatmulChoice choices[MOST], back[MOST];
    int count = 0, again = 0;
    bool elsewhere = false;
    Error e = NO_ERROR;
    const char* path = fuzz_file(data, size);
    const bool ok = matmul_plans_read(path, &here, choices, MOST, &count, &elsewhere, &e);
    fuzz_check_error(ok, &e);
    if (!ok) {
        REQUIRE(count == 0);
        return 0;
    }
    REQUIRE(count <= MOST);
    if (!matmul_plans_write(path, &here, choices, count, &e) ||
        !matmul_plans_read(path, &here, back, MOST, &again, &elsewhere, &e)) {
        die("%s", e.msg);
    }
    REQUIRE(again == count);
    for (int i = 0; i < count; i++) {
        REQUIRE(memcmp(&choices[i].key, &back[i].key, sizeof back[i].key) == 0);
        REQUIRE(memcmp(choices[i].algo, back[i].algo, sizeof back[i].algo) == 0);
    }
    REQUIRE(count == 0 || !matmul_plans_read(path, &here, back, count - 1, &again, &elsewhere, &e));
    return 0;
}
