"""The older face of the capture: enable(), captured_weights, disable(). Only this file knows call indices.

A call index is the place of a call in the order of one forward: self-attention of layer N is 2N,
cross-attention 2N + 1.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from wan.capture import NOTHING, Asked, AttentionCapture, CapturedCall, CaptureRequest, move_to_cpu
from wan.sites import Site, check_indices


def call_index(site: Site) -> int:
    """Return the place of a site's call in the order of calls of one forward."""
    return 2 * site.layer + (site.kind == "cross")


class OlderCall(CapturedCall):
    """A captured call that also has layer_idx (the call index) and attn_weights (logits or probabilities)."""

    @property
    def _tokens(self) -> str:
        return "token_logits" if self.is_logits else "token_probabilities"

    def __getitem__(self, name: str) -> Any:
        if name == "layer_idx":
            return call_index(self.site)
        return self.values[self._tokens] if name == "attn_weights" else super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        has_tokens = self._tokens in self.values
        newer = (name for name in super().__iter__() if name != self._tokens)
        return iter(["layer_idx", *["attn_weights"] * has_tokens, *newer])


@dataclass(frozen=True)
class CallIndexRequest(CaptureRequest):
    """A request for calls by their index; None asks for all. num_calls: what was said of the model."""

    call_indices: frozenset[int] | None = None
    num_calls: int | None = None

    def selects(self, site: Site) -> bool:
        return self.call_indices is None or call_index(site) in self.call_indices

    def check(self, num_layers: int, num_blocks: int | None = None, num_passes: int | None = None) -> None:
        if self.num_calls not in (None, 2 * num_layers):
            raise ValueError(
                f"capture was enabled with num_layers={self.num_calls}, but this model of {num_layers} "
                f"layers has {2 * num_layers} attention calls; pass num_layers={2 * num_layers}"
            )
        super().check(num_layers, num_blocks, num_passes)
        check_indices("call index", self.call_indices, 2 * num_layers)


class OlderCapture(AttentionCapture):
    """An AttentionCapture that scripts of the public repositories can use as they are."""

    call_type = OlderCall

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
        request = CallIndexRequest(
            kinds=("self", "cross"), is_logits=capture_logits, call_indices=indices, num_calls=num_layers
        )
        self._asked = Asked((request,), [])

    def disable(self) -> None:
        """Stop, and forget what was captured."""
        self._asked = NOTHING

    @property
    def captured_weights(self) -> list[CapturedCall]:
        """What was kept, one call after the other, on the CPU; each can be read like a dict."""
        move_to_cpu(self._asked.calls)
        return self._asked.calls
