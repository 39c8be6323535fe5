#!/usr/bin/env bash
# A notebook for each of many layers, without clicking: executed notebooks, SVGs, a contact sheet and an HTML page.
#
#     bash experiments/run_notebooks.sh NOTEBOOK CACHE LAYERS... [flags of run_notebooks.py]
#     bash experiments/run_notebooks.sh extract_all_attention.ipynb cache/published/self_forcing_dmd_eagle_21f.pt all
#
# CACHE: an atlas, another cache with several layers, or a folder of layerN.pt. LAYERS: 0 5 7, 0-29, or all. Ctrl-C stops; the
# same command continues.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 3 any "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"
run_script run_notebooks.py "${words[@]}" ${flags[@]+"${flags[@]}"}
