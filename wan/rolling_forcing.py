"""The sampler of Rolling Forcing (arXiv 2509.25161): a window of blocks at rising noise levels.

With n denoising steps the window has n blocks, the oldest at the last step's level, the newest pure noise.
One forward denoises them together, each sees all of them, and every block goes on to its next lower level:
the oldest leaves clean, and a block of noise enters. At the video's ends the window is shorter. Checked
against https://github.com/TencentARC/RollingForcing as forks quote it; their clean passes over a first block
that is not clean yet are left out, since the next one overwrites what they write.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from wan.blocks import rolling_attention_size
from wan.cache import Capacity, KVCache
from wan.errors import ConfigError
from wan.interventions import active_edits
from wan.keys import KeyLayout, Slot, rotate
from wan.noise import Noise, check_frames
from wan.pipeline import CausalInferencePipeline, Probe, add_noise, flow_to_x0
from wan.policies import PromptSwitch, WindowedPolicy
from wan.sites import Pass, check_watchers, during, visit


@dataclass
class CleanFrames(WindowedPolicy):
    """Keep the first block, with its keys without RoPE as well, and the newest frames."""

    name = "rolling_forcing"

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        slots = min(self.window, num_frames)
        return Capacity(slots, min(self.sink, slots))


class RollingCache:
    """A KVCache of clean frames with the keys of a window behind them.

    The first block is the anchor, whose keys are rotated to stand right before the other clean frames. The
    model writes a forward's keys and gets those that it sees, as from a KVCache.
    """

    def __init__(self, clean: KVCache, attention_size: int):
        """attention_size: frames that a forward sees at most."""
        self.clean, self.anchor, self.attention_size = clean, clean.sink, attention_size
        self.is_clean = self.stores_raw = False
        self.seen = range(0)  # slots that a window sees beside its own keys and the anchor

    def begin_window(self, frames: range) -> None:
        """Announce a forward that denoises frames; it writes nothing."""
        self.is_clean = self.stores_raw = False
        clean, room = len(self.clean.slots), self.attention_size - len(frames) - self.anchor
        self.seen = range(max(self.anchor, clean - max(room, 0)), max(self.anchor, clean))
        first = frames.start - len(self.seen) - self.anchor  # where the anchor stands
        past = [Slot(slot.frame, first + slot.frame) for slot in self.clean.slots[: self.anchor]]
        self.anchor_rope = self.clean.rope(range(first, first + self.anchor)) if past else None
        past += self.clean.slots[self.seen.start : self.seen.stop]
        self._publish(past, frames, sink=min(self.anchor, len(past)))

    def begin_clean(self, frames: range) -> None:
        """Announce a forward that writes the clean keys and values of frames, and sees the newest ones."""
        self.clean.advance(frames)
        self.is_clean, self.stores_raw = True, self.clean.stores_raw
        self._publish(self.clean.slots[-self.attention_size :][: -len(frames)], frames, sink=0)

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Lk, H, D] that a forward with its own k and v [B, L, H, D] sees."""
        if self.is_clean:
            self.clean.write(layer, q, k, v, raw_k)
            keys, values = self.clean.view(layer)
            newest = -self.attention_size * self.clean.tokens_per_frame
            return keys[:, newest:], values[:, newest:]
        if self.anchor_rope is None:  # the window begins the video
            return k, v
        keys, values, seen = self.clean.keys[layer], self.clean.values[layer], self.clean.tokens(self.seen)
        anchor = rotate(self.clean.raw_keys[layer], *self.anchor_rope)
        values_of_anchor = values[:, self.clean.tokens(range(self.anchor))]
        return torch.cat([anchor, keys[:, seen], k], 1), torch.cat([values_of_anchor, values[:, seen], v], 1)

    def _publish(self, past: Sequence[Slot], frames: range, sink: int) -> None:
        """Make the layout of the forward to come."""
        self.newest = self.query_positions = self.key_positions = frames
        slots = (*past, *(Slot(frame, frame) for frame in frames))
        own, S = range(len(past), len(slots)), self.clean.tokens_per_frame
        layout = KeyLayout(slots, S, own, tuple(frames), sink=range(sink))
        self.layouts = [layout] * self.clean.num_layers


class RollingForcingPipeline(CausalInferencePipeline):
    """Text to video by a rolling window. A forward sees the model's local_attn_size frames, 21 if -1."""

    def __init__(self, *args, **kwargs):
        """Arguments of CausalInferencePipeline. ConfigError for what a rolling window does not have."""
        super().__init__(*args, **kwargs)
        self.attention_size = rolling_attention_size(
            self.model.local_attn_size, len(self.timesteps), self.num_frame_per_block
        )
        if self.first_steps != self.later_steps or self.independent_first_frame or self.recompute_context:
            raise ConfigError(
                "sampler rolling_forcing has equal blocks and steps; leave first_block_steps, "
                "independent_first_frame and recompute_context out"
            )

    @torch.no_grad()
    def blocks(
        self,
        noise: Noise,
        prompt_embeds: Tensor,
        *,
        num_frames: int | None = None,
        num_given: int = 0,
        given: Callable[[range], Tensor] | None = None,
        prompt_schedule: Sequence[PromptSwitch] = (),
        on_pass: Callable[[], None] | None = None,
        probe: Probe | None = None,
    ) -> Iterator[tuple[range, Tensor]]:
        """Roll out block by block as they leave the window: yield frames and latents [B, n, C, h, w].

        It holds the cache and one window. Raises ConfigError for a given beginning, other prompts later,
        probes and edits.
        """
        if num_given or prompt_schedule or probe or active_edits():
            raise ConfigError(
                "sampler rolling_forcing knows no given beginning, later prompts, probes or interventions; "
                "take sampler blocks"
            )
        num_frames = noise.shape[1] if num_frames is None else num_frames
        blocks, levels = self.block_ranges(0, num_frames), len(self.timesteps)
        check_frames(noise, range(num_frames))
        check_watchers(lambda: self.plan(num_frames))
        batch, _, _, height, width = noise.shape
        n, size = self.num_frame_per_block, self.attention_size
        policy, text = CleanFrames(window=n + size, sink=n), self.model.text_keys_values(prompt_embeds)
        kv_cache = self.model.new_kv_cache(batch, num_frames, height, width, policy, n)
        cache = RollingCache(cast(KVCache, kv_cache), size)
        window: dict[int, Tensor] = {}  # block -> its latents at its present level

        def forward(x: Tensor, t: Tensor, at: Pass) -> Tensor:
            with during(at):
                flow = self.model(x, t, text, cache)
            if on_pass:
                on_pass()
            return flow

        for newest in range(len(blocks) + levels - 1):
            # 1. A block of pure noise enters, while there is one.
            if newest < len(blocks):
                window[newest] = noise.first(blocks[newest])

            # 2. Denoise all blocks of the window together; block b stands at step newest - b.
            parts = [self._announced(block, newest - block, blocks[block]) for block in window]
            cache.begin_window(range(blocks[parts[0].block].start, blocks[parts[-1].block].stop))
            levels_of_frames = tuple((frame, one.timestep) for one in parts for frame in one.query_frames)
            frames_now = tuple(frame for frame, _ in levels_of_frames)
            at = replace(parts[0], query_frames=frames_now, parts=tuple(parts), levels=levels_of_frames)
            x = torch.cat(list(window.values()), 1)
            t = x.new_tensor([level for _, level in at.levels], dtype=torch.float32).expand(x.shape[0], -1)
            flows = forward(x, t, at).split([len(part.query_frames) for part in parts], 1)

            for part, flow in zip(parts, flows, strict=True):
                block, step, frames = part.block, part.step, blocks[part.block]
                x0 = flow_to_x0(flow, window[block], self.sigmas[step])
                with during(part):
                    x0 = visit("x0", None, x0)
                # 3. Each block goes on to its next lower level, unless it is at the last.
                if step + 1 < levels:
                    window[block] = add_noise(x0, noise.fresh(step, frames), self.sigmas[step + 1])
                    continue
                # 4. It leaves: the clean pass keeps its keys and values.
                del window[block]
                cache.begin_clean(frames)
                clean = self._announced(block, levels, frames)
                forward(x0, x0.new_full((), clean.timestep, dtype=torch.float32), clean)
                yield frames, x0

    def _announced(self, block: int, step: int, frames: range) -> Pass:
        """Return what one block's share of a forward is called: its own block, step and level."""
        return Pass(
            query_frames=tuple(frames),
            block=block,
            step=step,
            timestep=self.pass_timesteps[step],
            is_clean_pass=step == len(self.timesteps),
        )
