#!/bin/sh
# test_gpu.sh [quick|all] [NAME or PATTERN...] -- runs the tests that need a real GPU, a list of named tests. The code is in
# dev/test/gpu: lanes.sh has the scheduler and the format of the list, the other files have the tests.
# --list prints the names, --commands the commands. NAME or PATTERN (grep -E) selects tests.
#
# Builds each precision, and PTX-only binaries for older architectures, in its own folder under build/gpu with the project's
# Makefile. Then runs lanes of tests in parallel. The tests that measure memory run last, alone. Prints
# "ok   NAME (seconds)" or "FAIL NAME" as tests end, and finally "N passed, N failed, N skipped". Without a GPU, skips and names
# every test. Each program has its own time limit. BUDGET=SECONDS limits the whole run (quick 230, all 2400): tests not
# ended by then are skipped and named. PYTHON, with torch and safetensors, writes the larger pairs. TEXT=FILE is the text to
# train on.
. dev/test/lib.sh
python=${PYTHON:-python3}
# shellcheck disable=SC1090
for part in lanes programs sanitizer trainer fp8 lora memory ranks lost_ranks hosts; do . "dev/test/gpu/$part.sh"; done

written="larger pairs are written by PyTorch" greedy="greedy text of a trained model is the CPU trainer's"

tests() {
    lane parity
    quick "test_llama3cu, FP32" program 240 fp32 test_llama3cu
    quick "test_llama3cu, BF16" program 240 bf16 test_llama3cu
    full "test_llama3cu, FP16" program 240 fp16 test_llama3cu
    for v in fp32 bf16 fp16 bf16_ptx80 fp16_ptx75; do full "test_attention, $v" program 150 $v test_attention_cu; done

    lane determinism
    quick "steps repeat their bits, FP32" program 240 fp32 test_determinism_cu
    quick "steps repeat their bits, BF16" program 240 bf16 test_determinism_cu
    full "steps repeat their bits, FP16" program 240 fp16 test_determinism_cu

    lane kernels
    quick "every layer against its oracle, fp32" program 120 fp32 test_kernels_cu
    quick "every layer against its oracle, bf16" program 120 bf16 test_kernels_cu
    quick "ptxas warns of no spills and of no serialized wgmma" compiler_is_content
    full "every layer against its oracle, fp16" program 120 fp16 test_kernels_cu
    full "every layer against its oracle, BF16 from sm_80 PTX" program 150 bf16_ptx80 test_kernels_cu
    full "every layer against its oracle, FP16 from sm_75 PTX" program 150 fp16_ptx75 test_kernels_cu
    full "committed pairs, BF16 from sm_80 PTX" committed 150 bf16_ptx80
    full "committed pairs, FP16 from sm_75 PTX" committed 150 fp16_ptx75
    full "Hopper's building blocks, BF16" program 60 bf16 test_wgmma_cu
    full "Hopper's building blocks, FP16" program 60 fp16 test_wgmma_cu

    lane pairs
    quick "$written" pairs_written
    quick after "$written" "larger pairs pass in FP32" pairs_pass fp32 1
    quick after "$written" "larger pairs pass in BF16" pairs_pass bf16 123
    full after "$written" "larger pairs pass in FP16" pairs_pass fp16 123
    full after "$written" "larger pairs pass in BF16 from sm_80 PTX" pairs_pass bf16_ptx80 1
    full after "$written" "larger pairs pass in FP16 from sm_75 PTX" pairs_pass fp16_ptx75 1

    lane sanitizer
    quick after "$written" "compute-sanitizer memcheck is silent on our kernels" sanitize memcheck bf16 tiny_hd64_s1 tiny_hd128_s1 tiny_hd12_s1
    for tool in racecheck synccheck initcheck; do
        full after "$written" "compute-sanitizer $tool is silent on our kernels" sanitize $tool bf16 tiny_hd64_s1 tiny_hd128_s1 tiny_hd12_s1
    done
    for tool in memcheck racecheck; do
        for v in bf16 fp32; do full "compute-sanitizer $tool is silent on kernels of several GPUs, $v" sanitize_kernels $tool $v; done
    done
    full after "$written" "compute-sanitizer memcheck, FP32" sanitize memcheck fp32 tiny_hd12_s1
    full after "$written" "compute-sanitizer racecheck, FP32" sanitize racecheck fp32 tiny_hd12_s1
    full after "$written" "compute-sanitizer initcheck, FP32, in memory that nothing filled" sanitize initcheck fp32 tiny_hd64_s1 tiny_hd12_s1

    lane faults
    full "faults planted into the kernels are caught" faults_are_caught 900 'test_(attention|kernels|llama3)|on-host'

    lane trainer
    quick "20 steps of FP32 have the CPU trainer's losses" cpu_and_gpu_train_alike
    quick "20 steps of FP32 from PyTorch's folder have the CPU trainer's losses" a_folder_trains_alike
    quick "20 steps over two sources have the CPU trainer's losses, source by source" a_mix_trains_alike
    quick "20 steps over rows of documents, with and without a mask, have the CPU trainer's losses" documents_train_alike
    quick "20 steps whole, and 10 and 10: the same bits, BF16" parts_are_the_whole bf16 bf16
    quick "$greedy" greedy_text_is_the_cpu_s
    quick "a captured graph changes no bit" graph_changes_no_bit
    quick "SwiGLU and RoPE joined with their products: the same bits captured, recomputed and resumed" joined_layers_have_one_result
    quick "plans of other choices travel with the checkpoint: the same bits" plans_are_carried one cu $long
    quick "a plan of another card or shape is not used, with one warning" plans_from_elsewhere_are_not_used
    quick "--profile prints a table" profile_has_a_table bf16
    quick "SIGINT ends with a checkpoint and status 0" ends_well_at INT
    quick "killed with -9 and resumed: nothing is lost" killed_runs_go_on "$(in_all && echo 8 || echo 3)"
    quick "FP16 finds its loss scale" fp16_finds_its_scale
    quick "what is not finite is never applied, BF16" what_is_not_finite_is_never_applied bf16
    full "what is not finite is never applied, FP32" what_is_not_finite_is_never_applied fp32
    full "--debug names the tensor that is not finite" debug_names_the_tensor
    quick "a bad token late in the data: the last step is saved, bit for bit" bad_token_saves_the_last_step
    quick "SIGTERM ends a validation" term_ends_a_validation
    quick "SIGUSR1 saves and the run goes on" usr1_saves_and_the_run_goes_on
    quick "ten steps that are not finite end the run, BF16" ruin_ends_the_run bf16
    full "ten steps that are not finite end the run, FP32" ruin_ends_the_run fp32
    quick "timed checkpoints change no bit, BF16" timed_checkpoints_change_no_bit bf16
    full "timed checkpoints change no bit, FP16" timed_checkpoints_change_no_bit fp16
    quick "a weight that is nan is refused by name" nan_is_refused
    full "--plan is read by every job, and refused where it is something else" plan_is_for_every_job
    full "10 and 10: the same bits, split master and bf16 moments" parts_are_the_whole bf16 split --master split --moments bf16
    quick "10 and 10: the same bits, no master weights and bf16 moments" parts_are_the_whole bf16 none --master none --moments bf16
    full "10 and 10: the same bits, no master weights and fp32 moments, blocks recomputed, no graph" parts_are_the_whole bf16 none_fp32 --master none --recompute block --no-graph
    full "no master weights train like fp32 ones" no_master_trains_alike
    full "10 and 10: the same bits, fp32 gradients in 4 micro-batches" parts_are_the_whole bf16 micro --grad-dtype fp32 --batch 2 --total-batch 8192
    full "10 and 10: the same bits, FP16 with its loss scale" parts_are_the_whole fp16 fp16
    full "10 and 10: the same bits, FP32, block recomputed" parts_are_the_whole fp32 fp32 --recompute block
    full "10 and 10: the same bits, weights saved as F32" parts_are_the_whole bf16 f32 --export-dtype f32
    full "FP32, BF16 and FP16 train alike" precisions_train_alike
    full "TF32 trains like FP32" tf32_is_near
    full "outliers are skipped, the same ones after a resume" outliers_are_skipped
    full "--profile in FP32" profile_has_a_table fp32
    full "SIGTERM too ends with a checkpoint" ends_well_at TERM
    full after "$greedy" "BF16 and FP16 generate" generation_speaks

    lane adapters
    quick "20 steps of adapters have the CPU trainer's losses and text" adapters_train_as_on_the_cpu
    quick "adapters: 10 and 10, and blocks recomputed: the same bits, BF16" adapters_resume bf16 bf16
    full "adapters: 10 and 10, and blocks recomputed: the same bits, FP32 in 2 micro-batches" adapters_resume fp32 fp32 --total-batch 2000
    full "adapters: 10 and 10, and blocks recomputed: the same bits, BF16 without master weights" adapters_resume bf16 none --master none --moments bf16
    full "adapters train alike in FP32, BF16 and FP16" adapters_train_alike_in_16_bits

    lane fp8
    quick "--fp8 trains like BF16, and tells what it loses" fp8_trains_like_bf16
    quick "--fp8: 10 and 10: the same bits" fp8_parts_are_the_whole fp8 --fp8
    full "--fp8: 10 and 10, blocks recomputed, split master, bf16 moments: the same bits" fp8_parts_are_the_whole fp8_lean --fp8 --recompute block --master split --moments bf16
    full "--fp8: 10 and 10, no master weights, bf16 moments: the same bits" fp8_parts_are_the_whole fp8_none --fp8 --master none --moments bf16
    quick "--fp8: a captured graph changes no bit" fp8_graph_changes_no_bit
    quick "--fp8 --lora trains like BF16" fp8_adapters_train_like_bf16
    quick "--fp8 --lora: 10 and 10, and blocks recomputed: the same bits" with_fp8 adapters_resume bf16 fp8 --fp8 --seq 256
    full "--fp8: plans of other choices travel with the checkpoint" fp8_plans_travel
    quick "--fp8 has rows in --profile" fp8_profile_has_rows
    quick "--fp8-head trains like BF16, and tells what it loses" fp8_head_trains_like_bf16
    quick "--fp8-head: 10 and 10: the same bits" fp8_head_parts_are_the_whole fp8_head
    full "--fp8 is refused by name where it cannot be" fp8_is_refused

    lane ranks alone
    quick "2 GPUs are one, FP32" two_are_one plain
    full "2 GPUs are one, FP32, blocks recomputed" two_are_one block --recompute block
    quick "2 GPUs are near one, BF16" two_are_near_in_16_bits
    quick "2 GPUs have the same bits with and without graph, by each of NCCL's ways" two_have_one_result
    quick "2 GPUs stop and go on, also as 1 and as 2 again, BF16" two_go_on_as_one
    full "2 GPUs: 10 and 10, split master, bf16 moments, fp32 gradients: the same bits" two_split_and_lean
    quick "2 GPUs skip a step that is not finite on one of them" two_skip_together
    quick "2 GPUs survive kills of one rank" two_survive_kills "$(in_all && echo 20 || echo 6)"
    for rank in 1 0; do full "2 GPUs: rank $rank that is stopped is named, and the run goes on" a_stopped_rank_is_named $rank; done
    full "2 GPUs: a CUDA error of one rank is named, and the run goes on" a_cuda_error_is_named
    quick "2 GPUs share rows as one has them, FP32" two_share_rows plain
    full "2 GPUs share rows as one has them, FP32, blocks recomputed" two_share_rows block --recompute block
    quick "2 GPUs share rows of documents as one has them, FP32" two_share_rows documents
    full "2 GPUs share rows as one has them, FP32, adapters" two_share_rows adapters
    quick "2 GPUs share rows: the same bits with and without graph, recomputed, stopped and resumed" two_share_rows_with_one_result 5e-3
    quick "2 GPUs share rows, as near FP32 as one, BF16" two_share_rows_in_16_bits
    quick "2 GPUs share rows, and ZeRO 1, 2 or 3: the same bits, BF16" two_share_rows_and_blocks

    for v in bf16 fp32; do quick "2 GPUs, ZeRO 1, 2 and 3: the same bits, $v" zeros_agree $v $v "1 2 3" --batch 4; done
    quick "2 GPUs, ZeRO 1, 2 and 3, tied: the same bits, BF16" tied_zeros_agree bf16
    full "2 GPUs, ZeRO 1, 2 and 3, FP16, blocks recomputed: the same bits" zeros_agree fp16 fp16 "1 2 3" --batch 4 --recompute block
    quick "2 GPUs, ZeRO 2 and 3 in 4 micro-batches: the same bits" zeros_agree bf16 micro "2 3" --batch 2 --total-batch 4096
    full "2 GPUs, ZeRO 2 and 3, split master, bf16 moments: the same bits" zeros_agree bf16 split "2 3" --batch 2 --total-batch 4096 --master split --moments bf16
    full "2 GPUs, ZeRO 1, 2 and 3, no master weights, bf16 moments: the same bits" zeros_agree bf16 none "1 2 3" --batch 4 --master none --moments bf16
    full "2 GPUs, --fp8, ZeRO 1, 2 and 3, no master weights: the same bits" fp8_zeros_agree fp8_none "1 2 3" --batch 4 --fp8 --master none --moments bf16
    quick "2 GPUs, ZeRO 2 in 4 micro-batches is near ZeRO 1" zeros_are_near
    quick "2 GPUs, ZeRO 2 and 3: the same bits with and without graph, where what travels is slow" zeros_have_one_result "2 3"
    quick "2 GPUs stop and go on from ZeRO 3 as 1 and as 3 again: the same bits" zeros_go_on_as_another
    quick "2 GPUs, ZeRO 3: samples and validation are those of ZeRO 1" zeros_speak_alike
    quick "2 GPUs, ZeRO 1 and 3: exact weights are written whole" exact_weights_are_collected
    quick "2 GPUs, ZeRO 1 and 3: exact adapters are written whole" adapters_are_collected
    full "2 GPUs: plans of other choices travel with the checkpoint: the same bits" two_carry_plans
    full "2 GPUs, ZeRO 3: steps that are not finite end the run" zeros_are_ruined_together
    quick "2 GPUs as two hosts of two ranks are one, FP32" hosts_are_one 2
    full "2 GPUs as two hosts of two ranks: ZeRO 1, 2 and 3: the same bits" hosts_have_one_result 2 20
    full "2 GPUs as four hosts of two ranks are one, FP32" hosts_are_one 4
    full "2 GPUs as four hosts of two ranks: ZeRO 1, 2 and 3: the same bits" hosts_have_one_result 4 6
    full "2 GPUs as four hosts stop and go on as two, as one GPU and as four, FP32" eight_go_on_as_four_and_one

    full "2 GPUs: faults planted into what they exchange are caught" faults_between_gpus_are_caught

    quick "2 GPUs, --fp8, ZeRO 1, 2 and 3: the same bits" fp8_zeros_agree fp8 "1 2 3" --batch 4 --fp8
    full "2 GPUs, --fp8, ZeRO 1, 2 and 3, blocks recomputed: the same bits" fp8_zeros_agree fp8_block "1 2 3" --batch 4 --fp8 --recompute block
    full "2 GPUs, --fp8, ZeRO 2 and 3 in 4 micro-batches: the same bits" fp8_zeros_agree fp8_micro "2 3" --batch 2 --total-batch 4096 --fp8
    quick "2 GPUs, --fp8-head, ZeRO 1, 2 and 3: the same bits" fp8_head_zeros_agree
    quick "2 GPUs, --fp8, ZeRO 1 and 3: the same bits with and without graph, where what travels is slow" with_fp8 zeros_have_one_result "1 3" --fp8
    quick "2 GPUs, --fp8, stop and go on from ZeRO 3 as 1 and as 3 again: the same bits" with_fp8 zeros_go_on_as_another --fp8
    full "2 GPUs, --fp8, ZeRO 3: samples and validation are those of ZeRO 1" with_fp8 zeros_speak_alike --fp8
    quick "2 GPUs, --fp8, ZeRO 1 and 3 are near one" fp8_two_are_near_one
    full "2 GPUs, --fp8, share rows, as near FP32 as one" with_fp8 two_share_rows_in_16_bits --fp8
    full "2 GPUs, --fp8, share rows, and ZeRO 1, 2 or 3: the same bits" with_fp8 two_share_rows_and_blocks --fp8
    full "2 GPUs, --fp8, share rows: the same bits with and without graph, recomputed, stopped and resumed" with_fp8 two_share_rows_with_one_result 0.2 --fp8

    lane memory alone
    quick "15 GiB: refused with flags that run, BF16" hint_fits bf16
    quick "the memory table is true, d12 B=16" table_is_true bf16 --batch 16
    full "15 GiB: refused with flags that run, FP16" hint_fits fp16
    full "the memory table is true, one block recomputed" table_is_true bf16 --batch 16 --recompute block
    full "the memory table is true, split master, bf16 moments" table_is_true bf16 --batch 8 --master split --moments bf16
    full "the memory table is true, no master weights, bf16 moments" table_is_true bf16 --batch 8 --master none --moments bf16
    full "the memory table is true, FP32" table_is_true fp32 --batch 8
    quick "the memory table is true, --fp8" fp8_memory_is_true
    full "the memory table is true, --fp8-head" fp8_head_memory_is_true
    full "the memory table is true with samples and validation" table_is_true bf16 --batch 4 --sample-tokens 64 --sample-every 1 --val-every 1 --val-batches 2 --val "$tmp/wide.bin"
    full "adapters of 8B at T=4096 fit into 22 GiB" lora_fits 22G llama3.1-8b --batch 1 --seq 4096 --recompute block
    full "adapters of 1B at T=4096 fit into 7 GiB" lora_fits 7G llama3.2-1b --batch 1 --seq 4096 --recompute block
    full "the first token of a 1B checkpoint within 2 s" first_token_is_soon
}

run_tests "$@"
