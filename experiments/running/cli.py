"""What the extraction scripts share on the command line: flags that override a config, one line for bad
input, exit codes.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from experiments.extraction import edit_files
from experiments.running import run_files
from experiments.running.entry import fail, main, parsed
from experiments.running.policy_flags import add_policy_flags, policy_overrides
from wan.config import DTYPES, RunConfig, load_config
from wan.errors import ConfigError, one_line, quoted, require_text
from wan.limits import MAX_COUNT
from wan.modules.interventions import PASSES
from wan.validation import check_seed

__all__ = [
    "Parser",
    "add_gpus",
    "add_memory_flags",
    "add_run_flags",
    "config_from",
    "count",
    "fail",
    "main",
    "refuse",
    "run_parser",
]

OVERRIDES = (
    "ckpt_dir",
    "checkpoint_path",
    "prompt",
    "num_frames",
    "independent_first_frame",
    "seed",
    "device",
    "use_ema",
    "step",
    "layer_indices",
    "layer_index",
    "dtype",
    "gpus",
    "offload",
    "t5_cpu",
    "prompt_embeds",
)


def whole_number(text: str) -> int:
    """A number of 64 bits: what no flag of ours exceeds."""
    try:
        return check_seed(int(text))
    except ValueError:  # no number, or a ConfigError
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number of 64 bits") from None


def finite_number(text: str) -> float:
    """A number that is neither infinite nor nan."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a finite number")
    return number


def count(text: str) -> int:
    """How many of something are made or used: from 1 to MAX_COUNT."""
    number = whole_number(text)
    if not 1 <= number <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{number} is not in 1..{MAX_COUNT}")
    return number


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the default of a flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False
        return action.help if says_nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line.

    Numbers have limits, words are text, and no file that is written is one that is read (args.files knows
    them).
    """

    LIMITED: ClassVar = {int: whole_number, float: finite_number}

    def __init__(self, **options: Any):
        super().__init__(formatter_class=Help, **options)
        self.add_argument("--debug", action="store_true", help="also print the traceback of an error")

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        if options.get("type") in self.LIMITED:
            options["type"] = self.LIMITED[options["type"]]
        return super().add_argument(*names, **options)

    def parse_args(  # type: ignore[override]  # argparse's is overloaded by the namespace's type
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        words = sys.argv[1:] if args is None else list(args)
        for number, word in enumerate(words):
            require_text(
                word, words[number - 1] if number and words[number - 1].startswith("-") else "a word"
            )
        found = super().parse_args(words, namespace)
        parsed.append(found)
        found.files = run_files.of_arguments(found)
        found.words = words  # for the processes of --gpus
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message)}; see {self.prog} --help\n")


def run_parser(description: str, output_path: str | None) -> Parser:
    """Flags that all extractions have; output_path is the default place of the cache."""
    parser = Parser(description=description.strip().splitlines()[0])
    flag = parser.add_argument
    both = argparse.BooleanOptionalAction
    flag(
        "--config_path",
        default="configs/self_forcing_dmd.yaml",
        help="YAML with everything a run needs; flags override it",
    )
    flag("--checkpoint_path", help="Self-Forcing style .pt with the causal weights")
    flag(
        "--no_checkpoint",
        action="store_true",
        help="run the base weights of ckpt_dir through the causal sampler",
    )
    flag("--ckpt_dir", help="directory of the base model in diffusers layout")
    flag("--output_path", default=output_path, help="where the cache goes")
    flag("--prompt", help="text to generate from")
    flag("--num_frames", type=int, help="latent frames; 21 are 81 video frames")
    flag("--independent_first_frame", action=both, default=None, help="the first block is one frame")
    flag("--seed", type=int, help="of all noise")
    flag("--device", help="auto, cpu, cuda or cuda:N")
    flag("--gpu_id", type=int, help="short for --device cuda:N")
    flag(
        "--use_ema",
        action=both,
        default=None,
        help="the checkpoint's generator_ema rather than its generator",
    )
    flag("--step", type=int, help="which pass: 0 is t = 1000, the last is the clean pass")
    flag(
        "--save_video",
        metavar="PATH",
        nargs="?",
        const="",
        help="also decode the video and write an mp4, beside the cache unless PATH says where",
    )
    add_policy_flags(parser)
    flag("--prompt_embeds", metavar="FILE", help="a .pt of prompt embeddings, in place of umT5")
    add_edit_flags(parser)
    add_memory_flags(parser)
    add_run_flags(parser)
    return parser


def add_gpus(parser: Parser) -> None:
    """Of scripts that make one rollout: docs/many_gpus.md."""
    parser.add_argument(
        "--gpus", type=count, help="make one rollout on so many GPUs of this host; it starts torchrun itself"
    )


def add_edit_flags(parser: Parser) -> None:
    """What a run changes inside attention: docs/interventions.md."""
    flag = parser.add_argument
    flag("--interventions", metavar="FILE", help="a YAML of edits, in place of the config's")
    flag("--ablate_heads", metavar="FILE.csv", help="layers x heads, 1 drops a head; with --ablate_passes")
    flag("--ablate_passes", choices=PASSES, help="in which passes --ablate_heads drops them; no default")


def add_memory_flags(parser: Parser) -> None:
    """What of the model lies where, and how large its numbers are."""
    flag, both = parser.add_argument, argparse.BooleanOptionalAction
    flag(
        "--dtype", choices=DTYPES, help="of weights and generation; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    flag(
        "--offload",
        action=both,
        default=None,
        help="keep the layers' weights on the host and stream them to the GPU; the "
        "same bits, less GPU memory; umT5 runs on the CPU",
    )
    flag("--t5_cpu", action=both, default=None, help="run umT5 on the CPU")


def add_run_flags(parser: Parser) -> None:
    """How a run behaves; nothing of what it makes."""
    flag = parser.add_argument
    flag(
        "--overwrite",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="replace what is there; a sweep leaves it",
    )
    flag(
        "--deterministic", action="store_true", help="equal bits in every run on one device, slower on a GPU"
    )
    flag("--quiet", action="store_true", help="say nothing but errors")
    flag("--log_file", metavar="PATH", help="also log as JSON lines, appended")


def refuse(args: argparse.Namespace, remedy: str, *names: str) -> None:
    """Raise ConfigError for flags that were given to a script that has no use for them."""
    for name in names:
        if (value := getattr(args, name)) not in (None, []):
            raise ConfigError(f"--{'no-' * (value is False)}{name} has no use here: {remedy}")


def config_from(args: argparse.Namespace) -> RunConfig:
    """The run's settings: the YAML, overridden by what was given on the command line."""
    overrides = {name: getattr(args, name, None) for name in OVERRIDES} | policy_overrides(args)
    config = load_config(args.config_path, overrides)
    if args.no_checkpoint:
        if args.checkpoint_path:
            raise ConfigError("--no_checkpoint and --checkpoint_path exclude each other")
        config = replace(config, checkpoint_path=None)
    if args.gpu_id is not None:
        config = replace(config, device=f"cuda:{args.gpu_id}")
    if config.prompt_embeds:
        from experiments.extraction.prompt_embeds import with_given_prompt  # with torch: not for a --help

        config = replace(config, prompt=with_given_prompt(config, args.prompt))
    for seed in getattr(args, "seeds", None) or ():
        check_seed(seed)
    return with_edits(args, config)


def with_edits(args: argparse.Namespace, config: RunConfig) -> RunConfig:
    """A config with the interventions that flags name, after its own have been checked."""
    path, heads, passes = (
        getattr(args, name, None) for name in ("interventions", "ablate_heads", "ablate_passes")
    )
    if (heads is None) != (passes is None):
        raise ConfigError("--ablate_heads and --ablate_passes (denoise, clean or all) go together")
    edits = (
        edit_files.read_edits(path) if path else edit_files.edits_of(config.interventions, args.config_path)
    )
    if heads and passes:
        from wan.checkpoint import read_model_config  # with torch: not for a --help

        sizes = read_model_config(config.ckpt_dir)
        edits += edit_files.read_ablated_heads(heads, sizes.num_layers, sizes.num_heads, passes)
    return replace(config, interventions=[edit.to_dict() for edit in edits])


def videos_of(args: argparse.Namespace, paths: Iterable[str]) -> list[str]:
    """The mp4 that --save_video asks for, beside the first cache unless it says where.

    Raises ConfigError for another name.
    """
    if args.save_video is None:
        return []
    if args.save_video and Path(args.save_video).suffix != ".mp4":
        raise ConfigError(f"--save_video writes an mp4, and {args.save_video} does not end in .mp4")
    return [args.save_video or str(Path(next(iter(paths))).with_suffix(".mp4"))]
