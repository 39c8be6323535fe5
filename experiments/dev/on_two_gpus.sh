#!/usr/bin/env bash
# Everything here that needs GPUs, on one host with two of them: the miniature's weights and every GPU number.
#
#     bash experiments/dev/on_two_gpus.sh PART [OUT_DIR]
#
# PART: vae, base, causal, evaluation, findings, parallel, in this order; each takes at most ten minutes, keeps both GPUs
# busy and leaves at most eight files in OUT_DIR (outputs/gpu). Weights grow and logs lie in $MINIATURE
# (outputs/gpu-miniature). $MINUTES is the time of a training. A command that fails does not stop the others: its log
# says why.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../running/usage.sh" 1 2 "$@"
OUT=${2:-outputs/gpu}
MINIATURE=${MINIATURE:-outputs/gpu-miniature}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}. PYTHONUNBUFFERED=1 TORCH_NCCL_ASYNC_ERROR_HANDLING=0
GPU=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | grep -oE '[A-Z]+[0-9]+' | tail -1)
[[ $GPU ]] || { echo "on_two_gpus.sh: no NVIDIA GPU found; run it on a host with two" >&2; exit 2; }
GPU=${GPU,,}
mkdir -p "$OUT" "$MINIATURE/logs"

# on GPU NAME SECONDS COMMAND...: at most so long, its output in a log, whose end is shown.
on() {
    local gpu=$1 name=$2 seconds=$3 begin=$SECONDS
    CUDA_VISIBLE_DEVICES=$gpu timeout -s INT -k 10 "$seconds" "${@:4}" >"$MINIATURE/logs/$name.log" 2>&1
    local status=$?
    echo "$name: status $status after $((SECONDS - begin)) s"
    tail -n $((status ? 12 : 2)) "$MINIATURE/logs/$name.log" | cut -c 1-300
}

train() { # train GPUS STAGE SECONDS FLAGS...
    local launch=python3
    [[ $1 != *,* ]] || launch="torchrun --nproc-per-node 2"
    on "$1" "$2" "$3" $launch experiments/train_mini.py --stage "$2" --steps 1000000 --output_dir "$MINIATURE" "${@:4}"
}

benchmark() { # benchmark GPU NAME SECONDS FLAGS...: the shapes of 1.3B with random weights
    on "$1" "$2" "$3" python3 "experiments/dev/benchmark_$2.py" --random_weights --device cuda \
        --output_path "$OUT/$2_$GPU.json" "${@:4}"
}

keep() { # the weights and their log, in folders that OUT_DIR shares with the checkpoint
    cp "$MINIATURE/training.json" "$OUT/"
    local name
    for name in "$@"; do cp -r "$MINIATURE/$name" "$OUT/"; done
}

vae() { # the VAE gains nothing from a second GPU
    train 0 vae 580 --minutes "${MINUTES:-8}" && keep vae &
    benchmark 1 policies 280 --num_frames 240 --blocks 4 --repeats 1
    benchmark 1 capture 100 --repeats 3
    benchmark 1 maps 90 --repeats 2
    benchmark 1 interventions 100 --repeats 2
    on 1 tests 100 python3 -m pytest -q -p no:cacheprovider tests/wan/test_capture_policies.py tests/wan/test_capture.py \
        tests/wan/test_reductions.py tests/wan/test_grouped_attention.py tests/wan/test_key_maps.py
    wait
}

base() {
    train 0,1 base 500 --minutes "${MINUTES:-5.5}"
    keep transformer text_encoder tokenizer
}

causal() {
    train 0,1 causal 590 --minutes "${MINUTES:-8.5}" --training_checkpoints "$MINIATURE/steps"
    keep self_forcing_mini.pt
}

evaluation() {
    on 0 evaluation 400 python3 experiments/evaluate_mini.py --ckpt_dir "$MINIATURE" --device cuda \
        --output_path "$OUT/evaluation.json" &
    on 1 checkpoints 300 python3 experiments/measure_checkpoints.py "$MINIATURE/steps" --ckpt_dir "$MINIATURE" \
        --steps 0 500 --device cuda --output_path outputs/checkpoints/moments.json
    tar -cf "$OUT/checkpoints.tar" -C outputs/checkpoints .
    wait
}

findings() {
    on 0 hidden_shapes 420 python3 experiments/dev/hidden_shapes.py --ckpt_dir "$MINIATURE" --device cuda --dtype float32 \
        --workers 14 --output_path "$OUT/hidden_shapes.json" --figures "$OUT" &
    on 1 policies_compared 420 python3 experiments/compare_policies.py --policies findings --held_out 18 --seeds 0 1 2 \
        --ckpt_dir "$MINIATURE" --checkpoint_path "$MINIATURE/self_forcing_mini.pt" \
        --device cuda --output_dir outputs/policies --log_file outputs/policies.jsonl
    on 1 long_rollouts 60 python3 experiments/dev/long_rollout_findings.py outputs/policies/comparison.json \
        --output_path "$OUT/long_rollouts.json"
    wait
}

parallel() {
    train 0 lora 110 --minutes 1.2 --clips 20480 && train 0 framewise 110 --minutes 1.2 --clips 20480 &
    on 1 models 230 python3 experiments/dev/benchmark_models.py --device cuda --output_path "$OUT/models_$GPU.json"
    wait
    on 0,1 parallel 240 torchrun --standalone --nproc-per-node 2 experiments/dev/benchmark_parallel.py \
        --repeats 1 --sweep 8 --output_path "$OUT/parallel_2x$GPU.json"
    keep lora_window.pt lora_framewise.pt
}

case $1 in
    vae | base | causal | evaluation | findings | parallel) "$1" ;;
    *) echo "on_two_gpus.sh: no part '$1'; see --help" >&2; exit 2 ;;
esac
