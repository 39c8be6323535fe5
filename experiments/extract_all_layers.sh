#!/usr/bin/env bash
# A layer cache for every layer, from one rollout -> OUT_DIR/layerN.pt.
#
#     bash experiments/extract_all_layers.sh CONFIG OUT_DIR [--flags of run_extraction_each.py]
#     bash experiments/extract_all_layers.sh wan_mini cache/layers
#
# CONFIG: a YAML, or the name of one of configs/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 2 2 "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"
run_script run_extraction_each.py --config_path "${words[0]}" --output_dir "${words[1]}" ${flags[@]+"${flags[@]}"}
