"""Tables of what the miniature's videos show (experiments/evaluate_mini.py)."""

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
    return f"{of_captions(report['captions'])}\n\n{of_the_past(report['past'])}\n\n{below}"


def of_captions(captions: dict) -> str:
    header = ("videos that show", "colour", "shape", "background", "direction", "landmark, crossing, return")
    rows = []
    for name, part in captions.items():
        for source, words in SOURCES.items():
            answers = part["shares"][source]
            shown = [answers[q] for q in ("color", "shape", "background", "direction", OWN_QUESTION[name])]
            rows.append((f"{part['count']} captions, {name}: {words}", *(f"{x:.0%}" for x in shown)))
    return markdown(header, rows)


def of_the_past(past: list[dict]) -> str:
    header = (
        f"{past[0]['count']} shapes that go behind a wall; a block sees",
        *("hide", "come back", "in their colour", "as their shape", "all of it"),
    )
    questions = ("hides", "comes_back", "same_color", "same_shape", "same")
    return markdown(header, [(window(row), *(f"{row[q]:.0%}" for q in questions)) for row in past])


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
