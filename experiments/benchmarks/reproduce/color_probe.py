"""Where can the colour of a hidden shape be read from the miniature, while a wall hides it?

    python experiments/benchmarks/reproduce/color_probe.py --train 192 --test 64

A rendered first block shows a shape whose colour the caption does not say; the model goes on until the shape
is behind the wall. A linear probe (ridge) reads the colour from resid_post of one patch, the one that the
shape is behind, or from the mean of a frame's patches. It is fitted on captions of the training split and
judged on held-out ones; a control is fitted on shuffled colours. Writes docs/color_probe.json.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.analysis.stats import rounded
from experiments.benchmarks.harness import finding_parser, save_finding
from experiments.extraction import causal
from experiments.miniature.moving_shapes import (
    COLORS,
    Scene,
    hidden_share,
    positions,
    render_batch,
    sample_scenes,
)
from experiments.running.cli import count, main
from experiments.studies.runs import Batch
from wan.blocks import VIDEO_FRAMES_PER_LATENT as STRIDE
from wan.config import load_config
from wan.sites import ActivationSite, SiteCapture, watched
from wan.vae import VAE

GIVEN, FRAMES = 3, 12  # latent frames: of the rendered beginning, and of the whole video
BATCH, SHUFFLES, DRAWS, SCENE_SEED = 32, 20, 2000, 77
RIDGES = (1.0, 10.0, 100.0, 1000.0)
NUMBERS = ("accuracy", "low", "high")
PLACES = ("patch behind the wall", "mean of the frame")
Observed = tuple[Tensor, Tensor, Tensor]  # features [layers, passes, places, n, dim], colours [n], videos [n]


def run(argv=None):
    parser = finding_parser(__doc__, "docs/color_probe.json")
    parser.add_argument("--train", type=count, default=192, help="videos that the probe is fitted on")
    parser.add_argument("--test", type=count, default=64, help="videos of held-out captions")
    args = parser.parse_args(argv)
    config = load_config(args.config_path, {"device": args.device, "num_frames": FRAMES})
    loaded = causal.prepare(config, [])
    train, test = (observe(loaded, scenes(n, held)) for n, held in ((args.train, False), (args.test, True)))
    about = {"model": config.model, "train": args.train, "test": args.test}
    save_finding(args, about | report_of(train, test))


def scenes(number: int, held_out: bool) -> list[Scene]:
    """Return scenes of unnamed colours whose shape is wholly hidden in some generated frame."""
    found = (s for s in sample_scenes(SCENE_SEED, held_out, ("wall",)) if s.unnamed_color and hidden(s).any())
    return list(islice(found, number))


def hidden(scene: Scene) -> Tensor:
    """Return in which generated latent frames the shape is wholly hidden, bool [FRAMES - GIVEN]."""
    share = hidden_share(scene, 1 + STRIDE * (FRAMES - 1))
    return (share[1:] == 1).unflatten(0, (-1, STRIDE)).all(1)[GIVEN - 1 :]


def observe(loaded: causal.LoadedModel, chosen: Sequence[Scene]) -> Observed:
    """Roll out scenes and keep the features of frames in which the shape is hidden."""
    config, side, last = loaded.config, loaded.config.height // 2, 1 + STRIDE * (FRAMES - 1)
    vae, batches, owners, colors = VAE.from_pretrained(config.ckpt_dir, device=loaded.device), [], [], []
    for start in range(0, len(chosen), BATCH):
        scenes = list(chosen[start : start + BATCH])
        first = render_batch(scenes, 1 + STRIDE * (GIVEN - 1), 8 * config.height)  # [B, 3, F, H, W]
        given = vae.encode(((first + 1) / 2).transpose(1, 2).to(loaded.device))
        configs = [replace(config, prompt=s.caption, seed=start + n) for n, s in enumerate(scenes)]
        batch = Batch(loaded, configs)
        batch.noise, batch.renoise = batch.noise[:, GIVEN:], batch.renoise[:, :, GIVEN:]
        centres = torch.stack([positions(scene, last)[::STRIDE, 0] for scene in scenes])
        x, y = (centres * side).long().clamp(0, side - 1).unbind(-1)
        watcher = SiteCapture(("resid_post",), reduce=partial(of_places, at=y * side + x))
        with watched(watcher):
            batch.rollout(initial_latent=given)
        kept = [one.value for one in watcher.kept if one.where.frames[0] >= GIVEN]
        sizes = (-1, config.num_passes, loaded.model_config.num_layers)
        values = torch.stack(kept).unflatten(0, sizes).permute(2, 1, 3, 0, 4, 5, 6)
        behind = torch.stack([hidden(scene) for scene in scenes])  # [B, frames]
        batches.append(values.flatten(3, 4)[:, :, behind].transpose(2, 3))
        for n, (scene, frames) in enumerate(zip(scenes, behind, strict=True)):
            owners += [start + n] * int(frames.sum())
            colors += [list(COLORS).index(scene.movers[0].color)] * int(frames.sum())
    return torch.cat(batches, 3), torch.tensor(colors), torch.tensor(owners)


def of_places(x: Tensor, where: ActivationSite, at: Tensor) -> Tensor:
    """Return the patch that the shape's centre is in and the mean of all, [B, F, 2, dim]."""
    frames = x.unflatten(1, (len(where.frames), -1))  # [B, F, S, dim]
    index = at[:, list(where.frames), None, None].expand(-1, -1, 1, x.shape[-1]).to(x.device)
    return torch.cat([frames.gather(2, index), frames.mean(2, keepdim=True)], 2)


# --- The probe
def read(train: Tensor, colors: Tensor, test: Tensor, ridge: float) -> Tensor:
    """Fit one score a colour on standardised features [n, dim] -> the best colour of test rows."""
    mean, std = train.mean(0), train.std(0) + 1e-6
    x, y = (torch.cat([(part - mean) / std, part.new_ones(len(part), 1)], 1) for part in (train, test))
    wanted = torch.nn.functional.one_hot(colors, len(COLORS)).double()
    weights = torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype), x.T @ wanted)
    return (y @ weights).argmax(1)


def probe(train: Tensor, colors: Tensor, owners: Tensor, test: Tensor) -> Tensor:
    """Return the colours that are read of test, with the ridge that does best over folds of the videos."""

    def right(ridge: float) -> int:
        outs = [owners % 4 == fold for fold in range(4)]
        hits = (read(train[~out], colors[~out], train[out], ridge) == colors[out] for out in outs)
        return sum(int(each.sum()) for each in hits)

    return read(train, colors, test, max(RIDGES, key=right))


def report_of(train: Observed, test: Observed) -> dict[str, Any]:
    """Return accuracy over test videos by place, layer and pass: mean, 95 % bootstrap interval, control."""
    (x, colors, owners), (y, truth, videos) = train, test
    dice, each = torch.Generator().manual_seed(0), len(videos.unique())
    draws = torch.randint(each, (DRAWS, each), generator=dice)
    shuffles = [torch.randperm(int(owners.max()) + 1, generator=dice) for _ in range(SHUFFLES)]
    of_video = torch.zeros(int(owners.max()) + 1, dtype=torch.long)
    of_video[owners] = colors

    def shares(answers: Tensor) -> Tensor:
        """Return the share of hits of each test video."""
        hits = (answers == truth).double()
        return torch.stack([hits[videos == video].mean() for video in videos.unique()])

    found: dict[str, Any] = {
        "frames": [len(colors), len(truth)],
        "most frequent colour": round(shares(colors.mode().values.expand_as(truth)).mean().item(), 4),
        "steps": "0 to 3 denoise, 4 is the clean pass",
        "places": {},
    }
    for place, name in enumerate(PLACES):
        rows = []
        for layer, step in np.ndindex(*x.shape[:2]):
            a, b = (part[layer, step, place].double() for part in (x, y))
            right = shares(probe(a, colors, owners, b))
            numbers = rounded([right.mean().item(), *np.percentile(right[draws].mean(1), (2.5, 97.5))], 4)
            rows.append({"layer": layer, "step": step} | dict(zip(NUMBERS, numbers, strict=True)))
        best = max(rows, key=lambda row: row["accuracy"])
        a, b = (part[best["layer"], best["step"], place].double() for part in (x, y))
        control = [shares(probe(a, of_video[order][owners], owners, b)).mean().item() for order in shuffles]
        shuffled = rounded([float(np.mean(control)), max(control)], 4)
        found["places"][name] = {"best": best, "shuffled": shuffled, "rows": rows}
    return found


if __name__ == "__main__":
    main(run)
