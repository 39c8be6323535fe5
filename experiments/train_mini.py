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

from experiments.running.cli import Parser, count, finite_number, main


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    stages = ("vae", "base", "causal", "few_step", "lora", "framewise")
    add("--stage", required=True, choices=stages)
    add("--steps", type=count, help="of the stage; the recipe's where left out, as the next two")
    add("--batch", type=count, help="clips of 81 frames per step")
    add("--clips", type=count, help="different clips to train on")
    add("--minutes", type=finite_number, help="at most; the data is not counted")
    add("--output_dir", type=Path, default=Path("checkpoints/wan-mini"))
    add("--device", default="auto")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    from experiments.miniature.training import train  # no torch for --help

    names = ("steps", "batch", "clips", "minutes", "seed")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    numbers = train(args.stage, args.output_dir, args.device, **given)
    told = ", ".join(f"{name} {numbers[name]}" for name in ("steps", "seconds", "loss_mean_of_last_10"))
    print(f"{args.stage}: {told}")


if __name__ == "__main__":
    main(run)
