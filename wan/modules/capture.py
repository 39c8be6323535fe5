"""Observing attention: who is asked for, where the rollout is, and what is kept of each call.

A call is identified by who it is. Each attention module carries its Site, the rollout announces its Pass, and nothing
is counted. Whatever is kept is computed beside the attention call, from its own q, k and log-sum-exp.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from wan.modules import reductions
from wan.modules.rope import RotaryTable

Kind = Literal["self", "cross"]


@dataclass(frozen=True)
class Site:
    """An attention module of the model: its transformer layer, counted from 0, and what it attends to."""

    layer: int
    kind: Kind

    @property
    def call_index(self) -> int:
        """Place in the order of calls of one forward: self-attention of layer N is 2N, cross-attention 2N + 1."""
        return 2 * self.layer + (self.kind == "cross")


@dataclass(frozen=True)
class Pass:
    """One forward of the model as the sampler announces it; frames are global latent frame indices."""

    query_frames: tuple[int, ...]
    key_frames: tuple[int, ...]
    block: int = 0
    step: int = 0  # index of the pass within its block
    timestep: float = 0.0
    is_clean_pass: bool = False
    branch: str = "cond"  # classifier-free guidance runs a second branch, "uncond"


@dataclass(frozen=True)
class CaptureRequest:
    """Which calls to keep and what of them. None selects all.

    granularity: "token" keeps [B, H, Lq, Lk] on the CPU in token_dtype, logits q·k/√D or probabilities;
    "key" the query-averaged logits [B, H, Lk]; "frame" mean logits and, with mass, the mass per frame [B, H, Fq, Fk].
    Of cross-attention, "frame" keeps the mass per text token [B, H, Fq, tokens].
    """

    layers: Collection[int] | None = None
    kinds: tuple[Kind, ...] = ("self",)
    blocks: Collection[int] | None = None
    steps: Collection[int] | None = None
    granularity: Literal["token", "key", "frame"] = "token"
    is_logits: bool = True
    mass: bool = True
    rope_bands: bool = False  # "frame" keeps the mean logits by RoPE band too, [B, H, Fq, Fk, bands]
    token_dtype: torch.dtype = torch.float32
    call_indices: frozenset[int] | None = None  # of the older enable(); overrides layers and kinds

    def __post_init__(self):
        if self.granularity not in ("token", "key", "frame"):
            raise ValueError(f"granularity {self.granularity!r} is not one of token, key, frame")
        if not set(self.kinds) <= {"self", "cross"}:
            raise ValueError(f"kinds {self.kinds} may hold 'self' and 'cross'")
        if self.granularity == "key" and not self.is_logits:
            raise ValueError("granularity 'key' keeps mean logits; probabilities need granularity 'token'")
        if self.rope_bands and (self.granularity != "frame" or "self" not in self.kinds):
            raise ValueError(
                "rope_bands needs granularity 'frame' of self-attention: nothing else has RoPE bands"
            )

    def wants(self, site: Site, at: Pass | None) -> bool:
        if self.call_indices is not None:
            chosen = site.call_index in self.call_indices
        else:
            chosen = site.kind in self.kinds and (self.layers is None or site.layer in self.layers)
        return chosen and (
            at is None
            or (
                (self.blocks is None or at.block in self.blocks)
                and (self.steps is None or at.step in self.steps)
            )
        )

    def check(self, num_layers: int, num_blocks: int | None = None, num_passes: int | None = None) -> None:
        """Raise ValueError for a layer, block or step that this model and rollout do not have."""
        for name, chosen, count in (
            ("layer", self.layers, num_layers),
            ("block", self.blocks, num_blocks),
            ("step", self.steps, num_passes),
            ("call index", self.call_indices, 2 * num_layers),
        ):
            for index in chosen or ():
                if count is not None and not 0 <= index < count:
                    raise ValueError(f"{name} {index} is not in 0..{count - 1}")


class AttentionCapture:
    """What attention modules report to; idle until a request is made, and idle again when it ends."""

    def __init__(self):
        self._requests: tuple[CaptureRequest, ...] = ()
        self._records: list[dict] = []
        self._num_calls: int | None = None  # what enable() was told about the model
        self._pass: Pass | None = None

    # -- asking ---------------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self, *requests: CaptureRequest, **fields) -> Iterator[list[dict]]:
        """Keep what the requests (or one request of the given fields) ask for while the context lasts.

        Yields the list of records, complete and on the CPU once the context has ended. On exit, also on an error,
        this object is as it was before.
        """
        before = self.__dict__.copy()
        self.__init__()
        self._requests = requests or (CaptureRequest(**fields),)
        records = self._records
        try:
            yield records
            move_to_cpu(records)
        finally:
            self.__dict__.update(before)

    def enable(
        self,
        layer_indices: Collection[int] | None = None,
        capture_logits: bool = True,
        num_layers: int | None = None,
    ) -> None:
        """Keep token matrices of the given call indices (self-attention of layer N is 2N, cross 2N + 1; None: all).

        num_layers is the number of call indices, twice the model's layers; ValueError where an index is outside.
        """
        self.disable()
        indices = frozenset(layer_indices if layer_indices is not None else range(num_layers or 0))
        outside = sorted(i for i in indices if i < 0 or (num_layers is not None and i >= num_layers))
        if outside:
            limit = "" if num_layers is None else f"..{num_layers - 1}"
            raise ValueError(
                f"call index {outside[0]} is not in 0{limit}; self-attention of layer N is 2N, cross 2N + 1"
            )
        request = CaptureRequest(kinds=("self", "cross"), is_logits=capture_logits)
        self._requests = (request if layer_indices is None else replace(request, call_indices=indices),)
        self._num_calls = num_layers

    def disable(self) -> None:
        """Stop, and forget what was captured."""
        self._requests, self._records, self._num_calls = (), [], None

    @property
    def active(self) -> bool:
        return bool(self._requests)

    @property
    def now(self) -> Pass | None:
        """The forward that runs, as the sampler announced it."""
        return self._pass

    @property
    def captured_weights(self) -> list[dict]:
        """What was kept, one dict a call in call order, on the CPU."""
        move_to_cpu(self._records)
        return self._records

    # -- being told -----------------------------------------------------------------------------------------------

    def check_model(
        self, num_layers: int, num_blocks: int | None = None, num_passes: int | None = None
    ) -> None:
        """Raise ValueError where a request does not fit the model (and rollout) that is about to run."""
        if self._num_calls is not None and self._num_calls != 2 * num_layers:
            raise ValueError(
                f"capture was enabled with num_layers={self._num_calls}, but this model of {num_layers} layers "
                f"has {2 * num_layers} attention calls; pass num_layers={2 * num_layers}"
            )
        for request in self._requests:
            request.check(num_layers, num_blocks, num_passes)

    @contextmanager
    def during(self, at: Pass) -> Iterator[None]:
        """The sampler announces the forward that runs inside this context."""
        before, self._pass = self._pass, at
        try:
            yield
        finally:
            self._pass = before

    def observe(
        self,
        site: Site,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        frame_key_means: Callable[[], Tensor] | None = None,
    ) -> None:
        """Called by attention(): q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq]."""
        for request in self._requests:
            if request.wants(site, self._pass):
                kept = self._reduce(request, site, q, k, lse, frame_key_means)
                self._records.append(self._tags(site, q, k) | kept)

    def _tags(self, site: Site, q: Tensor, k: Tensor) -> dict:
        at = self._pass
        own_keys = site.kind == "self" and at is not None
        return {
            "layer_idx": site.call_index,
            "layer": site.layer,
            "kind": site.kind,
            "q_shape": list(q.shape),
            "k_shape": list(k.shape),
            "block": at and at.block,
            "step": at and at.step,
            "timestep": at and at.timestep,
            "is_clean_pass": at and at.is_clean_pass,
            "branch": at and at.branch,
            "query_frames": at and list(at.query_frames),
            "key_frames": list(at.key_frames) if own_keys else None,
        }

    def _reduce(
        self,
        request: CaptureRequest,
        site: Site,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        frame_key_means: Callable[[], Tensor] | None,
    ) -> dict:
        if request.granularity == "token":
            weights = reductions.token_matrix(q, k, request.is_logits, request.token_dtype)
            return {"attn_weights": weights, "is_logits": request.is_logits}
        if request.granularity == "key":
            return {"key_curve": reductions.key_curve(q, k), "is_logits": True}
        if self._pass is None:
            raise ValueError(
                "frame granularity needs to know the frames of each call: run the model through the pipeline, "
                "or inside ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=..., key_frames=...))"
            )
        num_query_frames, num_key_frames = len(self._pass.query_frames), len(self._pass.key_frames)
        if site.kind == "cross":
            return {"cross_mass": reductions.token_mass(q, k, num_query_frames), "is_logits": False}
        key_means = frame_key_means() if frame_key_means else reductions.frame_means(k, num_key_frames)
        kept = {"frame_logits": reductions.frame_logits(q, key_means, num_query_frames), "is_logits": True}
        if request.rope_bands:
            bands = RotaryTable(q.shape[-1]).bands.values()
            kept["frame_logits_by_band"] = reductions.frame_logits_by_band(
                q, key_means, num_query_frames, bands
            )
        if request.mass:
            kept["frame_mass"] = reductions.frame_mass(q, k, lse, num_query_frames, num_key_frames)
        return kept


def move_to_cpu(records: list[dict]) -> None:
    """Bring the records' tensors to the CPU in one copy per dtype: a thousand small ones would cost a sync each."""
    waiting = [
        (record, name)
        for record in records
        for name, value in record.items()
        if isinstance(value, Tensor) and value.device.type != "cpu"
    ]
    for dtype in {record[name].dtype for record, name in waiting}:
        group = [(record, name) for record, name in waiting if record[name].dtype == dtype]
        flat = torch.cat([record[name].flatten() for record, name in group]).cpu()
        parts = flat.split([record[name].numel() for record, name in group])
        for (record, name), part in zip(group, parts, strict=True):
            record[name] = part.view(
                record[name].shape
            ).clone()  # a view would be saved with its whole storage
