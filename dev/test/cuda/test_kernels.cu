/* test_kernels.cu -- compares every CUDA layer except attention with its CPU oracle, on a real GPU. The tests are in kernels/.
 *
 *   make build/test_kernels_cu PRECISION=FP32 && build/test_kernels_cu [WORD]     only the tests whose name contains WORD
 *
 * Inputs are random and rounded to the build's type before the oracle sees them. Every output starts as NaN (bytes 0xFF), has
 * padded rows if the layer allows them, and is followed by a guard; padding and guards must not change. Every launch runs
 * twice, on fresh memory, and must give the same bits. Tolerances: fp32 1e-5; 16-bit builds half a unit in the last place of
 * the result (at most 1/256 or 1/2048 of it), because the arithmetic is in fp32.
 */
#pragma nv_diag_suppress 1675  // matmul.h: pragmas for GCC
#include "kernels/adamw.cuh"
#include "kernels/crossentropy.cuh"
#include "kernels/embedding.cuh"
#include "kernels/fp8.cuh"
#include "kernels/gradients.cuh"
#include "kernels/heads.cuh"
#include "kernels/joined.cuh"
#include "kernels/lora.cuh"
#include "kernels/matmul.cuh"
#include "kernels/muon.cuh"
#include "kernels/rmsnorm.cuh"
#include "kernels/rope.cuh"
#include "kernels/step.cuh"
#include "kernels/swiglu.cuh"

static const struct {
    const char* name;
    void (*run)();
    bool needs_gpu;
} tests[] = {
#define HOST_ENTRY(test) \
    { #test, test, false }
#define ENTRY(test) \
    { #test, test, true }
    // first, since it starts other processes
    HOST_ENTRY(more_rows_than_a_grid_has_room_for_are_refused),
    HOST_ENTRY(split_weights_are_exact),
    HOST_ENTRY(stochastic_rounding_is_to_a_neighbour),
    ENTRY(embedding_copies_and_sums_rows),
    ENTRY(embedding_sort_is_stable),
    ENTRY(embedding_gradient_misses_no_row),
    ENTRY(rmsnorm_forward_agrees),
    ENTRY(rmsnorm_backward_adds_to_both_gradients),
    ENTRY(rope_turns_q_and_k_and_leaves_v),
    ENTRY(heads_are_packed_and_unpacked),
    ENTRY(attention_by_heads_is_that_over_whole_rows),
    ENTRY(swiglu_agrees_in_place_and_apart),
    ENTRY(crossentropy_agrees_for_all_vocabularies),
    ENTRY(crossentropy_plans_agree),
    ENTRY(crossentropy_shows_what_is_not_finite),
    ENTRY(the_first_not_finite_is_found),
    ENTRY(norm_and_loss_sums_agree),
    ENTRY(ordered_sums_agree),
    ENTRY(losses_add_up_by_source),
    ENTRY(decisions_follow_the_host),
    ENTRY(a_step_is_divided_by_its_trained_targets),
    ENTRY(loss_scale_halves_and_doubles),
    ENTRY(adamw_agrees_in_all_forms),
    ENTRY(adamw_takes_gradients_from_a_window),
    ENTRY(a_skipped_step_changes_nothing),
    ENTRY(quotients_and_roots_are_rounded),
    ENTRY(adamw_rounds_each_operation),
    ENTRY(muon_agrees_in_all_forms),
    ENTRY(newton_schulz_is_no_worse_than_pytorch_s),
    ENTRY(newton_schulz_by_half_is_near_the_whole),
#ifdef PRECISION_BF16
    ENTRY(small_steps_survive_on_average),
    ENTRY(small_steps_of_muon_survive_on_average),
#endif
    HOST_ENTRY(gradients_of_a_third_norm_have_a_place),
    HOST_ENTRY(element_sizes_are_those_of_the_types),
    ENTRY(matmul_agrees_in_all_directions),
    ENTRY(every_candidate_agrees_and_repeats_its_bits),
    ENTRY(matmul_plans_survive_a_file),
    ENTRY(quantised_rows_are_the_oracle_s),
    ENTRY(quantised_weights_are_the_oracle_s),
    ENTRY(rmsnorm_quantises_what_it_writes),
    ENTRY(swiglu_quantises_what_it_writes),
#ifndef PRECISION_FP32
    ENTRY(tiles_of_a_product_are_taken_once),
    ENTRY(a_product_joins_where_it_gains),
    ENTRY(swiglu_joins_its_product),
    ENTRY(rope_joins_its_product),
    ENTRY(a_half_has_the_bits_of_the_whole),
#endif
    ENTRY(transposes_are_the_oracle_s),
    ENTRY(products_of_quantised_rows_agree),
    ENTRY(weights_gradients_of_transposes_agree),
    ENTRY(lora_agrees_with_its_oracle),
};

int main(int argc, char** argv) {
    int devices = 0;
    const bool gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    printf("CUDA layers, " PRECISION_NAME "\n");
    for (auto& test : tests) {
        if (argc > 1 && !strstr(test.name, argv[1])) { continue; }
        if (!gpu && test.needs_gpu) {
            SKIP(test.name, "no GPU here");
            continue;
        }
        test_run(test.name, test.run);
    }
    return test_summary();
}
