"""A second run in step with the first: patches take its tensors while they are there, and store none.

The two alternate: when an edited call asks for the same call of the source, the source runs up to that call
and stops in it until the next is asked for. Each has its own announced pass, captures and edits.
"""

from collections.abc import Callable
from threading import Semaphore, Thread

import torch
from torch import Tensor

from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.captured_call import Pass, Site
from wan.modules.edit_fields import InterventionError
from wan.modules.edited_call import EditedCall, SourceCall
from wan.modules.edits import ACTIVE_EDITS, Hand
from wan.modules.rollout_plan import RolloutPlan

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
