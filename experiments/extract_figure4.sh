#!/usr/bin/env bash
# The last block's attention of chosen layers, which Figure 4 of Deep Forcing draws -> cache/attention_cache_figure4.pt.
#
#     bash experiments/extract_figure4.sh [CONFIG] [LAYERS...] [--flags of run_extraction_figure4.py]
#     bash experiments/extract_figure4.sh wan_mini 1 5
#
# CONFIG: a YAML, or the name of one of configs/; self_forcing_dmd. LAYERS: those of the config.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 0 any "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"

options=() layers=(${words[@]+"${words[@]}"})
if [[ "${words[0]-0}" != [0-9]* ]] || [ -f "${words[0]-}" ]; then
    options+=(--config_path "${words[0]}")
    layers=("${words[@]:1}")
fi
if [ ${#layers[@]} -gt 0 ]; then options+=(--layer_indices "${layers[@]}"); fi
run_script run_extraction_figure4.py ${options[@]+"${options[@]}"} ${flags[@]+"${flags[@]}"}
