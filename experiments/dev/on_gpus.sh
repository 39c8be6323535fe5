#!/usr/bin/env bash
# Everything here that needs GPUs, on all GPUs of one host: the miniature's weights and every GPU number.
#
#     bash experiments/dev/on_gpus.sh OUT_DIR PART...
#
# PART: vae, base, causal, few_step (the miniature), causal_again, evaluation (of it), numbers (the benchmarks), limit
# (those of FlashAttention-4), findings, siblings, seeds (the causal stage twice more), parallel, parallel_long. Training,
# findings and parallel take all GPUs, and their ranks share the cores; they wait for what was named before them. Of the
# other parts each job takes the GPU that is free first; a job's own name is a part too. JSON goes to OUT_DIR; weights grow
# and logs lie in $MINIATURE (outputs/gpu-miniature), which holds the files of the stages that are left out. A command that
# fails does not stop the others: its log says why.
# GPUS=2,3 names some GPUs of more. RANKS=1 lets a finding have one rank on a GPU in place of three: the miniature leaves
# a GPU waiting for Python. FA4 names a virtual environment that has flash-attn-4, where python3 has not; CHECKOUT is a
# clone of Self-Forcing's repository.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../running/usage.sh" 2 30 "$@"
export OUT=$1 MINIATURE=${MINIATURE:-outputs/gpu-miniature}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}. PYTHONUNBUFFERED=1 TORCH_NCCL_ASYNC_ERROR_HANDLING=0
ALL=$(nvidia-smi --query-gpu=index,name --format=csv,noheader 2>/dev/null)
GPU=$(head -1 <<<"$ALL" | grep -oE '[A-Z]+[0-9]+' | tail -1)
[[ $GPU ]] || { echo "on_gpus.sh: no NVIDIA GPU found; run it on a host that has one" >&2; exit 2; }
export GPU=${GPU,,} CAUSAL=$MINIATURE/self_forcing_mini.pt GPUS=${GPUS:-$(cut -d , -f 1 <<<"$ALL" | paste -sd ,)}
export COUNT=$(tr , '\n' <<<"$GPUS" | wc -l) RANKS=${RANKS:-3}
mkdir -p "$OUT" "$MINIATURE/logs"

# on SLOT NAME SECONDS COMMAND...: on the GPU of that number among GPUS (or on all), at most so long, its output in a log,
# whose end is shown.
on() {
    local gpus=$GPUS name=$2 seconds=$3 begin=$SECONDS
    [[ $1 == all ]] || gpus=$(cut -d , -f $(($1 + 1)) <<<"$GPUS")
    [[ $1 == all ]] || local -x OMP_NUM_THREADS=$(($(nproc) / COUNT))
    CUDA_VISIBLE_DEVICES=$gpus timeout -s INT -k 10 "$seconds" "${@:4}" >"$MINIATURE/logs/$name.log" 2>&1
    local status=$?
    echo "$name: status $status after $((SECONDS - begin)) s"
    tail -n $((status ? 12 : 2)) "$MINIATURE/logs/$name.log" | cut -c 1-300
}

one_each() { # one_each JOB...: each on the GPU that is free first; $SLOT says which
    [[ $# == 0 ]] || printf '%s\n' "$@" | xargs -P "$COUNT" -I JOB --process-slot-var=SLOT bash -c JOB
}

train() { # train SLOT STAGE SECONDS FLAGS...
    local launch=python3
    [[ $1 != all || $COUNT == 1 ]] || launch="torchrun --nproc-per-node $COUNT"
    on "$1" "$2" "$3" $launch experiments/train_mini.py --stage "$2" --steps 1000000 --output_dir "$MINIATURE" "${@:4}"
}

everywhere() { # everywhere NAME SECONDS SCRIPT FLAGS...: a rank on every GPU
    on all "$1" "$2" torchrun --standalone --nproc-per-node "$COUNT" "${@:3}"
}

as_ranks() { # as_ranks COMMAND...: $RANKS of it on every GPU, which take their parts from one folder; as srun tells them
    local count=$((RANKS * COUNT))
    seq 0 $((count - 1)) | SLURM_STEP_NUM_TASKS=$count OMP_NUM_THREADS=1 xargs -P $count -I RANK bash -c '
        export SLURM_PROCID=RANK SLURM_LOCALID=RANK
        CUDA_VISIBLE_DEVICES=$(cut -d , -f $((RANK % COUNT + 1)) <<<"$GPUS") exec "$@"' rank "$@"
}

sweep_of_ranks() { # sweep_of_ranks NAME SECONDS SCRIPT FLAGS...
    on all "$1" "$2" bash -c 'as_ranks "$@"' ranks python3 "${@:3}"
}

shared() { # shared MINUTES: of one GPU, by all of them
    awk "BEGIN { print $1 / $COUNT }"
}

benchmark() { # benchmark NAME SECONDS FLAGS...: the shapes of 1.3B with random weights
    on "$SLOT" "$1" "$2" python3 "experiments/dev/benchmark_$1.py" --random_weights --device cuda \
        --output_path "$OUT/$1_$GPU.json" "${@:3}"
}

# -- parts of all GPUs ------------------------------------------------------------------------------------------------

vae() { # gains nothing from a second GPU
    train 0 vae 700 --minutes 8
}

base() {
    train all base 1200 --minutes "$(shared 11)"
}

causal() {
    train all causal 1800 --minutes "$(shared 29)" --training_checkpoints "$MINIATURE/steps"
}

causal_again() { # from the few-step weights in $MINIATURE, where causal.pt is not at hand
    train all causal 900 --minutes "$(shared 8)" --start_from "$MINIATURE"
}

few_step() {
    train all few_step 1200 --minutes "$(shared 18)" --training_checkpoints "$MINIATURE/steps"
}

parallel() {
    everywhere parallel 240 experiments/dev/benchmark_parallel.py --repeats 1 --profile \
        --output_path "$OUT/parallel_${COUNT}x$GPU.json"
}

parallel_long() { # 14B, 120 frames: 38 GB of keys and values on each of four GPUs
    everywhere parallel_long 150 experiments/dev/benchmark_parallel.py --parts long \
        --output_path "$OUT/parallel_long_${COUNT}x$GPU.json"
}

policies_compared() { # no mp4s: they would need ffmpeg
    sweep_of_ranks policies_compared 580 experiments/compare_policies.py --policies findings --held_out 18 \
        --seeds 0 1 2 --videos 0 --ckpt_dir "$MINIATURE" --checkpoint_path "$CAUSAL" --device cuda \
        --output_dir outputs/policies --log_file outputs/policies.jsonl
    on 0 long_rollouts 60 python3 experiments/dev/long_rollout_findings.py outputs/policies/comparison.json \
        --output_path "$OUT/long_rollouts.json"
}

hidden_shapes() {
    sweep_of_ranks hidden_shapes 780 experiments/dev/hidden_shapes.py --ckpt_dir "$MINIATURE" --device cuda \
        --dtype float32 --output_path "$OUT/hidden_shapes.json" --figures "$OUT"
}

findings() {
    policies_compared
    hidden_shapes
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
    train "$SLOT" causal 900 --steps 8000 --seed "$1" --clips 20480 --training_checkpoints "$folder/steps"
    checkpoints "seed_$1"
}

policies() { benchmark policies 280 --num_frames 240 --blocks 4 --repeats 1; }
capture() { WAN_ATTENTION=cudnn benchmark capture 100 --repeats 3; }
maps() { benchmark maps 180 --repeats 2; }
interventions() { benchmark interventions 300 --repeats 2 --sweep_seconds 60 --folder outputs/sweep; }

sweep() { # the whole causal atlas of 1.3B in two calls, the second of which goes on
    for call in 1 2; do
        on "$SLOT" "sweep_$call" 480 python3 experiments/dev/benchmark_interventions.py --random_weights --device cuda \
            --sweep_only --sweep_seconds 350 --folder outputs/whole_sweep \
            --output_path "$OUT/interventions_${GPU}_call$call.json"
    done
}

models() {
    on "$SLOT" models 280 python3 experiments/dev/benchmark_models.py --device cuda --output_path "$OUT/models_$GPU.json"
}

mass() {
    local PATH=${FA4:+$FA4/bin:}$PATH
    on "$SLOT" mass 90 python3 experiments/dev/benchmark_mass.py --output_path "$OUT/mass_$GPU.json"
}

attention() {
    local PATH=${FA4:+$FA4/bin:}$PATH
    on "$SLOT" attention 300 python3 experiments/dev/benchmark_attention.py --output_path "$OUT/attention_$GPU.json"
}

capture_fa4() { # capture_fa4 [--graphs]
    local PATH=${FA4:+$FA4/bin:}$PATH name=capture_fa4${1:+_graphs}
    WAN_ATTENTION=fa4 on "$SLOT" "$name" 200 python3 experiments/dev/benchmark_capture.py --random_weights \
        --device cuda --repeats 9 --output_path "$OUT/${name}_$GPU.json" "$@"
}

public() {
    local PATH=${FA4:+$FA4/bin:}$PATH
    on "$SLOT" public 200 python3 experiments/dev/benchmark_public.py "${CHECKOUT:-../Self-Forcing}" \
        --random_weights --device cuda --repeats 7 --output_path "$OUT/public_$GPU.json"
}

gpu_tests() {
    local PATH=${FA4:+$FA4/bin:}$PATH
    on "$SLOT" gpu_tests 200 python3 -m pytest -q -p no:cacheprovider tests/wan/test_capture_policies.py \
        tests/wan/test_capture.py tests/wan/test_reductions.py tests/wan/test_attention_rows.py \
        tests/wan/test_grouped_attention.py tests/wan/test_key_maps.py tests/wan/test_host_copies.py \
        tests/wan/test_cuda_graphs.py tests/wan/test_hopper_attention.py tests/wan/test_segment_kernel.py \
        tests/wan/test_layers.py tests/wan/test_kv_cache.py tests/wan/test_frame_sum_kernel.py \
        tests/wan/test_late_logits.py
}

variants() { # one after the other: they write one log; as many clips as the first process of the base had
    for stage in lora framewise; do train "$SLOT" "$stage" 240 --minutes 1.2 --clips $((40960 / COUNT)); done
}

# -- in the order that was asked for ----------------------------------------------------------------------------------

for part in "${@:2}"; do
    case $part in
        vae | base | causal | causal_again | few_step | evaluation | numbers | findings | siblings | seeds) ;;
        evaluate | checkpoints | policies | capture | maps | interventions | models | mass | attention) ;;
        limit | capture_fa4 | public) ;;
        parallel | parallel_long | hidden_shapes | policies_compared | variants | sweep | gpu_tests) ;;
        *) echo "on_gpus.sh: no part '$part'; see --help" >&2; exit 2 ;;
    esac
done
export -f on as_ranks train benchmark evaluate checkpoints seed mass policies capture maps interventions attention gpu_tests
export -f models variants sweep capture_fa4 public
jobs=()
for part in "${@:2}"; do
    case $part in
        evaluation) jobs+=(evaluate checkpoints) ;;
        siblings) jobs+=(variants models) ;;
        limit) jobs+=(capture_fa4 attention "capture_fa4 --graphs" public gpu_tests) ;;
        numbers) jobs+=(policies capture maps mass gpu_tests interventions) ;;
        seeds) jobs+=("seed 1" "seed 2") ;;
        vae | base | causal | causal_again | few_step | parallel | parallel_long | findings | policies_compared | \
            hidden_shapes)
            one_each "${jobs[@]}"
            jobs=()
            "$part"
            ;;
        *) jobs+=("$part") ;;
    esac
done
one_each "${jobs[@]}"
