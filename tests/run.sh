#!/usr/bin/env bash
# All tests, a process for each core:  bash tests/run.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../experiments/running/env.sh"
python -m pytest -n auto --dist loadfile "$@"
