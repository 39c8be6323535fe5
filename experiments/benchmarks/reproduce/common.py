"""Flags of the scripts that make published findings, and the files that they write."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.caches.files import save_report
from experiments.extraction.devices import choose_device
from experiments.extraction.provenance import environment
from experiments.figures.style import save_svg
from experiments.running.cli import Parser, count
from wan.config import RunConfig, load_config


def finding_parser(description: str, output_path: str, several: bool = False) -> Parser:
    """Return the flags of a script that makes a published finding, of one miniature or of several."""
    parser = Parser(description=description.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml")
    flag("--device", default="auto")
    flag("--output_path", type=Path, default=Path(output_path))
    flag("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    other = "directory of another miniature, with self_forcing_mini.pt in it"
    flag("--ckpt_dir", nargs="+" if several else None, help=other)
    flag("--judges", type=count, help="processes that judge videos")
    return parser


def miniature_config(args: argparse.Namespace) -> RunConfig:
    """Return the config of --config_path, --device and --ckpt_dir, in float32."""
    settings = {"device": args.device, "dtype": "float32"}
    if args.ckpt_dir:
        weights = f"{args.ckpt_dir}/self_forcing_mini.pt"
        settings |= {"ckpt_dir": args.ckpt_dir, "checkpoint_path": weights}
    return load_config(args.config_path, settings)


def save_finding(
    args: argparse.Namespace, report: Mapping[str, Any], figures: Mapping[str, Figure] | None = None
) -> None:
    """Write a report and its figures, and print their paths."""
    made = {} if "environment" in report else {"environment": environment(choose_device(args.device))}
    save_report(made | dict(report), args.output_path)
    print(args.output_path)
    for name, figure in (figures or {}).items():
        print(save_svg(figure, args.figures / f"{name}.svg"))
