#!/usr/bin/env bash
# A layer cache for every layer, from one rollout -> OUT_DIR/layerN.pt.
#
#     bash experiments/extract_all_layers.sh CONFIG OUT_DIR [flags of run_extraction_each.py]
#     bash experiments/extract_all_layers.sh configs/wan_mini.yaml cache/layers
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 2 any "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"
exec python experiments/run_extraction_each.py --config_path "$1" --output_dir "$2" "${@:3}"
