#!/usr/bin/env bash
# One layer of the miniature's base weights above the same layer of its causal weights, four heads on one scale, in one SVG.
#
#     bash experiments/base_and_causal.sh [LAYER] [SVG]      # outputs/base_and_causal/base_and_causal_mini.svg where not given
#
# Both are 21 latent frames of one prompt and seed where they are (nearly) clean: the base model's last step, the clean pass
# of the causal one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 0 2 "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"
layer=${1:-5}
out=outputs/base_and_causal
sheet=${2:-$out/base_and_causal_mini.svg}

python experiments/extract_attention_wan.py --ckpt_dir checkpoints/wan-mini --layer_index "$layer" --num_frames 81 --step last \
    --output_dir $out/base
python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml --layer_index "$layer" --step 4 \
    --output_path "$out/causal/layer$layer.pt"
python experiments/benchmarks/reproduce/readme_figures.py --layers "$out/base/layer$layer.pt" "$out/causal/layer$layer.pt" \
    --output_dir $out
[ "$sheet" = $out/base_and_causal_mini.svg ] || mv $out/base_and_causal_mini.svg "$sheet"
