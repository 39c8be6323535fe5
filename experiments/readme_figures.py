"""Draw the figures that the README shows, into notebooks/figures/.

    python experiments/readme_figures.py --mini_cache cache/atlas.pt

The real model's are made from cache/published/; the miniature's from a cache of its own, where one is given.
"""

from pathlib import Path

from matplotlib.figure import Figure

from experiments import atlas_figures, figures, published, reports, survey, taxonomy
from experiments.caches import load_cache
from experiments.cli import Parser, main
from experiments.profiles import Profiles, open_profiles

FOLDER = Path("notebooks/figures")
SHORT, LONG = (published.FOLDER / f"self_forcing_dmd_eagle_{F}f.pt" for F in (21, 72))


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--mini_cache", help="a figure4 or atlas cache of the miniature, with --key_curve")
    parser.add_argument("--output_dir", type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    short, long = open_profiles(load_cache(SHORT)), open_profiles(load_cache(LONG))
    drawn = {
        "figure4_published.svg": figure4(short, published.FOLDER / published.FIGURE4_CSV),
        "sink_or_wave_published.svg": sink_or_wave(long),
        "kinds_of_heads_published.svg": kinds_of_heads(short),
    }
    if args.mini_cache:
        drawn["figure4_mini.svg"] = figure4(open_profiles(load_cache(args.mini_cache, expect=("figure4", "atlas"))), None)
    for name, figure in drawn.items():
        print(figures.save_svg(figure, args.output_dir / name))


def figure4(view: Profiles, curves_csv: Path | None) -> Figure:
    """The heads of the paper's Figure 4, over the paper's own curves where they are given."""
    curves, _ = published.curves_for(view, curves_csv, published.FIGURE4_MODEL)
    panels, _ = reports.choose_heads(view, published.FIGURE4_HEADS)
    return figures.head_curves(reports.with_reference(panels, view, curves), **view.caption)


def sink_or_wave(view: Profiles) -> Figure:
    """The older score beside the excess at equal distance, on one scale."""
    wanted = ("first_minus_middle", "equal_distance_excess")
    maps = [one for one in survey.survey(view, None) if one.name in wanted]
    return atlas_figures.head_maps(maps, view.layers, taken=view.caption["taken"])


def kinds_of_heads(view: Profiles) -> Figure:
    """Anchor, wave and veil by our rule beside the published labels."""
    thresholds = taxonomy.load_thresholds("configs/taxonomy.yaml")
    maps = survey.label_maps(view, None, thresholds, published.labels_for(view))[:2]
    return atlas_figures.label_maps(maps, view.layers, taken=view.caption["taken"])


if __name__ == "__main__":
    main(run)
