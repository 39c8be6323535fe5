"""Both samplers, observed: numbers checked, stopped between blocks or steps, out of memory explained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from experiments.caches.files import RunError
from experiments.extraction import checks
from experiments.extraction.observer import RunObserver
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.blocks import block_ranges
from wan.capture import CapturedCall, CaptureRequest, move_to_cpu
from wan.parallel import any_process, gather_calls
from wan.pipeline import CausalInferencePipeline
from wan.text2video import TextToVideoPipeline

NO_MEMORY = ("can't allocate memory", "not enough memory")  # how torch's CPU allocator says it


class _StoppedError(Exception):
    """Leaves a sampler between two blocks or steps."""


def roll_out(
    pipeline: CausalInferencePipeline,
    noise: Tensor,
    sizes: Sequence[int],
    requests: Sequence[CaptureRequest],
    observer: RunObserver,
    **inputs: Any,
) -> tuple[Tensor, list[CapturedCall]]:
    """Generate blocks of sizes frames -> latents [1, F, C, h, w] of the finished blocks, captured calls.

    inputs are those of the pipeline. Fewer frames than the noise has come back where the observer asked to
    stop. Raises RunError for numbers that cannot be right, and for memory that does not suffice.
    """
    frames, finished, checked = block_ranges(list(sizes)), list[Tensor](), 0

    def on_block(block: int, latents: Tensor) -> None:
        nonlocal checked
        checks.check_latents(pipeline.model, latents, f"block {block}")
        checked = _keep(records, checked)
        finished.append(latents.clone())
        observer.block(block, frames[block], len(frames))
        if any_process(pipeline.model, observer.stopping) and block + 1 < len(frames):
            raise _StoppedError

    with (
        out_of_memory(lambda: f"rolling out block {len(finished)} of {len(frames)}", requests),
        capturing(requests) as records,
        suppress(_StoppedError),
    ):
        pipeline.inference(noise, on_block=on_block, **inputs)
    records = [record for record in records if record["block"] < len(finished)]  # a window began others
    return torch.cat(finished, 1), gather_calls(pipeline.model, records)


def sample(
    pipeline: TextToVideoPipeline,
    texts: tuple[Tensor, Tensor],
    noise: Tensor,
    requests: Sequence[CaptureRequest],
    observer: RunObserver,
) -> tuple[Tensor, list[CapturedCall], int]:
    """Run the base model's steps -> latents [1, F, C, h, w], captured calls, the number of steps done.

    texts are those of guidance's two branches. Not all steps are done where the observer asked to stop.
    Raises RunError as roll_out does.
    """
    timesteps, done, last, checked = pipeline.pass_timesteps, 0, noise, 0

    def on_step(step: int, latents: Tensor) -> None:
        nonlocal done, last, checked
        checks.check_latents(pipeline.model, latents, f"step {step}")
        checked = _keep(records, checked)
        done, last = step + 1, latents
        observer.step(step, timesteps[step], len(timesteps))
        if observer.stopping and done < len(timesteps):
            raise _StoppedError

    with (
        out_of_memory(lambda: f"sampling step {done} of {len(timesteps)}", requests),
        capturing(requests) as records,
        suppress(_StoppedError),
    ):
        pipeline.inference(noise, *texts, on_step=on_step)
    return last, records, done


def _keep(records: list[CapturedCall], checked: int) -> int:
    """Move the calls since the last check to the CPU and check them; return how many there are now."""
    move_to_cpu(records[checked:])
    checks.check_values(records[checked:])
    return len(records)


def capturing(requests: Sequence[CaptureRequest]) -> AbstractContextManager[list[CapturedCall]]:
    return ATTENTION_WEIGHT_CAPTURE.capture(*requests) if requests else nullcontext([])


@contextmanager
def out_of_memory(phase: str | Callable[[], str], requests: Sequence[CaptureRequest] = ()) -> Iterator[None]:
    """Say in which phase (a text, or a function that gives it) memory did not suffice, and what helps."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_host = isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY)
        if not on_host and not isinstance(error, torch.OutOfMemoryError):
            raise
        what = phase() if callable(phase) else phase
        if any(request.granularity == "token" for request in requests):
            remedy = "--granularity frame keeps no token matrices, fewer --layer_indices fewer of them"
        elif "rolling" in what or "sampling" in what:
            remedy = "take fewer --num_frames, or a --cache_policy with a window"
        else:
            remedy = "a GPU that nothing else uses (--gpu_id N), or --device cpu"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        memory = "host" if on_host else "GPU"
        raise RunError(f"out of {memory} memory while {what}: {reason}; {remedy}") from error
