#!/usr/bin/env bash
# The released weights, into the places that configs/self_forcing_dmd.yaml names. Says how much is missing and asks first;
# the same command goes on where it was stopped, and fetches nothing twice.
#
#     bash experiments/download_weights.sh [--yes] [FOLDER]      # FOLDER: the root of the repository where not given
set -euo pipefail
usage="usage: bash experiments/download_weights.sh [--yes] [FOLDER]"
yes=""
if [ "${1-}" = --yes ]; then yes=1; shift; fi
case "${1-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; -*) echo "error: unknown flag $1; $usage" >&2; exit 2 ;; esac
if [ $# -gt 1 ]; then echo "error: $usage" >&2; exit 2; fi
folder=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/..}")
source "$(dirname "${BASH_SOURCE[0]}")/running/env.sh"

model="$folder/wan_models/Wan2.1-T2V-1.3B"
fetch() {      # everything of the base model, one file of Self-Forcing; "$@" are flags of hf
    hf download Wan-AI/Wan2.1-T2V-1.3B --local-dir "$model" "$@" &&
        hf download gdhe17/Self-Forcing checkpoints/self_forcing_dmd.pt --local-dir "$folder" "$@"
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

planned=$(fetch --dry-run --format human 2>&1) ||
    { echo "error: ${HF_ENDPOINT:-https://huggingface.co} does not answer; look at the network, then run this again" >&2; exit 1; }
echo "$planned"
echo "into $folder, where $(df -Ph "$(realpath -e "$folder" 2>/dev/null || echo .)" | awk 'NR == 2 {print $4}') are free"
if [ -z "$yes" ]; then
    read -r -p "Download? [y/N] " answer || answer=""
    case "$answer" in
        y | Y | yes) ;;
        *) echo "error: nothing was downloaded; --yes does not ask" >&2; exit 2 ;;
    esac
fi
for file in diffusion_pytorch_model.safetensors models_t5_umt5-xxl-enc-bf16.pth Wan2.1_VAE.pth; do
    resume Wan-AI/Wan2.1-T2V-1.3B "$file" "$model"
done
resume gdhe17/Self-Forcing checkpoints/self_forcing_dmd.pt "$folder"
fetch --format human
echo "next: python experiments/run_extraction_figure4.py --layer_indices 1 5"
