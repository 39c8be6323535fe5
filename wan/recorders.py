"""Record what edits need of other runs: outputs of heads, their means, and a second run in step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Semaphore, Thread

import torch
from torch import Tensor

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import Call, Pass, Site
from wan.interventions import ACTIVE_EDITS, CallHook, InterventionError
from wan.keys import HeadShard

# --- What heads put out in an unedited run: the mean of z per frame, and its size
Key = tuple[str, int, int, str]  # kind, layer, step, branch


def key_of(site: Site, at: Pass) -> Key:
    return site.kind, site.layer, at.step, at.branch


@dataclass(eq=False)
class HeadOutputs(CallHook):
    """Means and sizes of z by call, float32 on the CPU; what Ablate("frame_mean") of the same run takes.

    means [B, Fq, H, D] over the tokens of each query frame; norms [B, Fq, H], of ‖z‖ over its tokens.
    """

    means: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    norms: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    shard: HeadShard | None = None  # where heads are in several processes

    def apply(self, call: Call) -> None:
        self.shard = call.site.shard
        call.after.append(lambda z: self._keep(call, z))

    def gather(self) -> None:
        """Bring together what other processes recorded of their heads."""
        if self.shard is not None:
            for recorded in (self.means, self.norms):
                for key, values in recorded.items():
                    recorded[key] = self.shard.gather(values, dim=2)

    def of(self, site: Site, at: Pass) -> Tensor:
        """[B, Fq, H, D] of the same call; InterventionError where it was not recorded."""
        try:
            return self.means[key_of(site, at), at.block]
        except KeyError:
            raise InterventionError(
                f"layer {site.layer}, block {at.block}, step {at.step}: no output was recorded; "
                "record_head_outputs() must have seen a run of the same blocks and steps"
            ) from None

    def _keep(self, call: Call, z: Tensor) -> Tensor:
        assert call.at is not None
        frames = z.unflatten(1, (len(call.at.query_frames), -1))  # [B, Fq, S, H, D]
        where = key_of(call.site, call.at), call.at.block
        means = frames.mean(2, dtype=torch.float32).cpu()
        norms = frames.float().norm(dim=-1).mean(2).cpu()
        for kept, values in ((self.means, means), (self.norms, norms)):
            if call.of_heads is None:
                kept[where] = values
                continue
            if where not in kept or len(kept[where]) != len(values):  # the first of a layer's groups
                shape = (*values.shape[:2], call.layer_heads, *values.shape[3:])
                kept[where] = values.new_full(shape, torch.nan)
            kept[where][:, :, list(call.of_heads)] = values
        return z


@contextmanager
def record_head_outputs() -> Iterator[HeadOutputs]:
    """Record the outputs of all heads while the context lasts; no bit of the run changes."""
    outputs = HeadOutputs()
    with ACTIVE_EDITS.installed(outputs):
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


class RunInStep(CallHook):
    """A source run: rollout() starts it from its beginning, in a thread, and makes no other edits.

    Use it as a context around the edited run; on leaving, the source is stopped where it is.
    """

    def __init__(self, rollout: Callable[[], object]):
        self._rollout = rollout
        self._thread: Thread | None = None
        self._mine, self._theirs = Semaphore(0), Semaphore(0)  # whose turn it is
        self._wanted: Place | None = None
        self._found: tuple[Place, Call] | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._state: list[dict] = []  # what the source had announced, captures and edits

    def __enter__(self) -> "RunInStep":
        return self

    def __exit__(self, *error: object) -> None:
        self._cancelled = True
        if self._thread is not None and self._thread.is_alive():
            self._let_run()
            self._thread.join()
        self._found = None

    def call(self, site: Site, at: Pass, of_heads: OfHeads = None) -> Call:
        """Return the source's own call of a site in a pass; InterventionError where it has none."""
        place = (site, at.block, at.step, at.branch, of_heads)
        if self._found is None or self._found[0] != place:
            self._wanted, self._found = place, None
            if self._thread is None:
                self._thread = Thread(target=self._run, args=(torch.get_num_threads(),), daemon=True)
                self._state = [vars(type(each)()) for each in (ATTENTION_WEIGHT_CAPTURE, ACTIVE_EDITS)]
                self._let_run()
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

    def apply(self, call: Call) -> None:
        """In the source's thread, of each of its calls: stop in the one that is wanted."""
        assert call.at is not None
        place = (call.site, call.at.block, call.at.step, call.at.branch, call.of_heads)

        def stop(z: Tensor) -> Tensor:
            call.z = z
            self._found = place, call
            self._mine.release()
            self._theirs.acquire()
            if self._cancelled:
                raise _Cancelled
            return z

        if place == self._wanted:
            call.after.append(stop)

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # a new thread has its own count, and other counts other bits
        try:
            with ACTIVE_EDITS.installed(self):
                self._rollout()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._found = None
            self._mine.release()

    def _let_run(self) -> None:
        """Hand over to the source, with its own captures and edits, until it stops in a call or ends."""
        before = self._swap(self._state)
        try:
            assert self._thread is not None
            if self._thread.ident is None:
                self._thread.start()
            else:
                self._theirs.release()
            self._mine.acquire()
        finally:
            self._state = self._swap(before)

    @staticmethod
    def _swap(state: list[dict]) -> list[dict]:
        """Give capture and edits another state -> the one before."""
        observers = (ATTENTION_WEIGHT_CAPTURE, ACTIVE_EDITS)
        before = [dict(vars(each)) for each in observers]
        for each, values in zip(observers, state, strict=True):
            vars(each).update(values)
        return before
