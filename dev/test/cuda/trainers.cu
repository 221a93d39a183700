/* trainers.cu -- train_llama3cu, test_llama3cu and test_determinism_cu as one program, for CI: all three hold the trainer's
 * kernels, which take long to compile. The name by which the program is started says which of them runs.
 *
 *   make build/trainers_cu && ln build/trainers_cu build/test_llama3cu
 */
#include <errno.h>

#define main train_llama3cu_main
#include "dev/test/cuda/run_of_flags.cuh"
#undef main
#define main test_llama3cu_main
#include "test_llama3.cu"
#undef main
#define main test_determinism_cu_main
#include "dev/test/cuda/test_determinism.cu"
#undef main

int main(int argc, char** argv) {
    const char* name = program_invocation_short_name;
    return strcmp(name, "train_llama3cu") == 0  ? train_llama3cu_main(argc, argv)
           : strcmp(name, "test_llama3cu") == 0 ? test_llama3cu_main(argc, argv)
                                                : test_determinism_cu_main(argc, argv);
}
