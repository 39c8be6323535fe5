# Sourced by the shell scripts: goes to the root, and takes the packages of the active environment,
# or makes .venv there, once.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
run_script() {  # NAME WORDS...: a script of experiments/, in the folder where the command was typed
    local root=$PWD script="$1"
    shift
    cd "$here"
    if [ "$here" != "$root" ]; then script="$root/experiments/$script"; else script="experiments/$script"; fi
    exec python "$script" "$@"
}
has_packages() {  # of the active environment: the versions that pyproject.toml asks for
    python - 2> /dev/null << 'PY'
import tomllib
from importlib.metadata import version

from packaging.requirements import Requirement

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
for text in project["dependencies"] + project["optional-dependencies"]["notebooks"]:
    package = Requirement(text)
    assert package.specifier.contains(version(package.name))
PY
}
active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [ -n "$active" ] && [ ! "$active" -ef .venv ] && has_packages; then
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"  # before another checkout that is installed there
    return
fi
shared=$(cd .venv 2> /dev/null && pwd -P || true)  # -e . of the requirements would turn that one to this code
if [ -n "$shared" ] && [ "${shared#"$(pwd -P)/"}" = "$shared" ]; then
    echo "error: .venv leads out of this checkout, to $shared; remove the link (rm .venv), and one is made here" >&2
    exit 2
fi
if [ ! -x .venv/bin/python ]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: python3 must be 3.11 or newer" >&2; exit 2; }
    python3 -m venv .venv || exit 1
fi
# shellcheck disable=SC1091
source .venv/bin/activate
# Of 18,000 files most are never imported, and compiling them all takes a minute; unless Python may keep nothing that it compiles
compile=--no-compile && [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile
install_packages() {  # what pip would install, by uv in a third of the time; by pip where uv is not found or fails
    local settings  # of pip, which uv does not read: mirrors, folders of wheels, certificates
    settings=$(python -m pip config list | sed -nE "s/\\\\n/ /g; s/^.*[.]index-url=('.*')$/UV_DEFAULT_INDEX=\1/p
        s/^.*[.]extra-index-url=('.*')$/UV_INDEX=\1/p; s/^.*[.]find-links=('.*')$/UV_FIND_LINKS=\1/p
        s/^.*[.]constraint=('.*')$/UV_CONSTRAINT=\1/p; s/^.*[.]cert=('.*')$/SSL_CERT_FILE=\1/p")
    { command -v uv || python -m pip install -q --disable-pip-version-check --retries 1 uv==0.13.9; } > /dev/null 2>&1 &&
        (set -a && eval "$settings" && uv pip install -q --index-strategy unsafe-best-match $compile "$@" 2> /dev/null) ||
        python -m pip install -q --disable-pip-version-check $compile "$@"
}
is_installed() {  # by a file in .venv that says of which requirements it was written
    [ "$(cat requirements.txt pyproject.toml | cksum)" = "$(cat ".venv/$1" 2> /dev/null)" ]
}
mark_installed() {
    cat requirements.txt pyproject.toml | cksum > ".venv/$1"
}
if ! is_installed installed; then
    echo "installing requirements.txt into .venv (once)"
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi > /dev/null; then
        # For Linux the usual torch brings CUDA along: gigabytes that only a GPU needs. Where this fails, it is what comes.
        UV_HTTP_RETRIES=1 PIP_RETRIES=1 install_packages --no-deps --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" \
            "$(grep '^torch==' requirements.txt)" 2> /dev/null ||
            echo "notice: torch's CPU wheels were not found; the usual ones, with CUDA, take some GB more"
    fi
    install_packages -r requirements.txt || exit 1
    # ipykernel would warn, at every start, that a kernel on this machine is not encrypted
    mkdir -p .venv/etc/ipython && echo 'c.IPKernelApp.log_level = "ERROR"' > .venv/etc/ipython/ipython_kernel_config.py
    mark_installed installed
fi
