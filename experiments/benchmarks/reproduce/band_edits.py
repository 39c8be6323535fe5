"""Turn and remove temporal RoPE bands of the miniature: do crests move, does s stay, do hidden shapes return?

python experiments/benchmarks/reproduce/band_edits.py --device cuda

Writes docs/band_edits.json (docs/first_frame.md): curves predicted from the means of queries and keys beside
captured ones, and what Band does to all heads in the denoising passes, a band after another.
"""

from contextlib import nullcontext
from dataclasses import replace
from math import pi
from typing import Any

import numpy as np
import torch

from experiments.analysis.rope_waves import fit_matrix, predicted_context, temporal_frequencies
from experiments.analysis.stats import bootstrap, pearson, rounded
from experiments.benchmarks.harness import finding_parser, miniature_config, save_finding
from experiments.extraction import causal
from experiments.miniature.tracking import EvalPool
from experiments.running.cli import count, main
from experiments.running.progress import Progress
from experiments.running.ranks import workers_of
from experiments.studies.hidden_shapes import QUESTIONS, Design, captions_behind_a_wall
from experiments.studies.runs import Runs, distance
from wan.blocks import block_ranges
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.interventions import Band, intervene
from wan.vae import VAE

FITTED = 2  # bands of 6 and 63 frames; over 21 frames the slower ones are lines
LARGE = 1.0  # logits: heads whose band 0 is at least that large tell where its crest is
SHUFFLES = 200  # of heads, for the null of predicted curves


def run(argv=None):
    parser = finding_parser(__doc__, "docs/band_edits.json")
    parser.add_argument("--captions", type=count, default=96, help="held-out, of shapes behind a wall")
    args = parser.parse_args(argv)
    config = miniature_config(args)
    numbered, _ = captions_behind_a_wall(Design(args.captions, selection=0))
    scenes = [scene for _, scene in numbered]
    with EvalPool(workers_of(args.judges)) as judges, Progress() as watch:  # it forks
        session = causal.prepare(config, [], [scene.caption for scene in scenes], watch)
        vae = VAE.from_pretrained(config.ckpt_dir, device=session.device)
        configs = [replace(config, prompt=scene.caption, seed=number) for number, scene in numbered]
        runs, head_dim = Runs(session, configs), session.model_config.head_dim
        bands = temporal_frequencies(head_dim)
        edits: dict[str, Band | None] = {"base": None}
        for band in range(len(bands)):
            edits[f"band {band}, π/2"] = Band((band,), phase=pi / 2, passes="denoise")
            edits[f"band {band}, π"] = Band((band,), phase=pi, passes="denoise")
            edits[f"band {band}, removed"] = Band((band,), scale=0.0, passes="denoise")
        base, report = dict[str, np.ndarray](), dict[str, Any]()
        for name, edit in edits.items():
            # The mean logits of the first pass, and the means of queries and keys of all passes.
            capture = ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", mass=False, query_key_means=True)
            with intervene(edit) if edit else nullcontext(), capture as calls:
                latents = runs.rollout()
            logits = of_frames(calls, "frame_logits", 0)  # [captions, layers, H, F, F]
            if not base:
                report["predicted curves"] = predicted(calls, logits, config.block_sizes, head_dim)
            fit = fit_matrix(logits, config.block_sizes, bands[:FITTED])
            found = {"s": fit.s, "wave": fit.waves.cosine - 1j * fit.waves.sine}  # amplitude e^{i phase}
            base = base or found
            change = distance(latents, runs.latents) / runs.between_seeds
            videos = (video for part in latents.split(96) for video in vae.decode(part).cpu())
            answers = judges.judge_all(videos, scenes)
            report[name] = {
                "change of x0": rounded(bootstrap(change.mean(1).numpy())),
                **{q: rounded(bootstrap(np.array([float(a[q]) for a in answers]))) for q in QUESTIONS},
                **crests(found, base, edit),
            }
            watch.print(f"{name}: {report[name]}")
    periods = [round(2 * pi / w, 1) for w in bands]
    about = {"captions": args.captions, "periods of the bands, frames": periods}
    save_finding(args, {"weights_sha256": session.sha256.result()} | about | report)


def of_frames(calls, name: str, step: int) -> np.ndarray:
    """Gather a value of all blocks in a pass (-1: the clean one), [captions, layers, H, F, ...]."""
    chosen = [call for call in calls if call["is_clean_pass"] == (step < 0) and step in (-1, call["step"])]
    layers, frames = 1 + max(call["layer"] for call in chosen), 1 + max(chosen[-1]["query_frames"])
    B, H, _, *rest = chosen[-1].values[name].shape  # of the last block, which sees all frames
    found = torch.full((B, layers, H, frames, *rest), torch.nan, dtype=torch.float64)
    for call in chosen:
        value = call.values[name].double()
        found[:, call["layer"], :, call["query_frames"], : value.shape[3]] = value
    return found.numpy()


def predicted(calls, logits: np.ndarray, block_sizes, head_dim: int) -> dict[str, Any]:
    """Return r per head of captured last-block curves with those of one mean query and key, and its null."""
    last, generator = block_ranges(list(block_sizes))[-1], np.random.default_rng(0)
    captured = logits[..., last.start : last.stop, : last.start].mean(-2)  # [captions, layers, H, n]
    means = of_frames(calls, "query_means", 0), of_frames(calls, "key_means", -1)
    curves = predicted_context(*means, block_sizes, head_dim)
    flat, null = curves.reshape(len(curves), -1, curves.shape[-1]), []
    for _ in range(SHUFFLES):
        shuffled = flat[:, generator.permutation(flat.shape[1])].reshape(curves.shape)
        null.append(np.median(pearson(shuffled, captured)))
    whole, later = (pearson(curves[..., n:], captured[..., n:]) for n in (0, 1))
    other = [round(float(f(null)), 3) for f in (np.mean, np.max)]
    return {
        "r, median of heads": rounded(bootstrap(np.median(whole, (1, 2)))),
        "r, median of heads, without frame 0": rounded(bootstrap(np.median(later, (1, 2)))),
        f"r with another head's means, mean and best of {SHUFFLES}": other,
        "r by head": np.round(np.median(whole, 0), 3).tolist(),  # [layers, H], median of captions
    }


def crests(found: dict[str, np.ndarray], base: dict[str, np.ndarray], edit: Band | None) -> dict[str, Any]:
    """Return by how much each fitted band turned in heads where it is large, and what became of s."""
    report: dict[str, Any] = {}
    for band in range(FITTED):
        before, after = (x["wave"][..., band].mean(0) for x in (base, found))  # [layers, H]
        large = np.abs(before) >= LARGE
        expected = edit.phase if edit and band in edit.bands else 0.0
        beyond = np.angle((after * before.conj() * np.exp(-1j * expected))[large])  # no jump at π
        turned = expected + np.percentile(beyond, (50, 25, 75))
        report[f"band {band}"] = {
            "heads": int(large.sum()),
            "turned, radians: median, quartiles": turned.round(2).tolist(),
            "amplitude after / before, median": round(float(np.median(np.abs(after / before)[large])), 2),
        }
    s, before = found["s"].mean(0), base["s"].mean(0)
    r = pearson(s.ravel(), before.ravel())
    report["s: mean before, after, r over heads"] = [round(float(x), 3) for x in (before.mean(), s.mean(), r)]
    return report


if __name__ == "__main__":
    main(run)
