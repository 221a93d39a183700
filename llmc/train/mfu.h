/* mfu.h -- FLOPs per token, peak FLOP/s of GPUs, and their ratio, the model FLOPs utilization (MFU).
 *
 *   FLOPs per token = 6 * (matmul weights, with the head, without the embedding) + 6 * L * NH * HD * T
 *
 * The forward pass takes 2 FLOPs per weight and token, the backward pass twice that. Attention's two products take
 * 2 * 2 * NH * HD FLOPs per pair of positions. The causal half leaves T/2 pairs per token: 2 * NH * HD * T FLOPs forward,
 * 6 * NH * HD * T in all. MFU (Chowdhery et al., "PaLM", 2022, appendix B) is the achieved rate over the device's dense
 * peak. Recomputation does not count. With LoRA the backward pass computes no gradient of the frozen
 * weights: they take 4 FLOPs, the adapters 6.
 *
 * The table holds dense peaks in TFLOP/s from NVIDIA's data sheets (tensor cores, fp32 accumulation, no sparsity) at the
 * boost clock of the named board. A card that is not in the table has no MFU: it is left out, never guessed.
 */
#ifndef LLMC_MFU_H
#define LLMC_MFU_H

#include "llmc/base/utils.h"  // first, since it asks for the functions beyond C11
#include "llmc/config.h"      // defines: ModelConfig, ParamTable, q_width
#include <strings.h>

typedef enum { PEAK_FP32, PEAK_TF32, PEAK_FP16, PEAK_BF16, NUM_PEAKS } PeakKind;

typedef struct {
    const char* name;  // its words must all be in the device's name, in this order; the first match wins
    double tflops[NUM_PEAKS];
} GpuPeak;

// clang-format off
static const GpuPeak gpu_peaks[] = {
    // name                fp32   tf32    fp16    bf16; 0: the card has no such units
    {"B300",              {75.0, 1100.0, 2250.0, 2250.0}},
    {"B200",              {75.0, 1100.0, 2250.0, 2250.0}},
    {"GH200",             {67.0,  494.7,  989.4,  989.4}},
    {"H200 NVL",          {60.0,  417.5,  835.5,  835.5}},
    {"H200",              {67.0,  494.7,  989.4,  989.4}},
    {"H100 NVL",          {60.0,  417.5,  835.5,  835.5}},
    {"H100 PCIe",         {51.2,  378.0,  756.5,  756.5}},
    {"H100",              {67.0,  494.7,  989.4,  989.4}},
    {"H800",              {67.0,  494.7,  989.4,  989.4}},
    {"H20",               {44.0,   74.0,  148.0,  148.0}},
    {"A100",              {19.5,  156.0,  312.0,  312.0}},
    {"A800",              {19.5,  156.0,  312.0,  312.0}},
    {"A40",               {37.4,   74.8,  149.7,  149.7}},
    {"A30",               {10.3,   82.5,  165.1,  165.1}},
    {"A10G",              {31.5,   35.0,   70.0,   70.0}},
    {"A10",               {31.2,   62.5,  125.0,  125.0}},
    {"A2",                { 4.5,    9.0,   18.0,   18.0}},
    {"L40S",              {91.6,  183.0,  362.0,  362.0}},
    {"L40",               {90.5,   90.5,  181.0,  181.0}},
    {"L4",                {30.3,   60.0,  121.0,  121.0}},
    {"T4",                { 8.1,    0.0,   65.0,    0.0}},
    {"V100 PCIE",         {14.0,    0.0,  112.0,    0.0}},
    {"V100",              {15.7,    0.0,  125.0,    0.0}},
    {"RTX PRO 6000",      {125.0, 251.9,  503.8,  503.8}},
    {"RTX 6000 Ada",      {91.1,  182.1,  364.2,  364.2}},
    {"RTX A6000",         {38.7,   77.4,  154.8,  154.8}},
    {"RTX 5090",          {104.8, 104.8,  209.5,  209.5}},
    {"RTX 5080",          {56.3,   56.3,  112.6,  112.6}},
    {"RTX 5070 Ti",       {43.9,   43.9,   87.9,   87.9}},
    {"RTX 5070",          {30.9,   30.9,   61.7,   61.7}},
    {"RTX 4090 D",        {73.5,   73.5,  147.0,  147.0}},
    {"RTX 4090",          {82.6,   82.6,  165.2,  165.2}},
    {"RTX 4080 SUPER",    {52.2,   52.2,  104.4,  104.4}},
    {"RTX 4080",          {48.7,   48.7,   97.5,   97.5}},
    {"RTX 4070 Ti SUPER", {44.1,   44.1,   88.2,   88.2}},
    {"RTX 4070 Ti",       {40.1,   40.1,   80.2,   80.2}},
    {"RTX 4070 SUPER",    {35.5,   35.5,   71.0,   71.0}},
    {"RTX 4070",          {29.1,   29.1,   58.3,   58.3}},
    {"RTX 4060 Ti",       {22.1,   22.1,   44.1,   44.1}},
    {"RTX 4060",          {15.1,   15.1,   30.2,   30.2}},
    {"RTX 3090 Ti",       {40.0,   40.0,   80.0,   80.0}},
    {"RTX 3090",          {35.6,   35.6,   71.2,   71.2}},
    {"RTX 3080 Ti",       {34.1,   34.1,   68.2,   68.2}},
    {"RTX 3080",          {29.8,   29.8,   59.5,   59.5}},
    {"RTX 3070",          {20.3,   20.3,   40.6,   40.6}},
    {"RTX 3060",          {12.7,   12.7,   25.4,   25.4}},
    {"RTX 2080 Ti",       {13.4,    0.0,   53.8,    0.0}},
};
// clang-format on

/* Returns the FLOPs of forward and backward per token, in rows of T tokens. */
static inline double flops_per_token(const ModelConfig* c, const ParamTable* t, int T) {
    const double attention = 6.0 * c->num_layers * (double)q_width(c) * T;
    if (c->lora.rank == 0) { return 6.0 * (double)t->num_matmul + attention; }
    ParamTable adapters = trained_table(c);
    const double trained = 6.0 * (double)adapters.num_params;
    param_table_free(&adapters);
    return 4.0 * (double)t->num_matmul + trained + attention;
}

/* Returns whether `name` contains the words of `pattern`, whole and in order: "A10" is not in "NVIDIA A100"; "H100 NVL" is in
 * "NVIDIA H100 NVL" and in "H100-80GB NVL". */
static inline bool gpu_name_fits(const char* name, const char* pattern) {
    static const char gaps[] = " -_/()";
    while (*pattern) {
        size_t want = strcspn(pattern, " ");
        bool found = false;
        while (!found && *name) {
            name += strspn(name, gaps);
            size_t have = strcspn(name, gaps);
            found = have == want && strncasecmp(name, pattern, want) == 0;
            name += have;
        }
        if (!found) { return false; }
        pattern += want + (pattern[want] == ' ');
    }
    return true;
}

/* Returns the dense peak of a device in FLOP/s by the driver's name for it; 0: unknown. MIG instances, and laptop boards, which
 * run at another clock under the same name, are unknown. */
static inline double gpu_peak_flops(const char* device_name, PeakKind kind) {
    static const char* const others[] = {"Laptop", "Max-Q", "MIG"};
    for (int i = 0; i < 3; i++) {
        if (strstr(device_name, others[i])) { return 0.0; }
    }
    for (size_t i = 0; i < sizeof gpu_peaks / sizeof *gpu_peaks; i++) {
        if (gpu_name_fits(device_name, gpu_peaks[i].name)) { return gpu_peaks[i].tflops[kind] * 1e12; }
    }
    return 0.0;
}

/* Writes the MFU, such as "41.2%", or if `peak` is 0 (a CPU or an unknown card) the FLOP/s, such as "57.3G". Returns `out`. */
static inline const char* mfu_text(double flops_per_second, double peak, char* out, size_t cap) {
    if (!(flops_per_second > 0)) {
        snprintf(out, cap, "-");
    } else if (peak > 0) {
        snprintf(out, cap, "%.1f%%", 100.0 * flops_per_second / peak);
    } else if (flops_per_second < 1e9) {
        snprintf(out, cap, "%.3gM", flops_per_second * 1e-6);
    } else if (flops_per_second < 999.5e9) {
        snprintf(out, cap, "%.3gG", flops_per_second * 1e-9);
    } else {
        snprintf(out, cap, "%.3gT", flops_per_second * 1e-12);
    }
    return out;
}

#endif
