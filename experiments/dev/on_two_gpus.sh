#!/usr/bin/env bash
# Everything here that needs GPUs, on one host with two of them: the miniature's weights and every GPU number.
#
#     bash experiments/dev/on_two_gpus.sh OUT_DIR PART...
#
# PART: vae, base, causal (the miniature), evaluation (of it), seeds (the causal stage twice more), numbers (the benchmarks),
# findings, siblings, parallel; they run in the order given. JSON goes to OUT_DIR; weights grow and logs lie in $MINIATURE
# (outputs/gpu-miniature), which holds the files of the stages that are left out. A command that fails does not stop the
# others: its log says why. GPUS names two of more (0,1): a host with four does two lists of parts at a time.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../running/usage.sh" 2 11 "$@"
export OUT=$1 GPUS=${GPUS:-0,1} MINIATURE=${MINIATURE:-outputs/gpu-miniature}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}. PYTHONUNBUFFERED=1 TORCH_NCCL_ASYNC_ERROR_HANDLING=0
GPU=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | grep -oE '[A-Z]+[0-9]+' | tail -1)
[[ $GPU ]] || { echo "on_two_gpus.sh: no NVIDIA GPU found; run it on a host with two" >&2; exit 2; }
export GPU=${GPU,,} CAUSAL=$MINIATURE/self_forcing_mini.pt
mkdir -p "$OUT" "$MINIATURE/logs"

# on SLOT NAME SECONDS COMMAND...: on the first GPU (0), the second (1) or both, at most so long, its output in a log,
# whose end is shown.
on() {
    local gpus=$GPUS name=$2 seconds=$3 begin=$SECONDS
    [[ $1 == both ]] || gpus=$(cut -d , -f $(($1 + 1)) <<<"$GPUS")
    CUDA_VISIBLE_DEVICES=$gpus timeout -s INT -k 10 "$seconds" "${@:4}" >"$MINIATURE/logs/$name.log" 2>&1
    local status=$?
    echo "$name: status $status after $((SECONDS - begin)) s"
    tail -n $((status ? 12 : 2)) "$MINIATURE/logs/$name.log" | cut -c 1-300
}

one_each() { # one_each JOB...: each on the GPU that is free first; $SLOT says which
    printf '%s\n' "$@" | xargs -P 2 -I JOB --process-slot-var=SLOT bash -c JOB
}

train() { # train SLOT STAGE SECONDS FLAGS...
    local launch=python3
    [[ $1 != both ]] || launch="torchrun --nproc-per-node 2"
    on "$1" "$2" "$3" $launch experiments/train_mini.py --stage "$2" --steps 1000000 --output_dir "$MINIATURE" "${@:4}"
}

benchmark() { # benchmark NAME SECONDS FLAGS...: the shapes of 1.3B with random weights
    on "$SLOT" "$1" "$2" python3 "experiments/dev/benchmark_$1.py" --random_weights --device cuda \
        --output_path "$OUT/$1_$GPU.json" "${@:3}"
}

# -- parts ------------------------------------------------------------------------------------------------------------

vae() { # gains nothing from a second GPU
    train 0 vae 700 --minutes 8
}

base() {
    train both base 1200 --minutes 5.5
}

causal() {
    train both causal 1200 --minutes 11.5 --training_checkpoints "$MINIATURE/steps"
}

evaluation() {
    one_each evaluate checkpoints
}

seeds() {
    one_each "seed 1" "seed 2"
}

numbers() {
    one_each policies models capture maps mass gpu_tests interventions
}

findings() {
    one_each policies_compared hidden_shapes
}

siblings() { # one after the other: they write one log; as many clips as the latents of one of two processes
    for stage in lora framewise; do train 0 "$stage" 110 --minutes 1.2 --clips 20480; done
}

parallel() {
    on both parallel 240 torchrun --standalone --nproc-per-node 2 experiments/dev/benchmark_parallel.py \
        --repeats 1 --sweep 8 --output_path "$OUT/parallel_2x$GPU.json"
}

# -- jobs of one GPU --------------------------------------------------------------------------------------------------

evaluate() {
    on "$SLOT" evaluation 400 python3 experiments/evaluate_mini.py --ckpt_dir "$MINIATURE" --device cuda \
        --output_path "$OUT/evaluation.json"
}

checkpoints() { # the atlas of every one is kept; cache/wan-mini-training has the first, step 500's and the last
    # shellcheck disable=SC2046 # a word a step
    on "$SLOT" checkpoints 300 python3 experiments/measure_checkpoints.py "$MINIATURE/steps" --ckpt_dir "$MINIATURE" \
        --steps $(ls "$MINIATURE/steps" | tr -cd '0-9\n') --device cuda --output_path "$OUT/${1:-checkpoints}/moments.json"
}

seed() { # seed N: the causal stage from the same base, in a folder of its own
    local folder=$MINIATURE/seed_$1
    mkdir -p "$folder/logs"
    cp -r "$MINIATURE"/{vae,transformer,text_encoder,tokenizer} "$folder"
    export MINIATURE=$folder
    train "$SLOT" causal 900 --minutes 11.5 --seed "$1" --clips 20480 --training_checkpoints "$folder/steps"
    checkpoints "seed_$1"
}

policies() { benchmark policies 280 --num_frames 240 --blocks 4 --repeats 1; }
capture() { benchmark capture 100 --repeats 3; }
maps() { benchmark maps 90 --repeats 2; }
interventions() { benchmark interventions 100 --repeats 2; }

mass() {
    on "$SLOT" mass 90 python3 experiments/dev/benchmark_mass.py --output_path "$OUT/mass_$GPU.json"
}

gpu_tests() {
    on "$SLOT" gpu_tests 150 python3 -m pytest -q -p no:cacheprovider tests/wan/test_capture_policies.py \
        tests/wan/test_capture.py tests/wan/test_reductions.py tests/wan/test_grouped_attention.py tests/wan/test_key_maps.py
}

hidden_shapes() {
    on "$SLOT" hidden_shapes 480 python3 experiments/dev/hidden_shapes.py --ckpt_dir "$MINIATURE" --device cuda \
        --dtype float32 --workers 14 --output_path "$OUT/hidden_shapes.json" --figures "$OUT"
}

policies_compared() {
    on "$SLOT" policies_compared 480 python3 experiments/compare_policies.py --policies findings --held_out 18 \
        --seeds 0 1 2 --workers 16 --ckpt_dir "$MINIATURE" --checkpoint_path "$CAUSAL" --device cuda \
        --output_dir outputs/policies --log_file outputs/policies.jsonl
    on "$SLOT" long_rollouts 60 python3 experiments/dev/long_rollout_findings.py outputs/policies/comparison.json \
        --output_path "$OUT/long_rollouts.json"
}

models() {
    on "$SLOT" models 280 python3 experiments/dev/benchmark_models.py --device cuda --output_path "$OUT/models_$GPU.json"
}

for part in "${@:2}"; do
    case $part in
        vae | base | causal | evaluation | seeds | numbers | findings | siblings | parallel) ;;
        *) echo "on_two_gpus.sh: no part '$part'; see --help" >&2; exit 2 ;;
    esac
done
export -f on train benchmark evaluate checkpoints seed mass policies capture maps interventions gpu_tests \
    hidden_shapes policies_compared models
for part in "${@:2}"; do "$part"; done
