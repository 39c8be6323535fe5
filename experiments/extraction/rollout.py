"""Both samplers, observed: numbers checked, stopped between blocks or steps, out of memory explained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor

from experiments.caches.files import RunError
from experiments.extraction import checks
from experiments.extraction.observer import RunObserver
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.blocks import block_ranges
from wan.capture import CapturedCall, CaptureRequest, move_to_cpu
from wan.model import WanModel
from wan.parallel import any_process, gather_calls
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch
from wan.text2video import TextToVideoPipeline

NO_MEMORY = ("can't allocate memory", "not enough memory")  # how torch's CPU allocator says it


class _StoppedError(Exception):
    """Leaves a sampler between two blocks or steps."""


def roll_out(
    pipeline: CausalInferencePipeline,
    noise: Tensor,
    renoise: Tensor,
    prompt_embeds: Tensor,
    sizes: Sequence[int],
    requests: Sequence[CaptureRequest],
    observer: RunObserver,
    prompt_schedule: Sequence[PromptSwitch] = (),
) -> tuple[Tensor, list[CapturedCall]]:
    """Generate blocks of sizes frames -> latents [1, F, C, h, w] of the finished blocks, captured calls.

    Fewer frames than the noise has come back where the observer asked to stop. Raises RunError, naming block,
    pass and layer, for numbers that cannot be right, and for memory that does not suffice.
    """
    frames = block_ranges(list(sizes))
    finished: list[Tensor] = []

    def on_block(block: int, latents: Tensor) -> None:
        check(latents)
        finished.append(latents.clone())
        observer.block(block, frames[block], len(frames))
        if any_process(pipeline.model, observer.stopping) and block + 1 < len(frames):
            raise _StoppedError

    phase = lambda: f"rolling out block {len(finished)} of {len(frames)}"  # noqa: E731
    with capture_guarded(pipeline.model, requests, phase) as (records, check):
        pipeline.inference(
            noise,
            prompt_embeds=prompt_embeds,
            renoise=renoise,
            on_block=on_block,
            prompt_schedule=prompt_schedule,
        )
    records = [record for record in records if record["block"] < len(finished)]  # a window began others
    done = pipeline.model.config.num_layers, len(finished), len(pipeline.pass_timesteps)
    checks.check_complete(records, requests, *done, pipeline.has_pass)
    return torch.cat(finished, 1), gather_calls(pipeline.model, records)


def sample(
    pipeline: TextToVideoPipeline,
    noise: Tensor,
    prompt: Tensor,
    negative: Tensor,
    requests: Sequence[CaptureRequest],
    observer: RunObserver,
) -> tuple[Tensor, list[CapturedCall], int]:
    """Run the base model's steps -> latents [1, F, C, h, w], captured calls, the number of steps done.

    Not all are where the observer asked to stop. Raises RunError as roll_out does.
    """
    timesteps, done, last = pipeline.pass_timesteps, 0, noise

    def on_step(step: int, latents: Tensor) -> None:
        nonlocal done, last
        check(latents)
        done, last = step + 1, latents
        observer.step(step, timesteps[step], len(timesteps))
        if observer.stopping and done < len(timesteps):
            raise _StoppedError

    phase = lambda: f"sampling step {done} of {len(timesteps)}"  # noqa: E731
    with capture_guarded(pipeline.model, requests, phase) as (records, check):
        pipeline.inference(noise, prompt, negative, on_step=on_step)
    for branch in ("cond", "uncond"):
        of_one = [record for record in records if record["branch"] == branch]
        checks.check_complete(of_one, requests, pipeline.model.config.num_layers, 1, done)
    return last, records, done


@contextmanager
def capture_guarded(
    model: WanModel, requests: Sequence[CaptureRequest], phase: Callable[[], str]
) -> Iterator[tuple]:
    """Capture while a sampler runs -> the calls, and a check for the latents of every finished block or step.

    The check raises RunError for numbers that cannot be right. phase says what is being done, where memory
    does not suffice. What a _StoppedError leaves is kept.
    """
    with (
        out_of_memory(phase, requests),
        capturing(requests) as records,
        checks.record_forwards(model) as forwards,
        suppress(_StoppedError),
    ):  # innermost: what was captured is kept
        checked = 0

        def check(latents: Tensor) -> None:
            nonlocal checked
            checks.check_forwards(model, forwards, latents)
            move_to_cpu(records[checked:])
            checks.check_values(records[checked:])
            checked = len(records)

        yield records, check


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
        elif any(request.rope_bands for request in requests):
            remedy = "leave out --rope_bands, or take fewer --num_frames"
        elif "sampling" in what:
            remedy = "fewer --num_frames"
        elif "rolling" in what:
            remedy = "fewer --num_frames, or a --cache_policy with a window, make the KV cache smaller"
        else:
            remedy = "a GPU that nothing else uses (--gpu_id N), or --device cpu"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(
            f"out of {'host' if on_host else 'GPU'} memory while {what}: {reason}; {remedy}"
        ) from error
