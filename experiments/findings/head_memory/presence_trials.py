"""Let heads read another run's past, or none, and judge what comes back (presence_and_identity.md).

PresenceTrials makes all trials of one training. A trial is one batch of rollouts of pairs: the caption of
block 0, that of later blocks, and a seed. Its answers are one line in a file, a character a video; what is in
the file is not made again. Sets of heads are chosen on captions that no trial is judged on.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import dist
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.miniature.moving_shapes import (
    BACKGROUNDS,
    COLORS,
    FPS,
    MIN_CONTRAST,
    SHAPES,
    Scene,
    coverage,
)
from experiments.miniature.tracking import (
    DIFFERS,
    SETS,
    SMALLEST,
    grown,
    held_out_scenes,
    in_sight,
    judge,
    outline_size,
    shrunk,
)
from experiments.session import Session
from experiments.studies.batches import Head, by_layer, matched
from experiments.studies.paired_prompts import OTHER, Pair, PairedRuns, RecordedCalls
from wan.blocks import block_ranges
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Edit, Knockout, Patch, intervene
from wan.sites import ActivationSite, Pass, Watcher
from wan.vae import VAE

SEED_STEP = 10_000  # between seeds of a caption; the first is the caption's number, as in evaluation.json
CHOSEN = 8  # heads of a set
DRAWS = 4  # random sets of the same layers
HALVES = 2
SEEN = 4  # the first test captions, whose answers were seen before the run: made, and left out of contrasts
WALLS = 24  # test captions whose shape is left out
HIDDEN = 0.15  # of its first area, as the tracker judges
HEADS_AT_ONCE = 4  # single heads without a past in one batch
DECODED_AT_ONCE = 32  # videos; one size of batches, for which cuDNN looks for its kernels once
CHECKED = 32  # videos that the tracker judges too, one by one

NumberedScenes = list[tuple[int, Scene]]
Answers = dict[str, Any]  # question -> a character a video; None of a shape or colour is "-"


# --- Scenes and pairs
@dataclass(frozen=True)
class Design:
    """Sizes of the study."""

    captions: int = 96
    selection: int = 24
    seeds: int = 3


def captions_behind_a_wall(design: Design) -> tuple[NumberedScenes, NumberedScenes]:
    """Return held-out scenes of different captions with their numbers, of the test and of the selection."""
    count, found = design.captions + design.selection, dict[str, tuple[int, Scene]]()
    for number, scene in enumerate(held_out_scenes(SETS["behind a wall"], 4 * count)):
        found.setdefault(scene.caption, (number, scene))
    chosen = [*found.values()][:count]
    if len(chosen) < count:
        raise ConfigError(f"{count} captions behind a wall are asked for, {len(chosen)} are held out")
    return chosen[: design.captions], chosen[design.captions :]


def other_color(scene: Scene) -> str:
    """Return the next of COLORS that stands out from the background."""
    names = [*COLORS]
    start, ground = names.index(scene.movers[0].color), BACKGROUNDS[scene.background]
    turned = names[start + 1 :] + names[:start]
    return next(name for name in turned if dist(COLORS[name], ground) >= MIN_CONTRAST)


def named(scene: Scene, color: str = "") -> str:
    """Return the caption that names the shape's colour, or another one."""
    mover = scene.movers[0]
    return replace(scene, movers=(replace(mover, color=color or mover.color),), unnamed_color=False).caption


def extreme_colors(scene: Scene) -> tuple[str, str]:
    """Return the two colours that stand out most from background, wall and each other; "" for none."""
    behind = BACKGROUNDS[scene.background], COLORS[scene.wall or "white"]
    far = [c for c, rgb in COLORS.items() if min(dist(rgb, other) for other in behind) >= MIN_CONTRAST]
    apart = [(dist(COLORS[a], COLORS[b]), a, b) for a in far for b in far if a < b]
    return max(apart)[1:] if apart else ("", "")


def seeded(scenes: NumberedScenes, seeds: int) -> NumberedScenes:
    """Return all scenes with their first seed, then with the next."""
    return [(number + SEED_STEP * n, scene) for n in range(seeds) for number, scene in scenes]


def plain_pairs(scenes: NumberedScenes, later: int = 0) -> list[Pair]:
    """Return runs of one caption; later: seeds by which they are put off."""
    return [
        Pair((scene.caption, scene.caption), scene.caption, seed + SEED_STEP * later)
        for seed, scene in scenes
    ]


def color_pairs(scenes: NumberedScenes) -> list[Pair]:
    """Return runs whose block 0 names the own colour, or another; later blocks have the run's caption."""
    return [
        Pair((named(scene), named(scene, other_color(scene))), scene.caption, seed) for seed, scene in scenes
    ]


def reading_pairs(scenes: NumberedScenes) -> tuple[list[Pair], NumberedScenes]:
    """Return runs of two colours whose later captions do not name one, and their scenes."""
    found = [(one, extreme_colors(one[1])) for one in scenes]
    kept = [(seed, scene, colors) for (seed, scene), colors in found if colors[0]]
    pairs = [
        Pair(
            (named(scene, colors[0]), named(scene, colors[1])),
            replace(scene, unnamed_color=True).caption,
            seed,
        )
        for seed, scene, colors in kept
    ]
    return pairs, [(seed, scene) for seed, scene, _ in kept]


def empty_pairs(scenes: NumberedScenes) -> list[Pair]:
    """Return runs of captions without their shapes."""
    found = []
    for seed, scene in scenes:
        text = scene.caption.partition(" behind ")[2]
        found.append(Pair((text, text), text, seed))
    return found


# --- The judge of many videos at once, on any device
@torch.no_grad()
def judge_returns(videos: Tensor, scenes: Sequence[Scene], block_sizes: Sequence[int]) -> Answers:
    """Judge videos [B, T, 3, H, W] in 0..1 as tracking.judge() does -> a character a video, by question.

    hides, comes_back; color and shape, of the first second and of the last half (numbers in COLORS, SHAPES);
    seen_last: there is a shape in the last half; gone, back: the first block that shows no shape, and that of
    its return, 0 where there is none.
    """
    # 1. The background, the shape's core, and its colour in each frame: medians without what is covered.
    size, nan = videos.shape[-1], videos.new_tensor(torch.nan)
    sight = torch.stack([in_sight(scene, size) for scene in scenes]).to(videos.device)[
        :, None
    ]  # [B, 1, H, W]
    in_view = videos.where(sight[:, :, None], nan)
    ground = in_view.transpose(1, 2).flatten(2).nanmedian(2).values  # [B, 3]
    difference = videos - ground[:, None, :, None, None]
    red, green, blue = difference.unbind(2)
    core = shrunk(((red * red + green * green + blue * blue).sqrt() > DIFFERS) & sight)  # [B, T, H, W]
    color = videos.where(core[:, :, None], nan).flatten(3).nanmedian(3).values  # [B, T, 3]
    # 2. Coverage, area and place in each frame.
    axis = color.nanmedian(1).values - ground
    way = (difference * axis[:, None, :, None, None]).sum(2) / axis.square().sum(1)[:, None, None, None]
    alpha = (way.clamp(0, 1) * grown(core) * sight).nan_to_num()  # [B, T, H, W]
    area, at = alpha.mean((2, 3)), (torch.arange(size, device=videos.device) + 0.5) / size
    weight = alpha.sum((2, 3)).clamp(min=1e-6)
    centre = torch.stack([(alpha * at).sum((2, 3)), (alpha * at[:, None]).sum((2, 3))], 2) / weight[..., None]
    shown = area > SMALLEST

    def color_of(frames: slice) -> Tensor:
        rgb = color[:, frames].where(shown[:, frames, None], nan).nanmedian(1).values.double()
        palette = torch.tensor([*COLORS.values()], dtype=torch.float64, device=rgb.device)
        best = (rgb[:, None] - palette).norm(dim=2).argmin(1)
        return torch.where(shown[:, frames].any(1), best, -1)

    def shape_of(frames: slice) -> Tensor:
        a, middle, of, there = (x[:, frames] for x in (alpha, centre, area, shown))
        likeness = []
        for number in range(len(SHAPES)):
            unit_area, drop = outline_size(number)
            radius = (of / unit_area).sqrt()
            place = middle - torch.stack([torch.zeros_like(radius), drop * radius], 2)
            template = coverage(place, radius, number, size)
            union = torch.maximum(a, template).sum((2, 3)).clamp(min=1e-6)
            likeness.append((torch.minimum(a, template).sum((2, 3)) / union * there).sum(1))
        return torch.where(there.any(1), torch.stack(likeness).argmax(0), -1)

    # 3. The first second against the last half, and the blocks of hiding and return.
    first, last = slice(0, FPS), slice(-FPS // 2, None)
    start = area[:, first].median(1).values
    hides = (area < HIDDEN * start[:, None]).any(1)
    there = (area[:, last] > 0.5 * start[:, None]).float().mean(1) > 0.5
    gone = area < HIDDEN * start[:, None]
    # Latent frame 0 is one video frame, each later one four.
    hidden = torch.cat([gone[:, :1], gone[:, 1:].unflatten(1, (-1, 4)).all(2)], 1).tolist()
    blocks = [hiding(one, block_sizes) for one in hidden]
    found = {
        "hides": hides.int(),
        "comes_back": (hides & there).int(),
        "seen_last": (shown[:, last].float().mean(1) > 0.5).int(),
        "color": color_of(first),
        "last_color": color_of(last),
        "shape": shape_of(first),
        "last_shape": shape_of(last),
    }
    answers = {name: "".join("-" if x < 0 else str(x) for x in of.tolist()) for name, of in found.items()}
    return answers | {name: "".join(str(one[n]) for one in blocks) for n, name in enumerate(("gone", "back"))}


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


def agrees(answers: Mapping[str, str], videos: Tensor, scenes: Sequence[Scene]) -> int:
    """Count the videos of which tracking.judge(), one by one on the CPU, says the same."""
    count = 0
    for n, (video, scene) in enumerate(zip(videos.cpu(), scenes, strict=True)):
        one = judge(video, scene)
        mine = {name: of[n] for name, of in answers.items()}
        back = mine["comes_back"] == "1"
        said = {
            "hides": mine["hides"] == "1",
            "comes_back": back,
            "shape": mine["shape"] == str(SHAPES.index(scene.movers[0].shape)),
        }
        if back:
            said["same_color"] = mine["color"] == mine["last_color"]
            said["same_shape"] = mine["shape"] == mine["last_shape"]
        count += all(one[name] == value for name, value in said.items())
    return count


# --- What heads read
def knockouts_of(heads: Iterable[Head]) -> list[Edit]:
    """Leave the past out of the view of heads, in all passes."""
    layers = by_layer(heads).items()
    return [Knockout(frames=("past",), layers=(n,), heads=some, passes="all") for n, some in layers]


def patches_of(heads: Iterable[Head], passes: str = "all", **when: Any) -> list[Edit]:
    """Give heads the past of another run."""
    layers = by_layer(heads).items()
    return [Patch("kv", OTHER, layers=(n,), heads=some, passes=passes, **when) for n, some in layers]


@dataclass(eq=False)
class BlindHeads(Watcher):
    """Each video of a batch has one head that sees its own block alone: single knockouts, many at once."""

    heads: Sequence[Head]
    calls: dict[int, Any] = field(default_factory=dict)  # of the pass that runs, by layer

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        return site in ("self", "z")

    def on_activation(self, x: Any, where: ActivationSite) -> Any:
        rows = [n for n, (layer, _) in enumerate(self.heads) if layer == where.layer]
        if where.site == "self" and rows:
            self.calls[where.layer or 0] = x
        if where.site != "z" or not rows or where.at.block == 0:
            return None
        # The block's own keys come last.
        call, own = self.calls.pop(where.layer or 0), x.shape[1]
        numbers = torch.tensor([(n, self.heads[n][1]) for n in rows], device=x.device)
        of = numbers[:, 0], slice(None), numbers[:, 1]
        q, k, v = (one[of] for one in (call.q, call.k[:, -own:], call.v[:, -own:]))  # [rows, own, D]
        x = x.clone()
        x[of] = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x


# --- All trials of one training
@dataclass
class PresenceTrials:
    """Trials of one training; file has those that are done, a line each."""

    config: RunConfig
    session: Session
    file: Path
    design: Design

    def __post_init__(self) -> None:
        model, scenes = self.session.model_config, captions_behind_a_wall(Design())
        self.heads: list[Head] = [*np.ndindex((model.num_layers, model.num_heads))]
        test, selection = scenes[0][: self.design.captions], scenes[1][: self.design.selection]
        self.test, self.selection = (seeded(some, self.design.seeds) for some in (test, selection))
        self.walls = seeded(test[SEEN : SEEN + WALLS] or test, self.design.seeds)
        self.done: dict[str, dict[str, Any]] = {}
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                with_name = json.loads(line)
                self.done[with_name["name"]] = with_name
        else:
            self.file.parent.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def texts() -> list[str]:
        """Return all captions that trials need."""
        found = []
        for some in captions_behind_a_wall(Design()):
            pairs = plain_pairs(some) + color_pairs(some) + reading_pairs(some)[0] + empty_pairs(some)
            found += [text for pair in pairs for text in pair.texts]
        return list(dict.fromkeys(found))

    @cached_property
    def vae(self) -> VAE:
        return VAE.from_pretrained(self.config.ckpt_dir, device=self.session.device)

    def runs(self, pairs: Sequence[Pair]) -> PairedRuns:
        return PairedRuns(self.config, self.session, pairs)

    # -- one trial
    def write(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line of what was found."""
        self.done[name] = line = {"name": name, **values}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def judged(self, latents: Tensor, scenes: NumberedScenes, checked: int = 0) -> Answers:
        """Decode and judge latents [B, F, C, h, w]."""
        found: dict[str, str] = {}
        for start in range(0, len(latents), DECODED_AT_ONCE):
            part = latents[start : start + DECODED_AT_ONCE]
            # Repeat the last one: batches of one size.
            more = DECODED_AT_ONCE - len(part) if latents.is_cuda else 0
            videos = self.vae.decode(torch.cat([part, part[-1:].expand(more, *part.shape[1:])]))[: len(part)]
            these = [scene for _, scene in scenes[start : start + DECODED_AT_ONCE]]
            answers = judge_returns(videos, these, self.config.block_sizes)
            found = {name: found.get(name, "") + of for name, of in answers.items()}
            if start == 0 and checked:
                said = agrees(answers, videos[:checked], these[:checked])
        return found | ({"agrees": f"{said}/{min(checked, len(latents))}"} if checked else {})

    def trial(
        self,
        name: str,
        runs: PairedRuns,
        scenes: NumberedScenes,
        edits: Sequence[Edit] = (),
        source: RecordedCalls | None = None,
        which: int = 0,
        rows: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Roll out pairs under edits and judge them, unless that is done. rows: their numbers in the test."""
        if name in self.done:
            return self.done[name]
        began = time.monotonic()
        data = dict.fromkeys(edits, source) if source else None
        with intervene(*edits, data=data) if edits else nullcontext():
            latents = runs.rollout(which)
        rolled = time.monotonic()
        checked = CHECKED if name == "unedited" else 0
        values: dict[str, Any] = self.judged(latents, scenes, checked)
        if checked:  # is a video of a batch that of a rollout of its own?
            ends = [0, len(runs.pairs) - 1]
            alone = torch.cat([self.runs([runs.pairs[n]]).rollout(which) for n in ends])
            values["alone"] = float(f"{(alone - latents[ends]).abs().max():.2g}")
        if rows is not None:
            values["rows"] = list(rows)
        values["seconds"] = [round(rolled - began, 2), round(time.monotonic() - rolled, 2)]
        return self.write(name, values)

    # -- choosing heads on the selection captions
    def singles(self) -> None:
        """Knock out every head alone: what comes back of each video, and how far its latents move."""
        runs = self.runs(plain_pairs(self.selection))
        base = runs.rollout(0)
        if "selection" not in self.done:
            self.write("selection", self.judged(base, self.selection))
        many = self.runs(plain_pairs(self.selection) * HEADS_AT_ONCE)
        for start in range(0, len(self.heads), HEADS_AT_ONCE):
            some = self.heads[start : start + HEADS_AT_ONCE]
            if f"without {some[-1]}" in self.done:
                continue
            blind = BlindHeads([head for head in some for _ in self.selection])
            latents = many.rollout(0, blind)
            moved = (latents.unflatten(0, (len(some), -1)) - base).double().square().mean((2, 3, 4, 5)).sqrt()
            answers = self.judged(latents, self.selection * len(some))
            for n, head in enumerate(some):
                own = slice(n * len(base), (n + 1) * len(base))
                line = {question: of[own] for question, of in answers.items()}
                self.write(f"without {head}", line | {"change": [round(x, 4) for x in moved[n].tolist()]})

    def presence_heads(self, half: int | None = None) -> list[Head]:
        """Return the eight of largest fall of comes_back, ties broken by the change of x0.

        half: of the selection captions alone whose number leaves this rest.
        """
        count = len(self.selection) // self.design.seeds
        rows = [n for n in range(len(self.selection)) if half is None or n % count % HALVES == half]

        def share(line: Mapping[str, Any]) -> float:
            return float(np.mean([line["comes_back"][n] == "1" for n in rows]))

        base, effects = share(self.done["selection"]), {}
        for head in self.heads:
            line = self.done[f"without {head}"]
            effects[head] = base - share(line) + 1e-6 * float(np.mean([line["change"][n] for n in rows]))
        return sorted(self.heads, key=lambda head: -effects[head])[:CHOSEN]

    def identity_heads(self) -> list[Head]:
        """Return the eight whose patched keys and values move x0 of the return most to another colour's."""
        if "readers" not in self.done:
            self.write("readers", self.readers())
        shares = self.done["readers"]["shares"]
        return sorted(self.heads, key=lambda head: -shares[self.heads.index(head)])[:CHOSEN]

    def readers(self) -> dict[str, Any]:
        """Trace the colour in the pairs of the commonest hiding and return, as trace() of commit 01e1ad6.

        shares: how far x0 of the returning block moves on the way to the other run's when one head reads the
        other run's frames that show the shape, mean over pairs, by head.
        """
        pairs, scenes = reading_pairs(self.selection)
        both = self.runs(pairs)
        one, other = (self.judged(both.rollout(n), scenes) for n in range(2))
        blocks = [
            (int(a), int(b)) if (a, b) == (c, d) else (0, 0)
            for a, b, c, d in zip(one["gone"], one["back"], other["gone"], other["back"], strict=True)
        ]
        alike = Counter(block for block in blocks if block[1])
        if not alike:
            return {"pairs": 0, "shares": [0.0] * len(self.heads)}
        gone, back = alike.most_common(1)[0][0]
        runs = self.runs([pair for pair, block in zip(pairs, blocks, strict=True) if block == (gone, back)])
        own, visible = runs.ranges[back], tuple(range(runs.ranges[gone].start))
        source = RecordedCalls(0)
        mine = runs.rollout(0)[:, own.start : own.stop]
        way = (runs.rollout(1, source)[:, own.start : own.stop] - mine).flatten(1).double()
        shares: list[float] = []

        def probe(block: int, denoise: Any) -> None:
            for head in self.heads if block == back else ():
                edits = patches_of([head], "denoise", blocks=(block,), frames=visible)
                with intervene(*edits, data=dict.fromkeys(edits, source)):
                    moved = (denoise() - mine).flatten(1).double()
                share = (moved * way).sum(1) / way.square().sum(1)
                shares.append(round(float(share.mean()), 4))

        runs.rollout(0, probe=probe)
        return {"pairs": len(runs.pairs), "gone": gone, "back": back, "shares": shares}

    # -- all of it
    def sets(self) -> dict[str, list[Head]]:
        """Return the sets of heads: P, I, and random others of their layers."""
        found = {"P": self.presence_heads(), "I": self.identity_heads()}
        for name in ("P", "I"):
            for draw in range(DRAWS):
                found[f"random of {name}: {draw}"] = matched(self.heads, found[name], draw)
        return found

    def run(self) -> None:
        """Make the trials that are missing."""
        # 1. Choose heads on other captions.
        self.singles()
        sets = self.sets()
        if "sets" not in self.done:
            self.write("sets", {"heads": {name: [list(head) for head in of] for name, of in sets.items()}})
        # 2. Runs that nobody edits, and their donors: a pair counts where both hide and return alike.
        plain = self.runs(plain_pairs(self.test))
        unedited = self.trial("unedited", plain, self.test)
        other_seed = self.runs(plain_pairs(self.test, 1))
        by_seed = self.alike(unedited, self.trial("donor: other seed", other_seed, self.test))
        colors = self.runs(color_pairs(self.test))
        own_color = self.trial("own color", colors, self.test)
        by_color = self.alike(own_color, self.trial("donor: other color", colors, self.test, which=1))
        del other_seed
        # 3. The same with edits.
        every = sets | {"all": self.heads}
        for name, heads in every.items():
            self.trial(f"knockout, {name}", plain, self.test, knockouts_of(heads))
        for name, heads in sets.items():
            others = [head for head in self.heads if head not in heads]
            self.trial(f"rescue, {name}", plain, self.test, knockouts_of(others))
        in_colors = color_pairs(self.test)
        for how, rows, pairs, donors in (
            ("other seed", by_seed, plain_pairs(self.test), plain_pairs(self.test, 1)),
            ("other color", by_color, in_colors, in_colors),
        ):
            if rows and any(f"{how}, {name}" not in self.done for name in every):
                runs, source = self.runs([pairs[n] for n in rows]), RecordedCalls(0)
                self.runs([donors[n] for n in rows]).rollout(int(how == "other color"), source)
                scenes = [self.test[n] for n in rows]
                for name, heads in every.items():
                    self.trial(f"{how}, {name}", runs, scenes, patches_of(heads), source, rows=rows)
        # 4. Walls with nothing behind them; P chosen on one half of the selection captions, on the other.
        self.empty_walls(every)
        self.other_halves()

    @staticmethod
    def alike(one: Mapping[str, str], other: Mapping[str, str]) -> list[int]:
        """Return the rows whose shapes hide and return in the same blocks in both runs."""
        blocks = zip(one["gone"], one["back"], other["gone"], other["back"], strict=True)
        return [n for n, (a, b, c, d) in enumerate(blocks) if a != "0" and (a, b) == (c, d)]

    def empty_walls(self, sets: Mapping[str, Sequence[Head]]) -> None:
        """Give runs without a shape the past of runs that have one: does a patch conjure an object?"""
        runs, twins = self.runs(empty_pairs(self.walls)), self.runs(plain_pairs(self.walls))
        self.trial("wall", runs, self.walls)
        if any(f"wall, {name}" not in self.done for name in sets):
            source = RecordedCalls(0)
            twins.rollout(0, source)
            for name, heads in sets.items():
                self.trial(f"wall, {name}", runs, self.walls, patches_of(heads), source)

    def other_halves(self) -> None:
        """Knock out the heads chosen on one half of the selection captions, on the other half."""
        count = len(self.selection) // self.design.seeds
        for half in range(HALVES):
            heads = self.presence_heads(half)
            scenes = [one for n, one in enumerate(self.selection) if n % count % HALVES != half]
            if scenes:
                runs = self.runs(plain_pairs(scenes))
                self.trial(f"half {half}", runs, scenes, knockouts_of(heads))
