"""A causal atlas and an effects cache as arrays and lines, for notebooks and figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis import head_taxonomy
from experiments.analysis.effects import ENOUGH_PROMPTS, head_correlation
from experiments.analysis.first_frame import first_frame_effect
from experiments.analysis.measures import first_frame_mass
from experiments.analysis.panels import HeadMap
from experiments.caches import load_cache
from experiments.caches.view import edits_in_words, open_profiles

UNIT = "/ seeds"  # effects are in units of the distance between two seeds
S = "First-frame effect s"


def changes_of(cache: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The effects of an effects cache [F] each, in units of the distance between seeds."""
    names = {"direct": "direct", "own_block": "own block", "total": "total", "floor": "floor"}
    unit = cache["between_seeds"].numpy()
    return {label: cache[name].numpy() / unit for name, label in names.items() if name in cache}


def change_lines(changes: Mapping[str, np.ndarray]) -> str:
    """Mean of each effect over the frames that have one, a line each."""
    return "\n".join(f"{name}: mean {np.nanmean(values):.2g}" for name, values in changes.items())


QUESTIONS = {  # of the miniature's tracker, in words
    "background": "background",
    "color": "colour",
    "shape": "shape",
    "direction": "direction",
    "landmark": "landmark",
    "crossing": "paths cross",
    "hides": "it hides",
    "comes_back": "it comes back",
    "same": "back in colour and shape",
}


def tracker_lines(cache: Mapping[str, Any]) -> str:
    """What the tracker says of both videos of an effects cache, a line each; or why it says nothing."""
    if "questions" not in cache:
        return "the tracker judges captions of the miniature alone"
    names = ("answers_base", "answers_edited")
    yes = [
        [
            QUESTIONS[q]
            for q, said in zip(cache["questions"], cache[name].tolist(), strict=True)
            if said and q in QUESTIONS
        ]
        for name in names
    ]
    return f"right in the unedited video: {', '.join(yes[0])}\nright in the edited one: {', '.join(yes[1])}"


@dataclass(frozen=True)
class HeadStudy:
    """Direct effects of heads and what they attend to; reason says why there is nothing."""

    reason: str = ""
    subtitle: str = ""
    layers: list[int] = field(default_factory=list)
    effects: np.ndarray = field(
        default_factory=lambda: np.empty((0, 0, 0))
    )  # [prompts, N, H], mean over frames
    floor: float = float("nan")
    controls: dict[str, np.ndarray] = field(default_factory=dict)  # [N, H]
    norms: np.ndarray | None = None  # [N, H]
    measures: dict[str, np.ndarray] = field(default_factory=dict)  # [N, H], of one atlas
    kinds: np.ndarray | None = None  # [N, H], names, by the signs of logits in that atlas

    @property
    def effect(self) -> np.ndarray:
        """[N, H], mean over prompts."""
        return self.effects.mean(0)

    def maps(self) -> list[HeadMap]:
        maps = [HeadMap("effect", "Direct effect", UNIT, "sequential", self.effect)]
        maps += [HeadMap(name, name, UNIT, "sequential", values) for name, values in self.controls.items()]
        for name, values in self.measures.items():
            unit, scale = ("logits", "diverging") if name == S else ("share", "sequential")
            maps.append(HeadMap(name, name, unit, scale, values))
        return maps

    def notes(self) -> dict[str, str]:
        """ρ and partial ρ of every measure with the effect, with intervals."""
        layer = np.broadcast_to(np.arange(len(self.layers))[:, None], self.effect.shape)
        given = [layer] if self.norms is None else [layer, self.norms]
        found = {}
        for name, values in self.measures.items():
            rho, partial = (
                head_correlation(self.effects, values),
                head_correlation(self.effects, values, given),
            )
            found[name] = f"ρ = {rho}\npartial ρ = {partial}"
        return found

    def lines(self) -> str:
        few = len(self.effects) < ENOUGH_PROMPTS
        return (
            f"{len(self.effects)} prompts; mean effect {self.effect.mean():.4f}, largest "
            f"{self.effect.max():.4f}, floor {self.floor:.2g}"
            + (f"; with fewer than {ENOUGH_PROMPTS} prompts intervals say little" if few else "")
        )


def read_study(causal_atlas: str | Path, atlas: str | Path | None = None) -> HeadStudy:
    """A causal atlas of heads, beside an attention atlas of the same model where one is there."""
    if not Path(causal_atlas).is_file():
        return HeadStudy(
            f"{causal_atlas} not found; run: python experiments/run_causal_atlas.py "
            "(on a CPU add --config_path configs/wan_mini.yaml)"
        )
    cache = load_cache(causal_atlas, expect=("causal_atlas",))
    if cache["each"] != "head" or len(cache["units"]) != cache["num_heads"]:
        return HeadStudy(f"{causal_atlas} is of each {cache['each']}; these figures are of every head")
    prompts = sorted(set(cache["prompts"]), key=cache["prompts"].index)
    rows = [[n for n, prompt in enumerate(cache["prompts"]) if prompt == one] for one in prompts]
    per_run = np.nanmean(cache["effects"].numpy(), -1)  # [R, N, H]
    controls = {
        label: np.nanmean(cache[name].numpy(), (0, -1))
        for name, label in (("frame_control", "On a random frame"), ("head_control", "On another head"))
        if name in cache
    }
    return HeadStudy(
        subtitle=edits_in_words(cache["interventions"]),
        layers=cache["layers"],
        effects=np.stack([per_run[row].mean(0) for row in rows]),  # seeds of a prompt first
        floor=float(np.nanmean(cache["floor"].numpy())),
        controls=controls,
        norms=cache["head_norms"].numpy().mean(0) if "head_norms" in cache else None,
        **_attention(atlas, cache),
    )


def _attention(atlas: str | Path | None, causal: Mapping[str, Any]) -> dict[str, Any]:
    """What heads attend to, and their kinds, from an unedited atlas of the same weights; nothing without."""
    if atlas is None or not Path(atlas).is_file():
        return {}
    cache = load_cache(atlas, expect=("atlas",))
    same = cache["weights_sha256"] == causal["weights_sha256"] and "interventions" not in cache
    if not same or "frame_mass" not in cache or cache["layers"] != causal["layers"]:
        return {}
    found: dict[str, Any] = {"measures": _measures(cache)}
    if "frame_logits" in cache:
        rates = head_taxonomy.context_sign_rate(open_profiles(cache, quantity="mean_logit"))
        labels = head_taxonomy.kinds(rates, head_taxonomy.Thresholds())
        names = {**head_taxonomy.KINDS, head_taxonomy.ABSENT: "no kind"}
        found["kinds"] = np.vectorize(names.__getitem__, otypes=[object])(labels)
    return found


def _measures(cache: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """s, the mass on frame 0 and the mass on the past of every head, [N, H]."""
    view = open_profiles(cache, quantity="mass")
    profile = view.profiles()
    first, _ = first_frame_mass(profile, view.context_frames)
    past = np.nansum(profile[..., list(view.context_frames)], -1)
    found = {"Mass on frame 0": first, "Mass on the past": past}
    matrices = (
        open_profiles(cache, quantity="mean_logit").frame_matrices() if "frame_logits" in cache else None
    )
    if matrices is not None:
        found = {S: first_frame_effect(matrices, cache["block_sizes"])[0]} | found
    return found
