# Sourced by the two commands of the README: makes .venv at the root, once, and goes there.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
if [ ! -x .venv/bin/python ]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: python3 must be 3.11 or newer" >&2; exit 2; }
    python3 -m venv .venv || exit 1
fi
# shellcheck disable=SC1091
source .venv/bin/activate
wanted=$(cat requirements.txt pyproject.toml | cksum)
if [ "$wanted" != "$(cat .venv/installed 2>/dev/null)" ]; then
    echo "installing requirements.txt into .venv (once)"
    python -m pip install -q --disable-pip-version-check -r requirements.txt || exit 1
    echo "$wanted" > .venv/installed
fi
