"""Frames of long videos side by side, a row a policy, small enough to be kept beside the findings.

    python experiments/dev/long_rollout_strips.py outputs/policies/videos

Takes the mp4s that compare_policies.py kept of one prompt, and what comparison.json beside their folder says
of them. Writes docs/long_rollouts_strips.json, a PNG of
few colours a policy, which the notebook draws, and the README's strip of full against sinks, an SVG.
"""

import base64
import io
from pathlib import Path

from experiments.running.cli import Parser, main, whole_number
from wan.errors import ConfigError
from wan.files import read_json

SECONDS = (0, 2, 5, 10, 15, 20, 30, 40, 50, 59)
ROWS = {  # label -> what the figure calls it
    "full": "full",
    "window,window=9": "window 9, no sink",
    "window,window=9,sink=3": "window 9, sink 3",
    "deep_sink,window=21,sink=10": "deep sink 21/10",
    "participative,window=21,sink=10,budget=16,recent=4": "participative 21/10",
    "vae": "rendered, through the VAE",
}
README_ROWS = ("full", "window 9, no sink", "window 9, sink 3", "deep sink 21/10")
COLOURS, FPS, SIDE = 32, 16, 64


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("videos", help="folder of mp4s, LABEL_PROMPT.mp4")
    parser.add_argument("--number", type=whole_number, default=0, help="which prompt")
    parser.add_argument("--output_path", default="docs/long_rollouts_strips.json", help="the strips")
    parser.add_argument("--figure", default="notebooks/figures/long_rollouts.svg", help="the README's strip")
    args = parser.parse_args(argv)

    from experiments.caches.files import require_ffmpeg, require_writable
    from experiments.dev.tables import save_report

    found = {name: Path(args.videos) / f"{label}_{args.number}.mp4" for label, name in ROWS.items()}
    found = {name: path for name, path in found.items() if path.is_file()}
    if not found:
        raise ConfigError(f"{args.videos} holds no videos of compare_policies.py; run it with --videos 1")
    about = of_videos(read_json(Path(args.videos).parent / "comparison.json"), args.number)
    for path in (args.output_path, args.figure):
        require_writable(path)
    require_ffmpeg()
    strips = {name: strip(path) for name, path in found.items()}
    rows = {name: base64.b64encode(content).decode() for name, content in strips.items()}
    save_report(about | {"seconds": list(SECONDS), "side": SIDE, "rows": rows}, args.output_path)
    print(draw(args.output_path, args.figure))


def of_videos(comparison: dict, number: int) -> dict:
    """Prompt, seed and weights of the videos that a comparison kept of a prompt: its first seed's."""
    try:
        prompt = comparison["prompts"][number]
        seed = next(video["seed"] for video in comparison["videos"] if video["prompt"] == prompt)
        return {"prompt": prompt, "seed": seed, "weights_sha256": comparison["weights_sha256"]}
    except (KeyError, IndexError, StopIteration) as error:
        raise ConfigError(f"comparison.json has no prompt {number} ({type(error).__name__})") from None


def strip(path: Path) -> bytes:
    """A PNG of the chosen seconds of a video beside each other."""
    import imageio.v3 as iio
    import numpy as np
    from PIL import Image

    video = iio.imread(path)
    scale = video.shape[1] // SIDE
    frames = [video[min(second * FPS, len(video) - 1), ::scale, ::scale] for second in SECONDS]
    content = io.BytesIO()
    picture = Image.fromarray(np.concatenate(frames, 1)).quantize(COLOURS)
    picture.save(content, "PNG", optimize=True)
    return content.getvalue()


def draw(strips: str, path: str) -> Path:
    """The README's figure."""
    from experiments import figures
    from experiments.analysis.long_rollouts import read_strips

    videos, seconds, about = read_strips(strips)
    chosen = {name: videos[name] for name in README_ROWS if name in videos}
    return figures.save_svg(figures.long_strips(chosen, seconds, about), path)


if __name__ == "__main__":
    main(run)
