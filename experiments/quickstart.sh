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
python - "$figure4" "$inference" "$atlas" <<'PY'
import sys
from pathlib import Path
from experiments.caches import load_cache
for path in filter(lambda p: Path(p).exists(), sys.argv[1:]):
    cache = load_cache(path)
    if cache["model"] != "wan-mini":
        sys.exit(f"error: {path} is a cache of {cache['model']}; move it away first, the quickstart would replace it")
PY

mkdir -p outputs
python experiments/run_extraction_figure4.py --config_path configs/wan_mini.yaml --output_path "$figure4" \
    --save_video outputs/wan-mini.mp4
python experiments/run_extraction_all.py --config_path configs/wan_mini.yaml --output_path "$atlas" --key_curve --cross --rope_bands
python experiments/run_extraction.py --config_path configs/wan_mini.yaml --output_path "$inference"
papermill --cwd notebooks --no-progress-bar --log-level WARNING notebooks/plt_fig4.ipynb outputs/plt_fig4.ipynb \
    -p CACHE_PATH "../$figure4" -p SAVE_DIR figure4

echo
echo "the generated video:    outputs/wan-mini.mp4"
echo "caches of its rollout:  $figure4  $inference  $atlas"
echo "the executed notebook:  outputs/plt_fig4.ipynb"
for svg in notebooks/figure4/*.svg; do echo "figure:                 $svg"; done
