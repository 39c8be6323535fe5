#!/usr/bin/env bash
# The released weights of a model, into the places that its config names. Says licence, source and how much is missing, and
# asks first; the same command goes on where it was stopped, and fetches nothing twice. Weights that are not under a common
# open licence are asked for once more. Then sizes and SHA-256 are compared with the hub's, and where there is a GPU
# Self-Forcing's attention with what was published of it (experiments/check_model.py).
#
#     bash experiments/download_weights.sh [--yes] [--accept_licence] [--from DIR] [NAME] [FOLDER]
#
# --from DIR: copy from DIR/OWNER/REPOSITORY in place of the hub, as from another machine or in a rehearsal.
# NAME: a configuration of configs/, self_forcing_dmd where not given. FOLDER: the root of the repository where not given;
# a new folder is written with a slash, ./weights.
set -euo pipefail
usage="usage: bash experiments/download_weights.sh [--yes] [--accept_licence] [--from DIR] [NAME] [FOLDER]"
yes="" accepted="" copies="" name=self_forcing_dmd
while [ $# -gt 0 ]; do
    case "$1" in
        --yes) yes=1 ;;
        --accept_licence) accepted=1 ;;
        --from)
            if [ ! -d "${2-}" ]; then echo "error: --from takes a folder with OWNER/REPOSITORY in it, not '${2-}'" >&2; exit 2; fi
            copies=$(realpath "$2"); shift ;;
        -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) echo "error: unknown flag $1; $usage" >&2; exit 2 ;;
        *) break ;;
    esac
    shift
done
configs=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../configs")
case "${1-}" in
    "" | */* | .*) ;;      # a folder
    *) if [ -f "$configs/$1.yaml" ] || [ ! -d "$1" ] || [ $# -gt 1 ]; then name="$1"; shift; fi ;;
esac
if [ $# -gt 1 ]; then echo "error: $usage" >&2; exit 2; fi
folder=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/..}")
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"

plan=$(python - "$configs" "$name" <<'PY'
import sys
from pathlib import Path

from wan.config import load_config
from wan.errors import did_you_mean
from wan.names import VAE_FILE, WIDE_VAE_FILE

configs, name = Path(sys.argv[1]), sys.argv[2]
known = [path.stem for path in sorted(configs.glob("*.yaml")) if "\nrelease:\n" in path.read_text(encoding="utf-8")]
if name not in known:
    sys.exit(f"error: no weights of {name!r} are released{did_you_mean(name, known)}; a new folder is written ./{name}")
config = load_config(configs / f"{name}.yaml")
base = Path(config.ckpt_dir).name
for field in ("source", "licence", "repository", "folder"):
    print(field, config.release[field])
print("ask", "yes" if config.release["ask"] else "no")
for file in config.release["files"]:
    print("file", file)
print("base", base)
unused = base in ("Wan2.1-T2V-14B", "Wan2.2-TI2V-5B")  # whose own weights are not run
print("base_files", "no transformer" if unused else "everything")
print("vae", WIDE_VAE_FILE if base.startswith("Wan2.2") else VAE_FILE)
PY
) || exit 2
said() { sed -n "s/^$1 //p" <<< "$plan"; }
base=$(said base) repository=$(said repository) licence=$(said licence)
mapfile -t files < <(said file)
model="$folder/wan_models/$base" target="$folder/$(said folder)"
without=()
if [ "$(said base_files)" = "no transformer" ]; then without=(--exclude "diffusion_pytorch_model*"); fi
copy() {       # REPOSITORY FOLDER FILES...: from the folder of --from, whole and never over another file
    local from="$copies/$1" to="$2" file
    shift 2
    for file in "$@"; do
        if [ ! -f "$from/$file" ]; then echo "error: $from/$file not found; --from takes a folder with OWNER/REPOSITORY in it" >&2; exit 2; fi
        if [ -f "$to/$file" ] && ! cmp -s "$from/$file" "$to/$file"; then
            echo "error: $to/$file is not the file that $copies has; move it away, and run the same command again" >&2; exit 1
        fi
        mkdir -p "$(dirname "$to/$file")"
        if [ ! -f "$to/$file" ]; then cp "$from/$file" "$to/$file.part" && mv "$to/$file.part" "$to/$file"; fi
        echo "$to/$file"
    done
}
fetch() {      # the base model, then the release's files; "$@" are flags of hf
    hf download "Wan-AI/$base" --local-dir "$model" ${without[@]+"${without[@]}"} "$@" &&
        hf download "$repository" "${files[@]}" --local-dir "$target" "$@"
}
resume() {     # REPOSITORY FILE FOLDER: hf begins a file anew where it was killed, curl goes on; hf then compares its hash
    local target="$3/$2"
    if [ -f "$target" ]; then return; fi
    mkdir -p "$(dirname "$target")"
    echo "$2"
    curl --fail --location --continue-at - --retry 5 --progress-bar --output "$target.part" \
        "${HF_ENDPOINT:-https://huggingface.co}/$1/resolve/main/$2" && mv "$target.part" "$target" ||
        { echo "error: $2 did not arrive whole; the same command goes on where it stopped" >&2; exit 1; }
}
agree() {      # QUESTION REFUSAL
    local answer
    read -r -p "$1 [y/N] " answer || answer=""
    case "$answer" in
        y | Y | yes) ;;
        *) echo "error: $2" >&2; exit 2 ;;
    esac
}

echo "$name: licence $licence; $(said source), https://huggingface.co/$repository"
if [ -n "$copies" ]; then
    planned="copied from $copies"
else
    planned=$(fetch --dry-run --format human 2>&1) ||
        { echo "error: ${HF_ENDPOINT:-https://huggingface.co} does not answer; look at the network, then run this again; HF_ENDPOINT names a mirror, --from DIR a folder with copies" >&2; exit 1; }
fi
echo "$planned"
echo "into $folder, where $(df -Ph "$(realpath -e "$folder" 2>/dev/null || echo .)" | awk 'NR == 2 {print $4}') are free"
if [ "$(said ask)" = yes ] && [ -z "$accepted" ]; then
    agree "Do you accept its licence ($licence)?" "nothing was downloaded; --accept_licence says that you accept it"
fi
if [ -z "$yes" ]; then agree "Download?" "nothing was downloaded; --yes does not ask"; fi
if [ -n "$copies" ]; then
    mapfile -t of_base < <(cd "$copies/Wan-AI/$base" 2> /dev/null && find . -type f | sed 's|^[.]/||')
    copy "Wan-AI/$base" "$model" ${of_base[@]+"${of_base[@]}"}
    copy "$repository" "$target" "${files[@]}"
    echo "copied: every file is that of $copies"
else
transformer=(diffusion_pytorch_model.safetensors)
if [ ${#without[@]} -gt 0 ]; then transformer=(); fi
for file in ${transformer[@]+"${transformer[@]}"} models_t5_umt5-xxl-enc-bf16.pth "$(said vae)"; do
    resume "Wan-AI/$base" "$file" "$model"
done
for file in "${files[@]}"; do
    resume "$repository" "$file" "$target"
done
fetch --format human
python - "$model" "Wan-AI/$base" "$target" "$repository" <<'PY' || exit 1
import sys
from hashlib import file_digest
from pathlib import Path

from huggingface_hub import HfApi

checked = hashed = 0
for folder, repository in zip(sys.argv[1::2], sys.argv[2::2]):
    for entry in HfApi().list_repo_tree(repository, recursive=True):
        file = Path(folder, entry.path)
        if not file.is_file() or not hasattr(entry, "size"):  # not asked for, or a folder
            continue
        checked, wanted = checked + 1, entry.lfs.sha256 if entry.lfs else None
        hashed += wanted is not None
        with file.open("rb") as content:
            wrong = file.stat().st_size != entry.size or (wanted and file_digest(content, "sha256").hexdigest() != wanted)
        if wrong:
            sys.exit(f"error: {file} is not the file that the hub has; remove it, and run the same command again")
print(f"checked: the sizes of {checked} files are the hub's, and so are the SHA-256 of {hashed}")
PY
fi
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
if [ "$name" != self_forcing_dmd ]; then
    echo "next: python experiments/run_extraction_figure4.py --config_path configs/$name.yaml --layer_indices 1 5"
elif [ "$folder" = "$root" ] && python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "checking the model against published attention"
    cd "$root" && python experiments/check_model.py
else
    echo "next: python experiments/check_model.py"
fi
