"""The older face of the capture: enable(), captured_weights, disable(). Only this file knows call indices.

A call index is the place of a call in the order of one forward: self-attention of layer N is 2N,
cross-attention 2N + 1.
"""

from collections.abc import Callable, Collection, KeysView
from dataclasses import dataclass
from typing import Any

from wan.capture import AttentionCapture, CaptureRequest, Session, check_indices
from wan.captured_call import CapturedCall, Site, move_to_cpu


def call_index(site: Site) -> int:
    """Place of a site's call in the order of calls of one forward."""
    return 2 * site.layer + (site.kind == "cross")


class OlderCall(CapturedCall):
    """A captured call that also has layer_idx (the call index) and attn_weights (logits or probabilities)."""

    def __getitem__(self, name: str) -> Any:
        return OLDER[name](self) if name in OLDER else super().__getitem__(name)

    def keys(self) -> KeysView[str]:
        tokens = {"token_logits", "token_probabilities"}
        newer = [name for name in iter(super().keys()) if name not in tokens]
        older = ["layer_idx", "attn_weights"] if tokens & self.values.keys() else ["layer_idx"]
        return dict.fromkeys([*older, *newer]).keys()


def _tokens(call: CapturedCall) -> Any:
    return call.values["token_logits" if call.is_logits else "token_probabilities"]


OLDER: dict[str, Callable[[CapturedCall], Any]] = {
    "layer_idx": lambda call: call_index(call.site),
    "attn_weights": _tokens,
}


@dataclass(frozen=True)
class CallIndexRequest(CaptureRequest):
    """A request for calls by their index; None asks for all."""

    call_indices: frozenset[int] | None = None

    def selects(self, site: Site) -> bool:
        return self.call_indices is None or call_index(site) in self.call_indices

    def check(self, num_layers: int, num_blocks: int | None = None, num_passes: int | None = None) -> None:
        super().check(num_layers, num_blocks, num_passes)
        check_indices("call index", self.call_indices, 2 * num_layers)


class OlderCapture(AttentionCapture):
    """An AttentionCapture that scripts of the public repositories can use as they are."""

    call_type = OlderCall

    def __init__(self) -> None:
        super().__init__()
        self._num_calls: int | None = None  # what enable() was told about the model

    def enable(
        self,
        layer_indices: Collection[int] | None = None,
        capture_logits: bool = True,
        num_layers: int | None = None,
    ) -> None:
        """Keep token matrices of the given call indices (None: all).

        num_layers is the number of call indices, twice the model's layers; ValueError where an index is
        outside.
        """
        self.disable()
        indices = None if layer_indices is None else frozenset(layer_indices)
        outside = sorted(i for i in indices or () if i < 0 or (num_layers is not None and i >= num_layers))
        if outside:
            limit = "" if num_layers is None else f"..{num_layers - 1}"
            raise ValueError(
                f"call index {outside[0]} is not in 0{limit}; self-attention of layer N is 2N, cross 2N + 1"
            )
        request = CallIndexRequest(kinds=("self", "cross"), is_logits=capture_logits, call_indices=indices)
        self._sessions[-1] = Session((request,))
        self._num_calls = num_layers

    def disable(self) -> None:
        """Stop, and forget what was captured."""
        self._sessions[-1] = Session()
        self._num_calls = None

    @property
    def captured_weights(self) -> list[CapturedCall]:
        """What was kept, one call after the other, on the CPU; each can be read like a dict."""
        self._sessions[-1].finish()
        calls = self._sessions[-1].calls
        move_to_cpu(calls)
        return calls

    def check_model(
        self, num_layers: int, num_blocks: int | None = None, num_passes: int | None = None
    ) -> None:
        by_index = any(isinstance(request, CallIndexRequest) for request in self._sessions[-1].requests)
        if by_index and self._num_calls is not None and self._num_calls != 2 * num_layers:
            raise ValueError(
                f"capture was enabled with num_layers={self._num_calls}, but this model of {num_layers} "
                f"layers has {2 * num_layers} attention calls; pass num_layers={2 * num_layers}"
            )
        super().check_model(num_layers, num_blocks, num_passes)
