"""Train the miniature of checkpoints/wan-mini in four stages, each from the files of the one before.

    python experiments/train_mini.py --stage vae --minutes 8        # AutoencoderKLWan, videos of 64 x 64
    python experiments/train_mini.py --stage base --minutes 14      # bidirectional WanModel and its umT5
    python experiments/train_mini.py --stage causal --minutes 17    # block-causal, by teacher forcing
    python experiments/train_mini.py --stage few_step --minutes 12  # 4 steps a block
    python experiments/train_mini.py --stage lora --minutes 1       # LoRA of a window of 9 frames
    python experiments/train_mini.py --stage framewise --minutes 1  # LoRA of blocks of one frame

A stage ends after its steps or, where they end first, its minutes (data is not counted). Then it
writes bf16 weights (the moving average of training) and its numbers in OUTPUT_DIR/training.json. A stage
that is stopped leaves nothing. On a CPU, `--steps 2 --batch 1 --clips 4` rehearses a stage in seconds.
"""

from pathlib import Path

from experiments.running import cli


def run(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument
    stages = ("vae", "base", "causal", "few_step", "lora", "framewise")
    flag("--stage", required=True, choices=stages, help="what to train; each starts from the one before")
    flag("--steps", type=cli.count, help="of the stage; the recipe's where left out, as the next two")
    flag("--batch", type=cli.count, help="clips of 81 frames per step")
    flag("--clips", type=cli.count, help="different clips to train on")
    flag("--minutes", type=cli.number(float, 1e-3, 1e6), help="at most; the data is not counted")
    flag("--output_dir", type=Path, default=Path("checkpoints/wan-mini"), help="folder of the weights")
    flag("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    flag("--seed", type=cli.count_or_none, default=0, help="of clips and noise")
    flag("--overwrite", action="store_true", help="replace the weights of this stage in OUTPUT_DIR")
    args = parser.parse_args(argv)

    from experiments.miniature.training import train  # after the flags: a --help needs no torch

    names = ("steps", "batch", "clips", "minutes", "seed")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    numbers = train(args.stage, args.output_dir, args.device, args.overwrite, **settings)
    results = [f"{name} {numbers[name]}" for name in ("steps", "seconds", "loss_mean_of_last_10")]
    print(f"{args.stage}: {', '.join(results)}")


if __name__ == "__main__":
    cli.main(run)
