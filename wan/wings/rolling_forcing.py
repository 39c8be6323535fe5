"""Sample with Rolling Forcing (arXiv 2509.25161): a window of blocks at rising noise levels.

With n denoising steps the window has n blocks, from the oldest at the last step's level to the newest, pure
noise. One forward denoises all of them, attending to each other, and moves every block to its next lower
level: the oldest leaves the window clean, and a block of noise enters. At the ends of a video the window is
shorter. Checked against https://github.com/TencentARC/RollingForcing as forks quote it. Their clean passes
over a first block that is still noisy are omitted, since the next pass overwrites what they write.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wan import pipeline, sites
from wan.blocks import rolling_attention_size
from wan.cache import CachePolicy, CacheSizes, Capacity, KVCache, WindowedPolicy
from wan.errors import ConfigError
from wan.keys import KeyLayout, Slot, rotate
from wan.noise import check_frames


class RollingCache(KVCache):
    """A KVCache of clean frames; a window's own keys follow them in each forward and are not stored.

    The first block is the anchor: its keys are rotated to positions right before the other clean frames. A
    forward sees at most size frames.
    """

    policy: "CleanFrames"

    def __init__(self, sizes: CacheSizes, policy: CachePolicy):
        super().__init__(sizes, policy)
        self.size, self.is_clean = self.policy.window - self.sink, False
        self.seen = range(0)  # slots that a window sees beside its own keys and the anchor

    def begin_window(self, frames: range) -> None:
        """Announce a forward that denoises frames and writes nothing."""
        self.is_clean = self.stores_raw = False
        clean, room, anchor = len(self.slots), self.size - len(frames) - self.sink, self.sink
        self.seen = range(max(anchor, clean - max(room, 0)), max(anchor, clean))
        first = frames.start - len(self.seen) - anchor  # where the anchor stands
        past = [Slot(slot.frame, first + slot.frame) for slot in self.slots[:anchor]]
        self.anchor_rope: tuple[Tensor, Tensor] | None = None
        if past:
            self.anchor_rope = self.rope(range(first, first + anchor))
        self._announce(past + self.slots[self.seen.start : self.seen.stop], frames, min(anchor, len(past)))

    def begin_clean(self, frames: range) -> None:
        """Announce a forward that writes clean keys and values of frames, and sees the newest ones."""
        self.advance(frames)
        self.is_clean = True
        self._announce(self.slots[-self.size :][: -len(frames)], frames, sink=0)

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Lk, H, D] that a forward with its own k and v [B, L, H, D] sees."""
        if self.is_clean:
            keys, values = super().write(layer, q, k, v, raw_k)
            newest = -self.size * self.tokens_per_frame
            return keys[:, newest:], values[:, newest:]
        if self.anchor_rope is None:  # the window begins the video
            return k, v
        keys, values, seen = self.keys[layer], self.values[layer], self.tokens(self.seen)
        anchor = rotate(self.raw_keys[layer], *self.anchor_rope)
        values_of_anchor = values[:, self.tokens(range(self.sink))]
        return torch.cat([anchor, keys[:, seen], k], 1), torch.cat([values_of_anchor, values[:, seen], v], 1)

    def _announce(self, past: Sequence[Slot], frames: range, sink: int) -> None:
        """Make the layout of the next forward."""
        self.newest = self.query_positions = self.key_positions = frames
        slots = (*past, *(Slot(frame, frame) for frame in frames))
        layout = KeyLayout(
            slots=slots,
            tokens_per_slot=self.tokens_per_frame,
            own=range(len(past), len(slots)),
            query_positions=tuple(frames),
            sink=range(sink),
        )
        self.layouts = [layout] * self.num_layers


@dataclass
class CleanFrames(WindowedPolicy):
    """Keep the newest frames and the first block, the latter also with keys before RoPE."""

    name = "rolling_forcing"
    cache_type = RollingCache

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return super().capacity(num_frames, block_size)._replace(raw_slots=self.sink)


class RollingForcingPipeline(pipeline.CausalInferencePipeline):
    """Text to video by a rolling window. A forward sees the model's local_attn_size frames, 21 if -1."""

    def __init__(self, *args, **kwargs):
        """Take the arguments of CausalInferencePipeline; ConfigError for those a rolling window lacks."""
        super().__init__(*args, **kwargs)
        self.attention_size = rolling_attention_size(
            self.model.local_attn_size, len(self.timesteps), self.num_frame_per_block
        )

    @torch.no_grad()
    def roll_out(self, inputs: pipeline.RolloutInputs) -> pipeline.Blocks:
        """Yield frames and latents [B, n, C, h, w] of each block as it leaves the window.

        It holds the cache and one window. Raises ConfigError for a given beginning, other prompts later,
        probes and edits.
        """
        unequal = self.first_steps != self.later_steps or self.independent_first_frame
        is_more = inputs.num_given or inputs.prompt_schedule or inputs.probe or sites.active_edits()
        if unequal or self.recompute_context or is_more:
            raise ConfigError(
                "sampler rolling_forcing has equal blocks and steps, without recompute_context, given "
                "beginning, later prompts, probes and interventions; take sampler blocks"
            )
        noise, num_frames = inputs.noise, len(inputs.generated)
        blocks, levels = self.block_ranges(0, num_frames), len(self.timesteps)
        check_frames(noise, inputs.generated)
        sites.check_watchers(self.sizes(num_frames))
        text = self.model.text_keys_values(inputs.prompt_embeds)
        batch, _, _, height, width = noise.shape
        block_size = self.num_frame_per_block
        cache = self.model.new_kv_cache(
            batch=batch,
            num_frames=num_frames,
            height=height,
            width=width,
            policy=CleanFrames(window=block_size + self.attention_size, sink=block_size),
            block_size=block_size,
        )
        assert isinstance(cache, RollingCache)  # CleanFrames.cache_type
        window: dict[int, Tensor] = {}  # block -> its latents at its present level

        def forward(x: Tensor, t: Tensor, at: sites.Pass) -> Tensor:
            with sites.during(at):
                flow = self.model(x, t, text, cache)
            if inputs.on_pass:
                inputs.on_pass()
            return flow

        for newest in range(len(blocks) + levels - 1):
            # 1. A block of pure noise enters, while there is one.
            if newest < len(blocks):
                window[newest] = noise.first(blocks[newest])

            # 2. Denoise all blocks of the window together; block b stands at step newest - b.
            parts = [self.at(block, blocks[block], newest - block) for block in window]
            cache.begin_window(range(blocks[parts[0].block].start, blocks[parts[-1].block].stop))
            timesteps = {frame: part.timestep for part in parts for frame in part.query_frames}
            at = replace(parts[0], query_frames=(*timesteps,), parts=(*parts,), levels=(*timesteps.items(),))
            x = torch.cat(list(window.values()), 1)
            t = x.new_tensor([*timesteps.values()], dtype=torch.float32).expand(batch, -1)
            flows = forward(x, t, at).split([len(part.query_frames) for part in parts], 1)

            for part, flow in zip(parts, flows, strict=True):
                assert part.step is not None  # this sampler counts its steps
                block, step, frames = part.block, part.step, blocks[part.block]
                x0 = pipeline.flow_to_x0(flow, window[block], self.sigmas[step])
                with sites.during(part):
                    x0 = sites.hook_point("x0", None, x0)
                # 3. Each block goes on to its next lower level, unless it is at the last.
                if step + 1 < levels:
                    window[block] = pipeline.add_noise(x0, noise.fresh(step, frames), self.sigmas[step + 1])
                    continue
                # 4. It leaves: the clean pass keeps its keys and values.
                del window[block]
                cache.begin_clean(frames)
                clean = self.at(block, frames, levels)
                forward(x0, x0.new_full((), clean.timestep, dtype=torch.float32), clean)
                yield frames, x0
