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
/* The launchers ask the driver; here it gives the numbers of the table by compute capability. */
static void multiprocessor_is_that_of_the_card(void) {
    const int capability =
        10 * device_attribute(cudaDevAttrComputeCapabilityMajor) + device_attribute(cudaDevAttrComputeCapabilityMinor);
    const Multiprocessor got = mma_multiprocessor(), want = multiprocessor_of(capability);
    CHECK(
        got.shared == want.shared && got.reserved == want.reserved && got.threads == want.threads && got.blocks == want.blocks,
        "card of %d: %d and %d bytes, %d threads, %d blocks", capability, got.shared, got.reserved, got.threads, got.blocks);
}

/* Checks the blocks and their warps that a multiprocessor with 64, 100, 164 and 228 KB of shared memory holds. */
template <typename List>
static void check_warps(const char* part, int HD, List list, std::initializer_list<const char*> want) {
    const int capabilities[] = {75, 86, 80, 90};
    for (size_t i = 0; i < want.size(); i++) {
        const Multiprocessor m = multiprocessor_of(capabilities[i]);
        const bool async = capabilities[i] >= 80;
        char got[32] = "";
        const auto print = [&](auto tiles) {
            const int warps = mma_warps<decltype(tiles)>(m, async);
            snprintf(got, sizeof got, "%d x %d", warps / tiles.WARPS, tiles.WARPS);
        };
        mma_choose(list, print, m, async);
        CHECK(strcmp(got, want.begin()[i]) == 0, "%s, head_dim %d, card of %d: %s warps, wanted %s", part, HD, capabilities[i],
              got, want.begin()[i]);
    }
}

/* Eight warps, two a scheduler, hide each other's waits: in one block, where shared memory holds only one and the block fits.
 * The table of dev/doc/cards.md. */
static void attention_has_these_warps_on_each_card(void) {
    check_warps("forward", 64, MmaTiles<64>::Forward(), {"2 x 4", "2 x 4", "2 x 4", "2 x 4"});
    check_warps("dK dV", 64, MmaTiles<64>::BackwardKV(), {"1 x 8", "1 x 8", "2 x 4", "2 x 4"});
    check_warps("dQ", 64, MmaTiles<64>::BackwardQ(), {"2 x 4", "1 x 8", "2 x 4", "2 x 4"});
    check_warps("forward", 128, MmaTiles<128>::Forward(), {"2 x 4", "2 x 4", "2 x 4", "2 x 4"});
    check_warps("dK dV", 128, MmaTiles<128>::BackwardKV(), {"1 x 4", "1 x 4", "1 x 8", "2 x 4"});
    check_warps("dQ", 128, MmaTiles<128>::BackwardQ(), {"1 x 4", "1 x 4", "1 x 8", "2 x 4"});
}
#endif

#endif
