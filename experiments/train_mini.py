"""Train the miniature of checkpoints/wan-mini in four stages, each from the files of the one before.

    python experiments/train_mini.py --stage vae --minutes 8        # AutoencoderKLWan, videos of 64 x 64
    python experiments/train_mini.py --stage base --minutes 14      # bidirectional WanModel and its umT5
    python experiments/train_mini.py --stage causal --minutes 17 --training_checkpoints outputs/training
    python experiments/train_mini.py --stage few_step --minutes 12 --training_checkpoints outputs/training
    python experiments/train_mini.py --stage lora --minutes 1            # LoRA of a window of 9 frames
    python experiments/train_mini.py --stage framewise --minutes 1       # LoRA of blocks of one frame

A stage ends after its steps or, where they end first, its minutes. Then it writes bf16 weights (the moving
average of training) and its numbers in training.json. Its state is saved every minute: after Ctrl-C or a
kill the same command with --resume goes on, and without --minutes the weights are the same bytes as if
nothing had happened. On a CPU, `--steps 2 --batch 1 --clips 4` rehearses a stage in seconds.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from experiments.miniature.recipe import HARD_KINDS, LOG, OPTIMIZERS, RECIPES, StageRun
from experiments.running.cli import Parser, count, finite_number, main
from experiments.running.ranks import this_rank
from wan.config import DTYPES
from wan.errors import ConfigError

STARTS = {  # what --start_from goes on from
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "base": "transformer/diffusion_pytorch_model.safetensors",
    "causal": "self_forcing_mini.pt",  # which is shipped, while causal.pt, of this stage, is not
}


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--stage", required=True, choices=RECIPES)
    add("--steps", type=count, help="of the stage; the recipe's where left out")
    add(
        "--minutes",
        type=finite_number,
        help="at most, of all runs of the stage together; the data is not counted",
    )
    add("--output_dir", type=Path, default=Path("checkpoints/wan-mini"))
    add("--device", default="auto")
    add("--dtype", choices=DTYPES, default="auto", help="of the working weights")
    add("--seed", type=int, default=0)
    add("--log", type=Path, help=f"JSON with the numbers of every stage (OUTPUT_DIR/{LOG})")
    add("--lr", type=finite_number, help="peak learning rate")
    add("--batch", type=count, help="clips of 81 frames per step")
    add("--optimizer", choices=OPTIMIZERS, help="of matrices and kernels; AdamW has the other parameters")
    add("--clips", type=count, help="different clips to train on")
    add("--kinds", nargs="+", choices=sorted(set(HARD_KINDS)), help="of scenes; twice: drawn twice as often")
    add("--training_checkpoints", type=Path, metavar="DIR", help="keep the causal weights of some steps")
    add("--start_from", type=Path, metavar="DIR", help="vae, base, causal: go on from the weights in DIR")
    add("--resume", action="store_true", help="go on where this stage was stopped")
    add("--compile", action=argparse.BooleanOptionalAction, help="fuse each layer; on a GPU the default")
    args = parser.parse_args(argv)
    for name in ("minutes", "lr"):
        if (value := getattr(args, name)) is not None and value <= 0:
            raise ConfigError(f"--{name} must be above 0, not {value:g}")
    if not 0 <= args.seed < 2**31:
        raise ConfigError(f"--seed must be in 0..{2**31 - 1}, not {args.seed}")
    given = {name: getattr(args, name) for name in ("steps", "lr", "batch", "clips", "optimizer")}
    given["kinds"] = tuple(args.kinds) if args.kinds else None
    recipe = replace(RECIPES[args.stage], **{name: v for name, v in given.items() if v is not None})
    start = args.start_from and args.start_from / STARTS.get(args.stage, "none")
    if start and not start.is_file():
        raise ConfigError(f"--start_from takes the stages {', '.join(STARTS)}; {start} was not found")
    if missing := [path for path in recipe.needs if not (args.output_dir / path).exists()]:
        raise ConfigError(f"{args.output_dir / missing[0]} not found; --stage {args.stage} needs it")
    if this_rank().count > 1:
        raise ConfigError("the miniature trains on one GPU; start it without torchrun")

    import torch  # after the flags: a --help needs no torch
    from diffusers.utils import logging as diffusers_logging

    from experiments.caches.files import require_writable
    from experiments.extraction.devices import choose_device, choose_dtype, device_name
    from experiments.miniature.stages import STAGES
    from experiments.miniature.tracking import hashes
    from experiments.miniature.training import log_stage
    from wan.checkpoint import file_sha256

    device = choose_device(args.device)
    on_gpu, dtype = device.type == "cuda", choose_dtype(args.dtype, device)
    compiles = on_gpu if args.compile is None else args.compile
    folders = args.training_checkpoints, args.start_from
    limits = args.seed, args.minutes, args.resume, compiles
    stage = StageRun(args.stage, recipe, args.output_dir, device, dtype, *limits, *folders)
    log = args.log or args.output_dir / LOG
    for path in (stage.state_file, log):
        require_writable(path)
    if args.training_checkpoints:
        require_writable(args.training_checkpoints / "step_00000.pt")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 5
    diffusers_logging.set_verbosity_error()
    numbers = STAGES[args.stage](stage)
    about = {
        "device": device_name(device),
        "torch": torch.__version__,
        "seed": args.seed,
        "dtype": str(dtype),
        "frozen": hashes(),
        "start_from": start and file_sha256(start),
        **asdict(recipe),
    }
    log_stage(log, args.stage, about | numbers)
    print(f"{args.stage}: " + ", ".join(f"{k} {v}" for k, v in numbers.items() if not isinstance(v, list)))


if __name__ == "__main__":
    main(run)
