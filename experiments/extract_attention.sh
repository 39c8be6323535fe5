#!/usr/bin/env bash
# Attention of a base Wan model (1.3B, 14B or the miniature): one layer while it samples a video -> OUT_DIR/layerN.pt.
#
#     bash experiments/extract_attention.sh CKPT_DIR [LAYER] [OUT_DIR] [flags of extract_attention_wan.py]
#     bash experiments/extract_attention.sh checkpoints/wan-mini
#
# LAYER: 20, or the last one where the model has fewer. OUT_DIR: cache.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 1 any "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"

flags=(--ckpt_dir "$1" --output_dir "${3:-cache}")
if [ -n "${2:-}" ]; then flags+=(--layer_index "$2"); fi
exec python experiments/extract_attention_wan.py "${flags[@]}" "${@:4}"
