"""Draw the figures of docs/miniature.md and of README: training, videos, base beside causal, heads and words.

    python experiments/miniature/figures.py
    python experiments/miniature/figures.py --layers cache/base/layer7.pt cache/causal/layer7.pt
    python experiments/miniature/figures.py --looks
    python experiments/miniature/figures.py --policies --output_dir docs/policies

The first draws the log in checkpoints/wan-mini/ and videos that are generated again; the second one layer of
two layer caches; the third where heads and words of one video look, with an mp4; the fourth the slots of
released cache policies. They write SVGs, into notebooks/figures/ if no folder is named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from einops import reduce
from matplotlib.figure import Figure
from PIL import Image

import experiments.figures.style as st
from experiments import capture, load
from experiments.analysis import axes, video_maps
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.captured import policy_atlas
from experiments.extraction import cache_builders
from experiments.figures import heads
from experiments.figures import video_maps as drawing
from experiments.miniature import SHIPPED, moving_shapes
from experiments.miniature.evaluation import Miniature
from experiments.running import cli
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.config import load_config
from wan.files import read_json, read_yaml

STRIPS = {"one shape": 3, "two that cross": 1, "behind a wall": 2}  # captions shown: the first of each set
STRIP_FRAMES = 7  # shown of 81, evenly
HEADS_SHOWN = 4  # of a layer of two caches: those that differ most
SMOOTHED = 7  # values of a loss that are averaged
CAPTION = "a red circle moving right over a dark blue background"
WORDS = ["circle", "red", "background"]
HEADS_THAT_FOLLOW = 3  # drawn, of all
QUERY_FRAME = 18  # whose patch looks
LOOK_FRAMES = [0, 3, 6, 9, 12, 15, 18]
POLICIES = [  # in configs/policies/
    *("self_forcing_window", "infinity_rope", "deep_sink", "deep_forcing"),
    *("reward_forcing", "memrope", "rolling_sink", "memflow"),
]
POLICY_FRAMES, POLICY_LAYER = 30, 2


def run(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--layers", nargs=2, metavar=("BASE", "CAUSAL"), help="layer caches: draw base above causal")
    flag("--looks", action="store_true", help="draw where three heads look, and where words lie")
    flag("--policies", action="store_true", help="draw the slots of cache policies (docs/policies.md)")
    flag("--output_dir", type=Path, default=Path("notebooks/figures"))
    flag("--overwrite", action="store_true", help="replace figures that were changed since")
    args = parser.parse_args(argv)
    if args.looks:
        figures = looks(args.output_dir / "where_heads_look.mp4", args.overwrite)
    elif args.layers:
        figures = {"base_and_causal_mini": base_and_causal(*args.layers)}
    elif args.policies:
        figures = {name: policy_slots(name) for name in POLICIES}
    else:
        figures = {"videos_mini": videos(), "training_mini": training()}
    for name, figure in figures.items():
        print(st.save_figure(figure, args.output_dir / f"{name}.svg", overwrite=args.overwrite))


def base_and_causal(*paths: str) -> Figure:
    """Draw a layer of base and of causal weights: heads of the largest mean absolute difference, by row."""
    base, causal = (open_profiles(load_cache(path, expect=("layer",))) for path in paths)
    (layer,) = base.layers
    of_base, of_causal = base.frame_matrix(layer), causal.frame_matrix(layer)
    assert of_base is not None and of_causal is not None
    both = {"base": of_base, "causal": of_causal}
    # [heads, F, F]
    difference = of_base - of_causal  # NaN in later blocks; softmax ignores a row's mean
    apart = np.abs(difference - np.nanmean(difference, -1, keepdims=True))
    shown = sorted(np.argsort(-np.nanmean(apart, (1, 2)))[:HEADS_SHOWN].tolist())
    matrices = np.concatenate([matrix[shown] for matrix in both.values()])
    names = [f"{weights}, H{head}" for weights in both for head in shown]
    about = f"base, {base.pass_label}; causal, {causal.pass_label}; the heads that differ most"
    caption = replace(causal.caption, subtitle=about, highlighted_frames={})
    largest = [float(np.nanmax(np.abs(matrix))) for matrix in both.values()]
    title = (
        f"Layer {layer}: logits reach {largest[0]:.0f} in the base model, {largest[1]:.0f} in the causal one"
    )
    return heads.frame_maps(matrices, range(base.num_frames), caption, layer=layer, heads=names, title=title)


def looks(movie: Path, overwrite: bool) -> dict[str, Figure]:
    """Draw what a patch of the circle looks at, by the three heads that follow it best, and where words lie.

    Writes an mp4 of the first figure's rows too. A head follows the circle as far as the root of its mass
    correlates with the tokens that the circle covers, over the frames before the query's block.
    """
    # 1. The video, with words; then again with the maps of one patch, in the first pass.
    session = load("wan_mini")
    grid = cache_builders.token_grid(session.config)
    with capture(session, words=WORDS) as captured:
        run = session.generate(CAPTION, seed=42)
    words = {word: values.numpy() for word, values in captured.words().items()}
    covered = covered_by_red(run.video.numpy(), grid)  # [F, rows, columns]
    row, column = np.unravel_index(covered[QUERY_FRAME].argmax(), grid)
    query = (QUERY_FRAME, int(row), int(column))
    requests = cache_builders.map_requests(session.config, grid, [query], steps=[0])
    cache = cache_builders.maps_cache(session.generate(CAPTION, seed=42, requests=requests), grid)
    # 2. The heads.
    correlations = {}
    for layer, head in product(cache["layers"], cache["heads"]):
        seen = video_maps.open_map(cache, layer, head)
        past = slice(seen.query_frames[0])
        roots = np.sqrt(np.nan_to_num(seen.values[past]))
        correlations[layer, head] = np.corrcoef(roots.ravel(), covered[past].ravel())[0, 1]
    best = sorted(correlations, key=lambda place: -correlations[place])[:HEADS_THAT_FOLLOW]
    rows = {
        f"L{layer} H{head}": video_maps.open_map(cache, layer, head).values for layer, head in sorted(best)
    }
    queries = dict.fromkeys(rows, query)
    rows['word "circle"'] = words["circle"]
    # 3. Pictures of twice as many pixels.
    video = enlarged(run.video.numpy())
    pictures = video[[0, *range(VIDEO_FRAMES_PER_LATENT, len(video), VIDEO_FRAMES_PER_LATENT)]]
    about = (
        f'rows 1 to 3: what a patch of frame {QUERY_FRAME} looks at; below: what each frame reads of "circle"'
    )
    drawing.save_rows_movie(movie, video, rows, overwrite)
    at_frames = {name: values[LOOK_FRAMES] for name, values in rows.items()}
    by_word = {f'"{word}"': words[word][LOOK_FRAMES] for word in WORDS}
    return {
        "where_heads_look": drawing.map_rows(
            at_frames,
            LOOK_FRAMES,
            pictures,
            title="Three heads and a word follow the circle",
            subtitle=about,
            queries=queries,
        ),
        "where_words_lie": drawing.map_rows(
            by_word,
            LOOK_FRAMES,
            pictures,
            title="Where the video reads each word",
            subtitle=f'"{CAPTION}"; mean over layers, heads and passes; wan-mini',
        ),
    }


def covered_by_red(video: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the share of each token that is red, float [F, rows, columns], of a video [n, h, w, 3] uint8."""
    is_red = video[..., 0].astype(int) - video[..., 2] > 60
    last = is_red[[0, *range(VIDEO_FRAMES_PER_LATENT, len(video), VIDEO_FRAMES_PER_LATENT)]]
    return reduce(last.astype(float), "f (r h) (c w) -> f r c", "mean", r=grid[0], c=grid[1])


def enlarged(video: np.ndarray) -> np.ndarray:
    """Return a video [n, h, w, 3] uint8 at twice as many pixels a side."""
    images = [Image.fromarray(pixels) for pixels in video]
    size = (2 * images[0].width, 2 * images[0].height)
    return np.stack([np.asarray(image.resize(size, Image.Resampling.LANCZOS)) for image in images])


def videos() -> Figure:
    """Draw strips of the first held-out captions of each set: rendered, few-step rollout, base model."""
    mini = Miniature(load_config("configs/wan_mini.yaml"))
    scenes = [
        scene
        for name, count in STRIPS.items()
        for scene in moving_shapes.held_out_scenes(moving_shapes.SETS[name], count)
    ]
    captions = [scene.caption for scene in scenes]
    rows = {
        "rendered": moving_shapes.render_videos(scenes, moving_shapes.FRAMES),
        "causal": mini.causal(captions),
        "base": mini.base(captions),
    }
    strips = {name: [v.permute(0, 2, 3, 1).numpy() for v in row] for name, row in rows.items()}
    # Of all held-out captions, by the judge (experiments/evaluate_mini.py)
    of_sets = read_json(SHIPPED / "evaluation.json")["captions"].values()
    right = {name: np.mean([of["shares"][name]["shape"] for of in of_sets]) for name in ("causal", "base")}
    count = sum(of["count"] for of in of_sets)
    title = (
        f"In {right['causal']:.0%} of {count} held-out captions the causal model draws the right shapes, the "
        f"base model in {right['base']:.0%}"
    )
    subtitle = (
        f"wan-mini; {len(captions)} of them: the rendered scene, the causal model in 4 steps, the base model"
    )
    return video_strips(captions, strips, title, subtitle)


def policy_slots(name: str) -> Figure:
    """Draw which frames the slots of the cache hold at every block, under a policy of configs/policies/."""
    config, policy = "configs/wan_mini.yaml", read_yaml(f"configs/policies/{name}.yaml")
    atlas = policy_atlas(config, policy, POLICY_FRAMES)
    slots = axes.slots_of(atlas, POLICY_LAYER)
    return heads.slot_map(*slots, POLICY_FRAMES, name, open_profiles(atlas).caption.source)


def training() -> Figure:
    """Draw losses of the stages and PSNR of the VAE, from the log of the shipped weights."""
    log = read_json(SHIPPED / "training.json")
    # 1. PSNR of the VAE: its first run, and a second one from the first one's weights.
    first_run, second_run = log["vae"], log["vae_resumed"]
    psnr = _psnr_curve(first_run)
    for step, *values in _psnr_curve(second_run)[1:]:  # it begins at the first one's end
        psnr.append([first_run["steps"] + step, *values])
    # 2. Losses of each stage, of which some were run twice.
    losses = {}
    for stage, name in (("vae", "VAE"), ("base", "base"), ("causal", "causal"), ("few_step", "few-step")):
        runs = [log[key] for key in (f"{stage}_first", stage) if key in log]
        losses[name] = [run["loss_curve"] for run in runs]
    return training_curves(losses, psnr, first_run["steps"], "wan-mini, the stages of the shipped weights")


def _psnr_curve(run: Mapping[str, Any]) -> list[list[float]]:
    """Return [step, all, first second, last second] of a run of the VAE; the last point is of more clips."""
    last = [run[name] for name in ("steps", "psnr", "psnr_first_second", "psnr_last_second")]
    return [*run["psnr_curve"], last]


# --- Arrays -> figures
@st.styled
def training_curves(
    losses: Mapping[str, Sequence[Sequence]],
    psnr: Sequence[Sequence[float]],
    resumed: int | None,
    subtitle="",
) -> Figure:
    """Draw the losses of each stage, and the PSNR of the VAE on held-out clips.

    losses are runs of [step, seconds, loss] by the stage's name, dashed but for the last run; psnr is
    [step, all, first second, last second]. resumed is the step at which the VAE's second run begins.
    """
    figure, (left, right) = st.panels(2, 2, (3.8, 2.4))
    half = SMOOTHED // 2
    for (name, runs), color in zip(losses.items(), st.series(len(losses)), strict=True):
        for curve in runs:
            _, seconds, loss = np.array(curve).T
            share = seconds / seconds[-1]
            # A running geometric mean: the axis is logarithmic
            smooth = np.exp(np.convolve(np.log(loss), np.ones(SMOOTHED) / SMOOTHED, "valid"))
            if curve is runs[-1]:
                left.plot(share[half:-half], smooth, color=color, label=f"loss, {name}")
                left.plot(share, loss, color=color, linewidth=0.7, alpha=0.35)
            else:
                left.plot(share[half:-half], smooth, "--", color=color)
    left.set(yscale="log", xlabel="Share of the run's time", ylabel="Loss (log scale)")
    left.set_title("Loss of each stage")
    left.yaxis.set_major_formatter("{x:g}")  # not by powers of ten: text of figures is no formula
    steps, *curves = np.array(psnr).T
    # The three are nearly alike: narrow lines lie on wide ones
    looks = zip(curves, ("81 frames", "first second", "last second"), (5, 3, 1), strict=True)
    for (values, name, width), color in zip(looks, reversed(st.series(3)), strict=True):
        right.plot(steps, values, color=color, linewidth=width, label=name)
    if resumed is not None:
        right.axvline(resumed, color=st.DARK, linestyle=":", linewidth=1, label="second run begins")
    right.set(xlabel="Step of the VAE", ylabel="PSNR (dB)", title="The VAE on held-out clips")
    legend = st.handles(left) | st.handles(right)
    _, whole, _, last_second = psnr[-1]
    title = (
        f"The VAE rebuilds held-out clips at {whole:.1f} dB, and their last second at {last_second:.1f} dB"
    )
    note = f"thick: mean of {SMOOTHED} values, pale: single ones; dashed: an earlier run of the stage"
    st.label_figure(figure, [], title, subtitle, legend=legend, note=note)
    return figure


@st.styled
def video_strips(
    captions: Sequence[str], rows: Mapping[str, Sequence[np.ndarray]], title="Videos", subtitle=""
) -> Figure:
    """Draw under each caption a strip of frames a source: source -> videos [F, H, W, 3] in 0..1."""
    room = len(st.columns_with_room(2 * STRIP_FRAMES, 0.55, beside=1.2))
    count = min(STRIP_FRAMES, room)
    chosen = np.linspace(0, len(next(iter(rows.values()))[0]) - 1, count).round().astype(int)
    size = (0.6 * count + 0.6, 0.62 * len(rows) + 0.4)
    figure, axes = st.panels(len(captions), room // STRIP_FRAMES or 1, size, keep=True)
    edge = ((0, 0), (1, 1), (1, 1), (0, 0))
    for axis, (i, caption) in zip(axes, enumerate(captions), strict=True):
        shown = [np.pad(videos[i][chosen], edge, constant_values=1) for videos in rows.values()]
        # [rows · H, frames · W, 3]
        picture = np.concatenate([np.concatenate([*strip], 1) for strip in shown])
        height, width = picture.shape[0] / len(rows), picture.shape[1] / len(chosen)
        # Five bits of a colour are enough, and an SVG packs them twice as well.
        st.show_picture(axis, np.round(31 * picture) / 31)
        axis.set_yticks([(n + 0.5) * height for n in range(len(rows))], list(rows))
        if i >= len(captions) - 2:  # frame numbers under the lowest strip of each column
            axis.set_xticks([(n + 0.5) * width for n in range(len(chosen))], [str(f) for f in chosen])
            axis.set_xlabel("Video frame", fontsize=st.SMALL, labelpad=1)
        axis.set_title(caption, fontsize=st.SMALL)
    st.label_figure(figure, [], title, subtitle)
    return figure


if __name__ == "__main__":
    cli.main(run)
