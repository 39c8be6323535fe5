#!/usr/bin/env bash
# The miniature, end to end: prompt -> video and caches -> executed notebook -> SVG figures. Every notebook's own cache too.
#
#     bash experiments/quickstart.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/running/usage.sh" 0 0 "$@"
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"

figure4=cache/attention_cache_figure4.pt
inference=cache/attention_cache.pt
atlas=cache/atlas.pt
maps=cache/maps.pt
effects=cache/effects.pt
mkdir -p outputs
# In one process, which imports torch, diffusers and transformers once; each line is a command of its own too:
# python experiments/SCRIPT --config_path configs/wan_mini.yaml FLAGS
python - <<PY
import runpy
import sys

commands = """
run_extraction_figure4.py --output_path $figure4 --save_video outputs/wan-mini.mp4
run_extraction_all.py --output_path $atlas --key_curve --cross --rope_bands
run_extraction.py --output_path $inference
run_extraction_maps.py --output_path $maps --query_patch 3,2,1 --words --save_video
run_intervention.py --output_path $effects --interventions configs/edits/forget_past.yaml
"""
for script, *flags in map(str.split, commands.strip().splitlines()):
    sys.argv = [f"experiments/{script}", "--config_path", "configs/wan_mini.yaml", *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")
PY
papermill --cwd notebooks --no-progress-bar --log-level WARNING notebooks/plt_fig4.ipynb outputs/plt_fig4.ipynb \
    -p CACHE_PATH "../$figure4" -p SAVE_DIR figure4

echo
echo "the generated video:    outputs/wan-mini.mp4"
echo "caches of its rollout:  $figure4  $inference  $atlas  $maps  $effects"
echo "the executed notebook:  outputs/plt_fig4.ipynb"
for svg in notebooks/figure4/*.svg; do echo "figure:                 $svg"; done
