/* occupancy.cuh -- tests of llmc/cuda/occupancy.cuh: NVIDIA's calculator agrees, and what attention gets on each card. */
#ifndef TEST_OCCUPANCY_CUH
#define TEST_OCCUPANCY_CUH

#include "llmc/attention.cuh"
#include "dev/test/test.h"

#include <cuda_occupancy.h>

#include <initializer_list>

/* The function that counts resident blocks gives what NVIDIA's calculator gives. */
static void resident_blocks_are_those_of_the_toolkit(void) {
    for (int capability : {75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121}) {
        const Multiprocessor m = multiprocessor_of(capability);
        const int most = m.shared - m.reserved;
        cudaOccDeviceProp card = {};
        card.computeMajor = capability / 10, card.computeMinor = capability % 10, card.warpSize = 32, card.numSms = 1;
        card.maxThreadsPerBlock = 1024, card.maxThreadsPerMultiprocessor = m.threads;
        card.regsPerBlock = card.regsPerMultiprocessor = 65536;
        card.sharedMemPerBlock = 48 << 10, card.sharedMemPerBlockOptin = (size_t)most;
        card.sharedMemPerMultiprocessor = (size_t)m.shared, card.reservedSharedMemPerBlock = (size_t)m.reserved;
        cudaOccDeviceState state = {};
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        for (int threads : {32, 96, 128, 160, 256, 384, 1000, 1024}) {
            for (int registers : {16, 40, 63, 65, 128, 168, 234, 255}) {
                cudaOccFuncAttributes kernel = {};
                kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers;
                kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = (size_t)most;
                for (int shared : {0, 1000, 24576, 32768, 33280, 49664, 66560, 99328, most}) {
                    cudaOccResult want;
                    if (shared > most) { continue; }
                    const cudaOccError status =
                        cudaOccMaxActiveBlocksPerMultiprocessor(&want, &card, &kernel, &state, threads, (size_t)shared);
                    const int got = resident_blocks(m, threads, registers, shared);
                    CHECK(status == CUDA_OCC_SUCCESS && got == want.activeBlocksPerMultiprocessor,
                          "sm_%d, %d threads of %d registers, %d bytes: %d, wanted %d", capability, threads, registers, shared,
                          got, want.activeBlocksPerMultiprocessor);
                }
            }
        }
    }
}

#ifndef PRECISION_FP32
/* The warps of a multiprocessor with 64, 100, 164 and 228 KB of shared memory; the table of dev/doc/cards.md. Four warps are
 * one a scheduler, so that nothing hides a wait. */
static void attention_has_these_warps_on_each_card(void) {
#define WARPS(Tiles, capability) (mma_blocks<Tiles>(capability) * Tiles::THREADS / 32)
#define ASYNC_ROW(HD, part)                                                                                           \
    {                                                                                                                 \
#part, HD, { 0, WARPS(MmaTiles<HD>::part, 86), WARPS(MmaTiles<HD>::part, 80), WARPS(MmaTiles<HD>::part, 90) } \
    }
#define ROW_75(HD, part)                                      \
    {                                                         \
#part, HD, { WARPS(MmaTiles<HD>::part, 75), 0, 0, 0 } \
    }
    struct Row {
        const char* part;
        int HD, warps[4];
    };
    const Row got[] = {ASYNC_ROW(64, Forward),  ASYNC_ROW(64, BackwardKV),  ASYNC_ROW(64, BackwardQ),
                       ASYNC_ROW(128, Forward), ASYNC_ROW(128, BackwardKV), ASYNC_ROW(128, BackwardQ),
                       ROW_75(64, Forward75),   ROW_75(64, BackwardKV75),   ROW_75(64, BackwardQ75),
                       ROW_75(128, Forward75),  ROW_75(128, BackwardKV75),  ROW_75(128, BackwardQ75)};
    const int want[][4] = {{0, 8, 8, 8}, {0, 4, 8, 8}, {0, 4, 8, 8}, {0, 8, 8, 8}, {0, 4, 4, 8}, {0, 4, 4, 8},
                           {8, 0, 0, 0}, {4, 0, 0, 0}, {8, 0, 0, 0}, {8, 0, 0, 0}, {4, 0, 0, 0}, {4, 0, 0, 0}};
    for (size_t i = 0; i < sizeof got / sizeof *got; i++) {
        for (int k = 0; k < 4; k++) {
            CHECK(got[i].warps[k] == want[i][k], "%s, head_dim %d, card %d: %d warps, wanted %d", got[i].part, got[i].HD, k,
                  got[i].warps[k], want[i][k]);
        }
    }
}
#endif

#endif
