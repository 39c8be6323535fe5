#!/usr/bin/env bash
# One layer of the miniature's base and causal weights, drawn by the same notebook, side by side in one SVG.
#
#     bash experiments/base_and_causal.sh [LAYER] [SVG]      # outputs/base_and_causal/sheet.svg where not given
#
# Both are 21 latent frames of one prompt and seed where they are (nearly) clean: the base model's last step, the clean pass
# of the causal one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 0 2 "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"
layer=${1:-5}
out=outputs/base_and_causal
sheet=${2:-$out/sheet.svg}

python experiments/extract_attention_wan.py --ckpt_dir checkpoints/wan-mini --layer_index "$layer" --num_frames 81 --step last \
    --output_dir $out/base
python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml --layer_index "$layer" --step 4 \
    --output_path "$out/causal/layer$layer.pt"
for weights in base causal; do
    papermill --cwd notebooks --no-progress-bar --log-level WARNING notebooks/extract_all_attention.ipynb $out/$weights.ipynb \
        -p DATA_PATH "../$out/$weights/layer$layer.pt" -p SAVE_DIR "../$out/$weights" -p USE_ORIG_FRAMES False
done
python experiments/contact_sheet.py "$sheet" \
    --title "wan-mini, layer $layer: the same notebook on its bidirectional base weights and on its causal weights" \
    "Base=$out/base/layer$layer/layer${layer}_2d_heatmap_all_heads.svg" \
    "Causal=$out/causal/layer$layer/layer${layer}_2d_heatmap_all_heads.svg"
