"""Record what edits need of other runs: outputs of heads, their means, and a second run in step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from threading import Semaphore, Thread

import torch
from torch import Tensor

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import Call
from wan.interventions import InterventionError
from wan.keys import HeadShard
from wan.sites import Watcher, Where, watched

# --- What an unedited run puts out: the mean per frame, and its size
Key = tuple[str, int, int, str]  # kind (self, cross for z and cross_z), or another site; layer, step, branch
KINDS = {"z": "self", "cross_z": "cross"}


def key_of(where: Where) -> Key:
    return KINDS.get(where.site, where.site), where.layer or 0, where.step, where.branch


@dataclass(eq=False)
class HeadOutputs(Watcher):
    """Means and sizes by call, float32 on the CPU; what Ablate("frame_mean") of the same run takes.

    means [B, Fq, H, D] (or [B, Fq, dim]) over the tokens of each query frame; norms [B, Fq, H], of ‖z‖ over
    its tokens.
    """

    sites: tuple[str, ...] = ("z", "cross_z")
    means: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    norms: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    shard: HeadShard | None = None  # where heads are in several processes

    def visit(self, x: Tensor, where: Where) -> None:
        if where.site in self.sites:
            self.shard = where.shard
            frames = x.unflatten(1, (len(where.frames), -1))  # [B, Fq, S, H, D]
            self.means[key_of(where), where.block] = frames.mean(2, dtype=torch.float32).cpu()
            self.norms[key_of(where), where.block] = frames.float().norm(dim=-1).mean(2).cpu()

    def gather(self) -> None:
        """Bring together what other processes recorded of their heads."""
        if self.shard is not None:
            for recorded in (self.means, self.norms):
                for key, values in recorded.items():
                    recorded[key] = self.shard.gather(values, dim=2)

    def of(self, where: Where) -> Tensor:
        """[B, Fq, H, D] of the same call; InterventionError where it was not recorded."""
        try:
            return self.means[key_of(where), where.block]
        except KeyError:
            raise InterventionError(
                f"{where}: no output was recorded; "
                "record_head_outputs() must have seen a run of the same blocks and steps"
            ) from None


@contextmanager
def record_head_outputs(*sites: str) -> Iterator[HeadOutputs]:
    """Record outputs of all heads, or of other sites, while the context lasts; no bit of the run changes."""
    outputs = HeadOutputs(sites or HeadOutputs.sites)
    with watched(outputs):
        yield outputs
    outputs.gather()


@dataclass(frozen=True, eq=False)
class ReferenceMeans:
    """Mean z over a reference set, per place of a frame in its block: float32 [offsets, H, D] by call."""

    values: Mapping[Key, Tensor]

    @classmethod
    def over(cls, runs: Sequence[HeadOutputs]) -> "ReferenceMeans":
        """The mean over runs, batch items and blocks. A place that few blocks have is a mean of these."""
        sums: dict[Key, Tensor] = {}
        counts: dict[Key, Tensor] = {}
        for run in runs:
            for (key, _), means in run.means.items():
                batch, offsets, *rest = means.shape
                if key not in sums or len(sums[key]) < offsets:
                    wider = torch.zeros(offsets, *rest), torch.zeros(offsets, *[1] * len(rest))
                    for mine, total in zip(wider, (sums.get(key), counts.get(key)), strict=True):
                        if total is not None:
                            mine[: len(total)] = total
                    sums[key], counts[key] = wider
                sums[key][:offsets] += means.sum(0)
                counts[key][:offsets] += batch
        return cls({key: sums[key] / counts[key] for key in sums})

    def of(self, where: Where) -> Tensor:
        """[1, Fq, H, D] of a call; InterventionError where the set has no such layer, pass or place."""
        means, count = self.values.get(key_of(where)), len(where.frames)
        if means is None or len(means) < count:
            raise InterventionError(
                f"the means have no layer {where.layer}, step {where.step} with {count} frames a block: they "
                "must be of the same model and steps"
            )
        return means[None, :count]


# --- A second run in step with the first: patches take its tensors while they are there, and store none
class _Cancelled(BaseException):
    """Unwinds a source that nobody waits for any more."""


class RunInStep(Watcher):
    """A source run: rollout() starts it from its beginning, in a thread, and makes no other edits.

    Use it as a context around the edited run; on leaving, the source is stopped where it is.
    """

    def __init__(self, rollout: Callable[[], object]):
        self._rollout = rollout
        self._thread: Thread | None = None
        self._mine, self._theirs = Semaphore(0), Semaphore(0)  # whose turn it is
        self._wanted: Where | None = None
        self._found: tuple[Where, Tensor | Call] | None = None
        self._error: BaseException | None = None
        self._cancelled = False

    def __enter__(self) -> "RunInStep":
        return self

    def __exit__(self, *error: object) -> None:
        self._cancelled = True
        if self._thread is not None and self._thread.is_alive():
            self._let_run()
            self._thread.join()
        self._found = None

    def value(self, where: Where) -> Tensor | Call:
        """Return what the source has in a place; InterventionError where it has none."""
        if self._found is None or self._found[0] != where:
            self._wanted, self._found = where, None
            if self._thread is None or self._thread.is_alive():
                self._let_run()
        if self._error is not None:
            raise self._error
        if self._found is None:
            raise InterventionError(
                f"the source has no {where}: it must have the same frames, blocks and steps"
            )
        return self._found[1]

    def wants(self, site: str, layer: int | None, at: object) -> bool:
        wanted = self._wanted
        return wanted is not None and (site, layer, at) == (wanted.site, wanted.layer, wanted.at)

    def visit(self, x: Tensor | Call, where: Where) -> None:
        """In the source's thread: stop in the place that is wanted."""
        if where == self._wanted:
            self._found = where, x
            self._mine.release()
            self._theirs.acquire()
            if self._cancelled:
                raise _Cancelled

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # a new thread has its own count, and other counts other bits
        try:
            with watched(self), ATTENTION_WEIGHT_CAPTURE.serving():
                self._rollout()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._found = None
            self._mine.release()

    def _let_run(self) -> None:
        """Hand over to the source until it stops in a place or ends; its thread is a context of its own."""
        if self._thread is None:
            self._thread = Thread(
                target=Context().run, args=(self._run, torch.get_num_threads()), daemon=True
            )
            self._thread.start()
        else:
            self._theirs.release()
        self._mine.acquire()
