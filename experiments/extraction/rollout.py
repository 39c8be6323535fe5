"""Both samplers, observed: progress and a log, numbers checked, stopped between blocks or steps.

with observed(args) as watch:  # a bar on stderr, a JSON line per event in --log_file; Ctrl-C stops
    session.generate(observer=watch)
"""

import argparse
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.caches.files import CacheError, RunError, StoppedError, handled, interrupt
from experiments.caches.formats import MASS_TOLERANCE
from wan.cache import PromptSwitch
from wan.capture import ATTENTION_WEIGHT_CAPTURE, SMALL, CapturedCall, CaptureRequest, move_to_cpu
from wan.errors import UserError, library_writes
from wan.noise import TensorNoise

if TYPE_CHECKING:
    from wan.model import WanModel
    from wan.pipeline import CausalInferencePipeline
    from wan.text2video import TextToVideoPipeline

NO_MEMORY = ("can't allocate memory", "not enough memory")  # how torch's CPU allocator says it
REMEDY = "try --device cpu or another dtype in the config"


# --- Progress: a bar on stderr, a JSON line per event in a log, and the wish to stop
class Progress(AbstractContextManager["Progress"]):
    """Is told how a rollout goes on, and may stop it: set `stopping`, and it ends after a block or step.

    Shows a bar of blocks or steps on stderr unless quiet, and appends JSON lines to log_file. Raises
    CacheError where log_file cannot be written.
    """

    stopping = False
    generating = False  # from the first rollout on: before, nothing is lost by stopping at once
    video: Any = None  # a LiveVideo that is made of the blocks of a rollout

    def __init__(self, quiet: bool = False, log_file: str | Path | None = None):
        self.quiet, self.start = quiet, time.monotonic()
        self.rollout_start = self.start
        self._bar: tqdm | None = None
        self._log = open_log(log_file) if log_file else None

    def __exit__(self, kind, error, trace) -> None:
        about = {} if error is None else {"error": f"{kind.__name__}: {error}"}
        if error is not None and not isinstance(error, (UserError, KeyboardInterrupt)):
            about["traceback"] = "".join(traceback.format_exception(error))
        self.log("end", ok=error is None, **about)
        self.close_bar()
        if self._log:
            self._log.close()

    def log(self, event: str, **values: Any) -> None:
        """Note an event: "rollout" begins one, "block" or "step" ends a part of it."""
        if event == "rollout":
            self.rollout_start, self.generating = time.monotonic(), True
        if self._log:
            seconds = round(time.monotonic() - self.start, 3)
            line = json.dumps({"event": event, "seconds": seconds} | values, ensure_ascii=False) + "\n"
            try:
                self._log.write(line)
            except OSError as error:  # a full disk must not end a rollout
                self.print(f"the log ends here: {error.strerror or error}")
                self._log = None

    def print(self, line: str) -> None:
        """Something worth a line on the screen."""
        if not self.quiet:
            with suppress(OSError, ValueError):  # a terminal that is gone must not end a rollout
                tqdm.write(line, file=sys.stderr)  # above a bar

    def advance(self, unit: str, index: int, count: int, what: str) -> None:
        """Note that a block, or a step of the base model's sampler, is finished: what says which."""
        passed = time.monotonic() - self.rollout_start
        left = passed / (index + 1) * (count - index - 1)  # later blocks see more keys: a little too short
        self.log(unit, **{unit: index, f"num_{unit}s": count}, seconds_left=round(left, 3), **memory_bytes())
        if self.quiet:
            return
        with suppress(OSError, ValueError):  # a full disk must not end it either
            if self._bar is None or index < self._bar.n:  # of another rollout
                self.close_bar()
                # It is first shown when its first unit is done, which began `passed` ago; and however fast
                # the blocks are, each is shown (mininterval: tqdm would leave out what is faster than 0.1 s)
                self._bar = tqdm(
                    desc=f"{unit}s", unit=unit, total=count, initial=index, delay=1e-9, mininterval=0
                )
                self._bar.start_t = self._bar.last_print_t = self._bar.start_t - passed
            self._bar.set_postfix_str(f"{what}, {memory()}", refresh=False)
            self._bar.update()
            if index + 1 == count:
                self.close_bar()

    def close_bar(self) -> None:
        """Leave the bar of a rollout that has ended, or was stopped, on the screen."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError, ValueError):
                bar.close()


def memory_bytes() -> dict[str, int]:
    """Return the peak memory of the process, and of the GPU where one is in use, in bytes."""
    host = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return host | ({"gpu_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_initialized() else {})


def memory() -> str:
    """Return the peak memory in words, of the GPU where one is in use."""
    name, nbytes = list(memory_bytes().items())[-1]
    return f"{nbytes / 2**30:.1f} GiB {'GPU' if name == 'gpu_bytes' else 'memory'}"


def open_log(path: str | Path) -> TextIO:
    """Open a regular file to append lines to. Raises CacheError for a pipe or device."""
    with library_writes(path, CacheError):
        # A pipe would block the rollout until somebody reads
        if Path(path).suffix == ".pt" or (Path(path).exists() and not Path(path).is_file()):
            raise ValueError("a log is a file such as log.jsonl, no cache, folder, pipe or device")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")


@contextmanager
def stopping_when_asked(observer: Progress, unit: str = "block") -> Iterator[None]:
    """Let the current block, or step, finish after Ctrl-C, SIGTERM or SIGHUP of a closed terminal.

    A second Ctrl-C or SIGTERM stops at once, as does any before something is generated.
    """
    # A closed terminal may send SIGHUP and SIGTERM both: they are one wish to stop, not two
    asked_before: set[int] = set()

    def asked(number: int, frame: FrameType | None) -> None:
        if not observer.generating or (number != signal.SIGHUP and asked_before - {signal.SIGHUP}):
            interrupt(frame)
        asked_before.add(number)
        observer.stopping = True
        if os.environ.get("RANK", "0") in ("", "0"):  # the first of several ranks
            with suppress(OSError, RuntimeError, ValueError):  # no terminal; a line that is being printed
                tqdm.write(f"stopping after this {unit}; Ctrl-C again stops at once", file=sys.stderr)

    numbers = [signal.SIGINT, signal.SIGHUP]  # which nohup ignores: the run outlives its terminal
    if not torch.distributed.is_initialized():  # else SIGTERM ends a process that waits for another at once
        numbers.append(signal.SIGTERM)
    with handled(asked, numbers):
        yield


@contextmanager
def observed(args: argparse.Namespace, unit: str | None = "block") -> Iterator[Progress]:
    """Yield the progress of a run, which stops after a unit when asked to (None: at once)."""
    with (
        Progress(args.quiet, args.log_file) as watch,
        stopping_when_asked(watch, unit) if unit else nullcontext(),
        deterministic() if args.deterministic else nullcontext(),
    ):
        yield watch


@contextmanager
def deterministic() -> Iterator[None]:
    """Refuse operations whose results differ from run to run (torch imports its compiler, for seconds)."""
    # cuBLAS reads its variable when CUDA starts; cuDNN's benchmark picks kernels by time, which differs
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


# --- The samplers
def roll_out(
    pipeline: "CausalInferencePipeline",
    noise: TensorNoise,
    prompt_embeds: Tensor,
    prompt_schedule: Sequence[PromptSwitch],
    requests: Sequence[CaptureRequest],
    observer: Progress,
    first: Tensor | None = None,
) -> tuple[Tensor, list[CapturedCall]]:
    """Generate all frames of a noise -> latents [B, F, C, h, w] of the finished blocks, captured calls.

    first [B, G, C, h, w] are given frames, which the noise follows: blocks that get a clean pass alone.

    Fewer frames come back where the observer asked to stop. Raises RunError for numbers that cannot be right,
    and for memory that does not suffice.
    """
    count = 0 if first is None else first.shape[1]
    model, blocks = pipeline.model, pipeline.block_ranges(count, noise.shape[1])
    given: dict[str, Any] = {"prompt_schedule": prompt_schedule}
    if first is not None:
        given |= {"num_given": count, "given": lambda frames: first[:, frames.start : frames.stop]}
    shard = model.head_shard  # with the heads in several processes, these stop and gather together
    finished, checked = list[Tensor](), 0
    phase = out_of_memory(lambda: f"rolling out block {len(finished)} of {len(blocks)}", requests)
    with phase, capturing(requests) as records:
        for frames, latents in pipeline.blocks(noise, prompt_embeds, **given):
            # 1. Numbers are checked as they come, so that hours are not spent on NaN.
            block = len(finished)
            move_to_cpu(records[checked:])
            check_numbers(model, latents, f"block {block}", records[checked:])
            checked = len(records)
            # 2. Keep the block and hand it on.
            finished.append(latents.clone())
            if observer.video is not None:
                observer.video.add(finished[-1])
            observer.advance("block", block, len(blocks), f"frames {frames.start}-{frames[-1]}")
            # 3. All processes of a rollout stop after the same block.
            if shard.any_process(observer.stopping) if shard else observer.stopping:
                break
    # A window of Rolling Forcing began blocks that a stop left unfinished.
    records = [record for record in records if record.at and record.at.block < len(finished)]
    return torch.cat(finished, 1), shard.gather_calls(records) if shard else records


def sample(
    pipeline: "TextToVideoPipeline",
    texts: tuple[Tensor, Tensor],
    noise: Tensor,
    requests: Sequence[CaptureRequest],
    observer: Progress,
) -> tuple[Tensor, list[CapturedCall], int]:
    """Run the base model's steps -> latents [1, F, C, h, w], captured calls, the number of steps done.

    texts are those of guidance's two branches. Stops and raises as roll_out does.
    """
    timesteps, latest = pipeline.pass_timesteps, noise
    done = checked = 0

    def on_step(step: int, latents: Tensor) -> None:
        nonlocal latest, done, checked
        move_to_cpu(records[checked:])
        check_numbers(pipeline.model, latents, f"step {step}", records[checked:])
        latest, done, checked = latents, step + 1, len(records)
        observer.advance("step", step, len(timesteps), f"t = {timesteps[step]:g}")
        if observer.stopping and done < len(timesteps):
            raise StoppedError

    phase = out_of_memory(lambda: f"sampling step {done} of {len(timesteps)}", requests)
    with phase, capturing(requests) as records, suppress(StoppedError):
        pipeline.inference(noise, *texts, on_step=on_step)
    return latest, records, done


def capturing(requests: Sequence[CaptureRequest]) -> AbstractContextManager[list[CapturedCall]]:
    """Capture what is requested; nothing where there is no request."""
    return ATTENTION_WEIGHT_CAPTURE.capture(*requests) if requests else nullcontext([])


@contextmanager
def out_of_memory(doing: str | Callable[[], str], requests: Sequence[CaptureRequest] = ()) -> Iterator[None]:
    """Say in which phase (a text, or a function that gives it) memory did not suffice, and what helps."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_host = isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY)
        if not on_host and not isinstance(error, torch.OutOfMemoryError):
            raise
        phase = doing() if callable(doing) else doing
        if any(request.granularity == "token" for request in requests):
            remedy = "--granularity frame keeps no token matrices, fewer --layer_indices fewer of them"
        elif "rolling" in phase or "sampling" in phase:
            remedy = "take fewer --num_frames, or a --cache_policy with a window"
        else:
            remedy = "a GPU that nothing else uses (--gpu_id N), or --device cpu"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        memory = "host" if on_host else "GPU"
        raise RunError(f"out of {memory} memory while {phase}: {reason}; {remedy}") from error


# --- Numbers are checked before they are kept, once a block or step
def check_numbers(model: "WanModel", latents: Tensor, place: str, calls: Sequence[CapturedCall] = ()) -> None:
    """Raise RunError for latents that are not finite, naming the weights that are to blame.

    And for captured numbers that cannot be right, naming layer, block and pass.
    """
    if not latents.isfinite().all():
        spoilt = next((name for name, x in model.named_parameters() if not x.isfinite().all()), None)
        remedy = f"nor is the weight {spoilt}: get the file of the weights again" if spoilt else REMEDY
        raise RunError(f"{place}: the latents are not finite, {remedy}")
    # 1. Mostly all is right, which a few steps show: small values of one shape are checked at once.
    alike: dict[Any, list[Tensor]] = {}
    for call in calls:
        for name, values in call.values.items():
            if values.numel() <= SMALL and name != "map_mass":
                alike.setdefault((name, values.shape, values.dtype), []).append(values)
    right = set()
    for kind, small in alike.items():
        together = torch.stack(small).float()
        is_mass = kind[0].endswith("_mass") or kind[0] == "token_probabilities"
        adds_up = not is_mass or bool(((together.sum(-1) - 1).abs() <= MASS_TOLERANCE).all())
        if adds_up and together.isfinite().all():
            right.add(kind)
    # 2. What is large, or not right everywhere, is looked at one by one.
    for call in calls:
        block, step = (call.at.block, call.at.step) if call.at else (None, None)
        where = f"layer {call.site.layer}, block {block}, step {step}: "
        for name, values in call.values.items():
            if name in ("attended", "map_queries") or (name, values.shape, values.dtype) in right:
                continue
            # Policies by head show heads different frames: whole columns of [B, H, Fq, Fk] are NaN
            heads_differ = False
            if name.startswith("frame_") and values.ndim == 4 and (missing := values.isnan()).any():
                heads_differ = not missing.all() and torch.equal(missing.any(2), missing.all(2))
            left_out = "attended" in call.values and not name.endswith("_mass")  # by an intervention: NaN
            wrong = values.isinf().any() if left_out else not all(x.isfinite() for x in values.aminmax())
            if wrong and not heads_differ:
                half = values.dtype == torch.float16
                remedy = " in float16; --capture probabilities keeps float32" if half else f"; {REMEDY}"
                raise RunError(f"{where}{name} is not finite{remedy}")
            if name == "frame_mass" and ("slot_mass" in call.values or heads_differ):
                continue  # averages of frames are of no frame
            if name.endswith("_mass") or name == "token_probabilities":
                # Maps keep mass times the tokens of a frame
                unit = call.layout.tokens_per_slot if name == "map_mass" and call.layout else 1
                off = (values.sum(-1, dtype=torch.float32) / unit - 1).abs().max().item()
                if off > MASS_TOLERANCE:
                    raise RunError(f"{where}rows of {name} sum to 1 ± {off:.2g}, not to 1")
