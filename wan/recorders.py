"""What heads put out in an unedited run: the mean of z per frame, and its size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Semaphore, Thread

import torch
from torch import Tensor

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.captured_call import HeadShard, Pass, Site
from wan.edits import ACTIVE_EDITS, EditedCall, Hand, RolloutPlan, SourceCall
from wan.interventions import InterventionError

# --- What heads put out in an unedited run: the mean of z per frame, and its size
Key = tuple[str, int, int, str]  # kind, layer, step, branch


def key_of(site: Site, at: Pass) -> Key:
    return site.kind, site.layer, at.step, at.branch


@dataclass(eq=False)
class HeadOutputs:
    """Means and sizes of z by call, float32 on the CPU; what Ablate("frame_mean") of the same run takes.

    means [B, Fq, H, D] over the tokens of each query frame; norms [B, Fq, H], of ‖z‖ over its tokens.
    """

    means: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    norms: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    shard: HeadShard | None = None  # where heads are in several processes

    def touch(self, call: EditedCall) -> None:
        self.shard = call.site.shard
        call.after.append(lambda z: self._keep(call, z))

    def gather(self) -> None:
        """Bring together what other processes recorded of their heads."""
        if self.shard is not None:
            for recorded in (self.means, self.norms):
                for key, values in recorded.items():
                    recorded[key] = self.shard.gather(values, dim=2)

    def check(self, plan: RolloutPlan) -> None:
        """Every rollout will do."""

    def of(self, site: Site, at: Pass) -> Tensor:
        """[B, Fq, H, D] of the same call; InterventionError where it was not recorded."""
        try:
            return self.means[key_of(site, at), at.block]
        except KeyError:
            raise InterventionError(
                f"layer {site.layer}, block {at.block}, step {at.step}: no output was recorded; "
                "record_head_outputs() must have seen a run of the same blocks and steps"
            ) from None

    def _keep(self, call: EditedCall, z: Tensor) -> Tensor:
        frames = z.unflatten(1, (len(call.at.query_frames), -1))  # [B, Fq, S, H, D]
        where = key_of(call.site, call.at), call.at.block
        found = (
            (self.means, frames.mean(2, dtype=torch.float32).cpu()),
            (self.norms, frames.float().norm(dim=-1).mean(2).cpu()),
        )
        for kept, values in found:
            if call.of_heads is None:
                kept[where] = values
                continue
            if where not in kept or len(kept[where]) != len(values):  # the first of a layer's groups
                kept[where] = values.new_full(
                    (*values.shape[:2], call.layer_heads, *values.shape[3:]), torch.nan
                )
            kept[where][:, :, list(call.of_heads)] = values
        return z


@contextmanager
def record_head_outputs() -> Iterator[HeadOutputs]:
    """Record the outputs of all heads while the context lasts; no bit of the run changes."""
    outputs = HeadOutputs()
    with ACTIVE_EDITS.with_hand(outputs):
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
                    wider = torch.zeros(offsets, *rest), torch.zeros(offsets, 1, 1)
                    for mine, total in zip(wider, (sums.get(key), counts.get(key)), strict=True):
                        if total is not None:
                            mine[: len(total)] = total
                    sums[key], counts[key] = wider
                sums[key][:offsets] += means.sum(0)
                counts[key][:offsets] += batch
        return cls({key: sums[key] / counts[key] for key in sums})

    def of(self, site: Site, at: Pass) -> Tensor:
        """[1, Fq, H, D] of a call; InterventionError where the set has no such layer, pass or place."""
        means = self.values.get(key_of(site, at))
        if means is None or len(means) < len(at.query_frames):
            raise InterventionError(
                f"the means have no layer {site.layer}, step {at.step} with {len(at.query_frames)} frames "
                "a block: they must be of the same model and steps"
            )
        return means[None, : len(at.query_frames)]


# --- A second run in step with the first: patches take its tensors while they are there, and store none
OfHeads = tuple[int, ...] | None  # the heads of a call that has some of a layer's
Place = tuple[Site, int, int, str, OfHeads]  # site, block, step, branch


class _Cancelled(BaseException):
    """Unwinds a source that nobody waits for any more."""


class RunInStep:
    """A source run: rollout() starts it from its beginning, and makes no other edits.

    Use it as a context around the edited run; on leaving, the source is stopped where it is.
    """

    def __init__(self, rollout: Callable[[], object]):
        self._rollout = rollout
        self._thread: Thread | None = None
        self._mine, self._theirs = Semaphore(0), Semaphore(0)  # whose turn it is
        self._wanted: Place | None = None
        self._found: tuple[Place, SourceCall] | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._state: tuple[dict, list[Hand]] = ({}, [])

    def __enter__(self) -> "RunInStep":
        return self

    def __exit__(self, *error: object) -> None:
        self._cancelled = True
        if self._thread is not None and self._thread.is_alive():
            self._let_run()
            self._thread.join()
        self._found = None

    def call(self, site: Site, at: Pass, of_heads: OfHeads = None) -> SourceCall:
        """The source's own call of a site in a pass. InterventionError where it has none, or not any more."""
        place = (site, at.block, at.step, at.branch, of_heads)
        if self._found is None or self._found[0] != place:
            self._wanted, self._found = place, None
            if self._thread is None:
                self._thread = Thread(target=self._run, args=(torch.get_num_threads(),), daemon=True)
                self._state = (ATTENTION_WEIGHT_CAPTURE.fresh_state(), [self])
                self._let_run(start=True)
            elif self._thread.is_alive():
                self._let_run()
        if self._error is not None:
            raise self._error
        if self._found is None:
            raise InterventionError(
                f"the source has no call of layer {site.layer}, block {at.block}, step {at.step}: "
                "it must have the same frames, blocks and steps"
            )
        return self._found[1]

    def touch(self, call: EditedCall) -> None:
        """In the source's thread, of each of its calls: stop in the one that is wanted."""
        place = (call.site, call.at.block, call.at.step, call.at.branch, call.of_heads)
        if place == self._wanted:
            call.after.append(lambda z: self._stop(place, call, z))

    def check(self, plan: RolloutPlan) -> None:
        """Whether the shapes are the same shows when they meet."""

    def _stop(self, place: Place, call: EditedCall, z: Tensor) -> Tensor:
        self._found = place, SourceCall(call.q, call.k, call.v, z, call.layout)
        self._mine.release()
        self._theirs.acquire()
        if self._cancelled:
            raise _Cancelled
        return z

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # a new thread has its own count, and other counts other bits
        try:
            self._rollout()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._found = None
            self._mine.release()

    def _let_run(self, start: bool = False) -> None:
        """Hand over to the source, with what it had announced, and wait until it stops or ends."""
        capture, hands = self._state
        before = ATTENTION_WEIGHT_CAPTURE.exchange(capture), ACTIVE_EDITS.exchange(hands)
        try:
            assert self._thread is not None
            if start:
                self._thread.start()
            else:
                self._theirs.release()
            self._mine.acquire()
        finally:
            capture = ATTENTION_WEIGHT_CAPTURE.exchange(before[0])
            self._state = capture, ACTIVE_EDITS.exchange(before[1])
