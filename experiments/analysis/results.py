"""Results of experiments/findings, as notebooks and figures take them."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # scipy.stats is loaded by its first use
from PIL import Image

from experiments.analysis import stats
from experiments.caches.files import CacheError
from wan.errors import library_reads
from wan.files import read_json


def read_report(path: str | Path, finding: str) -> dict[str, Any]:
    """Read the results of a finding in experiments/findings. CacheError where there are none."""
    ours = f"experiments/findings/{finding}/results.json"
    form = f"those of the repository are in {ours}"
    return read_json(path, CacheError, form)


# --- Long rollouts under cache policies

PRIMARY = "right"
CONTROLS = {  # in words
    "frozen": "frozen first frame",
    "vae": "rendered, through the VAE",
    "rendered": "rendered scene",
}
TITLES = {
    "right": "Colour and shape right",
    "hue_kept": "Hues kept (1: all)",
    "motion": "Motion (sides per second)",
    "flicker": "Flicker (share of full scale)",
    "distance": "Distance to the first frames",
    "non_repetition": "Non-repetition",
    "largest_drop": "Largest drop towards the first frames",
}


class LongRollouts:
    """Policies by their short names, with intervals over prompts."""

    def __init__(self, findings: Mapping[str, Any]):
        self.findings = findings
        self.labels = {
            label: CONTROLS.get(label, entry["name"]) for label, entry in findings["policies"].items()
        }
        self.controls = [name for label, name in CONTROLS.items() if label in self.labels]
        self.shown_controls = [label for label in CONTROLS if label in self.labels]
        # Windows beside head-wise policies of as many bytes belong to the family too.
        beside = [of["window"] for of in findings.get("at_equal_bytes", {}).values()]
        self.family = list(dict.fromkeys(["full", *findings["against_full"], *beside]))
        self.mapped = [policy for policy, rows in findings["sink_map"].items() if rows]  # by window and sink
        videos = f"{findings['prompts']} held-out prompts × {findings['seeds']} seeds"
        self.subtitle = f"{findings['model']}, {findings['num_frames']} latent frames, {videos}"

    @classmethod
    def open(cls, path: str | Path) -> "LongRollouts":
        """Read findings. Raises CacheError for a missing file, or one that is no JSON."""
        report = read_report(path, "long_rollouts")
        with library_reads(f"{path}: results of long_rollouts", CacheError):
            return cls(report)

    def interval(self, label: str, measure: str = PRIMARY) -> stats.Interval:
        """A measure of a policy or control, mean over prompts."""
        return _interval(self.findings["policies"][label]["measures"][measure])

    def intervals(self, measure: str = PRIMARY) -> dict[str, stats.Interval]:
        """A measure of the family, a user's own policies and the controls, by short names."""
        return {
            self.labels[label]: self.interval(label, measure)
            for label in [*self.family, *self.shown_controls]
        }

    def by_kind(self, *kinds: str) -> dict[str, dict[str, stats.Interval]]:
        """The primary measure over all scenes, and over each kind of scene, by short names."""
        labels, policies = [*self.family, *self.shown_controls], self.findings["policies"]
        return {"all scenes": self.intervals()} | {
            kind: {self.labels[label]: _interval(policies[label]["by_kind"][kind]) for label in labels}
            for kind in kinds
        }

    @property
    def kinds(self) -> list[str]:
        """Names of the kinds of scenes that by_kind takes."""
        return list(self.findings["policies"]["full"]["by_kind"])

    def curves(self, measure: str) -> dict[str, dict[str, np.ndarray]]:
        """mean, low and high [seconds] of the policies and controls that are shown over time."""
        return {
            self.labels[label]: {key: np.array(values, float) for key, values in of[measure].items()}
            for label, of in self.findings["curves"].items()
        }

    def sink_map(self, policy: str) -> tuple[list[int], list[int], np.ndarray]:
        """Windows, sinks, and the measure [windows, sinks] in frames; NaN where there is no such policy."""
        rows = self.findings["sink_map"][policy]
        windows = sorted({row["window"] for row in rows})
        sinks = sorted({row["sink"] for of_policy in self.findings["sink_map"].values() for row in of_policy})
        # [windows, sinks]
        values = np.full((len(windows), len(sinks)), np.nan)
        for row in rows:
            values[windows.index(row["window"]), sinks.index(row["sink"])] = row[PRIMARY][0]
        return windows, sinks, values

    def costs(self) -> dict[str, tuple[float, float, float]]:
        """Megabytes of keys and values, milliseconds of a late block of one video, the primary measure."""
        costs = {}
        for label in self.family:
            cost = self.findings["policies"][label].get("cost")
            if cost is None:
                continue
            # A batch of videos is rolled out together: milliseconds of one of them.
            late = 1000 * cost["last_block_seconds"] / cost["batch"]
            costs[self.labels[label]] = (cost["cache_bytes"] / 1e6, late, self.interval(label).estimate)
        return costs

    def cost_title(self) -> str:
        """Say what the best policy and the largest cache cost, and how often each is right."""
        costs = self.costs()
        best = max(costs, key=lambda name: costs[name][2])
        largest = max(costs, key=lambda name: costs[name][0])
        form = "{} needs {:.0f} MB of keys and values and is right in {} of seconds"
        lines = [form.format(name, costs[name][0], stats.percent(costs[name][2])) for name in (best, largest)]
        return "; ".join(dict.fromkeys(lines))

    def motion_title(self) -> str:
        """Say that what stands still scores well, and which policy moves least."""
        motion = {name: value.estimate for name, value in self.intervals("motion").items()}
        right = self.intervals()
        still = min(motion, key=motion.__getitem__)
        right_still = stats.percent(right[still].estimate)
        title = f"{still.capitalize()}: right in {right_still} of seconds at a motion of "
        title += f"{motion[still]:.2f} sides per second"
        policies = [name for name in motion if name not in self.controls]
        least = min(policies, key=motion.__getitem__)
        return f"{title}; of the policies {least} moves least ({motion[least]:.2f})"

    def rows(self) -> list[dict[str, Any]]:
        """A row a policy: the primary measure, its parts, and the paired difference to full with its p.

        right counts seconds in which nothing is in sight as wrong; right | visible leaves them out.
        """
        rows = []
        for label in [*self.family, *self.shown_controls]:
            row = {"policy": self.labels[label]}
            row |= {name: str(self.interval(label, name)) for name in (PRIMARY, "visible", "motion")}
            # right seconds are among the visible ones: a ratio of means over videos
            shares = [self.interval(label, name).estimate for name in (PRIMARY, "visible")]
            row["right | visible"] = f"{shares[0] / shares[1]:.2f}"
            against = self.findings["against_full"].get(label)
            if against is not None:
                row["against full"] = str(_interval(against["difference"]))
                row |= {"p": against["p"], "adjusted": "no"}
                if against["p_holm"] is not None:
                    row |= {"p": against["p_holm"], "adjusted": "Holm"}
            rows.append(row)
        return rows

    def answers(self) -> list[dict[str, Any]]:
        """A row a question: the paired differences and their intervals."""
        rows = []
        for question, of in self.findings["questions"].items():
            right, motion = (str(_interval(of[measure]["difference"])) for measure in (PRIMARY, "motion"))
            rows.append({"question": question, "right": right, "p": of[PRIMARY]["p"], "motion": motion})
        return rows

    def equal_bytes(self, *kinds: str) -> list[dict[str, Any]]:
        """A row a head-wise policy: its difference to the window of nearly its bytes, also by kind."""
        rows = []
        for label, of in self.findings["at_equal_bytes"].items():
            row = {"policy": self.labels[label], "window": self.labels[of["window"]], "bytes": of["bytes"]}
            row |= {"difference": str(_interval(of["difference"]))}
            row |= {kind: str(_interval(of["by_kind"][kind])) for kind in kinds}
            rows.append(row | {"p (Holm)": of["p_holm"]})
        return rows


def read_strips(path: str | Path, results: str | Path) -> tuple[dict[str, np.ndarray], list[int], str, str]:
    """Read frames side by side by policy, uint8 [side, n · side, 3], their seconds, a title and a subtitle.

    A row's name has the policy's mean over all videos of the results, and the share of this video.
    """
    report, runs = read_report(path, "long_rollouts"), LongRollouts.open(results)
    rows, means = {}, {}
    for label, row in report["rows"].items():
        share = runs.interval(label).estimate
        if label not in CONTROLS:
            means[runs.labels[label]] = share
        name = f"{runs.labels[label]}\n{stats.percent(share)} ({stats.percent(row['right'])})"
        picture = Image.open(io.BytesIO(base64.b64decode(row["png"])))
        # [side, n · side, 3] uint8, a PNG of 32 colours
        rows[name] = np.asarray(picture.convert("RGB"))
    best, worst = (choose(means, key=means.__getitem__) for choose in (max, min))
    title = f"The shape stays right in {stats.percent(means[best])} of seconds 5 to 60 with {best}, in "
    title += f"{stats.percent(means[worst])} with {worst}"
    runs_of = f"mean over {runs.findings['prompts']} prompts × {runs.findings['seeds']} seeds"
    about = f"{report['model']}, “{report['prompt']}”, seed {report['seed']}; %: seconds 5 to 60 in which a "
    about += f"tracker finds colour and shape right, {runs_of}, in brackets of this video"
    return rows, report["seconds"], title, about


def read_effects(path: str | Path) -> tuple[dict[str, dict[int, stats.Interval]], dict[int, float], str]:
    """Read s by policy and length, the largest placebos under the whole past by length, and a subtitle."""
    report = read_report(path, "long_rollouts")
    effects: dict[str, dict[int, stats.Interval]] = {}
    for row in report["rows"]:
        effects.setdefault(row["policy"], {})[row["num_frames"]] = _interval(row["effect"])
    whole = [row for row in report["rows"] if row["policy"] == "full" and row["largest_placebo"] is not None]
    prompts = report["prompts"]
    subtitle = f"pass 0 (t = 1000), mean of all heads, {prompts} prompts; bands: bootstrap over prompts"
    if prompts < stats.ENOUGH_PROMPTS:
        subtitle += f", too narrow for fewer than {stats.ENOUGH_PROMPTS}"
    return effects, {row["num_frames"]: row["largest_placebo"] for row in whole}, subtitle


def _interval(values: Sequence[float | None]) -> stats.Interval:
    return stats.Interval(*np.array(values, float).tolist())  # None is NaN


# --- Memory of heads: how much of something is left when more and more heads lose their past

ALL, EACH = "all", "each"  # miniatures together, with an interval over them and captions, and their means
CEILINGS = "rendered", "VAE"
HEADS = {  # sets of presence_and_identity.json -> in words; P and I were chosen on other captions
    "nobody": "no head",
    "P": "8 presence heads",
    "random of P": "8 beside presence heads",
    "I": "8 identity heads",
    "random of I": "8 beside identity heads",
    "all": "all 96 heads",
}
CHOSEN = (HEADS["P"], HEADS["I"])
SETS_NOTE = "presence heads: those without whose past fewest shapes return; identity heads: those that read"
SETS_NOTE += " the colour most, both chosen on other captions; beside: others of the same layers"
HIDDEN = {  # question -> captions by their colour, edit, answer
    "Does a shape come back?": ("not named", "knockout", "comes_back"),
    "If one does, is it in its colour?": ("not named", "knockout", "right"),
}


def presence_panels(
    report: Mapping[str, Any],
    asked: Mapping[str, tuple[str, str, str]] = HIDDEN,
    heads: Sequence[str] = ("nobody", "P", "random of P", "all"),
) -> dict[str, dict[str, tuple]]:
    """Return panels for figures.knockout_shares of presence_and_identity.json: question -> set -> share."""
    panels = {}
    for question, (captions, edit, answer) in asked.items():
        rows = {HEADS[of]: report["shares"][captions][f"{edit}, {of}"][answer] for of in heads}
        panels[question] = {label: (*row["all"], row["each"]) for label, row in rows.items()}
    return panels


def hidden_shapes(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what figures.knockout_shares takes to draw which heads bring a hidden shape back."""
    panels = presence_panels(report)
    shares = report["shares"]["not named"]
    counts = {HEADS[of]: shares[f"knockout, {of}"]["returns"] for of in ("nobody", "P", "random of P", "all")}
    without, others = (next(iter(panels.values()))[HEADS[of]][0] for of in ("P", "random of P"))
    title = f"Without the past of 8 presence heads {stats.percent(without)} of hidden shapes come back"
    title += f"; without that of 8 others of their layers {stats.percent(others)}"
    return {
        "panels": panels,
        "counts": counts,
        "title": title,
        "subtitle": presence_runs(report, "not named"),
        "note": f"{SETS_NOTE}; n: videos in which a shape comes back",
        "chosen": CHOSEN,
    }


def presence_runs(report: Mapping[str, Any], captions: str) -> str:
    """Say of which runs presence_and_identity.json is, of captions by their colour."""
    trainings = report["trainings"]
    seeds = next(iter(trainings.values()))["seeds"]
    count = report["shares"][captions]["knockout, nobody"]["videos"] // seeds // len(trainings)
    about = f"wan-mini, {count} captions"
    if captions == "not named":
        about += " that do not name the colour"
    return f"{about} × {seeds} seeds, {len(trainings)} trainings"


def budget_panels(report: Mapping[str, Any], window: int, sink: int) -> tuple:
    """Return panels, subtitle and note, for figures.budget_shares, of a window and sink of other heads.

    panels: rule -> miniature, or all -> budget -> (share,), of all with its interval.
    """
    panels: dict[str, dict[str, dict[int, list[float]]]] = {}
    for claim, shares in report["shares"].items():
        rule, *size = claim.split(", ")
        others = f"{window} with sink {sink}"
        if rule == "uniform":
            others = f"sink {sink}"
        if size[1:] != [others]:
            continue
        # One value a miniature has no interval; "all" has one, over miniatures and captions.
        rows = {ALL: shares["same"][ALL]}
        for name, share in zip(report["miniatures"], shares["same"][EACH], strict=True):
            rows[name] = [share]
        for name, row in rows.items():
            if row[0] is not None:
                panels.setdefault(rule, {}).setdefault(name, {})[int(size[0])] = row
    others = f"{window} frames"
    if sink > 0:
        others += f", among them the first {sink}"
    runs = f"{len(report['miniatures'])} trainings, {len(report['captions'])} captions"
    about = f"{report['model']}, {runs}; chosen heads keep all past frames, others {others}"
    # The judge's answers of videos that no model made, and of the base model, bound what a share can be.
    bounds = {name: stats.percent(report["shares"][name]["same"][ALL][0]) for name in (*CEILINGS, "base")}
    note = "of the same judge: rendered videos {rendered}, these through the VAE {VAE}, whole past {base}"
    return panels, about, note.format(**bounds)


# --- Attribution patching against exact patching (experiments/findings/attribution)
STRONGEST = 24  # heads of a pair, a quarter of the miniature's


def attribution_pairs(report: Mapping[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return scores and effects of all heads [pairs, layers, heads], by what is compared."""
    compared = {
        "score, one pass": ("attribution", "exact"),
        "score at 5 points, one pass": ("integrated", "exact"),
        "score of all passes, rollout": ("attribution_of_all", "rollout"),
        "score of one pass, rollout": ("attribution", "rollout"),
        "exact patch of one pass, rollout": ("exact", "rollout"),
    }
    pairs = {}
    for name, columns in compared.items():
        rows = [pair for pair in report["pairs"] if all(column in pair for column in columns)]
        if rows:
            score, effect = (np.array([row[column] for row in rows]) for column in columns)
            pairs[name] = score, effect
    return pairs


def attribution_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return Spearman's ρ of each comparison, over all heads and over the strongest, and where both differ.

    "the first named": in how many pairs the head of the largest score is that of the largest effect; "of the
    first 5": the share of the five that are among the five. Sizes count, whatever their sign. Intervals are
    of 95 %, from resampling pairs of captions.
    """
    rows = []
    for name, (score, effect) in attribution_pairs(report).items():
        of_pairs = [stats.spearman(a.ravel(), b.ravel()) for a, b in zip(score, effect, strict=True)]
        # Of the strongest heads of a pair: ρ, and whether scores name them. [pairs, heads], strongest first
        flat = [-np.abs(x.reshape(len(x), -1)) for x in (score, effect)]
        by_score, by_effect = (np.argsort(x, -1, kind="stable") for x in flat)
        strongest = by_effect[:, :STRONGEST]
        of_strongest = stats.spearman(
            *(np.take_along_axis(x.reshape(len(x), -1), strongest, 1) for x in (score, effect))
        )
        both = zip(by_score[:, :5], by_effect[:, :5], strict=True)
        fives = [len(np.intersect1d(*heads)) / 5 for heads in both]
        means = score.mean(0), effect.mean(0)
        ranks = [scipy.stats.rankdata(mean).reshape(mean.shape) for mean in means]
        apart = np.abs(ranks[0] - ranks[1])
        order = np.dstack(np.unravel_index(np.argsort(-apart, axis=None)[:3], apart.shape))[0]
        rows.append(
            {
                "compared": name,
                "pairs": len(of_pairs),
                "ρ of a pair": str(stats.bootstrap(np.array(of_pairs))),
                "least": min(of_pairs),
                f"ρ of the {STRONGEST} strongest": str(stats.bootstrap(of_strongest)),
                "the first named": f"{(by_score[:, 0] == by_effect[:, 0]).mean():.0%}",
                "of the first 5": f"{np.mean(fives):.0%}",
                "ρ of the means": stats.spearman(means[0].ravel(), means[1].ravel()),
                "ranks apart": ", ".join(f"L{a}H{b} by {apart[a, b]:.0f}" for a, b in order),
            }
        )
    return rows
