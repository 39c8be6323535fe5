#!/usr/bin/env bash
# Everything here that needs GPUs, on all GPUs of one host: the miniature's weights and every GPU number.
#
#     bash experiments/benchmarks/on_gpus.sh OUT_DIR PART...
#
# PARTs run one after the other. Of the miniature, on all GPUs: vae, base, causal, few_step, seeds (the causal stage
# twice more), evaluation, checkpoints. Its findings: policies, hidden_shapes. Benchmarks: rollout, rollout_fa4, other_rows,
# cache_policies, models, kernels, public, parallel, parallel_long. gpu_tests. A part that fails does not stop the others.
# JSON goes to OUT_DIR; weights and logs lie in $MINIATURE (outputs/gpu-miniature). FA4 names a virtual environment that
# has flash-attn-4, where python3 has not; CHECKOUT is a clone of Self-Forcing's repository.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../running/usage.sh" 2 30 "$@"
OUT=$1 MINIATURE=${MINIATURE:-outputs/gpu-miniature}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}. PYTHONUNBUFFERED=1
GPUS=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null)
COUNT=$(grep -c . <<<"$GPUS")
[[ $COUNT != 0 ]] || { echo "on_gpus.sh: no NVIDIA GPU found; run it on a host that has one" >&2; exit 2; }
GPU=$(head -1 <<<"$GPUS" | grep -oE '[A-Z]+[0-9]+' | tail -1)
GPU=${GPU,,}

on() { # on NAME SECONDS COMMAND...: at most so long, its output in a log, whose end is shown
    local name=$1 begin=$SECONDS
    timeout -s INT -k 10 "$2" "${@:3}" >"$MINIATURE/logs/$name.log" 2>&1
    local status=$?
    echo "$name: status $status after $((SECONDS - begin)) s"
    tail -n $((status ? 12 : 2)) "$MINIATURE/logs/$name.log" | cut -c 1-300
}
one() { on "$1" "$2" python3 "${@:3}"; }                                                   # on the first GPU
all() { on "$1" "$2" torchrun --standalone --nproc-per-node "$COUNT" "${@:3}"; }           # a rank on every GPU
train() { all "$1" "$2" experiments/train_mini.py --stage "$1" --steps 1000000 --output_dir "$MINIATURE" "${@:3}"; }
bench() { one "$1" "$2" "experiments/benchmarks/$3.py" --output_path "$OUT/$1_$GPU.json" "${@:4}"; }
random() { bench "$1" "$2" rollout --random_weights --device cuda "${@:3}"; }              # the shapes of 1.3B
with_fa4() { PATH=${FA4:+$FA4/bin:}$PATH WAN_ATTENTION=fa4 "$@"; }
shared() { awk "BEGIN { print $1 / $COUNT }"; }                                            # minutes of one GPU

vae() { one vae 700 experiments/train_mini.py --stage vae --steps 1000000 --output_dir "$MINIATURE" --minutes 8; }
base() { train base 1200 --minutes "$(shared 11)"; }
causal() { train causal 1800 --minutes "$(shared 29)" --training_checkpoints "$MINIATURE/steps"; }
few_step() { train few_step 1200 --minutes "$(shared 18)" --training_checkpoints "$MINIATURE/steps"; }
seeds() {
    local seed folder
    for seed in 1 2; do
        folder=$MINIATURE/seed_$seed
        mkdir -p "$folder"
        cp -r "$MINIATURE"/{vae,transformer,text_encoder,tokenizer} "$folder"
        one "seed_$seed" 900 experiments/train_mini.py --stage causal --output_dir "$folder" --steps 8000 --seed "$seed" \
            --clips 20480 --training_checkpoints "$folder/steps"
    done
}
evaluation() {
    one evaluation 400 experiments/evaluate_mini.py --ckpt_dir "$MINIATURE" --device cuda --output_path "$OUT/evaluation.json"
}
checkpoints() {
    one checkpoints 300 experiments/measure_checkpoints.py "$MINIATURE/steps" --ckpt_dir "$MINIATURE" --device cuda \
        --output_path "$OUT/checkpoints/moments.json"
}
policies() { # no mp4s: they would need ffmpeg
    one policies 1800 experiments/compare_policies.py --policies findings --held_out 18 --seeds 0 1 2 --videos 0 --workers "$COUNT" \
        --ckpt_dir "$MINIATURE" --checkpoint_path "$MINIATURE/self_forcing_mini.pt" --output_dir outputs/policies
    one long_rollouts 60 experiments/benchmarks/reproduce/long_rollouts.py outputs/policies/comparison.json \
        --output_path "$OUT/long_rollouts.json"
}
hidden_shapes() {
    one hidden_shapes 1800 experiments/benchmarks/reproduce/hidden_shapes.py --ckpt_dir "$MINIATURE" --workers "$COUNT" \
        --output_path "$OUT/hidden_shapes.json" --figures "$OUT"
}
rollout() { WAN_ATTENTION=cudnn random rollout 200; }
rollout_fa4() {
    with_fa4 random rollout_fa4 200 --repeats 9
    with_fa4 random rollout_fa4_graphs 200 --repeats 9 --graphs
}
other_rows() { random maps_and_edits 400 --what plain maps interventions; }
cache_policies() { random cache_policies 300 --what policies --num_frames 240 --repeats 1; }
models() { random models 500 --what models --repeats 1; }
kernels() { with_fa4 bench kernels 400 kernels; }
public() { with_fa4 bench public 200 public "${CHECKOUT:-../Self-Forcing}" --random_weights --device cuda --repeats 7; }
parallel() {
    all parallel 300 experiments/benchmarks/rollout.py --random_weights --what plain mass \
        --output_path "$OUT/parallel_${COUNT}x$GPU.json"
}
parallel_long() { # 38 GB of keys and values on each of four GPUs
    all parallel_long 300 experiments/benchmarks/rollout.py --config_path configs/wan_14b.yaml --random_weights --what plain \
        --num_frames 120 --repeats 1 --output_path "$OUT/parallel_long_${COUNT}x$GPU.json"
}
gpu_tests() { with_fa4 one gpu_tests 300 -m pytest -q -p no:cacheprovider tests/wan; }

PARTS=$(sed -n 's/^\([a-z_0-9]*\)() {.*/\1/p' "${BASH_SOURCE[0]}" | sed '1,/^shared$/d')
for part in "${@:2}"; do
    grep -qx "$part" <<<"$PARTS" || { echo "on_gpus.sh: no part '$part'; see --help" >&2; exit 2; }
done
mkdir -p "$OUT" "$MINIATURE/logs"
for part in "${@:2}"; do "$part"; done
