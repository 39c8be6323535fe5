#!/usr/bin/env bash
# Attention of a base Wan model (1.3B, 14B or the miniature): one layer while it samples a video -> OUT_DIR/layerN.pt.
#
#     bash experiments/extract_attention.sh CKPT_DIR [LAYER] [OUT_DIR] [--flags of extract_attention_wan.py]
#     bash experiments/extract_attention.sh checkpoints/wan-mini
#
# LAYER: 20, or the last one where the model has fewer. OUT_DIR: cache.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 1 3 "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"

options=(--ckpt_dir "${words[0]}" --output_dir "${words[2]:-cache}")
if [ -n "${words[1]:-}" ]; then options+=(--layer_index "${words[1]}"); fi
run_script extract_attention_wan.py "${options[@]}" ${flags[@]+"${flags[@]}"}
