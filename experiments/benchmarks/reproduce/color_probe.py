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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.harness import save_report
from experiments.caches.files import require_writable
from experiments.extraction import causal
from experiments.extraction.devices import choose_device
from experiments.extraction.provenance import environment
from experiments.miniature.moving_shapes import (
    COLORS,
    Scene,
    hidden_share,
    positions,
    render_batch,
    sample_scenes,
)
from experiments.running.cli import Parser, count, main
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.config import RunConfig, load_config
from wan.sites import SiteCapture, Where, watched
from wan.vae import VAE

OUTPUT = Path("docs/color_probe.json")
GIVEN, FRAMES = 3, 12  # latent frames: of the rendered beginning, and of the whole video
BATCH, SHUFFLES, DRAWS = 32, 20, 2000
RIDGES = (1.0, 10.0, 100.0, 1000.0)
PLACES = ("patch behind the wall", "mean of the frame")
SCENE_SEED = 77


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--config_path", default="configs/wan_mini.yaml")
    parser.add_argument("--train", type=count, default=192, help="videos that the probe is fitted on")
    parser.add_argument("--test", type=count, default=64, help="videos of held-out captions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output_path", type=Path, default=OUTPUT)
    args = parser.parse_args(argv)
    require_writable(args.output_path)
    config = load_config(args.config_path, {"device": args.device, "num_frames": FRAMES})
    loaded = causal.prepare(config, [])
    parts = [observe(loaded, config, scenes(n, held)) for n, held in ((args.train, False), (args.test, True))]
    report = report_of(*parts) | {"environment": environment(choose_device(config.device))}
    save_report({"model": config.model, "train": args.train, "test": args.test} | report, args.output_path)
    print(args.output_path)


def scenes(number: int, held_out: bool) -> list[Scene]:
    """Return scenes of unnamed colours whose shape is wholly hidden in some generated frame."""
    found = (s for s in sample_scenes(SCENE_SEED, held_out, ("wall",)) if s.unnamed_color and hidden(s).any())
    return list(islice(found, number))


def hidden(scene: Scene) -> Tensor:
    """Return in which latent frames the shape is wholly hidden, bool [FRAMES]; never in the given ones."""
    share = hidden_share(scene, 1 + VIDEO_FRAMES_PER_LATENT * (FRAMES - 1))
    behind = (share[1:] == 1).unflatten(0, (-1, VIDEO_FRAMES_PER_LATENT)).all(1)
    return torch.cat([torch.zeros(GIVEN, dtype=torch.bool), behind[GIVEN - 1 :]])


Observed = tuple[Tensor, Tensor, Tensor]


def observe(loaded: causal.LoadedModel, config: RunConfig, chosen: Sequence[Scene]) -> Observed:
    """Roll out scenes -> features [layers, passes, places, n, dim], colours [n], their videos [n]."""
    vae, batches, owners, colors = VAE.from_pretrained(config.ckpt_dir, device=loaded.device), [], [], []
    for start in range(0, len(chosen), BATCH):
        batch = chosen[start : start + BATCH]
        size = 8 * config.height
        first = render_batch(list(batch), 1 + VIDEO_FRAMES_PER_LATENT * (GIVEN - 1), size)  # [B, 3, F, H, W]
        given = vae.encode(((first + 1) / 2).transpose(1, 2).to(loaded.device))
        drawn = [
            causal.draw_noise(
                replace(config, seed=start + n), loaded.model_config, loaded.dtype, loaded.device
            )
            for n in range(len(batch))
        ]
        noise = torch.cat([pair[0] for pair in drawn])[:, GIVEN:]
        renoise = torch.cat([pair[1] for pair in drawn], 1)[:, :, GIVEN:]
        text = torch.cat([loaded.texts[scene.caption][0] for scene in batch])
        at = patches(batch, config.height // 2)
        watcher = SiteCapture(("resid_post",), reduce=partial(of_places, at=at))
        with watched(watcher):
            loaded.pipeline.inference(noise, prompt_embeds=text, renoise=renoise, initial_latent=given)
        batches.append(table(watcher, torch.stack([hidden(scene) for scene in batch])))
        for n, scene in enumerate(batch):
            owners += [start + n] * int(hidden(scene).sum())
            colors += [list(COLORS).index(scene.movers[0].color)] * int(hidden(scene).sum())
    return torch.cat(batches, 3), torch.tensor(colors), torch.tensor(owners)


def patches(batch: Sequence[Scene], side: int) -> Tensor:
    """Return the patch that the shape's centre is in, by video and latent frame, int64 [B, FRAMES]."""
    last = 1 + VIDEO_FRAMES_PER_LATENT * (FRAMES - 1)
    centres = torch.stack([positions(scene, last)[::VIDEO_FRAMES_PER_LATENT, 0] for scene in batch])
    x, y = (centres * side).long().clamp(0, side - 1).unbind(-1)
    return y * side + x


def of_places(x: Tensor, where: Where, at: Tensor) -> Tensor:
    """Return one patch and the mean of all, [B, F, 2, dim]."""
    frames = x.unflatten(1, (len(where.frames), -1))  # [B, F, S, dim]
    index = at[:, list(where.frames), None, None].expand(-1, -1, 1, x.shape[-1]).to(x.device)
    return torch.cat([frames.gather(2, index), frames.mean(2, keepdim=True)], 2)


def table(watcher: SiteCapture, behind: Tensor) -> Tensor:
    """Return what was kept of hidden frames: [layers, passes, places, n, dim]."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    for one in watcher.kept:
        if one.where.frames[0] >= GIVEN:
            found.setdefault((one.where.layer or 0, one.where.step), []).append(one.value)
    layers, passes = (sorted({key[n] for key in found}) for n in (0, 1))
    rows = [
        torch.stack([torch.cat(found[layer, step], 1)[behind[:, GIVEN:]].transpose(0, 1) for step in passes])
        for layer in layers
    ]
    return torch.stack(rows)


# --- The probe
def fitted(x: Tensor, colors: Tensor, ridge: float) -> Tensor:
    """Fit one score a colour by ridge regression: x [n, dim + 1] -> weights [dim + 1, colours]."""
    wanted = torch.nn.functional.one_hot(colors, len(COLORS)).double()
    return torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype), x.T @ wanted)


def scaled(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in units of the training features, with a column of ones."""
    mean, std = train.mean(0), train.std(0) + 1e-6
    return tuple(  # type: ignore[return-value]
        torch.cat([(x - mean) / std, x.new_ones(len(x), 1)], 1) for x in (train, test)
    )


def probe(train: Tensor, colors: Tensor, owners: Tensor, test: Tensor) -> Tensor:
    """Return the colours that are read of test, with the ridge that does best over folds of the videos."""
    right = []
    for ridge in RIDGES:
        hits = 0
        for fold in range(4):
            out = owners % 4 == fold
            mine, others = scaled(train[~out], train[out])
            hits += int(((others @ fitted(mine, colors[~out], ridge)).argmax(1) == colors[out]).sum())
        right.append(hits)
    mine, others = scaled(train, test)
    return (others @ fitted(mine, colors, RIDGES[right.index(max(right))])).argmax(1)


def shares(hits: Tensor, owners: Tensor) -> Tensor:
    """Return the share of hits of each video."""
    return torch.stack([hits[owners == owner].double().mean() for owner in owners.unique()])


def report_of(train: Observed, test: Observed) -> dict[str, Any]:
    """Return accuracy over test videos by place, layer and pass: mean, 95 % bootstrap interval, control."""
    (x, colors, owners), (y, truth, videos) = train, test
    dice = torch.Generator().manual_seed(0)
    each = len(videos.unique())
    draws = torch.randint(each, (DRAWS, each), generator=dice)
    shuffles = [torch.randperm(int(owners.max()) + 1, generator=dice) for _ in range(SHUFFLES)]
    of_video = torch.zeros(int(owners.max()) + 1, dtype=torch.long)
    of_video[owners] = colors
    most = torch.bincount(colors, minlength=len(COLORS)).argmax()
    found: dict[str, Any] = {
        "frames": [len(colors), len(truth)],
        "most frequent colour": round(shares(truth == most, videos).mean().item(), 4),
        "steps": "0 to 3 denoise, 4 is the clean pass",
        "places": {},
    }
    for place, name in enumerate(PLACES):
        rows = []
        for layer in range(len(x)):
            for step in range(x.shape[1]):
                a, b = x[layer, step, place].double(), y[layer, step, place].double()
                right = shares(probe(a, colors, owners, b) == truth, videos)
                low, high = right[draws].mean(1).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
                row = {
                    "layer": layer,
                    "step": step,
                    "accuracy": right.mean().item(),
                    "low": low,
                    "high": high,
                }
                rows.append({key: round(value, 4) for key, value in row.items()})
        best = max(rows, key=lambda row: row["accuracy"])
        a, b = (part[best["layer"], best["step"], place].double() for part in (x, y))
        null = [
            shares(probe(a, of_video[order][owners], owners, b) == truth, videos).mean() for order in shuffles
        ]
        control = torch.stack(null)
        found["places"][name] = {
            "best": best,
            "shuffled": [round(control.mean().item(), 4), round(control.max().item(), 4)],
            "rows": rows,
        }
    return found


if __name__ == "__main__":
    main(run)
