#!/bin/sh
# zero_bits.sh FOLDER [FLAGS...] -- for test_gpu_faults.sh: FOLDER/train_llama3cu on two GPUs, with FLAGS, has the same bits
# with ZeRO 1, 2 and 3. One case has one micro-batch a step, which computes for longer than blocks travel. Another (ZeRO 2 and
# 3) has four small micro-batches, also with a slow exchange. Run from the project's root.
. dev/test/lib.sh
trainer=$1/train_llama3cu
shift
flags=$*
token_file "$tmp/data.bin" 20000 97

# run OUT FLAGS...
run() {
    run_out=$tmp/$1
    shift
    ends_well "$trainer" --gpus 2 --model d7 --train "$tmp/data.bin" --seq 64 --steps 6 --lr 1e-3 --grad-clip 0.01 --sample-tokens 0 --out "$run_out" $flags "$@"
}
# same A B: the two checkpoints have the same bits
same() {
    for file in model state_rank00000 state_rank00001; do
        cmp "$tmp/$1/step_00000006/$file.safetensors" "$tmp/$2/step_00000006/$file.safetensors" || return 1
    done
}
run one --seq 1024 --batch 4
for zero in 2 3; do run one$zero --seq 1024 --batch 4 --zero $zero && check "ZeRO $zero has the bits of 1" same one one$zero; done
run two --batch 1 --total-batch 512 --zero 2 --no-graph
run three --batch 1 --total-batch 512 --zero 3
check "ZeRO 3 has the bits of 2, in four micro-batches" same two three
export NCCL_P2P_DISABLE=1 NCCL_PROTO=Simple
for zero in 2 3; do run slow$zero --batch 1 --total-batch 512 --zero $zero && check "ZeRO $zero has its bits where what travels is slow" same two slow$zero; done
summary
