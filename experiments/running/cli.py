"""Flags that scripts share, and their start and end: one line for any error, exit codes."""

import argparse
import atexit
import gc
import hashlib
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from os.path import isfile
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from experiments import configs, progress
from experiments.caches import files
from wan import errors
from wan.config import DType, LoRAFile, RunConfig
from wan.files import MAX_COUNT, MAX_PROMPTS, read_text, read_yaml

# This module and those it imports must not import torch: --help would wait for it.

# --- The beginning and end of a script
EXPLAINED = (1, 2, 130)  # exit codes of processes that have printed the reason
LOST = 70  # the exit code of a process whose partner is gone
OF_CLASSES = {  # of torch, Python and its pools: what an exception that no user causes means for one
    "OutOfMemoryError": "out of GPU memory: {reason}; try --offload, fewer frames, or --device cpu",
    "MemoryError": "out of memory; try fewer frames or layers",
    "BrokenProcessPool": "a process that measures was killed; run again: what is finished is kept",
}


@progress.talking()
def main(run: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> None:
    """Run a script and end the process: 0, 1 for a failed run, 2 for bad input, 130 where it was stopped."""
    atexit.register(gc.freeze)  # else Python goes over all objects of torch when it ends, for 0.6 s
    warnings.showwarning = lambda message, *_: print(f"warning: {errors.one_line(message)}", file=sys.stderr)
    earlier = dict[int, Any]()
    try:
        for number in progress.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # such as nohup's
                earlier[number] = signal.signal(number, progress.stop_when_asked)
        run(argv)
    except (KeyboardInterrupt, Exception) as error:
        message, code = explained(error)
        group = sys.modules.get("wan.wings.parallel")
        # Of several processes that fail together, one says it
        if code != LOST and (not group or group.is_first_to_fail(message)):
            if "--debug" in (sys.argv if argv is None else argv):
                traceback.print_exc()
            print(f"error: {message}", file=sys.stderr)
        raise SystemExit(code) from None
    finally:
        for installed, handler in earlier.items():
            signal.signal(installed, handler)


def explained(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code for an error."""
    # 1. Several processes make one rollout: one of them prints the reason
    group = sys.modules.get("wan.wings.parallel")
    trouble = group.trouble_with_others(error) if group is not None else ""
    if trouble == "lost":  # the other process, or its launcher, prints the reason
        return "another process of this rollout has ended", LOST
    if group is not None and trouble:
        return f"another process of this rollout did not answer in {group.TIMEOUT.seconds} s", 1
    # 2. What a user can mend
    if isinstance(error, files.StoppedError):
        return str(error), 130
    if isinstance(error, files.RunError):
        return str(error), 1
    if isinstance(error, errors.UserError):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    if isinstance(error, OSError) and error.errno is not None:
        return errors.one_line(f"{error.filename or 'a file'}: {error.strerror or error}"), 2
    if isinstance(error, OSError):  # of Dask, which says where no scheduler answers
        return errors.one_line(error), 2
    # 3. What nobody foresaw
    how = "please report it with the traceback, which --debug prints"
    message = OF_CLASSES.get(type(error).__name__, f"unexpected {type(error).__name__}: {{reason}}: {how}")
    return errors.one_line(message.format(reason=errors.reason_of(error))), 1


# --- Parsing: numbers have limits, words are text, no output is an input
OUTPUT_FLAGS = ("output_path", "save_video", "save_base", "log_file", "log")


@dataclass(frozen=True)
class number:  # in small letters, as int and float: a type of a flag
    """A type for argparse: numbers of a kind in low..high.

    It rejects nan and numbers that fit into no tensor, which would fail late or never.
    """

    kind: type[int] | type[float]
    low: float
    high: float
    words: str = ""  # what such a number is, in place of its limits

    def __call__(self, text: str) -> Any:
        with suppress(ValueError):
            is_plain = text.isascii() and "_" not in text  # Python would read 1_0 and digits of any script
            value = self.kind(text)
            if is_plain and self.low <= value <= self.high:
                return value
        raise argparse.ArgumentTypeError(f"{errors.short_repr(text)} is not a {self.range_in_words()}")

    def range_in_words(self) -> str:
        """Say which numbers are meant: "whole number from 1 to 131072"."""
        if self.words:
            return self.words
        noun = "number"
        if self.kind is int:
            noun = "whole number"
        return f"{noun} from {self.low:.12g} to {self.high:.12g}"


@dataclass(frozen=True)
class output_file:
    """A type for argparse: the path of a file that ends as what is written there."""

    suffixes: tuple[str, ...]

    def __call__(self, text: str) -> str:
        try:
            files.require_suffix(text, *self.suffixes)
        except files.CacheError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text


whole_number = number(int, -(2**63), 2**63 - 1, "whole number (of 64 bits)")
count = number(int, 1, MAX_COUNT)
count_or_none = number(int, 0, MAX_COUNT)

# The groups of --help, with the flags of each; what a script has besides says what it captures
WHAT_TO_RUN, WHAT_TO_CAPTURE, WHERE, HOW = "what to run", "what to capture", "where it goes", "how"
GROUPS: Mapping[str, Sequence[str]] = {
    WHAT_TO_RUN: (
        *("config_path", "no_checkpoint", "checkpoint_path", "checkpoints", "ckpt_dir", "lora", "use_ema"),
        *("prompt", "negative_prompt", "prompts", "prompt_schedule", "prompt_embeds", "first_frames"),
        *("num_frames", "independent_first_frame", "size", "seed", "seeds", "noise", "cache_policy"),
        *("interventions", "policies", "stage", "random_weights", "parameter"),
        *("video", "maps", "compare"),
    ),
    WHAT_TO_CAPTURE: (),
    WHERE: (
        *("output_path", "output_dir", "save_video", "save_base", "preview", "overwrite"),
        *("log_file", "log"),
    ),
    HOW: (
        *("device", "gpu_id", "gpus", "dtype", "vae_dtype", "offload", "t5_cpu", "deterministic"),
        *("workers", "scheduler", "slurm", "quiet", "repeats", "graphs", "jobs", "max_mb"),
        *("debug", "help"),
    ),
}
MOST_LINES = 60  # of --help; what does not fit is in --help-all
# Flags that --help names without a word where there is no room, the most seldom first
SELDOM: Sequence[str] = (
    *("independent_first_frame", "use_ema", "vae_dtype", "t5_cpu", "noise", "gpu_id", "log_file", "slurm"),
    *("scheduler", "first_frames", "prompt_embeds", "prompt_schedule", "deterministic", "debug", "preview"),
    *("lora", "interventions", "offload", "dtype", "ckpt_dir", "size", "checkpoints", "gpus", "query_patch"),
    *("quiet", "cache_policy"),
)


class Help(argparse.HelpFormatter):
    """Say the default of every flag; 100 columns, so that a help is as long on every terminal."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=100)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_told = action.default is argparse.SUPPRESS or action.required or "default" in text
        if is_told:
            return text
        default = str(action.default).replace("%", "%%")
        if action.default is None:
            default = "none"
            if action.dest in RunConfig.__dataclass_fields__:
                default = "the config's"
        elif isinstance(action.default, bool):
            default = "yes" if action.default else "no"
        elif isinstance(action.default, list | tuple):
            default = " ".join(map(str, action.default))
        return f"{text} (default: {default})".lstrip()


class PrintHelp(argparse.Action):
    """Print what a script takes, all of it for --help-all, and end."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: bool, help: str):
        super().__init__(option_strings, "help", 0, const, argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        print(parser.help_text(everything=self.const), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argparse that prints one line for an error, and flags in groups.

    The parsed arguments have two more fields: inputs, the existing files that they name, and words. without
    names flags that a script does not offer; their values are None. The description is a script's docstring:
    its first line and its first command are shown. A list of numbers or names takes spaces or commas.
    """

    def __init__(self, without: Sequence[str] = (), description: str = "", **options: Any):
        self.without = without
        lines = description.strip().splitlines() or [""]
        commands = [line.strip() for line in lines if re.match(r" *(python|bash|torchrun|PYTHON)", line)]
        # No abbreviations: --prompt of a script without it would mean --prompt_embeds
        super().__init__(
            description=lines[0], formatter_class=Help, allow_abbrev=False, add_help=False, **options
        )
        of_script = [command for command in commands if self.prog in command]
        self.example = next(iter(of_script or commands), "")
        self.register("action", "print_help", PrintHelp)
        self.add_argument("-h", "--help", action="print_help", const=False, help="print this")
        self.add_argument(
            "--help-all", action="print_help", const=True, help="print every flag, with its default"
        )
        self.add_argument("--debug", action="store_true", help="also print the traceback of an error")

    def format_help(self) -> str:
        return self.help_text(everything=False)

    def help_text(self, everything: bool) -> str:
        """Return the help: of every flag, or of as many as fit into MOST_LINES."""
        hidden: list[str] = []
        text = self._text_without(hidden)
        for name in SELDOM:
            if everything or len(text.splitlines()) <= MOST_LINES:
                break
            hidden.append(name)
            text = self._text_without(hidden)
        return text

    def _text_without(self, hidden: Sequence[str]) -> str:
        """Return the help without some flags, whose names stand at its end."""
        shown = [item for item in self._actions if item.help is not argparse.SUPPRESS]
        words = [item.metavar or item.dest for item in shown if not item.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(" ".join([self.prog, *map(str, words), "[flags]"]), [], [])
        formatter.add_text(self.description)
        for title in GROUPS:
            formatter.start_section(title)
            formatter.add_arguments(
                [item for item in shown if group_of(item) == title and item.dest not in hidden]
            )
            formatter.end_section()
        seldom = [item.option_strings[0] for item in shown if item.dest in hidden]
        if seldom:
            formatter.add_text(f"see --help-all for {', '.join(seldom)}")
        text = formatter.format_help()
        if self.example:  # on one line, to be copied
            text += f"\nexample: {self.example}\n"
        return text

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        name = names[0].removeprefix("--")
        if name in self.without:
            self.set_defaults(**{name: None})
            return argparse.Action([], name)
        if options.get("type") is int:
            options["type"] = whole_number
        return super().add_argument(*names, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of a flag's choices, with the nearest."""
        if action.choices is not None and value not in action.choices:
            hint = errors.did_you_mean(value, map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {errors.short_repr(value)}{hint}")

    def exclude(self, *names: str) -> None:
        """Make these flags mutually exclusive, with argparse's message."""
        group = self.add_mutually_exclusive_group()
        # A flag may be in several groups, for which argparse has no public method
        group._group_actions += [action for action in self._actions if action.dest in names]

    def parse_args(  # type: ignore[override]  # argparse's is overloaded by the namespace's type
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Raises CacheError where an output flag names an input, ConfigError for words that are no text."""
        words = sys.argv[1:] if args is None else list(args)
        self.check_words(words)
        parsed = super().parse_args(self.split_lists(words), namespace)
        # Whatever names an existing file is an input, also behind FIELD=
        inputs, outputs = list[str](), list[str]()
        for name, value in vars(parsed).items():
            values = value if isinstance(value, list) else [value]
            texts = [str(item) for item in values if item]
            if name in OUTPUT_FLAGS:
                outputs += texts
                continue
            for text in texts:
                inputs += [path for path in (text, text.partition("=")[2]) if isfile(path)]
        files.require_distinct(outputs, inputs)
        parsed.inputs, parsed.words = inputs, words  # words are for the processes of --gpus
        return parsed

    def split_lists(self, words: Sequence[str]) -> list[str]:
        """Split at commas the words behind flags that take several numbers or names: 0,4 is 0 4."""
        lists = set[str]()
        for action in self._actions:
            is_of_numbers = isinstance(action.type, number)
            is_of_names = action.choices is not None or (action.type is None and action.metavar is None)
            if action.nargs in ("+", "*") and (is_of_numbers or is_of_names):
                lists |= {*action.option_strings}
        parts, flag = list[str](), ""
        for word in words:
            if word.startswith("--"):
                flag, equals, value = word.partition("=")
                if equals and flag in lists:
                    parts.append(flag)
                    word = value
            if flag in lists and not word.startswith("--"):
                parts += [part for part in word.split(",") if part]
            else:
                parts.append(word)
        return parts

    def check_words(self, words: Sequence[str]) -> None:
        """Refuse words that are no text, which would fail when a name is printed, and empty ones.

        An empty word would be passed over in silence, as if the flag were not there.
        """
        flag = ""
        for word in words:
            errors.require_text(word, flag or "a word")
            value: str | None = word
            if word.startswith("--"):
                flag, equals, value = word.partition("=")
                if not equals:
                    value = None
            if value is not None and not value.strip() and flag not in ("--prompt", "--negative_prompt"):
                self.error(f"a word behind {flag} is empty; leave it out")

    def error(self, message: str) -> NoReturn:
        before, _, words = message.partition("unrecognized arguments: ")
        unknown = [word for word in words.split() if word.startswith("--")]
        flags = [flag for action in self._actions for flag in action.option_strings]
        if not before and unknown and get_close_matches(unknown[0], flags, 1):
            message += errors.did_you_mean(unknown[0], flags)
        self.exit(2, f"error: {errors.one_line(message)}; see {self.prog} --help\n")


def group_of(action: argparse.Action) -> str:
    """Return the group of --help that a flag belongs to; a word without a flag says what to run."""
    if not action.option_strings:
        return WHAT_TO_RUN
    for title, names in GROUPS.items():
        if action.dest in names:
            return title
    return WHAT_TO_CAPTURE


DECODING = ("preview", "vae_dtype")  # flags of the decoder of a video
WORKERS = ("workers", "scheduler", "slurm")
OVERWRITE = (
    "replace any file at an output's path. Without this flag the script keeps files that it did not write "
    "or that were changed since, files of another kind, model or weights, and caches with layers, steps, "
    "frames or fields that the new one lacks. It replaces a file of another prompt or seed when the new one "
    "is complete, and says so"
)


# --- Flags of a run; those named as a field of RunConfig override it
BASE = "base"  # of --checkpoints: the weights of ckpt_dir
FILE_FIELDS = ("cache_policy", "prompt_schedule", "interventions")  # their flags name files
FILES = ("prompt_embeds", "first_frames")


def add_config_flags(parser: argparse._ActionsContainer, *names: str) -> None:
    """Add a flag for each named setting, whose help and type stand with it in wan/config.py."""
    settings, kinds = {item.name: item for item in fields(RunConfig)}, get_type_hints(RunConfig)
    for name in names:
        kind = kinds[name]
        options: dict[str, Any] = {"help": settings[name].metadata["flag"]}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif kind is int:
            options["type"] = int
        elif kind == list[int]:
            options |= {"type": int, "nargs": "+"}
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        if name == "gpus":
            options["type"] = count
        if name in FILES:
            options["metavar"] = "FILE"
        parser.add_argument(f"--{name}", **options)


def run_parser(
    description: str,
    output_path: str | None = None,
    steps: bool = False,
    without: Sequence[str] = (),
    suffixes: tuple[str, ...] = (".pt",),
) -> Parser:
    """Return a parser with the flags of all extractions except those in `without`.

    output_path is the default place of the cache, or of another file with one of suffixes; steps: also a flag
    for several passes.
    """
    parser = Parser(without, description)
    flag = parser.add_argument
    flag(
        "--config_path",
        type=config_file,
        default="configs/self_forcing_dmd.yaml",
        help="YAML of the run, or the name of one of configs/; flags override it",
    )
    flag("--no_checkpoint", action="store_true", help="run the base weights of ckpt_dir")
    add_config_flags(parser, "checkpoint_path")
    parser.exclude("no_checkpoint", "checkpoint_path")
    what = {".mp4": "video", ".svg": "figure", ".csv": "table"}.get(suffixes[0], "cache")
    flag("--output_path", type=output_file(suffixes), default=output_path, help=f"where the {what} goes")
    add_config_flags(parser, "ckpt_dir", "prompt", "num_frames", "independent_first_frame")
    flag("--size", metavar="HEIGHTxWIDTH", help="of the video in pixels, in whole patches")
    add_config_flags(parser, "seed", "noise", "device", "use_ema", "step", "prompt_embeds", "first_frames")
    if steps:
        flag("--steps", type=int, nargs="+", help="several passes, in place of one --step")
        parser.exclude("step", "steps")
    flag("--gpu_id", type=int, help="short for --device cuda:N")
    flag("--save_video", metavar="PATH", nargs="?", const="", help="also an mp4, beside the cache or at PATH")
    flag(
        "--preview",
        type=files.located,
        metavar="FILE",
        help="decode the video by TAEHV's small decoder, for a first look",
    )
    flag(
        "--vae_dtype",
        choices=get_args(DType),
        default="auto",
        help="of the video's decoder: bfloat16 on a GPU",
    )
    flag("--cache_policy", metavar="FILE_OR_NAME", help="what a block may look at (configs/policies)")
    flag(
        "--prompt_schedule",
        type=files.located,
        metavar="FILE",
        help="a YAML of the prompts that follow, and their first frames",
    )
    flag("--lora", nargs="+", metavar="FILE[:STRENGTH]", help="LoRAs to merge, beside the config's lora_path")
    flag(
        "--interventions",
        type=files.located,
        metavar="FILE",
        help="a YAML of edits, in place of the config's",
    )
    add_run_flags(parser)
    parser.exclude("gpu_id", "device")
    return parser


def add_sweep_flags(parser: Parser, checkpoints: bool = False) -> None:
    """Add the flags of a sweep over prompts and seeds, and over checkpoints."""
    flag = parser.add_argument
    flag(
        "--prompts",
        type=files.located,
        metavar="FILE",
        help="a sweep over the prompts in a file, one per line; # comments",
    )
    flag("--seeds", type=int, nargs="+", help="a sweep over several seeds, in place of one --seed")
    flag("--output_dir", help="folder of a sweep: PROMPT_sSEED.pt each")
    if checkpoints:
        flag(
            "--checkpoints",
            type=files.located,
            nargs="+",
            metavar="FILE",
            help=f"a sweep over weights, each in a folder of its name; {BASE}: those of --ckpt_dir",
        )
    # Flags that mean one run, beside those that mean many
    parser.exclude("output_path", "output_dir")
    parser.exclude("preview", "output_dir")
    parser.exclude("prompt", "prompts")
    parser.exclude("prompt_embeds", "prompts")
    parser.exclude("seed", "seeds")
    parser.exclude("checkpoint_path", "checkpoints")
    parser.exclude("no_checkpoint", "checkpoints")


def add_worker_flags(parser: Parser) -> None:
    """Add the flags that choose between this process and workers (extraction/sweep.py)."""
    flag = parser.add_mutually_exclusive_group().add_argument
    flag("--workers", type=count, metavar="N", help="N processes of this machine, one for each GPU, by Dask")
    flag("--scheduler", metavar="ADDRESS", help="the workers of a Dask cluster, such as tcp://host:8786")
    flag(
        "--slurm",
        type=files.located,
        metavar="FILE",
        help="workers that SLURM starts: a YAML as experiments/running/slurm.yaml",
    )


def add_run_flags(parser: Parser) -> None:
    """Add flags for memory and for the behaviour of a run."""
    add_config_flags(parser, "dtype", "offload", "t5_cpu")
    flag = parser.add_argument
    flag("--overwrite", action=argparse.BooleanOptionalAction, default=False, help=OVERWRITE)
    flag("--deterministic", action="store_true", help="equal bits in every run on one device")
    flag("--quiet", action="store_true", help="say nothing but errors")
    flag("--log_file", metavar="PATH", help="also log as JSON lines, appended")


def config_from(args: argparse.Namespace) -> RunConfig:
    """Return the settings of a run_parser's flags: the YAML, overridden by the flags that were given."""
    # 1. The YAML, and flags that were given: None is a flag that was not
    names = [field.name for field in fields(RunConfig) if field.name not in FILE_FIELDS]
    values: dict[str, Any] = {name: getattr(args, name, None) for name in [*names, "size"]}
    if args.gpu_id is not None:
        values["device"] = f"cuda:{args.gpu_id}"
    if args.cache_policy is not None:
        # local_attn_size and sink_size of the YAML mean a policy too, and are replaced with it
        values |= {
            "cache_policy": configs.policy_settings(args.cache_policy),
            "local_attn_size": -1,
            "sink_size": 0,
        }
    if args.prompt_schedule:
        values["prompt_schedule"] = schedule_settings(args.prompt_schedule)
    if args.lora:
        values["lora"] = [lora_file(text) for text in args.lora]
    config = configs.load_with_paths(args.config_path, values, files.located)
    if args.no_checkpoint:
        config = replace(config, checkpoint_path=None)
    if config.prompt_embeds:
        from experiments.prompts import with_given_prompt

        config = replace(config, prompt=with_given_prompt(config, args.prompt))

    # 2. Edits: a file's in place of the YAML's
    if not (args.interventions or config.interventions):
        return config
    from wan.interventions import edits_of, read_edits  # only a run with edits needs them

    path = args.interventions
    edits = read_edits(path) if path else edits_of(config.interventions, args.config_path)
    return replace(config, interventions=[edit.to_dict() for edit in edits])


def lora_file(text: str) -> LoRAFile:
    """Parse a LoRA flag, FILE or FILE:STRENGTH; the name itself may contain colons and end in a number."""
    path, colon, strength = text.rpartition(":")
    if colon and path and not isfile(files.located(text)):
        with suppress(ValueError):  # of a name with a colon
            return LoRAFile(path, float(strength))
    return LoRAFile(text)


def require_effect(args: argparse.Namespace, flags: Iterable[str], where: str) -> None:
    """Raise ConfigError for one of these flags that was given, and changes nothing in this run."""
    words = {word.partition("=")[0] for word in args.words}
    for flag in flags:
        if f"--{flag}" in words:
            raise errors.ConfigError(f"--{flag} has no effect {where}; leave it out")


def videos_of(args: argparse.Namespace, paths: Iterable[str]) -> list[str]:
    """Return the mp4 that --save_video asks for, beside the first cache unless it names a path.

    Raises ConfigError for another name.
    """
    if args.save_video is None:
        if args.preview or args.vae_dtype not in (None, "auto"):
            require_effect(args, DECODING, "without --save_video")
        return []
    if args.save_video:
        files.require_suffix(args.save_video, ".mp4")
    return [args.save_video or str(Path(next(iter(paths))).with_suffix(".mp4"))]


# --- --config_path and --prompt_schedule: names and files -> settings of a config
def input_path(text: str) -> Path:
    """Return the path of a file or folder that a script reads, below the root where it is only there."""
    return Path(files.located(text))


def config_file(name: str) -> str:
    """Return the path of a config: itself, or of configs/ by its stem, such as wan_mini."""
    path, named = files.located(name), files.located(f"configs/{name}.yaml")
    if isfile(path):
        return path
    if isfile(named):
        return named
    if Path(name).name == name and not Path(name).suffix:
        hint = errors.did_you_mean(name, configs.model_names())
        raise argparse.ArgumentTypeError(f"{errors.short_repr(name)} is no file, and none of configs/{hint}")
    return name


def schedule_settings(path: str) -> list[Any]:
    """Read the list under `prompts` in a YAML file: frame, prompt and how of every switch."""
    settings = read_yaml(path) if isfile(path) else {}
    prompts = settings.get("prompts")
    fits = isinstance(prompts, list) and all(isinstance(prompt, dict) for prompt in prompts)
    if not isinstance(prompts, list) or not prompts or not fits or set(settings) != {"prompts"}:
        raise errors.ConfigError(
            f"prompt schedule {errors.short_repr(path)} is no YAML file of one list `prompts`, "
            "each with frame, "
            "prompt and perhaps how"
        )
    return prompts


# --- The flags of a sweep -> its runs, and where each cache goes
SLUG_BYTES = 60  # of a prompt that names a file
FOLDER_BYTES = 200  # of a checkpoint that names a folder; disks allow 255


def plan(args: argparse.Namespace, config: RunConfig) -> dict[str, RunConfig]:
    """Return the path and settings of every run, those of one checkpoint together.

    Raises ConfigError for flags and files that do not fit.
    """
    # 1. Where everything goes
    if not args.output_dir:
        raise errors.ConfigError("a sweep needs --output_dir, a folder, in place of --output_path")
    if args.save_video:
        raise errors.ConfigError("a sweep has a video for each cache: give --save_video without a PATH")
    # 2. A folder for each checkpoint, named as its file; None is the base weights
    folder = Path(args.output_dir)
    folders: dict[str | None, Path] = {config.checkpoint_path: folder}
    checkpoints = getattr(args, "checkpoints", None)
    if checkpoints:
        stems = {path: path if path == BASE else Path(path).stem for path in checkpoints}
        names = unique_slugs(stems, FOLDER_BYTES)
        folders = {None if path == BASE else path: folder / name for path, name in names.items()}
    # 3. Checkpoints outermost: a process holds one model, and loads each once
    prompts = read_prompts(args.prompts) if args.prompts else [config.prompt]
    slugs, runs = slugs_of(prompts), dict[str, RunConfig]()
    for checkpoint, folder in folders.items():
        for prompt in prompts:
            for seed in args.seeds or [config.seed]:
                run = replace(config, checkpoint_path=checkpoint, prompt=prompt, seed=seed)
                runs[str(folder / f"{slugs[prompt]}_s{seed}.pt")] = run
    return runs


def read_prompts(path: str | Path) -> list[str]:
    """Return the lines of a text file, without empty ones, comments (#) and repetitions."""
    form = "write a prompt a line, without quotes; lines that begin with # are left out"
    lines = [line.strip() for line in read_text(path, form=form).splitlines()]
    prompts = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise errors.ConfigError(
            f"{path} holds {len(prompts)} prompts, not 1 to {MAX_PROMPTS}; write one per line"
        )
    return prompts


def slugs_of(prompts: Sequence[str]) -> dict[str, str]:
    """Return a unique file name for each prompt, from its words in lower case."""
    words = {prompt: re.sub(r"[\W_]+", "-", prompt.lower()).strip("-") for prompt in prompts}
    return unique_slugs({prompt: slug or "prompt" for prompt, slug in words.items()}, SLUG_BYTES)


def unique_slugs(names: Mapping[str, str], max_bytes: int) -> dict[str, str]:
    """Return unique names: one that is taken, or cut to max_bytes, gets digits of the key's hash."""
    slugs, taken = dict[str, str](), set[str]()
    for prompt, slug in names.items():
        if len(slug.encode()) > max_bytes or slug in taken:
            # Bytes, not characters: disks limit the bytes of a name, and Chinese takes three for one
            cut = slug.encode()[:max_bytes].decode(errors="ignore").rstrip("-")
            digits = hashlib.sha256(prompt.encode()).hexdigest()
            candidates = (f"{cut}-{digits[:length]}" for length in range(8, 65))
            slug = next(name for name in candidates if name not in taken)
        slugs[prompt] = slug
        taken.add(slug)
    return slugs


# --- The runs of a sweep
