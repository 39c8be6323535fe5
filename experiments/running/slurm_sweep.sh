#!/usr/bin/env bash
#SBATCH --job-name=wan-sweep
#SBATCH --array=0-7
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@90
# A sweep by a SLURM array: every task claims what nobody else makes, and more tasks may join at any time.
#
#     sbatch experiments/running/slurm_sweep.sh CONFIG PROMPTS OUT_DIR [flags of run_extraction_all.py]
#
# Submit it at the root of the project. A task that is stopped or requeued goes on where all of them are.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
if [ $# -lt 3 ]; then
    echo "error: usage: sbatch experiments/running/slurm_sweep.sh CONFIG PROMPTS OUT_DIR [flags]" >&2
    exit 2
fi
# exec: the signal before the time limit reaches Python, which finishes its block and lets go of its claim
exec python experiments/run_extraction_all.py --config_path "$1" --prompts "$2" --output_dir "$3" "${@:4}"
