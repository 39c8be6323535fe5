"""How a video changes as it goes on, in numbers that need no network.

Videos are uint8 [T, H, W, 3]. A frozen first frame is perfect by every measure of stability: it is the
control, and motion stands beside them.

    policy_rows(json["videos"])        # of the comparison.json of compare_policies.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.analysis import stats
from experiments.caches.files import Record
from wan.errors import ConfigError

# --- Optical flow of two frames by polynomial expansion (Farnebäck, SCIA 2003)
EXPANSION, SMOOTHING = 1.5, 3.0  # pixels: widths of the Gaussians of the fit and of the neighbourhood
ITERATIONS = 4
FLAT = 1e-6  # squared curvature, in grey levels of 0..1 per square pixel: what is flatter counts as at rest


def flow(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Estimate the displacement (x, y) in pixels of grey frames [..., H, W] in 0..1 -> [..., H, W, 2]."""
    before, after = _expansion(first), _expansion(second)
    height, width = first.shape[-2:]
    row, column = np.arange(height)[:, None], np.arange(width)
    shift = np.zeros((*first.shape, 2))
    for _ in range(ITERATIONS):
        # 1. The second frame is read at whole pixels of the estimate so far; its rest is estimated again.
        whole = np.rint(shift).astype(int)
        rows = np.clip(row + whole[..., 1], 0, height - 1)
        columns = np.clip(column + whole[..., 0], 0, width - 1)
        pixels = (rows * width + columns).reshape(*first.shape[:-2], -1, 1)
        flat = after.reshape(*after.shape[:-3], height * width, after.shape[-1])
        moved = np.take_along_axis(flat, pixels, -2).reshape(after.shape)
        # 2. Both frames' curvatures are averaged, as the paper's A(x) = (A1 + A2) / 2.
        xx, yy, xy = np.moveaxis((before[..., 2:] + moved[..., 2:]) / 2, -1, 0)
        dx = (before[..., 0] - moved[..., 0]) / 2 + xx * whole[..., 0] + xy / 2 * whole[..., 1]
        dy = (before[..., 1] - moved[..., 1]) / 2 + xy / 2 * whole[..., 0] + yy * whole[..., 1]
        xy = xy / 2  # A = [[xx, xy], [xy, yy]]
        # 3. Least squares over a neighbourhood: shift = (sum A^T A)^-1 sum A^T db. Where nothing curves the
        #    motion is unknown: FLAT draws it to 0.
        g11 = _blurred(xx * xx + xy * xy) + FLAT
        g12 = _blurred(xy * (xx + yy))
        g22 = _blurred(yy * yy + xy * xy) + FLAT
        h1 = _blurred(xx * dx + xy * dy)
        h2 = _blurred(xy * dx + yy * dy)
        determinant = g11 * g22 - g12 * g12
        shift = np.stack([g22 * h1 - g12 * h2, g11 * h2 - g12 * h1], -1) / determinant[..., None]
    return shift


def _expansion(frames: np.ndarray) -> np.ndarray:
    """Coefficients [..., H, W, 5] of x, y, x², y², xy, weighted by a Gaussian around every pixel."""
    offsets, weights = _gaussian(EXPANSION)
    # 1. Moments of the picture around every pixel: sums of weight · x^i · y^j · grey.
    kernels = [weights * offsets**power for power in range(3)]
    moments_of_y = [_along(frames, kernel, -2) for kernel in kernels]
    basis = ((0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1))  # powers of x and y: 1, x, y, x², y², xy
    moments = np.stack([_along(moments_of_y[j], kernels[i], -1) for i, j in basis], -1)
    # 2. The Gram matrix of the basis under the weights turns moments into coefficients.
    gaussian_moments = [(weights * offsets**power).sum() for power in range(5)]
    gram = np.zeros((len(basis), len(basis)))
    for row, (i, j) in enumerate(basis):
        for column, (k, m) in enumerate(basis):
            gram[row, column] = gaussian_moments[i + k] * gaussian_moments[j + m]
    coefficients = moments @ np.linalg.inv(gram).T
    return coefficients[..., 1:]


def _blurred(x: np.ndarray) -> np.ndarray:
    _, kernel = _gaussian(SMOOTHING)
    return _along(_along(x, kernel, -1), kernel, -2)


def _gaussian(width: float) -> tuple[np.ndarray, np.ndarray]:
    """Offsets in pixels and weights of sum 1, to three widths."""
    radius = int(np.ceil(3 * width))
    offsets = np.arange(-radius, radius + 1.0)
    weights = np.exp(-(offsets**2) / (2 * width**2))
    return offsets, weights / weights.sum()


def _along(x: np.ndarray, kernel: np.ndarray, axis: int) -> np.ndarray:
    """Correlation of x with a kernel along one of its last two axes; the border's pixels go on beyond it."""
    size, radius = x.shape[axis], len(kernel) // 2
    pixels = np.clip(np.arange(size)[:, None] + np.arange(-radius, radius + 1), 0, size - 1)
    matrix = np.zeros((size, size))  # a product with it is sooner done than a sum of shifted pictures
    np.add.at(matrix, (np.arange(size)[:, None], pixels), kernel)
    if axis == -2:
        return matrix @ x
    return x @ matrix.T


FPS = 16
HUE_BINS = 180
FIRST_FRAMES = 9  # of the video: its first block of three latent frames
ENDS = 0.15  # shares of the video at its beginning and end that are compared
FLOW_SIDE = 128  # pixels of the shorter side, at most, on which motion is measured
FLOW_EVERY = 8  # frames from one measured pair of neighbours to the next
FASTEST = 0.05  # share of the pixels whose motion is averaged
# Units, and which direction is good. The functions below have the formulas.
MEASURES = {
    "hue_kept": "share, higher is better",
    "sharpness": "(grey levels / 255)²",
    "clipped": "share of values, lower is better",
    "flicker": "share of full scale, lower is better",
    "motion": "sides per second",
    "distance": "share of full scale, lower is better",
}
SUMMARIES = {
    "sharpness_change": "octaves",
    "clipped_change": "share of values, lower is better",
    "flicker_change": "share of full scale, lower is better",
    "largest_drop": "share of full scale, lower is better",
    "non_repetition": "share of full scale, higher is better",
}


def per_second(video: np.ndarray) -> dict[str, np.ndarray]:
    """Compute every measure of MEASURES for each whole second of uint8 [T, H, W, 3] -> [seconds] each."""
    require_pixels(video)
    by_frame = {"sharpness": sharpness(video), "clipped": clipped(video), "distance": distance(video)}
    by_frame["flicker"] = np.append(flicker(video), np.nan)  # the last frame has no next one
    whole = len(video) // FPS
    seconds = {name: np.nanmean(x[: whole * FPS].reshape(-1, FPS), 1) for name, x in by_frame.items()}
    seconds |= {"hue_kept": hue_kept(video), "motion": motion(video)}
    return {name: seconds[name] for name in MEASURES}


def summaries(video: np.ndarray) -> dict[str, float]:
    """Compute every measure of SUMMARIES of a video uint8 [T, H, W, 3]."""
    require_pixels(video)
    first_clipped, last_clipped = ends(clipped(video))
    first_flicker, last_flicker = ends(flicker(video))
    return {
        "sharpness_change": sharpness_change(video),
        "clipped_change": last_clipped - first_clipped,
        "flicker_change": last_flicker - first_flicker,
        "largest_drop": largest_drop(distance(video)),
        "non_repetition": non_repetition(video),
    }


def require_pixels(video: np.ndarray) -> None:
    """Raise ConfigError for what is no uint8 [T, H, W, 3]: of values in 0..1 every measure would be wrong."""
    if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3:
        shape = [*video.shape]
        raise ConfigError(f"a video is uint8 [T, H, W, 3], 0 to 255, not {video.dtype} {shape}")


def ends(values: np.ndarray) -> tuple[float, float]:
    """Return the means of the beginning and of the end of values by frame; NaN without a value."""
    if not len(values):
        return float("nan"), float("nan")
    count = max(1, round(ENDS * len(values)))
    return float(values[:count].mean()), float(values[-count:].mean())


def sharpness_change(video: np.ndarray) -> float:
    """Return how much sharper the end is than the beginning, in octaves."""
    first, last = ends(sharpness(video))
    if last == first:
        return 0.0
    with np.errstate(divide="ignore"):
        return float(np.log2(np.divide(last, first)))


def sharpness(video: np.ndarray) -> np.ndarray:
    """Variance of the Laplacian of luma -> [T]."""
    variances = []
    for start in range(0, len(video), FPS):  # a long video would not fit as floats
        grey = luma(video[start : start + FPS])
        around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
        laplacian = around - 4 * grey[:, 1:-1, 1:-1]
        variances.append(laplacian.var((1, 2)))
    return np.concatenate(variances)


def clipped(video: np.ndarray) -> np.ndarray:
    """Share of values at the ends of the scale -> [T]."""
    return ((video <= 1) | (video >= 254)).mean((1, 2, 3))


def flicker(video: np.ndarray) -> np.ndarray:
    """Mean absolute difference to the next frame, in shares of full scale -> [T − 1]."""
    parts = [video[start : start + FPS + 1].astype(np.float32) for start in range(0, len(video) - 1, FPS)]
    changes = [np.abs(np.diff(part, axis=0)).mean((1, 2, 3)) / 255 for part in parts]
    return np.concatenate([np.empty(0, np.float32), *changes])  # one frame has no next one


def distance(video: np.ndarray) -> np.ndarray:
    """Mean over the first frames of the root mean square difference to them -> [T]."""
    first = video[:FIRST_FRAMES].astype(np.float32) / 255
    return np.array([_rms(first, frame.astype(np.float32) / 255).mean() for frame in video])


def hue_kept(video: np.ndarray) -> np.ndarray:
    """Intersection of each second's hue histogram with that of the first second -> [seconds]."""
    whole, pixels = len(video) // FPS, FPS * video.shape[1] * video.shape[2]
    histograms = [hue_histogram(second) for second in video[: whole * FPS].reshape(whole, pixels, 3)]
    return np.array([1 - np.abs(histograms[0] - h).sum() / 2 for h in histograms])


def hue_histogram(pixels: np.ndarray) -> np.ndarray:
    """Hues of pixels [n, 3] in 180 bins, weighted by saturation; sum 1. Bin 181: no colour at all."""
    rgb = pixels.astype(np.float32)
    top, bottom = rgb.max(1), rgb.min(1)
    chroma = top - bottom
    coloured = chroma > 0
    r, g, b = rgb[coloured].T
    top, chroma = top[coloured], chroma[coloured]
    # HSV hue in sixths of a turn, 0..6; where two channels tie, red comes before green before blue.
    hue = np.where(top == r, (g - b) / chroma, np.where(top == g, 2 + (b - r) / chroma, 4 + (r - g) / chroma))
    bins = (hue % 6 * (HUE_BINS / 6)).astype(int) % HUE_BINS
    # Saturation is the weight: the hue of grey says nothing.
    histogram = np.bincount(bins, chroma / top, HUE_BINS + 1)
    histogram[HUE_BINS] = 0 if histogram.sum() > 0 else 1
    return histogram / histogram.sum()


def motion(video: np.ndarray) -> np.ndarray:
    """Length of the flow of the fastest pixels, in shorter sides per second -> [seconds]."""
    # Large videos are averaged down first: motion is in sides per second, whatever their size.
    scale = max(1, min(video.shape[1:3]) // FLOW_SIDE)
    height, width = (side // scale for side in video.shape[1:3])
    speeds = []
    for start in range(0, len(video) // FPS * FPS, FPS):
        grey = luma(video[start : start + FPS + 1])[:, : height * scale, : width * scale]
        small = grey.reshape(len(grey), height, scale, width, scale).mean((2, 4))
        # [frames, h, w] grey -> pairs of neighbours, every eighth.
        pairs = np.arange(0, len(small) - 1, FLOW_EVERY)
        lengths = np.linalg.norm(flow(small[pairs], small[pairs + 1]), axis=-1).reshape(len(pairs), -1)
        # A small object moves few pixels: the mean of all would be the background's.
        fastest = np.sort(lengths, 1)[:, -max(1, int(FASTEST * lengths.shape[1])) :]
        speeds.append(fastest.mean() * FPS / min(height, width))
    return np.array(speeds)


def largest_drop(distances: np.ndarray) -> float:
    """Return how far the distance [T] to the first frames falls within a second, at most."""
    # [T, 17]: each frame with the second that follows it, which the end of the video cuts short.
    padded = np.pad(distances, (0, FPS), constant_values=np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, FPS + 1)
    return float((windows[:, 0] - windows.min(1)).max())


def non_repetition(video: np.ndarray) -> float:
    """Distance between the beginning and what follows the later frame most like it; NaN below 2 seconds."""
    if len(video) < 2 * FPS:
        return float("nan")
    # About 64 pixels a side are enough to tell frames apart.
    rows, columns = (max(1, side // 64) for side in video.shape[1:3])
    frames = video[:, ::rows, ::columns].astype(np.float32) / 255
    # RIFLEx asks whether a video begins anew: find its later frame most like the first one.
    like = FPS + int(_rms(frames[FPS : len(frames) - 1], frames[0]).argmin())
    count = min(FPS, len(frames) - like - 1)
    return float(_rms(frames[like + 1 : like + 1 + count], frames[1 : 1 + count]).mean())


def luma(frames: np.ndarray) -> np.ndarray:
    """Grey values in 0..1 of uint8 frames [..., 3] (ITU-R BT.601)."""
    return frames @ np.array([0.299, 0.587, 0.114], np.float32) / 255


def _rms(video: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.sqrt(((video - other) ** 2).mean((-3, -2, -1)))


# --- Policies side by side
FROM = 5  # seconds: before, every policy sees nearly all there is; a shorter video counts as a whole


def policy_rows(videos: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a policy: means over prompts with intervals, and the difference to the first one with p.

    videos are those of a comparison.json. The difference is in the share of seconds that a tracker finds
    right, or else in the hues kept. Seeds of a prompt are averaged first: the unit is the prompt. Of many
    policies adjust p by stats.holm().
    """
    prompts = list(dict.fromkeys(video["prompt"] for video in videos))
    first_label, first = "", np.empty(0)
    rows: list[Record] = []
    for label in dict.fromkeys(video["label"] for video in videos):
        by_prompt: dict[str, list[dict[str, float]]] = {prompt: [] for prompt in prompts}
        for video in videos:
            if video["label"] == label:
                by_prompt[video["prompt"]].append(_video_means(video))
        measures = list(by_prompt[prompts[0]][0])
        values = {
            name: np.array([np.mean([seed[name] for seed in seeds]) for seeds in by_prompt.values()])
            for name in measures
        }
        row: Record = {"policy": label}
        row |= {name: str(stats.bootstrap(of_prompts)) for name, of_prompts in values.items()}
        primary = values[measures[0]]
        if not rows:
            first_label, first = label, primary
        else:
            row[f"less {first_label}"] = str(stats.bootstrap(primary - first))
            row["p"] = stats.sign_flip_p(primary - first)
        rows.append(row)
    return rows


def _video_means(video: Mapping[str, Any]) -> dict[str, float]:
    """Return the means over seconds of a video's measures, the primary one first."""
    seconds = {name: video["seconds"][name] for name in ("hue_kept", "motion", "distance")}
    if "tracker" in video:
        seconds = {"right": video["tracker"]["right"]} | seconds
    means = {}
    for name, values in seconds.items():
        late = np.array(values[FROM:] or values, float)
        means[name] = float(late.mean()) if late.size else float("nan")
    return means
