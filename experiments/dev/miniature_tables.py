"""Tables of what the miniature's videos show (experiments/evaluate_mini.py)."""

from collections.abc import Sequence

from experiments.dev.tables import markdown, measured_on

SOURCES = {
    "rendered": "rendered",
    "vae": "through the VAE",
    "causal": "causal, 4 steps",
    "base": "base, 50 steps, guided",
}
OWN_QUESTION = {"one shape": "landmark", "two that cross": "crossing", "behind a wall": "comes_back"}


def table(report: dict) -> str:
    """What videos of held-out captions show, and what the past of a block is good for."""
    vae = report["vae"]
    psnr = (
        f"VAE on {vae['clips']} held-out clips of 81 frames: {vae['psnr']:.1f} dB, first second "
        f"{vae['psnr_first_second']:.1f}, last {vae['psnr_last_second']:.1f}."
    )
    below = f"{psnr} {measured_on(report['environment'])}"
    tables = [of_captions(report["captions"]), of_the_past(report["past"])]
    if "long" in report:  # older reports have none
        tables.append(of_long_videos(report["long"]))
    return "\n\n".join([*tables, below])


def of_captions(captions: dict) -> str:
    header = ("videos that show", "colour", "shape", "background", "direction", "landmark, crossing, return")
    rows = []
    for name, part in captions.items():
        for source, words in SOURCES.items():
            if source not in part["shares"]:
                continue  # evaluated with --no-base
            sure = part.get("intervals", {}).get(source, {})  # older reports have none
            questions = ("color", "shape", "background", "direction", OWN_QUESTION[name])
            cells = [percent(part["shares"][source][q], sure.get(q)) for q in questions]
            rows.append((f"{part['count']} videos, {name}: {words}", *cells))
    return f"{markdown(header, rows)}\n\n{distinct(captions)}"


def distinct(captions: dict) -> str:
    """How many captions the videos of each set are of: some are drawn twice, with another seed."""
    counts = [f"{len({one['caption'] for one in part['each']})} ({name})" for name, part in captions.items()]
    return (
        f"Distinct captions: {', '.join(counts)}. Intervals (95 %, Wilson) take videos of the same caption "
        "as independent."
    )


def of_the_past(past: list[dict]) -> str:
    header = (
        f"{past[0]['count']} shapes that go behind a wall; a block sees",
        *("hide", "come back", "in their colour", "as their shape", "all of it"),
    )
    questions = ("hides", "comes_back", "same_color", "same_shape", "same")
    rows = [
        (window(row), *(percent(row[q], row.get("intervals", {}).get(q)) for q in questions)) for row in past
    ]
    return markdown(header, rows)


def of_long_videos(sets: dict) -> str:
    """A minute of each set through the VAE: dB at both ends, and the seconds that are right of those that
    can be judged."""
    first = next(iter(sets.values()))
    header = (
        f"{first['count']} videos of {first['seconds']} s of each set, through the VAE",
        *("first second", "last second", "right, rendered", "right, through the VAE"),
    )
    rows = [
        (
            name,
            *(f"{part['psnr'][end]:.1f} dB" for end in ("first_second", "last_second")),
            *(percent(part[source]["right"]) for source in ("rendered", "vae")),
        )
        for name, part in sets.items()
    ]
    return markdown(header, rows)


def percent(share: float, interval: Sequence[float] | None = None) -> str:
    """67%, or 67% (47-82) with a 95 % interval."""
    return f"{share:.0%}" + (f" ({100 * interval[0]:.0f}-{100 * interval[1]:.0f})" if interval else "")


def window(row: dict) -> str:
    """The past that a rollout's blocks see, in words."""
    size, sink = row["local_attn_size"], row["sink_size"]
    if size < 0:
        return "all of its past"
    return (
        f"{size} frames, its own 3 among them" + (f", the first {sink} too" if sink else "")
        if size > 3
        else "itself alone"
    )
