#!/usr/bin/env bash
# The paper's Figure 4 from the published numbers of the real model, over the paper's own curve, and the ranking of all heads.
#
#     bash experiments/published_figure.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 0 0 "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"

cache=cache/published/self_forcing_dmd_eagle_21f.pt
mkdir -p outputs
papermill --cwd notebooks --no-progress-bar --log-level WARNING notebooks/plt_fig4.ipynb outputs/figure4_published.ipynb \
    -p CACHE_PATH "../$cache" -p SAVE_DIR figure4_published
python experiments/match_curve.py --cache_path "$cache"

echo
echo "the figure:             notebooks/figure4_published/figure4_reproduction.svg"
echo "the executed notebook:  outputs/figure4_published.ipynb"
