"""Capture in diffusers' Wan (such as WanPipeline): attention processors that call our attention().

    with capture_diffusers(pipe.transformer, layers=[1], granularity="frame") as calls:
        pipe("a red circle moving right")

The transformer attends to all frames at once: its calls belong to block 0, the step counts the sampler's
timesteps, and the branch is "uncond" where guidance calls the transformer a second time at one timestep.
A third call at one timestep begins the next step; at the first step, the next video.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wan.attention import attention
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CapturedCall, CaptureRequest, Kind
from wan.errors import ConfigError
from wan.keys import KeyLayout
from wan.sites import Pass, Site

NAMES: dict[Kind, str] = {"self": "attn1", "cross": "attn2"}  # of a block's modules in diffusers


class CapturingProcessor:
    """An attention processor of one module: the numbers of diffusers' own, through our attention()."""

    def __init__(self, site: Site):
        self.site = site

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states [B, Lq, dim], text encoder_hidden_states [B, Lk, dim] -> [B, Lq, dim]."""
        # 1. Projections, norms over all heads together, and RoPE, as WanAttnProcessor has them.
        at = ATTENTION_WEIGHT_CAPTURE.current_pass
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source)), attn.to_v(source)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))  # [B, L, H, D]
        if rotary_emb is not None:
            q, k = rotate(q, *rotary_emb), rotate(k, *rotary_emb)
        # 2. Our attention(), which captures meet. All frames are each other's keys.
        layout = None
        if at is not None and self.site.kind == "self":
            layout = KeyLayout.of_frames(at.query_frames, k.shape[1])
        out = attention(q, k, v, self.site, attention_mask, layout).flatten(2).type_as(q)  # [B, Lq, dim]
        for module in attn.to_out:  # a projection, and dropout
            out = module(out)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring pairs of x [B, L, H, D]; cos and sin [1, L, 1, D] hold every angle twice."""
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2).type_as(x)


@contextmanager
def capture_diffusers(
    transformer: Any, *requests: CaptureRequest, **fields: Any
) -> Iterator[list[CapturedCall]]:
    """Capture the calls of a diffusers.WanTransformer3DModel; requests or fields as for CaptureRequest.

    Yields the list of calls. The transformer's own processors come back when the context ends. Raises
    ConfigError for an image-to-video model, and for a layer that the model does not have.
    """
    requests = requests or (CaptureRequest(**fields),)
    for request in requests:
        request.check(len(transformer.blocks))
    modules = {
        Site(layer, kind): getattr(block, name)
        for layer, block in enumerate(transformer.blocks)
        for kind, name in NAMES.items()
    }
    if any(attn.add_k_proj is not None for attn in modules.values()):
        raise ConfigError("an image-to-video model attends to image tokens too, which are not captured")
    # Everything is undone in reverse order, also where a request is refused half-way.
    with ExitStack() as stack:
        for site, attn in modules.items():
            stack.callback(attn.set_processor, attn.processor)
            attn.set_processor(CapturingProcessor(site))
        announcer = _Announcer(transformer.config.patch_size[0])
        stack.callback(announcer.leave)
        for hook in (
            transformer.register_forward_pre_hook(announcer.enter, with_kwargs=True),
            transformer.register_forward_hook(announcer.leave, always_call=True),
        ):
            stack.callback(hook.remove)
        yield stack.enter_context(ATTENTION_WEIGHT_CAPTURE.capture(*requests))


class _Announcer:
    """Says before every forward of the transformer which frames, step and branch it is."""

    def __init__(self, frames_per_patch: int):
        self.frames_per_patch = frames_per_patch
        self._during = ExitStack()
        self.forget()

    def forget(self) -> None:
        """Take the next forward for the first one of a video."""
        self.step, self.timestep, self.branch = -1, float("inf"), "uncond"

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = dict(zip(("hidden_states", "timestep"), args, strict=False)) | kwargs
        timestep = float(given["timestep"].flatten()[0])
        same = timestep == self.timestep
        self.branch = "uncond" if same and self.branch == "cond" else "cond"
        if self.branch == "cond":  # timesteps fall: one that rises, or the first again, is of another video
            anew = timestep > self.timestep or (same and self.step == 0)
            self.step, self.timestep = (0 if anew else self.step + 1), timestep
        frames = tuple(range(given["hidden_states"].shape[2] // self.frames_per_patch))
        at = Pass(query_frames=frames, step=self.step, timestep=timestep, branch=self.branch)
        self._during.enter_context(ATTENTION_WEIGHT_CAPTURE.during(at))

    def leave(self, *hook: Any) -> None:
        """After a forward: the module, its arguments and its output, which is None where it failed."""
        self._during.close()
        if hook and hook[-1] is None:
            self.forget()
