"""Make the files of a released model with random weights: native names, shapes and dtypes of the release.

    python experiments/benchmarks/random_weights.py wan_models/random --text_encoder --checkpoint

What loads, streams and runs the real model can be tried with them where the weights cannot be had.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

from experiments.benchmarks.harness import random_state
from experiments.extraction.devices import choose_device
from experiments.running.cli import Parser, main
from wan.checkpoint import UMT5_FILE, UMT5_TO_TRANSFORMERS, renamed
from wan.config import MODELS
from wan.model import CausalWanModel
from wan.text_encoder import TOKENIZER_DIR, UMT5_XXL

TOKENIZER = Path("checkpoints/wan-mini/tokenizer")  # umT5's cannot be made up; this one's ids are among its


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("folder", type=Path, help="where the model goes; about 6 GB, and 11 GB more with umT5")
    flag("--model", choices=MODELS, default="Wan2.1-T2V-1.3B", help="whose shapes")
    flag("--text_encoder", action="store_true", help="also umT5-XXL")
    flag("--checkpoint", action="store_true", help="also a Self-Forcing style self_forcing_dmd.pt")
    flag("--device", default="auto", help="which draws the numbers")
    args = parser.parse_args(argv)
    device, folder = choose_device(args.device), args.folder
    released = torch.bfloat16 if args.model.endswith("14B") else torch.float32
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(vars(MODELS[args.model])), encoding="utf-8")
    with torch.device("meta"):
        model = CausalWanModel(**vars(MODELS[args.model]))
        encoder = UMT5EncoderModel(UMT5Config(**UMT5_XXL))
    save_file(random_state(model, released, device), folder / "diffusion_pytorch_model.safetensors")
    if args.text_encoder:
        state = random_state(encoder, torch.bfloat16, device)
        native = {theirs: ours for ours, theirs in UMT5_TO_TRANSFORMERS.items()}
        torch.save(renamed(state, native), folder / UMT5_FILE)
        shutil.copytree(TOKENIZER, folder / TOKENIZER_DIR, dirs_exist_ok=True)
    if args.checkpoint:
        tensors = random_state(model, torch.float32, device)
        ema = {f"model.{name}": tensor for name, tensor in tensors.items()}
        torch.save({"generator_ema": ema}, folder / "self_forcing_dmd.pt")


if __name__ == "__main__":
    main(run)
