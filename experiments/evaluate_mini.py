"""Measure the miniature: its VAE, what its videos show of their captions, and what its past is good for.

    python experiments/evaluate_mini.py --output_path checkpoints/wan-mini/evaluation.json

Captions are of the held-out side of experiments/miniature/moving_shapes.py; tracking.py beside it judges.
What is done is kept in OUTPUT_PATH.partial: the same command goes on where it was stopped.
"""

from pathlib import Path

from experiments.caches import files, outputs
from experiments.running import cli
from wan.config import load_config


def run(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument
    flag("--config_path", type=cli.config_file, default="configs/wan_mini.yaml", help="YAML of the miniature")
    flag("--ckpt_dir", help="directory of another miniature, with self_forcing_mini.pt in it")
    flag("--captions", type=cli.count, default=96, help="held-out captions of each set")
    flag("--clips", type=cli.count, default=96, help="held-out clips of 81 frames for the VAE's PSNR")
    flag("--workers", type=cli.count, help="processes that judge videos; one a core where left out")
    flag("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    report = "checkpoints/wan-mini/evaluation.json"
    flag("--output_path", type=cli.output_file((".json",)), default=report, help="where the report goes")
    flag("--overwrite", action="store_true", help="replace a report that is there")
    args = parser.parse_args(argv)

    from experiments.miniature.evaluation import evaluate  # after the flags: a --help needs no torch

    settings = {"device": args.device}
    if args.ckpt_dir:
        settings["ckpt_dir"] = args.ckpt_dir
        settings["checkpoint_path"] = f"{args.ckpt_dir}/self_forcing_mini.pt"
    config = load_config(args.config_path, settings)
    output = Path(args.output_path)
    partial = output.with_name(f"{output.name}.partial")
    files.require_writable(output)
    files.require_writable(partial)
    outputs.require_replaceable(output, outputs.Contents("report"), overwrite=args.overwrite)
    # Workers fork: nothing has touched a GPU yet.
    report = evaluate(config, args.captions, args.clips, partial, args.workers)
    files.save_report(report, output)
    print("VAE:", report["vae"])
    for name, part in report["captions"].items():
        for source, result in part["shares"].items():
            print(f"{name}, {source}:", result)
    for row in report["past"]:
        print("past:", {key: value for key, value in row.items() if key != "intervals"})


if __name__ == "__main__":
    cli.main(run)
