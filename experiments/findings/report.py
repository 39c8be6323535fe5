"""The flags that all findings have, and the config that they name."""

import argparse
from pathlib import Path

from experiments.running.cli import Parser, count
from wan.config import RunConfig, load_config


def finding_parser(description: str, folder: str) -> Parser:
    """Return the flags of a finding whose results lie in experiments/findings/FOLDER."""
    parser = Parser(description=description.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml")
    flag("--device", default="auto")
    flag("--output_path", type=Path, default=Path(f"experiments/findings/{folder}/results.json"))
    flag("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    flag("--judges", type=count, help="processes that judge videos")
    return parser


def miniature_config(args: argparse.Namespace, ckpt_dir: str | None = None) -> RunConfig:
    """Return the config of --config_path and --device in float32, with the weights of another training."""
    settings = {"device": args.device, "dtype": "float32"}
    if ckpt_dir:
        settings |= {"ckpt_dir": ckpt_dir, "checkpoint_path": f"{ckpt_dir}/self_forcing_mini.pt"}
    return load_config(args.config_path, settings)
