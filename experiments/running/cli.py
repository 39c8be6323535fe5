"""What the extraction scripts share on the command line: flags that override a config, one line for bad
input, exit codes.
"""

import argparse
import json
import math
import os
import signal
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from os.path import isfile
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, ClassVar, NoReturn, TextIO

from experiments.caches.files import CacheError, RunError, StoppedError
from experiments.running import locks as run_files
from wan.config import DTYPES, RunConfig, check_seed, load_config
from wan.errors import ConfigError, one_line, reason_of, require_text, short_repr
from wan.files import MAX_COUNT, read_yaml
from wan.interventions import PASSES

# --- What a run prints never decides what it writes: a terminal that is gone, a full disk or a small alphabet
GONE = (OSError, ValueError)  # a closed pipe, a full disk; a file that is closed


class Unfailing:
    """A text stream that drops what cannot be written, and writes characters that it does not have as
    escapes.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            with suppress(*GONE):
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except GONE:
            pass
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(*GONE):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unfailing_streams() -> Iterator[None]:
    """Make stdout and stderr unfailing. The null device takes the place and number of a closed one."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except (
            OSError
        ):  # else the first file that is opened gets the number, and what is printed goes into it
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = (Unfailing(stream or null) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for number, stream in enumerate(before, 1):
            try:
                if stream:
                    stream.flush()
            except GONE:  # Python would complain of it at its end, and change the exit code
                os.dup2(null.fileno(), number)
        null.close()


# --- How a script begins and ends: exit codes, one line for whatever went wrong, and the last resort
EXPLAINED = (1, 2, 130)  # exit codes of processes that have said why
LOST = 70  # of one that another process left alone

parsed: list[Namespace] = []  # the flags of the script that runs, once they are read


def main(run: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> None:
    """Run a script and end the process: 0, 1 what went wrong while running, 2 bad input,
    130 asked to stop.
    """
    warnings.showwarning = lambda message, *_: print(f"warning: {one_line(message)}", file=sys.stderr)
    parsed.clear()
    with unfailing_streams(), _ended_by_signals():
        try:
            run(argv)
        except (KeyboardInterrupt, Exception) as error:
            message, code = explained(error)
            if code == LOST or not first_to_say(message):
                raise SystemExit(code) from None
            if parsed and getattr(parsed[-1], "debug", False):
                traceback.print_exc()
            fail(message, code)


def first_to_say(message: str) -> bool:
    """Whether no other process of the same rollout has said what went wrong."""
    group = sys.modules.get("wan.process_group")  # where several processes make one rollout
    return group is None or group.is_first_to_fail(message)


def explained(error: BaseException) -> tuple[str, int]:
    """What is printed of an error, and the exit code."""
    group = sys.modules.get("wan.process_group")
    if group is not None and (trouble := group.trouble_with_others(error)):
        if trouble == "lost":  # it says itself what went wrong, or its launcher does
            return "another process of this rollout has ended", LOST
        return f"another process of this rollout did not answer in {group.TIMEOUT.seconds} s", 1
    if isinstance(error, (ConfigError, CacheError)):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    if isinstance(error, StoppedError):
        return str(error), 130
    if isinstance(error, RunError):
        return str(error), 1
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch for it
        return f"out of GPU memory: {reason_of(error)}; try --offload, fewer frames, or --device cpu", 1
    if isinstance(error, MemoryError):
        return "out of memory; try fewer frames or layers", 1
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'a file'}: {error.strerror or error}", 2
    if isinstance(error, UnicodeDecodeError):
        return f"not a text file: {error}", 2
    return f"unexpected {type(error).__name__}: {reason_of(error)}: please report it, {_kept(error)}", 1


def _kept(error: BaseException) -> str:
    """Where the traceback of an unexpected error is: in the log, or to be had."""
    log = getattr(parsed[-1], "log_file", None) if parsed else None
    with suppress(OSError):
        if log:
            event = {"event": "unexpected", "traceback": "".join(traceback.format_exception(error))}
            with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(event) + "\n")
            return f"with the traceback at the end of {log}"
    return "with what the same command prints under --debug"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, end a script as Ctrl-C does: what it began is cleaned
    up.
    """
    if current_thread() is not main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [
        number for number in numbers if signal.getsignal(number) == signal.SIG_DFL
    ]  # nohup ignores one
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fail(message: object, code: int) -> NoReturn:
    """Print one line and end the process."""
    print(f"error: {one_line(message)}", file=sys.stderr)
    raise SystemExit(code)


# --- --cache_policy and --prompt_schedule: files and names turned into a config's settings
FOLDER = Path("configs/policies")  # the published settings of every method


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    """What a block may look at, and which prompts follow the first one."""
    parser.add_argument(
        "--cache_policy",
        metavar="FILE_OR_NAME",
        help="what a block may look at: a YAML, one of configs/policies, or a policy by its name",
    )
    parser.add_argument(
        "--prompt_schedule", metavar="FILE", help="a YAML of the prompts that follow, and their first frames"
    )


def policy_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """What the two flags set, where they were given."""
    chosen: dict[str, Any] = {}
    if name := getattr(args, "cache_policy", None):
        chosen |= {"cache_policy": policy_settings(name), "local_attn_size": -1, "sink_size": 0}
    if path := getattr(args, "prompt_schedule", None):
        chosen["prompt_schedule"] = schedule_settings(path)
    return chosen


def policy_settings(name: str, folder: Path = FOLDER) -> dict[Any, Any]:
    """Settings of a policy from a YAML file, from configs/policies by its stem, or by the policy's name
    alone. folder is configs/policies, where the working folder is not the project's.
    """
    for path in (Path(name), folder.parents[1] / name, folder / f"{name}.yaml"):
        if isfile(path):  # False for a name that is too long, where Path.is_file raises
            return read_yaml(path)
    from wan.policies import POLICIES  # here: a --help needs no torch

    if name in POLICIES:
        return {"name": name}
    published = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise ConfigError(
        f"cache_policy {short_repr(name)} is no file, none of {folder} ({published}) and no policy "
        f"({', '.join(POLICIES)})"
    )


def schedule_settings(path: str) -> list[Any]:
    """The list under `prompts` in a YAML file: frame, prompt and how of every switch."""
    if not isfile(path):
        raise ConfigError(f"prompt schedule {short_repr(path)} not found; it is a YAML with a list `prompts`")
    settings = read_yaml(path)
    if unknown := [name for name in settings if name != "prompts"]:
        raise ConfigError(
            f"{path} has no {short_repr(unknown[0])}; it has a list `prompts` of frame, prompt and how"
        )
    prompts = settings.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(entry, dict) for entry in prompts):
        raise ConfigError(f"{path}: needs a list `prompts`, each with frame, prompt and perhaps how")
    return prompts


# --- What the extraction scripts share on the command line: flags that override a config, one line for bad
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
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a whole number of 64 bits") from None


def finite_number(text: str) -> float:
    """A number that is neither infinite nor nan."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a finite number")
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
    from experiments.extraction import edits as edit_files  # with torch: not for a --help

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


# --- Flags that say whose maps are kept: query patches, frames, grids of patches, heads, blocks, passes
Place = tuple[int, int, int]  # frame, row, column; -1: all of the frame


def numbers(text: str, what: str) -> Place:
    """Three whole numbers from 0, separated by commas."""
    words = text.split(",")
    if len(words) != 3 or not all(word.strip().isdecimal() and len(word) < 10 for word in words):
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not {what}: three whole numbers from 0")
    first, second, third = (int(word) for word in words)
    return first, second, third


def patch(text: str) -> Place:
    """--query_patch: 18,2,1."""
    return numbers(text, "frame,row,column")


def grid(text: str) -> Place:
    """--query_grid: 18,4,4."""
    return numbers(text, "frame,rows,columns")


def frame(text: str) -> int:
    """--query_frame: 18."""
    if not text.isdecimal() or len(text) >= 10:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a latent frame, counted from 0")
    return int(text)


def add_map_flags(parser: argparse.ArgumentParser) -> None:
    """Whose maps, and which of them."""
    flag = parser.add_argument
    flag(
        "--query_patch",
        type=patch,
        nargs="+",
        default=[],
        metavar="FRAME,ROW,COLUMN",
        help="tokens that look, each on its own: latent frame, row and column of the token, from 0",
    )
    flag(
        "--query_frame",
        type=frame,
        nargs="+",
        default=[],
        help="frames that look, a mean over each one's tokens",
    )
    flag(
        "--query_grid",
        type=grid,
        metavar="FRAME,ROWS,COLUMNS",
        help="evenly spaced tokens of a frame: those that the HTML page lets one click",
    )
    flag("--heads", type=int, nargs="+", help="heads, counted from 0; all where not given")
    flag(
        "--blocks",
        type=int,
        nargs="+",
        help="blocks whose queries look; -1 is the last; those of the patches and frames, else the last",
    )
    flag("--steps", type=int, nargs="+", help="passes, in place of one --step")
    flag(
        "--words", action="store_true", help="also where in the query frames each word of the prompt is read"
    )


def places_of(
    args: argparse.Namespace, patches_of_grid: Callable[[int, int, int], list[Place]]
) -> list[Place]:
    """The places that flags name, in their order; the grid adds those that were not named already."""
    places = [*args.query_patch, *((frame, -1, -1) for frame in args.query_frame)]
    if args.query_grid:
        places += [place for place in patches_of_grid(*args.query_grid) if place not in places]
    return places
