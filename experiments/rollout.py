"""One rollout under watch: numbers guarded block by block, stopped between blocks when asked, out of memory explained."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from experiments import guards
from experiments.guards import RunError
from experiments.progress import Watch
from wan.config import block_ranges
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.capture import CaptureRequest
from wan.pipeline import CausalInferencePipeline

NO_MEMORY = ("can't allocate memory", "not enough memory")      # how torch's CPU allocator says it


class _StoppedError(Exception):
    """Leaves the pipeline between two blocks."""


def roll_out(pipeline: CausalInferencePipeline, noise: Tensor, renoise: Tensor, prompt_embeds: Tensor, sizes: Sequence[int],
             requests: Sequence[CaptureRequest], watch: Watch) -> tuple[Tensor, list[dict]]:
    """Generate blocks of sizes frames and capture on the way -> latents [1, F, C, h, w] of the finished blocks, records.

    Fewer frames than the noise has come back where the watch asked to stop. Raises RunError, naming block, pass and
    layer, for numbers that cannot be right, and for memory that does not suffice.
    """
    frames, finished = block_ranges(list(sizes)), []

    def on_block(block: int, latents: Tensor) -> None:
        guards.check_block(block, frames[block], latents, flags, pipeline.pass_timesteps, records)
        finished.append(latents.clone())
        watch.block(block, frames[block], len(frames))
        if watch.stopping and block + 1 < len(frames):
            raise _StoppedError

    with (out_of_memory(lambda: f"rolling out block {len(finished)} of {len(frames)}", requests),
          ATTENTION_WEIGHT_CAPTURE.capture(*requests) as records, guards.watched_flow(pipeline.model) as flags,
          suppress(_StoppedError)):       # innermost: what was captured until then is kept
        pipeline.inference(noise, prompt_embeds=prompt_embeds, renoise=renoise, on_block=on_block)
    guards.check_records(records, requests, pipeline.model.config.num_layers, len(finished), len(pipeline.pass_timesteps))
    return torch.cat(finished, 1), records


@contextmanager
def out_of_memory(doing, requests: Sequence[CaptureRequest] = ()) -> Iterator[None]:
    """Say what was being done (a text, or a function that gives it) and which flag helps where memory does not suffice."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_host = isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY)
        if not on_host and not isinstance(error, torch.OutOfMemoryError):
            raise
        what = doing() if callable(doing) else doing
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(f"out of {'host' if on_host else 'GPU'} memory while {what}: {reason}; "
                       f"{_advice(what, requests)}") from error


def _advice(what: str, requests: Sequence[CaptureRequest]) -> str:
    if any(request.granularity == "token" for request in requests):
        return "--granularity frame keeps no token matrices, and fewer --layer_indices keep fewer; else fewer --num_frames"
    if any(request.rope_bands for request in requests):
        return "leave out --rope_bands, or take fewer --num_frames"
    if "rolling" in what:
        return "fewer --num_frames, or local_attn_size in the config, make the KV cache smaller"
    return "a GPU that nothing else uses (--gpu_id N), or --device cpu"
