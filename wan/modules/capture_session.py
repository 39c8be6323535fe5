"""What is asked for together, and what is kept for it while the rollout goes on."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from wan.modules import frame_reductions, host_copies
from wan.modules.captured_call import CapturedCall
from wan.modules.late_logits import LateLogits
from wan.modules.late_work import LateWork

if TYPE_CHECKING:
    from wan.modules.capture import CaptureRequest


@dataclass(eq=False)
class Session:
    """What was asked for together, and what was kept for it so far."""

    requests: tuple["CaptureRequest", ...] = ()
    calls: list[CapturedCall] = field(default_factory=list)
    late: LateWork = field(default_factory=LateWork)
    logits: LateLogits = field(default_factory=LateLogits)

    def keep(self, call: CapturedCall) -> None:
        self.calls.append(call)
        host_copies.start(call.values)

    def finish(self) -> None:
        """Complete what was kept so far."""
        self.late.finish()
        self.logits.finish()

    def forget(self) -> None:
        """After an error: what is not complete is not kept."""
        self.late.forget()
        gone = self.logits.forget()
        if gone:
            self.calls[:] = [call for call in self.calls if not any(call.values is x for x in gone)]

    def of_frames(
        self, layer: Hashable, call: frame_reductions.Call, mass: bool, rope_bands: bool, waits: bool
    ) -> dict[str, Tensor]:
        """What is kept of a call by frame; of one that waits, in finish()."""
        self.logits.make_way(layer)
        if not waits or rope_bands or not call.layout.is_plain:
            means = self.logits.key_means.of(layer, call.layout, call.k)
            return frame_reductions.of_frames(call, means, mass, rope_bands)
        others = {"frame_mass": frame_reductions.mass_of(call)} if mass else {}
        return self.logits.add(layer, call, others)
