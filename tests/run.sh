#!/usr/bin/env bash
# The tests, a process for each core:  bash tests/run.sh [--full] [pytest arguments]
# --full runs those marked `beside` too: browsers, whole scripts, the shipped weights judged again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../experiments/running/env.sh"
chosen=(-m "not beside")
if [ "${1:-}" = --full ]; then chosen=() && shift; fi
python -m pytest -n auto --dist loadfile ${chosen[@]+"${chosen[@]}"} "$@"  # macOS: bash 3.2
