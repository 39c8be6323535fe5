"""Does a head follow the moving shape, look at its old place, or at the wall that it hid behind?

The miniature's tracker says which tokens the shape covers. Of what the queries on the shape read of the past,
the share that lies on a mask is divided by the mask's share of tokens: 1 is what a head would read that looks
at nothing in particular. Controls are masks of the same size: of frames in another order, and standing still.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.analysis.effects import holm, sign_flip_p
from experiments.analysis.panels import HeadMap
from experiments.extraction import causal
from experiments.extraction.video import decode
from experiments.miniature.moving_shapes import Scene
from experiments.miniature.tracking import DIFFERS, background, in_sight, track
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
        """Each of MASKS at keys of these frames and tokens, [keys, masks]."""
        every_order = self.shape[torch.unique(frames)].mean(0)  # the mean over all orders of the frames
        found = {
            "moving": self.shape[frames, tokens],
            "shuffled": every_order[tokens],
            "here": self.shape[query_frame, tokens],
            "first": self.shape[0, tokens],
            "wall": self.wall[tokens],
        }
        return torch.stack([found[name] for name in MASKS], 1)


def cover_of(video: Tensor, scene: Scene, rows: int, columns: int) -> Cover:
    """The cover of a generated video [T, 3, H, W] in 0..1, by the tracker's background and sight."""
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


class Sums:
    """Of one layer and pass: mass on each mask and on all of the past [H, masks], even shares [masks]."""

    def __init__(self, num_heads: int):
        self.on_mask, self.of_all = (torch.zeros(num_heads, len(MASKS)) for _ in range(2))
        self.even, self.weight = (torch.zeros(len(MASKS)) for _ in range(2))

    def add(self, rows: Tensor, masks: Tensor, weights: Tensor, which: slice) -> None:
        """Rows [H, S, keys] of one query frame, its tokens weighted [S]; some of the masks [keys, n]."""
        read = torch.einsum("hqk,q->hk", rows, weights)
        self.on_mask[:, which] += read @ masks
        self.of_all[:, which] += read.sum(1, keepdim=True)
        self.even[which] += weights.sum() * masks.mean(0)
        self.weight[which] += weights.sum()

    def lifts(self) -> Tensor:
        """Share of mass over share of tokens [masks, H]; NaN where no query counts, or a mask is empty."""
        return ((self.on_mask / self.of_all) / (self.even / self.weight)).T.where(
            self.even[:, None] > 0, torch.nan
        )


def lifts_of(calls: Sequence[CapturedCall], cover: Cover, num_heads: int) -> Tensor:
    """Share of mass on each mask over its share of tokens [layers, masks, H], of calls of one pass.

    Calls hold token_probabilities. Queries on the shape count by how much of them it covers; for the wall,
    all queries of frames in which the shape is hidden.
    """
    sums = {layer: Sums(num_heads) for layer in sorted({call.site.layer for call in calls})}
    last = len(MASKS) - 1  # the wall
    for call in calls:
        assert call.at is not None and call.layout is not None
        frames, tokens = key_frames(call.layout, 1)[0][0], key_tokens(call.layout, 1)[0]
        past = (frames >= 0) & (frames < call.at.query_frames[0])
        if not past.any():
            continue
        rows = call.values["token_probabilities"][0][..., past]  # [H, Lq, past]
        by_frame = rows.unflatten(1, (len(call.at.query_frames), -1)).unbind(1)
        for frame, of_frame in zip(call.at.query_frames, by_frame, strict=True):
            masks = cover.masks(frames[past], tokens[past], frame)
            here, hidden = cover.shape[frame], cover.hidden[frame].float().expand(of_frame.shape[1])
            if here.any():
                sums[call.site.layer].add(of_frame, masks[:, :last], here, slice(0, last))
            if hidden.any():
                sums[call.site.layer].add(of_frame, masks[:, last:], hidden, slice(last, None))
    return torch.stack([of_layer.lifts() for of_layer in sums.values()])


@dataclass(frozen=True)
class ShapeAttention:
    """lifts [R, P, layers, masks, H] of R captions in P passes; NaN where a video does not have it."""

    captions: list[str]
    steps: list[int]
    lifts: np.ndarray
    weights_sha256: str

    def comparable(self, step: int) -> np.ndarray:
        """Lifts [R', layers, 4, H] of moving and its controls, of captions that have all four everywhere.

        A video that shows no shape, or none in frame 0, has not.
        """
        lifts = self.lifts[:, self.steps.index(step), :, :4]
        return lifts[np.isfinite(lifts).all((1, 2, 3))]

    def mean(self, step: int) -> np.ndarray:
        """Mean over comparable captions [layers, masks, H]; for the wall, over those with one."""
        wall = self.lifts[:, self.steps.index(step), :, 4:]
        with warnings.catch_warnings(category=RuntimeWarning, action="ignore"):  # NaN where there are none
            return np.concatenate([self.comparable(step).mean(0), np.nanmean(wall, 0)], 1)

    def maps(self, step: int) -> list[HeadMap]:
        """A map of heads for every mask, and what moving has over its controls."""
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
    session = causal.prepare(config, [], [scene.caption for scene in scenes])
    sizes, request = session.model_config, CaptureRequest(steps=steps, is_logits=False)
    rows, columns = (n // p for n, p in zip((config.height, config.width), sizes.patch_size[1:], strict=True))
    found = []
    for number, scene in enumerate(scenes):
        run = causal.extract_next(
            session, replace(config, prompt=scene.caption, seed=seed + number), [request]
        )
        video = decode(run).permute(0, 3, 1, 2) / 255
        cover = cover_of(video, scene, rows, columns)
        by_step = [[call for call in run.records if call["step"] == step] for step in steps]
        found.append(torch.stack([lifts_of(calls, cover, sizes.num_heads) for calls in by_step]))
    captions, lifts = [scene.caption for scene in scenes], torch.stack(found).numpy()
    return ShapeAttention(captions, list(steps), lifts, session.sha256.result())


@dataclass(frozen=True)
class Followers:
    """What moving has over the best control, [layers, H] each: 95 % interval, and whether that is above 0.

    Intervals are of each head alone; p is adjusted for all heads.
    """

    low: np.ndarray
    high: np.ndarray
    follows: np.ndarray
    p: np.ndarray  # of the control that is hardest to tell from moving

    @property
    def surely(self) -> np.ndarray:
        """Heads that follow, adjusted for all of them [layers, H]."""
        return self.follows & (self.p < LEVEL)


def followers(found: ShapeAttention, step: int, draws: int = 1000) -> Followers:
    """Heads that look at the moving shape more than at each control: a bootstrap over captions, and sign
    flips with Holm's correction over heads."""
    lifts = found.comparable(step)
    if not len(lifts):
        none = np.full((lifts.shape[1], lifts.shape[3]), np.nan)
        return Followers(none, none, none > 0, none)
    picks = np.random.default_rng(0).integers(0, len(lifts), (draws, len(lifts)))
    means = np.stack([lifts[pick].mean(0) for pick in picks])
    low, high = np.percentile(means[:, :, 0] - means[:, :, 1:].max(2), (2.5, 97.5), 0)
    follows = (low > 0) & (lifts[:, :, 0].mean(0) > 1)
    return Followers(low, high, follows, adjusted_p(lifts[:, :, :1] - lifts[:, :, 1:]))


def adjusted_p(differences: np.ndarray) -> np.ndarray:
    """p of each head [layers, H] for differences [R, layers, controls, H]: the largest over controls, by Holm
    over heads."""
    by_head = differences.transpose(1, 3, 2, 0).reshape(-1, *differences.shape[2::-2])
    worst = [max(sign_flip_p(control) for control in head) for head in by_head]
    return holm(worst).reshape(differences.shape[1], differences.shape[3])
