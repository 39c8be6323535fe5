"""Numbers of interventions: effects of edits, and a causal atlas."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from experiments.analysis import stats, taxonomy
from experiments.analysis.first_frame import context_sign_rate, first_frame_effect
from experiments.analysis.measures import first_frame_mass
from experiments.analysis.panels import HeadMap
from experiments.analysis.taxonomy import kinds
from experiments.caches import load_cache, titles, view

QUESTIONS = {name: name for name in ("background", "shape", "direction", "landmark")}  # of the tracker
QUESTIONS |= {"color": "colour", "crossing": "paths cross", "hides": "it hides"}
QUESTIONS |= {"comes_back": "it comes back", "same": "back in colour and shape"}


def changes_of(cache: Mapping) -> dict[str, np.ndarray]:
    """Return the effects of an effects cache [F] each, in units of the distance between seeds.

    NaN where two seeds do not differ, as in given frames.
    """
    unit = cache["between_seeds"].where(cache["between_seeds"] > 0, torch.nan)
    names = [name for name in ("direct", "own_block", "total", "floor") if name in cache]
    return {name.replace("_", " "): (cache[name] / unit).numpy() for name in names}


def tracker_rows(cache: Mapping) -> list[dict[str, str]]:
    """List what the tracker says of both videos of an effects cache; nothing but for the miniature."""
    if "answers_base" not in cache or "questions" not in cache:
        return []
    words, answers = ("wrong", "right"), zip(cache["answers_base"], cache["answers_edited"], strict=True)
    return [
        {"question": QUESTIONS[name], "unedited": words[bool(base)], "edited": words[bool(edited)]}
        for name, (base, edited) in zip(cache["questions"], answers, strict=True)
        if name in QUESTIONS
    ]


# --- A causal atlas: the direct effect of editing each head alone, beside what heads attend to

UNIT = "1: another seed"  # effects are in units of the distance between two seeds
S = "first-frame effect s"


@dataclass(frozen=True)
class HeadStudy:
    """Direct effects of heads, controls, and what heads attend to."""

    subtitle: str
    layers: list[int]
    effects: np.ndarray  # [prompts, N, H], mean over frames
    floor: float
    controls: dict[str, np.ndarray]  # [N, H]
    norms: np.ndarray | None  # [N, H]
    measures: dict[str, np.ndarray] = field(default_factory=dict)  # [N, H], of one atlas
    kinds: np.ndarray | None = None  # [N, H], names, by the signs of logits in that atlas

    @property
    def effect(self) -> np.ndarray:
        """Mean over prompts [N, H]."""
        return self.effects.mean(0)

    def maps(self) -> list[HeadMap]:
        """Effect, controls and measures as panels for figures.head_maps."""
        of_effects = {"Direct effect of the edit": self.effect} | self.controls
        maps = [HeadMap(name, name, UNIT, "sequential", values) for name, values in of_effects.items()]
        for name, values in self.measures.items():
            if name == S:
                maps.append(HeadMap(name, name, "logits", "diverging", values))
            else:
                maps.append(HeadMap(name, name, "share", "sequential", values))
        return maps

    def effect_title(self) -> str:
        """Say which head changes x0 most when it alone is edited."""
        layer, head = np.unravel_index(np.nanargmax(self.effect), self.effect.shape)
        largest = self.effect[layer, head]
        title = f"Editing one head changes x0 by up to {largest:.2g} of the way to another seed: layer "
        return f"{title}{self.layers[layer]}, head {head}"

    def measure_title(self) -> str:
        """Say which measure of attention goes best with the effects."""
        rhos = {name: rho.estimate for name, (rho, _) in self.correlations().items()}
        best = max(rhos, key=lambda name: abs(rhos[name]))
        return f"What editing one head changes goes best with its {best}: ρ = {stats.signed(rhos[best])}"

    def correlations(self) -> dict[str, tuple[stats.Interval, stats.Interval]]:
        """ρ of every measure with the effect, and partial ρ given layer and ‖z‖."""
        # Deeper layers have larger effects and other attention: what is left beside layer and norm counts.
        layer = np.broadcast_to(np.arange(len(self.layers))[:, None], self.effect.shape)
        controls = [layer]
        if self.norms is not None:
            controls.append(self.norms)
        return {
            name: (
                stats.head_correlation(self.effects, values),
                stats.head_correlation(self.effects, values, controls),
            )
            for name, values in self.measures.items()
        }


def read_study(causal_atlas: str | Path, atlas: str | Path | None = None) -> HeadStudy | None:
    """Read a causal atlas of every head, beside an unedited attention atlas of the same weights; or None."""
    if not Path(causal_atlas).is_file():
        return None
    cache = load_cache(causal_atlas, expect=("causal_atlas",))
    if cache["each"] != "head" or len(cache["units"]) != cache["num_heads"]:
        return None
    prompts = np.array(cache["prompts"])
    # NaN: frames of blocks that had nothing to edit.
    per_run = np.nanmean(cache["effects"].numpy(), -1)  # [R, N, H]
    names = {
        "frame_control": "The same edit on a random frame",
        "head_control": "The same edit on another head",
    }
    return HeadStudy(
        titles.edits_in_words(cache["interventions"]),
        cache["layers"],
        np.stack([per_run[prompts == prompt].mean(0) for prompt in dict.fromkeys(cache["prompts"])]),
        float(np.nanmean(cache["floor"].numpy())),
        {label: np.nanmean(cache[name].numpy(), (0, -1)) for name, label in names.items() if name in cache},
        cache["head_norms"].numpy().mean(0) if "head_norms" in cache else None,
        *_attention(atlas, cache),
    )


def _attention(atlas: str | Path | None, causal: Mapping) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """s, the mass on frame 0 and on the past of every head [N, H], and the names of their kinds."""
    if atlas is None or not Path(atlas).is_file():
        return {}, None
    cache = load_cache(atlas, expect=("atlas",))
    # Attention of other weights, or of an edited run, would be no measure of these heads.
    same = cache["weights_sha256"] == causal["weights_sha256"] and cache["layers"] == causal["layers"]
    if not same or "interventions" in cache or "frame_mass" not in cache:
        return {}, None
    # 1. Shares of mass, [N, H]
    mass = view.open_profiles(cache, quantity="mass")
    profile, context = mass.profiles(), mass.context_frames
    of_past = profile[..., list(context)]
    past = np.where(np.isnan(of_past).all(-1), np.nan, np.nansum(of_past, -1))
    measures = {"mass on frame 0": first_frame_mass(profile, context)[0], "mass on the past": past}
    if "frame_logits" not in cache:
        return measures, None
    # 2. What needs logits
    logits = view.open_profiles(cache, quantity="mean_logit")
    matrices = logits.frame_matrices()
    if matrices is not None:
        measures = {S: first_frame_effect(matrices, logits.block_sizes).effect} | measures
    names = {**taxonomy.KINDS, taxonomy.ABSENT: "no kind"}
    labels = kinds(context_sign_rate(logits), taxonomy.Thresholds())
    return measures, np.vectorize(names.__getitem__, otypes=[object])(labels)
