/* occupancy.cuh -- how many blocks of a kernel a multiprocessor holds at a time, by compute capability. Limits: CUDA C++
 * Programming Guide, "Technical Specifications per Compute Capability". The driver answers for the card that is present
 * (blocks_at_once() in cuda_common.cuh). resident_blocks() needs no card, so tiles can be checked for other cards.
 */
#ifndef LLMC_OCCUPANCY_CUH
#define LLMC_OCCUPANCY_CUH

/* The limits of a multiprocessor. Each one has 65,536 registers, in four parts. */
typedef struct {
    int shared;    // bytes of shared memory
    int reserved;  // of them, the driver's own in each block
    int threads, blocks;
} Multiprocessor;

enum { REGISTERS_OF_PART = 16384, MOST_REGISTERS = 255 /* of a thread */ };

/* capability: as 75 or 120 */
constexpr Multiprocessor multiprocessor_of(int capability) {
    switch (capability) {
        case 75: return {64 << 10, 0, 1024, 16};
        case 80: return {164 << 10, 1 << 10, 2048, 32};
        case 87: return {164 << 10, 1 << 10, 1536, 16};
        case 86:
        case 88: return {100 << 10, 1 << 10, 1536, 16};
        case 89:
        case 120:
        case 121: return {100 << 10, 1 << 10, 1536, 24};
        case 110: return {228 << 10, 1 << 10, 1536, 24};
        default: return {228 << 10, 1 << 10, 2048, 32};  // 90, 100, 103
    }
}

constexpr int least_of(int a, int b) { return a < b ? a : b; }

/* Returns the blocks that run on a multiprocessor at a time. threads: of a block   registers: of a thread
 * shared: bytes of a block, static and dynamic */
constexpr int resident_blocks(Multiprocessor m, int threads, int registers, int shared) {
    const int warps = (threads + 31) / 32, warp_registers = (registers * 32 + 255) / 256 * 256;
    const int by_registers = REGISTERS_OF_PART / warp_registers * 4 / warps;
    const int bytes = (shared + m.reserved + 127) / 128 * 128, by_shared = bytes > 0 ? m.shared / bytes : m.blocks;
    return least_of(least_of(m.threads / (warps * 32), m.blocks), least_of(by_registers, by_shared));
}

#endif
