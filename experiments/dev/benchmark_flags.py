"""The flags of every benchmark that rolls out a config's model."""

import argparse

from experiments.running.cli import Parser, count, run_parser


def benchmark_parser(description: str, repeats: int) -> Parser:
    """The flags of a run, --random_weights, and --repeats with its default."""
    parser = run_parser(description, None)
    parser.add_argument(
        "--random_weights",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="the config's model with random weights: no files needed",
    )
    parser.add_argument("--repeats", type=count, default=repeats, help="timed repeats of every row")
    return parser
