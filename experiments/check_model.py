"""Tell within a minute whether a model is right: compare its attention with published atlases, head by head.

python experiments/check_model.py
python experiments/check_model.py --frames 72 --output_path outputs/check_model.svg

Generates the published videos (two prompts, seed 42) and compares the mean logits of their first pass with
cache/published. The verdict is "agrees", "differs like another prompt" or "wrong"; wrong ends with exit code
1. Noise on a GPU depends on the kind of card, so several are tried. --reference FILE ... compares with other
atlases, such as your own of before. docs/real_model.md says how surely what is told.
"""

from dataclasses import replace
from pathlib import Path

from experiments.caches.files import RunError
from experiments.running.cli import config_from, main, refuse, run_parser
from wan.config import CARDS
from wan.errors import ConfigError

# The log of the published run names an L40. It may have been made on another card.
TRIED = ("L40", "released", *(card for card in CARDS if card != "L40"))
OF_REFERENCES = ("prompt", "seed", "num_frames", "step", "save_video", "cache_policy", "prompt_schedule")


def run(argv=None):
    parser = run_parser(__doc__, "outputs/check_model.svg")
    flag = parser.add_argument
    flag("--frames", type=int, choices=(21, 72), default=21, help="length of the published videos")
    flag("--reference", nargs="+", metavar="FILE", help="atlases to compare with; the published ones")
    args = parser.parse_args(argv)
    refuse(args, "the references say it", *OF_REFERENCES)

    from experiments.analysis import agreement, published  # after the flags: a --help needs no torch
    from experiments.analysis.first_frame import matrices
    from experiments.analysis.rope_waves import fitted_frequencies, last_block_context
    from experiments.analysis.tables import table
    from experiments.caches import load_cache
    from experiments.caches.view import open_profiles
    from experiments.extraction import cache_builders
    from experiments.figures.heads import HeadPair, heads_by_agreement
    from experiments.figures.style import save_svg
    from experiments.running.progress import observed
    from experiments.session import load

    config = replace(config_from(args), num_frames=args.frames)
    names = [f"self_forcing_dmd_{name}_{args.frames}f.pt" for name in ("eagle", "castle")]
    paths = [Path(path) for path in args.reference or [published.FOLDER / name for name in names]]
    caches = [load_cache(path, expect=("atlas",)) for path in paths]
    views = [open_profiles(cache) for cache in caches]
    for path, view in zip(paths, views, strict=True):
        if view.model != config.model or view.quantity != "mean_logit":
            raise ConfigError(
                f"{path} holds {view.quantity} of {view.model}, not mean logits of {config.model}; "
                "name an atlas of this model by --reference"
            )

    given = [cache.get("config", {}).get("noise", "seeded") for cache in caches]
    noises = TRIED if all(cache["weights"] == "published" for cache in caches) else given[:1]
    if config.noise != "seeded":
        noises = (config.noise,)
    configs = [
        replace(config, prompt=cache["prompt"], seed=cache["seed"], num_frames=cache["num_frames"])
        for cache in caches
    ]
    largest = max(configs, key=lambda one: one.num_frames)
    requests = cache_builders.atlas_requests(largest, mass=False, key_curve=False, cross=False)

    def closest(found: list[agreement.Comparison]) -> float:
        """Return how near the farther video is."""
        return min(one.median_r for one in found)

    best: list[agreement.Comparison] = []
    best_logits, best_noise = [], ""
    with observed(args) as watch:
        session = load(largest).prepare(requests, [one.prompt for one in configs], watch)
        for noise in noises:
            found, logits = [], []
            for one, view in zip(configs, views, strict=True):
                own = replace(one, noise=noise)
                made = session.generate(config=own, requests=requests, observer=watch)
                if made.stopped:
                    raise RunError(f"stopped after {made.stopped}: nothing was compared")
                ours = matrices(open_profiles(cache_builders.atlas_cache(made)))
                logits.append(ours)
                waves = fitted_frequencies(view, view.num_frames - view.block_sizes[-1])
                theirs = view.profiles(), view.frame_matrices()
                found.append(agreement.compare(ours, *theirs, view.block_sizes, waves))
            if not best or closest(found) > closest(best):
                best, best_logits, best_noise = found, logits, noise
            watch.print(f"noise {noise}: median r {closest(found):.3f}")
            if agreement.verdict(best) == agreement.VERDICTS[0]:
                break

    titles = [path.stem.removeprefix("self_forcing_dmd_") for path in paths]
    print(table(agreement.rows(dict(zip(titles, best, strict=True)), published.FIGURE4_HEADS)))
    worst = []
    for name, one, ours, view in zip(titles, best, best_logits, views, strict=True):
        context, _ = last_block_context(view.profiles(), view.block_sizes)
        mine = ours[..., -view.block_sizes[-1] :, : context.shape[-1]].mean(-2)
        for layer, head in one.worst(4):
            pair = (mine[layer, head], context[layer, head], one.r[layer, head])
            worst.append(HeadPair(f"{name}, L{view.layers[layer]}H{head}", *pair))
    curves = {name: one.r.ravel() for name, one in zip(titles, best, strict=True)}
    says = agreement.verdict(best)
    figure = heads_by_agreement(curves, worst, f"{config.model}, noise {best_noise}: {says}")
    print(save_svg(figure, args.output_path))
    if says == agreement.VERDICTS[2]:
        raise RunError(f"{config.model} is wrong: {agreement.MEANING[says]}")
    print(f"{config.model} {says}: {agreement.MEANING[says]}")


if __name__ == "__main__":
    main(run)
