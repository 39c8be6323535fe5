"""What the extraction scripts share on the command line: flags that override a config, one line for bad input, exit codes."""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from experiments.caches import save_cache
from experiments.caches.errors import CacheError, RunError, StoppedError
from experiments.extraction.prompt_embeds import with_given_prompt
from experiments.extraction.result import Extraction
from experiments.extraction.video import save_video
from wan.config import DTYPES, RunConfig, check_seed, load_config
from wan.errors import ConfigError

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
    "offload",
    "t5_cpu",
    "prompt_embeds",
)


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line."""

    def error(self, message: str):
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def run_parser(description: str, output_path: str | None) -> Parser:
    """Flags that all extractions have; output_path is the default place of the cache."""
    parser = Parser(
        description=description.strip().splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
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
    flag("--prompt_embeds", metavar="FILE", help="a .pt of text states, in place of umT5")
    add_memory_flags(parser)
    add_run_flags(parser)
    return parser


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


def config_from(args: argparse.Namespace) -> RunConfig:
    """The run's settings: the YAML, overridden by what was given on the command line."""
    config = load_config(args.config_path, {name: getattr(args, name, None) for name in OVERRIDES})
    if args.no_checkpoint:
        if args.checkpoint_path:
            raise ConfigError("--no_checkpoint and --checkpoint_path exclude each other")
        config = replace(config, checkpoint_path=None)
    if args.gpu_id is not None:
        config = replace(config, device=f"cuda:{args.gpu_id}")
    if config.prompt_embeds:
        config = replace(config, prompt=with_given_prompt(config, args.prompt))
    for seed in getattr(args, "seeds", None) or ():
        check_seed(seed)
    return config


def main(run: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> None:
    """Run a script and end the process: 0, 1 what went wrong while running, 2 bad input, 130 Ctrl-C."""
    transformers.utils.logging.disable_progress_bar()  # the rollout's is the one to look at
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        run(argv)
    except (ConfigError, CacheError) as error:
        fail(error, 2)
    except torch.OutOfMemoryError as error:
        fail(
            f"out of GPU memory: {str(error).splitlines()[0]}; try --offload, fewer frames, or --device cpu",
            1,
        )
    except StoppedError as error:
        fail(error, 130)
    except RunError as error:
        fail(error, 1)
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}", 2)
    except UnicodeDecodeError as error:
        fail(f"not a text file: {error}", 2)
    except KeyboardInterrupt:
        fail("stopped", 130)


def fail(message: object, code: int):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def save_results(args: argparse.Namespace, result: Extraction, caches: dict[str, dict]) -> None:
    """Write the caches by path, and the video where it was asked for; say what was written."""
    for path, cache in caches.items():
        save_cache(path, cache)
    lines = [
        f"{path}: {cache['format']} cache of {cache['model']} ({cache['weights']} weights), {cache['num_frames']} latent "
        f"frames, seed {cache['seed']}, {cache['prompt']!r}"
        for path, cache in caches.items()
    ]
    for video in videos_of(args, caches):
        save_video(result, video)
        lines.append(f"{video}: the generated video")
    if not args.quiet:  # last: a pipe that is closed must not keep a file from being written
        print("\n".join(lines))


def videos_of(args: argparse.Namespace, paths: Iterable[str]) -> list[str]:
    """The mp4 that --save_video asks for, beside the first cache unless it says where. Raises ConfigError for another name."""
    if args.save_video is None:
        return []
    if args.save_video and Path(args.save_video).suffix != ".mp4":
        raise ConfigError(f"--save_video writes an mp4, and {args.save_video} does not end in .mp4")
    return [args.save_video or str(Path(next(iter(paths))).with_suffix(".mp4"))]
