"""Optical flow of two frames by polynomial expansion (Farnebäck, SCIA 2003), for videos as they are watched.

Near every pixel a frame is f(x) = xᵀ A x + bᵀ x + c. A shift d leaves A and turns b into b − 2 A d, so d
follows from two frames by least squares over a neighbourhood.
"""

import numpy as np

EXPANSION, SMOOTHING = 1.5, 3.0  # pixels: widths of the Gaussians of the fit and of the neighbourhood
ITERATIONS = 4
FLAT = 1e-6  # squared curvature, in grey levels of 0..1 per square pixel: what is flatter counts as at rest


def flow(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Displacement (x, y) in pixels of every pixel from the first to the second of grey frames
    [..., H, W] in 0..1 -> [..., H, W, 2].
    """
    before, after = _expansion(first), _expansion(second)
    shift = np.zeros((*first.shape, 2))
    for _ in range(ITERATIONS):
        shift = _updated(before, after, shift)
    return shift


def _updated(before: np.ndarray, after: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """One step: the second frame's polynomials are taken where the present shift says."""
    whole = np.rint(shift).astype(int)
    moved = _taken(after, whole)
    xx, yy, xy = (before[..., 2:] + moved[..., 2:]).transpose(-1, *range(before.ndim - 1)) / 2
    dx = (before[..., 0] - moved[..., 0]) / 2 + xx * whole[..., 0] + xy / 2 * whole[..., 1]
    dy = (before[..., 1] - moved[..., 1]) / 2 + xy / 2 * whole[..., 0] + yy * whole[..., 1]
    xy = xy / 2  # A = [[xx, xy], [xy, yy]]
    g11, g12, g22, h1, h2 = (
        _blurred(x, SMOOTHING)
        for x in (xx * xx + xy * xy, xy * (xx + yy), yy * yy + xy * xy, xx * dx + xy * dy, xy * dx + yy * dy)
    )
    g11, g22 = g11 + FLAT, g22 + FLAT
    solved = np.stack([g22 * h1 - g12 * h2, g11 * h2 - g12 * h1], -1)
    return solved / (g11 * g22 - g12 * g12)[..., None]


def _taken(values: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """values [..., H, W, n] at pixels moved by whole shifts [..., H, W, 2], the nearest at the border."""
    height, width = values.shape[-3:-1]
    rows = np.clip(np.arange(height)[:, None] + shift[..., 1], 0, height - 1)
    columns = np.clip(np.arange(width) + shift[..., 0], 0, width - 1)
    flat = values.reshape(*values.shape[:-3], height * width, values.shape[-1])
    places = (rows * width + columns).reshape(*shift.shape[:-3], height * width, 1)
    return np.take_along_axis(flat, places, -2).reshape(values.shape)


def _expansion(frames: np.ndarray) -> np.ndarray:
    """Coefficients [..., H, W, 5] of x, y, x², y², xy, weighted by a Gaussian around every pixel."""
    offsets = _offsets(EXPANSION)
    weights = _gaussian(offsets, EXPANSION)
    powers = [weights * offsets**power for power in range(3)]
    rows = [_along(frames, kernel, -2) for kernel in powers]  # moments of y
    names = ((0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1))  # powers of x and y: 1, x, y, x², y², xy
    moments = np.stack([_along(rows[y], powers[x], -1) for x, y in names], -1)
    total = [(weights * offsets**power).sum() for power in range(5)]
    gram = np.array([[total[a[0] + b[0]] * total[a[1] + b[1]] for b in names] for a in names])
    return (moments @ np.linalg.inv(gram).T)[..., 1:]


def _blurred(x: np.ndarray, width: float) -> np.ndarray:
    kernel = _gaussian(_offsets(width), width)
    return _along(_along(x, kernel, -1), kernel, -2)


def _offsets(width: float) -> np.ndarray:
    radius = int(np.ceil(3 * width))
    return np.arange(-radius, radius + 1.0)


def _gaussian(offsets: np.ndarray, width: float) -> np.ndarray:
    weights = np.exp(-(offsets**2) / (2 * width**2))
    return weights / weights.sum()


def _along(x: np.ndarray, kernel: np.ndarray, axis: int) -> np.ndarray:
    """Correlation of x with a kernel along one of its last two axes; the border's pixels go on beyond it."""
    size, radius = x.shape[axis], len(kernel) // 2
    places = np.clip(np.arange(size)[:, None] + np.arange(-radius, radius + 1), 0, size - 1)
    matrix = np.zeros((size, size))  # a product with it is sooner done than a sum of shifted pictures
    np.add.at(matrix, (np.arange(size)[:, None], places), kernel)
    return matrix @ x if axis == -2 else x @ matrix.T
