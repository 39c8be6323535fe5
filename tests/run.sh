#!/usr/bin/env bash
# The tests, a process for each core:  bash tests/run.sh [--full] [pytest arguments]
# --full runs those marked `beside` too: browsers, whole scripts, the shipped weights judged again.
# --full --install only installs what they need.
# --gpu runs what a GPU changes, by ${PYTHON:-python3} as it is: nothing is installed. At most 5 minutes on an H100.
set -euo pipefail
if [ "${1:-}" = --gpu ]; then
    cd "$(dirname "${BASH_SOURCE[0]}")/.." && shift
    exec "${PYTHON:-python3}" tests/helpers/gpu_run.py "$@"
fi
unset PYTHONDONTWRITEBYTECODE  # a hundred processes import the same; env.sh then leaves compiling to them
unset VIRTUAL_ENV CONDA_PREFIX  # the versions of requirements.txt, in .venv
source "$(dirname "${BASH_SOURCE[0]}")/../experiments/running/env.sh"
if ! is_installed installed_dev; then
    echo "installing pyproject.toml's extra dev into .venv (once)"
    install_packages -e ".[dev]"
    mark_installed installed_dev
fi
chosen=(-m "not beside")
if [ "${1:-}" = --full ]; then
    chosen=() && shift
    # torch's CUDA build brings Triton along; without a GPU it interprets the kernels and compiles them
    [ "$(uname -s)" != Linux ] || python -c 'import triton' 2> /dev/null || install_packages triton==3.7.1 ||
        echo "notice: Triton was not found; the tests of its kernels are skipped"
    python -c 'import material' 2> /dev/null || install_packages -e ".[docs]" ||
        echo "notice: mkdocs was not found; the test of the site is skipped"
fi
if [ "${1:-}" = --install ]; then exit; fi
python -m pytest -n auto --dist loadfile --no-loadscope-reorder ${chosen[@]+"${chosen[@]}"} "$@"  # macOS: bash 3.2
