#!/bin/sh
# test_emulated_layers.sh [kernels|passes] -- tests the kernels of the CUDA layers against their oracles; attention,
# test_llama3cu against PyTorch, and the smallest trials of test_determinism_cu; or all. They run on the emulated card
# (dev/test/emulator), built for several architectures. `make test-emulated` builds the programs and runs this. Times and memory
# are not tested, since the emulator's are no card's.
. dev/test/lib.sh
emulated=build/emulated

# emulated VARIANT PROGRAM ARGUMENT...: a test
emulated() {
    variant=$1 program=$2
    shift 2
    check "$program $*, $variant" timeout "${LIMIT:-300}" "$emulated/$variant/$program" "$@"
}

# every layer, without tests that measure products of real models' sizes; for older cards, the code that differs
tests_of_layers() { sed -n 's/^ *\(HOST_\)\{0,1\}ENTRY(\([a-z0-9_]*\)),$/\2/p' dev/test/cuda/test_kernels.cu; }
leave_out() { skip "test_kernels_cu $test, $variant" "FULL=1 runs it"; }
kernels() {
    for variant in FP32_90 BF16_90; do
        for test in $(tests_of_layers | grep -vE '^(every_candidate_agrees|matmul_agrees)'); do
            case $variant.$test in FP32*.tiles_of_a_product* | FP32*.a_half* | FP32*_joins* | FP32*.small_steps*) continue ;; esac # not in FP32
            # FP32 runs have the CPU trainer's losses, and their passes PyTorch's tensors; quotients are this processor's
            case ${FULL:-0}.$variant.$test in
                0.FP32*.* | 0.*.quotients*) leave_out && continue ;;
            esac
            case $test in # a card of four multiprocessors that holds three clusters
                tiles_of_a_product* | rope_joins*) export EMULATOR_CLUSTERS=3 ;;
            esac
            emulated "$variant" test_kernels_cu "$test"
            unset EMULATOR_CLUSTERS
        done
    done
    for test in crossentropy_plans_agree crossentropy_shows_what_is_not_finite swiglu_agrees_in_place_and_apart loss_scale_halves_and_doubles \
        muon_agrees_in_all_forms newton_schulz_is_no_worse_than_pytorch_s; do
        emulated FP16_75 test_kernels_cu $test
    done
}

# a card takes the kernels of the code that it loaded: without sm_90a's code, a card of 90 or newer has no wgmma
chosen() { # chosen CARD KERNEL
    EMULATOR_CAPABILITY=$1 timeout 60 $emulated/BF16_80/test_attention_cu mma more_blocks |
        grep "^BF16, code for sm_80; head_dim 64 runs $2 head_dim 128 runs $2$"
}

passes() {
    # attention by each of its kernels: plain loops, Hopper's products, older cards' products with and without asynchronous copies.
    # The copies do not depend on documents, and in FP32 test_llama3cu below runs the plain loops
    for kernel in FP32_90:plain BF16_90:plain BF16_90:wgmma BF16_80:mma FP16_75:mma; do
        for test in rows_with_scores documents_with_scores; do
            case ${FULL:-0}.$kernel.$test in
                0.FP16*.rows* | 0.FP32*) skip "test_attention_cu ${kernel#*:} $test, ${kernel%%:*}" "FULL=1 runs it" && continue ;;
            esac
            emulated "${kernel%%:*}" test_attention_cu "${kernel#*:}" $test
        done
    done

    # blocks of a walk wait for each other, but the emulated card runs blocks one after the other: so a walk gets one block
    for test in rows_with_scores_in_the_hundreds lengths_around_every_tile_edge gradients_turned_back walks_in_several; do
        check "test_attention_cu walk $test, BF16_90" env EMULATOR_PROCESSORS=1 timeout "${LIMIT:-300}" \
            "$emulated/BF16_90/test_attention_cu" walk $test
    done

    emulated BF16_90 test_attention_cu walk more_blocks_than_are_resident
    check "test_attention_cu wgmma a_part_of_a_card, 3 of 4 multiprocessors, BF16_90" env EMULATOR_PART=3 timeout "${LIMIT:-300}" \
        "$emulated/BF16_90/test_attention_cu" wgmma a_part_of_a_card

    for test in resident_blocks_are attention_has_these_warps; do emulated BF16_80 test_attention_cu mma $test; done

    for card in 80 90 100 120; do check "a card of $card with code for sm_80 runs mma, BF16_80" chosen $card mma; done
    # a card's shared memory decides which tiles of attention it takes, with and without documents: 164 KB above, here 228 and 100
    for card in 90 120; do
        for test in multiprocessor_is_that rows_with_scores documents_with_scores; do
            name="test_attention_cu mma $test on a card of $card, BF16_80"
            case ${FULL:-0}.$test in 0.rows*) skip "$name" "FULL=1 runs it" && continue ;; esac
            check "$name" env EMULATOR_CAPABILITY=$card timeout "${LIMIT:-300}" $emulated/BF16_80/test_attention_cu mma $test
        done
    done
    emulated BF16_80 test_attention_cu mma all_tiles_give_the_same_bits

    # the program's own passes against PyTorch's debug state, at each level of recomputation
    for pair in FP32_90:mha_odd FP32_90:gqa2_untied_rope8 FP32_90:documents FP32_90:lora_all \
                BF16_90:tied_gqa4_rope32 BF16_90:lora_some BF16_90:fp8 BF16_90:fp8_head; do
        emulated "${pair%%:*}" test_llama3cu "dev/test/pairs/${pair#*:}" "dev/test/pairs/${pair#*:}.state.safetensors"
    done

    # what lies among a step's gradients, and what a run sums in fp32; the other trials are too large here
    for variant in FP32_90 BF16_90; do emulated $variant test_determinism_cu gaps_between_tensors_stay_zero; done
    for test in activations_in_memory a_gradient_is_named a_run_sums_in_fp32; do emulated BF16_90 test_determinism_cu $test; done
}

case ${1:-} in
kernels) kernels ;;
passes) passes ;;
*) kernels; passes ;;
esac
summary
