"""Numbers of interventions: knockout curves, effects of edits, a causal atlas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.first_frame import context_sign_rate, first_frame_effect
from experiments.analysis.measures import first_frame_mass
from experiments.analysis.panels import HeadMap
from experiments.analysis.stats import DRAWS, Interval, bootstrap, head_correlation, rounded
from experiments.analysis.taxonomy import ABSENT, KINDS, Thresholds, kinds
from experiments.caches import load_cache
from experiments.caches.view import edits_in_words, open_profiles

# --- Knockout curves: how much of something is left when more and more heads lose their past

BACK = "same"  # the tracker's answer: hidden, and back in colour and shape
ORDERS = {"effect": "by single effect", "change": "by change of x0"}  # of heads -> in words
ORDERS |= {name: f"by {name}" for name in ("s", "mass on the past")}


def random_curve(draws: np.ndarray) -> list[list[float]]:
    """Share, interval over orders and captions, lowest, highest, of draws [draws, counts, captions]."""
    generator = np.random.default_rng(0)
    (orders, _, captions), drawn = draws.shape, []
    for _ in range(DRAWS):
        of_orders = draws[generator.integers(orders, size=orders)].mean(0)
        drawn.append(of_orders[:, generator.integers(captions, size=captions)].mean(1))
    of_draws = draws.mean(2)  # [draws, counts]
    ends = np.percentile(drawn, [2.5, 97.5], axis=0)
    columns = np.stack([of_draws.mean(0), *ends, of_draws.min(0), of_draws.max(0)], 1)
    return [rounded(row) for row in columns]


def heads_for_half(shares: Sequence[float], counts: Sequence[int], whole: float, none: float) -> int | None:
    """Return the fewest heads after which half of what the past gives is lost, or None."""
    half = (whole + none) / 2 + 1e-9  # shares are multiples of 1 / (captions x seeds): no rounding decides
    return next((count for count, share in zip(counts, shares, strict=True) if share <= half), None)


def curves_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Compute every order's curve from the seeds that come back in each condition.

    Of captions that do not name the shape's colour, whose answer the text cannot give; the ends and the
    effect's curve of the others beside them.
    """
    named = np.array([digit == "1" for digit in found["names_color"]])

    def answers(name: str, of: np.ndarray = ~named) -> np.ndarray:
        return np.array([int(digit) for digit in found["seeds_that_come_back"][name]])[of] / found["seeds"]

    def by_count(name: str, of: np.ndarray = ~named) -> np.ndarray:
        return np.stack([answers(f"{name}: {count}", of) for count in found["counts"]])

    def curve(shares: np.ndarray) -> list[list[float]]:
        return [rounded(bootstrap(row)) for row in shares]

    orders = {name: by_count(name) for name in ORDERS}
    random = np.stack([by_count(f"random {draw}") for draw in range(found["draws"])])
    means = {name: values.mean(1) for name, values in orders.items()} | {"random": random.mean((0, 2))}
    ends = {name: curve(answers(name)[None])[0] for name in ("base", "all")}
    paired = {name: curve(values - orders["effect"]) for name, values in orders.items() if name != "effect"}
    of_named = {name: curve(answers(name, named)[None])[0] for name in ends}
    return {
        "captions without colour": int((~named).sum()),
        "ends": ends,
        "curves": {name: curve(values) for name, values in orders.items()} | {"random": random_curve(random)},
        "more_than_by_effect": paired,
        "heads_for_half": {
            name: heads_for_half(each.tolist(), found["counts"], ends["base"][0], ends["all"][0])
            for name, each in means.items()
        },
        "colour named": {"ends": of_named, "effect": curve(by_count("effect", named))},
    }


def knockouts_of(report: Mapping[str, Any]) -> tuple:
    """Return counts, orders, random draws, ends, title and ceilings, for figures.knockout_curves."""
    found = report["knockouts"]
    curves = {name: np.array(rows) for name, rows in found["curves"].items()}
    orders = {label: curves[name] for name, label in ORDERS.items()}
    ends = np.array(found["ends"]["base"]), np.array(found["ends"]["all"])
    about = f"{found['captions without colour']} captions without its colour × {found['seeds']} seeds"
    title = f"Which heads bring a hidden shape back: {report['model']}, {about}"
    return found["counts"], orders, curves["random"], ends, title, found["ceilings"]


ALL, EACH = "all", "each"  # miniatures together, with an interval over them and captions, and their means
CEILINGS = "rendered", "VAE"


def budget_panels(report: Mapping[str, Any], window: int, sink: int) -> tuple:
    """Return panels, ceilings and subtitle, for figures.budget_curves, of a window and sink of other heads.

    panels: rule -> miniature, or all -> budget -> (share,), of all with its interval.
    """
    panels: dict[str, dict[str, dict[int, list[float]]]] = {}
    for claim, found in report["shares"].items():
        rule, *size = claim.split(", ")
        if size[1:] == [f"sink {sink}" if rule == "uniform" else f"{window} with sink {sink}"]:
            each = zip(report["miniatures"], found["same"][EACH], strict=True)
            for name, row in [(ALL, found["same"][ALL]), *((name, [share]) for name, share in each)]:
                if row[0] is not None:
                    panels.setdefault(rule, {}).setdefault(name, {})[int(size[0])] = row
    ceilings = {name: report["shares"][name]["same"][ALL][0] for name in (*CEILINGS, "base")}
    others = f"{window} frames" + f", {sink} of them a sink" * (sink > 0)
    return panels, ceilings, f"{_of_models(report)}; chosen heads keep the whole past, others {others}"


def _of_models(report: Mapping[str, Any]) -> str:
    count = len(report["miniatures"])
    return f"{report['model']}{f', {count} trainings' * (count > 1)}, {len(report['captions'])} captions"


def first_frame_report(found: Mapping[str, np.ndarray], layers: Sequence[int]) -> dict[str, Any]:
    """Report how attention predicts the effect of removing frame 0; found [prompts, layers, H] each."""
    effect, beyond = found["effect"], found["effect"] - found["control"]
    shape = effect.shape[1:]
    given = [np.broadcast_to(np.asarray(layers, float)[:, None], shape), found["norm"].mean(0)]
    measured = [name for name in found if name.endswith(("pass", "passes"))]
    labels = kinds(found["share of positive logits, first pass"].mean(0), Thresholds())
    by_kind, correlations = {}, {}
    for kind, name in KINDS.items():
        if count := int((labels == kind).sum()):
            mean = rounded(bootstrap(effect[:, labels == kind].mean(1)), 4)
            by_kind[name] = {"heads": count, "effect": mean}
    for name in measured:
        correlations[name] = {
            f"{partial}rho{suffix}": rounded(head_correlation(values, found[name], others))
            for suffix, values in (("", effect), ("_beyond_control", beyond))
            for partial, others in (("", ()), ("partial_", given))
        }
    above = [bootstrap(beyond[:, layer, head]).low > 0 for layer, head in np.ndindex(shape)]
    return {
        "prompts": len(effect),
        "layers": list(layers),
        "mean_effect": rounded(bootstrap(effect.mean((1, 2))), 4),
        "mean_control": rounded(bootstrap(found["control"].mean((1, 2))), 4),
        "floor": float(f"{found['floor'].mean():.2g}"),
        "heads_above_control": int(sum(above)),
        "kinds": by_kind,
        "correlations": correlations,
        "heads": {
            name: [[float(f"{value:.3g}") for value in row] for row in found[name].mean(0)]
            for name in ("effect", "control", "norm", *measured)
        },
    }


QUESTIONS = {name: name for name in ("background", "shape", "direction", "landmark")}  # of the tracker
QUESTIONS |= {"color": "colour", "crossing": "paths cross", "hides": "it hides"}
QUESTIONS |= {"comes_back": "it comes back", "same": "back in colour and shape"}


def changes_of(cache: Mapping) -> dict[str, np.ndarray]:
    """Return the effects of an effects cache [F] each, in units of the distance between seeds."""
    names = [name for name in ("direct", "own_block", "total", "floor") if name in cache]
    return {name.replace("_", " "): (cache[name] / cache["between_seeds"]).numpy() for name in names}


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

UNIT = "/ seeds"  # effects are in units of the distance between two seeds
S = "First-frame effect s"


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
        of_effects = {"Direct effect": self.effect} | self.controls
        maps = [HeadMap(name, name, UNIT, "sequential", values) for name, values in of_effects.items()]
        for name, values in self.measures.items():
            unit, scale = ("logits", "diverging") if name == S else ("share", "sequential")
            maps.append(HeadMap(name, name, unit, scale, values))
        return maps

    def correlations(self) -> dict[str, tuple[Interval, Interval]]:
        """ρ of every measure with the effect, and partial ρ given layer and ‖z‖."""
        layer = np.broadcast_to(np.arange(len(self.layers))[:, None], self.effect.shape)
        given = [layer] if self.norms is None else [layer, self.norms]
        return {
            name: (head_correlation(self.effects, values), head_correlation(self.effects, values, given))
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
    per_run = np.nanmean(cache["effects"].numpy(), -1)  # [R, N, H]
    names = {"frame_control": "On a random frame", "head_control": "On another head"}
    return HeadStudy(
        edits_in_words(cache["interventions"]),
        cache["layers"],
        np.stack([per_run[prompts == one].mean(0) for one in dict.fromkeys(cache["prompts"])]),
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
    same = cache["weights_sha256"] == causal["weights_sha256"] and cache["layers"] == causal["layers"]
    if not same or "interventions" in cache or "frame_mass" not in cache:
        return {}, None
    mass = open_profiles(cache, quantity="mass")
    profile, context = mass.profiles(), mass.context_frames
    past = np.nansum(profile[..., list(context)], -1)
    found = {"Mass on frame 0": first_frame_mass(profile, context)[0], "Mass on the past": past}
    if "frame_logits" not in cache:
        return found, None
    logits = open_profiles(cache, quantity="mean_logit")
    if (matrices := logits.frame_matrices()) is not None:
        found = {S: first_frame_effect(matrices, logits.block_sizes).effect} | found
    names = {**KINDS, ABSENT: "no kind"}
    labels = kinds(context_sign_rate(logits), Thresholds())
    return found, np.vectorize(names.__getitem__, otypes=[object])(labels)
