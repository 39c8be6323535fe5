"""Measure which heads follow a moving shape, look at its old place, or at the wall that it hid behind.

The miniature's tracker says which tokens the shape covers. Of what the queries on the shape read of the past,
the share that lies on a mask is divided by the mask's share of tokens: 1 is what a head would read that looks
at nothing in particular. Controls are masks of the same size: of frames in another order, and standing still.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.analysis.panels import HeadMap
from experiments.analysis.stats import holm, sign_flip_p
from experiments.extraction import causal
from experiments.extraction.video import decode
from experiments.miniature.moving_shapes import Scene
from experiments.miniature.recipe import SIDE
from experiments.miniature.tracking import DIFFERS, background, in_sight, track
from wan.blocks import block_ranges
from wan.capture import CapturedCall, CaptureRequest
from wan.config import RunConfig
from wan.keys import key_frames, key_tokens

MASKS = {  # of the past, and how each is called in figures
    "moving": "the moving shape",
    "shuffled": "frames shuffled",
    "here": "its place now, still",
    "first": "its place in frame 0, still",
    "wall": "the wall that hides it",
}
HIDDEN = 0.15  # of its first area, as the tracker judges
LEVEL = 0.05  # of an adjusted p


@dataclass(frozen=True)
class Cover:
    """Shares of each token that the shape [F, S] and the wall [S] cover; hidden [F]: no shape is seen."""

    shape: Tensor
    wall: Tensor
    hidden: Tensor

    def masks(self, frames: Tensor, tokens: Tensor, query_frame: int) -> Tensor:
        """Return MASKS, in their order, at keys of these frames and tokens, [keys, masks]."""
        moving, here, first = (self.shape[at, tokens] for at in (frames, query_frame, 0))
        shuffled = self.shape[torch.unique(frames)].mean(0)[tokens]  # the mean over all orders of the frames
        return torch.stack([moving, shuffled, here, first, self.wall[tokens]], 1)


def cover_of(video: Tensor, scene: Scene, rows: int, columns: int) -> Cover:
    """Return the cover of a generated video [T, 3, H, W] in 0..1, by the tracker's background and sight."""
    sight = in_sight(scene, video.shape[-1])
    differs = (video - background(video, sight)[:, None, None]).norm(dim=1) > DIFFERS
    shape = track(video, sight)
    mask = (differs & sight & shape.seen[:, None, None]).float()  # [T, H, W]
    latent = torch.stack([mask[0], *mask[1:].unflatten(0, (-1, 4)).mean(1)])  # frame 0 alone, groups of four
    hidden = shape.area < HIDDEN * shape.area[:16].median()
    hidden = torch.stack([hidden[0], *hidden[1:].unflatten(0, (-1, 4)).all(1)])
    wall = (~sight).float() if scene.wall else torch.zeros_like(mask[0])
    tokens = F.adaptive_avg_pool2d(torch.cat([latent, wall[None]])[:, None], (rows, columns)).flatten(1)
    return Cover(tokens[:-1], tokens[-1], hidden & bool(scene.wall))


def hidden_frames(video: np.ndarray, scene: Scene) -> list[bool]:
    """Return which latent frames of a video [T, 3, H, W] in 0..1 show no shape where it could be seen."""
    return cover_of(torch.from_numpy(video), scene, SIDE // 16, SIDE // 16).hidden.tolist()


def hiding(hidden: Sequence[bool], block_sizes: Sequence[int]) -> tuple[int, int]:
    """Return the first block all of whose frames are hidden, and that in which a frame is seen again.

    0, 0 where there are none, or the shape is hidden from the start.
    """
    first = list(hidden).index(True) if any(hidden) else len(hidden)
    seen = next((frame for frame in range(first, len(hidden)) if not hidden[frame]), None)
    ranges = block_ranges(list(block_sizes))
    back = next((block for block, own in enumerate(ranges) if seen in own), 0)
    gone = next((n for n, own in enumerate(ranges[:back]) if all(hidden[frame] for frame in own)), 0)
    return (gone, back) if gone else (0, 0)


def lifts_of(calls: Sequence[CapturedCall], cover: Cover, num_heads: int) -> Tensor:
    """Return shares of mass on masks over their shares of tokens [layers, masks, H], of one pass.

    Calls hold token_probabilities. Queries on the shape count by how much of them it covers; for the wall,
    all queries of frames in which the shape is hidden. NaN where no query counts, or a mask is empty.
    """
    layers = sorted({call.site.layer for call in calls})
    on_mask, of_all = (torch.zeros(len(layers), len(MASKS), num_heads) for _ in range(2))
    even, weight = (torch.zeros(len(layers), len(MASKS), 1) for _ in range(2))
    for call in calls:
        assert call.at is not None and call.layout is not None
        frames, tokens = key_frames(call.layout, 1)[0][0], key_tokens(call.layout, 1)[0]
        past = (frames >= 0) & (frames < call.at.query_frames[0])
        if not past.any():
            continue
        layer, rows = layers.index(call.site.layer), call.values["token_probabilities"][0][..., past]
        by_frame = rows.unflatten(1, (len(call.at.query_frames), -1)).unbind(1)  # [H, S, past] each
        for frame, of_frame in zip(call.at.query_frames, by_frame, strict=True):
            masks = cover.masks(frames[past], tokens[past], frame)  # [past, masks]
            hidden = cover.hidden[frame].float().expand(of_frame.shape[1])
            queries = torch.stack([cover.shape[frame]] * (len(MASKS) - 1) + [hidden])  # [masks, S]
            read = torch.einsum("hqk,mq->mhk", of_frame, queries)
            on_mask[layer] += torch.einsum("mhk,km->mh", read, masks)
            of_all[layer] += read.sum(-1)
            even[layer, :, 0] += queries.sum(1) * masks.mean(0)
            weight[layer, :, 0] += queries.sum(1)
    return ((on_mask / of_all) / (even / weight)).where(even > 0, torch.nan)


@dataclass(frozen=True)
class ShapeAttention:
    """lifts [R, P, layers, masks, H] of R captions in P passes; NaN where a video does not have it."""

    captions: list[str]
    steps: list[int]
    lifts: np.ndarray
    weights_sha256: str

    def comparable(self, step: int) -> np.ndarray:
        """Return lifts [R', layers, 4, H] of moving and its controls, of captions that have all four."""
        lifts = self.lifts[:, self.steps.index(step), :, :4]
        return lifts[np.isfinite(lifts).all((1, 2, 3))]

    def mean(self, step: int) -> np.ndarray:
        """Return the mean over comparable captions [layers, masks, H]; for the wall, over those with one."""
        wall = self.lifts[:, self.steps.index(step), :, 4:]
        with warnings.catch_warnings(category=RuntimeWarning, action="ignore"):  # NaN where there are none
            return np.concatenate([self.comparable(step).mean(0), np.nanmean(wall, 0)], 1)

    def maps(self, step: int) -> list[HeadMap]:
        """Return a map of heads for every mask, and one of moving less its best control."""
        mean = self.mean(step)
        found = [
            HeadMap(f"on_{name}", title.capitalize(), "log₂ lift", "diverging", np.log2(mean[:, i]))
            for i, (name, title) in enumerate(MASKS.items())
        ]
        over = mean[:, 0] - mean[:, 1:4].max(1)
        return [*found, HeadMap("follows", "Moving − the best control", "lift", "diverging", over)]


def measure(
    config: RunConfig, scenes: Sequence[Scene], steps: Sequence[int], seed: int = 0
) -> ShapeAttention:
    """Roll out the scenes' captions, each with a seed of its own from seed on, and measure every head."""
    captions = [scene.caption for scene in scenes]
    session = causal.prepare(config, [], captions)
    sizes, request = session.model_config, CaptureRequest(steps=steps, is_logits=False)
    rows, columns = (n // p for n, p in zip((config.height, config.width), sizes.patch_size[1:], strict=True))
    found = []
    for number, scene in enumerate(scenes):
        one = replace(config, prompt=scene.caption, seed=seed + number)
        run = causal.extract_next(session, one, [request])
        cover = cover_of(decode(run).permute(0, 3, 1, 2) / 255, scene, rows, columns)
        by_step = [[call for call in run.records if call["step"] == step] for step in steps]
        found.append(torch.stack([lifts_of(calls, cover, sizes.num_heads) for calls in by_step]))
    return ShapeAttention(captions, list(steps), torch.stack(found).numpy(), session.sha256.result())


class Followers(NamedTuple):
    """Moving less the best control, [layers, H] each: the 95 % interval of each head alone; adjusted p."""

    low: np.ndarray
    high: np.ndarray
    follows: np.ndarray
    p: np.ndarray  # of the control that is hardest to tell from moving
    surely: np.ndarray  # heads that follow, adjusted for all of them


def followers(found: ShapeAttention, step: int, draws: int = 1000) -> Followers:
    """Find heads that look at the moving shape more than at each control, by a bootstrap over captions.

    p is of sign flips over captions, the largest over controls, with Holm's correction over heads.
    """
    lifts = found.comparable(step)
    if not len(lifts):
        none = np.full((lifts.shape[1], lifts.shape[3]), np.nan)
        return Followers(none, none, none > 0, none, none > 0)
    picks = np.random.default_rng(0).integers(0, len(lifts), (draws, len(lifts)))
    means = np.stack([lifts[pick].mean(0) for pick in picks])
    low, high = np.percentile(means[:, :, 0] - means[:, :, 1:].max(2), (2.5, 97.5), 0)
    follows = (low > 0) & (lifts[:, :, 0].mean(0) > 1)
    over = (lifts[:, :, :1] - lifts[:, :, 1:]).transpose(1, 3, 2, 0)  # [layers, H, controls, R]
    worst = [max(sign_flip_p(control) for control in head) for head in over.reshape(-1, *over.shape[2:])]
    p = holm(worst).reshape(over.shape[:2])
    return Followers(low, high, follows, p, follows & (p < LEVEL))
