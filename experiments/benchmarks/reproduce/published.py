"""Make cache/published/ from published data: atlases of the real model, a digitised figure, head labels.

    python experiments/benchmarks/reproduce/published.py FOLDER

FOLDER holds self_forcing_dmd_last_block_logits.npz, self_forcing_dmd_frame_matrix_quantised.npz and the three
CSV files that experiments/analysis/published.py names; cache/published/README.md says where they come from.
"""

from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
import torch

from experiments.analysis.published import FIGURE4_CSV, FOLDER, HEAD_LABELS_CSV, STATIC_HEADS_CSV
from experiments.caches import save_cache
from experiments.caches.files import CacheError, replacing
from experiments.running.cli import Parser, main
from wan.blocks import block_frames, block_sizes, later_block
from wan.config import MODELS, RunConfig

RUN = RunConfig()  # the published runs are the defaults: Wan2.1-T2V-1.3B at 480 x 832
LOGITS = "self_forcing_dmd_last_block_logits.npz"
MATRICES = "self_forcing_dmd_frame_matrix_quantised.npz"
COLOURS = 256  # of the heat maps that the matrices were read from
HALF = 2**-11  # float16's relative rounding: an eighth of a colour
SHORT_NAMES = ("eagle", "castle")  # words of the prompts, for file names
CLIPPED = {("19", "L1H1")}  # points at the upper edge of the paper's plot
SOURCE = (
    "read off the SVG figures of github.com/winbeau/Self-Forcing-fork (Apache-2.0), "
    "see cache/published/README.md"
)


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the published files are")
    parser.add_argument("--output_dir", type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    tables = (HEAD_LABELS_CSV, STATIC_HEADS_CSV, FIGURE4_CSV)
    for name in (LOGITS, MATRICES, *tables):
        if not (args.folder / name).is_file():
            raise CacheError(f"{args.folder / name} not found; FOLDER must hold it")

    with np.load(args.folder / LOGITS) as logits, np.load(args.folder / MATRICES) as matrices:
        for F in (21, 72):
            indices, vmax = matrices[f"index_{F}"], matrices[f"vmax_{F}"]
            caches = [
                atlas(str(prompt), last_block, indices, vmax)
                for prompt, last_block in zip(logits["prompts"], logits[f"frames{F}"], strict=True)
            ]
            if sum("frame_logits" in cache for cache in caches) != len(indices):
                raise CacheError(f"not every matrix of {F} frames in {MATRICES} belongs to one prompt")
            for cache in caches:
                name = next(word for word in SHORT_NAMES if word in cache["prompt"])
                path = args.output_dir / f"self_forcing_dmd_{name}_{F}f.pt"
                save_cache(path, cache)
                if "frame_logits" in cache:
                    deflate(path)
                print(f"{path}: {cache['notes'][0]}")
    for name in tables:
        text = (args.folder / name).read_text(encoding="utf-8")
        with replacing(args.output_dir / name) as file:
            file.write((mark_clipped(text) if name == FIGURE4_CSV else text).encode())
        print(args.output_dir / name)


def deflate(path: Path) -> None:
    """Compress the records of a cache in place: 256 values a layer take a quarter of the room."""
    with ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with replacing(path) as file, ZipFile(file, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in records.items():
            archive.writestr(ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, ZIP_DEFLATED)


def atlas(prompt: str, last_block: np.ndarray, indices: np.ndarray, vmax: np.ndarray) -> dict[str, Any]:
    """Return one prompt and length as an atlas of one pass.

    last_block [layers, H, F] float16 is exact; indices [matrices, layers, H, F, F] uint8 and vmax [matrices,
    layers] are frame matrices as colours of heat maps, which need not be there for this prompt.
    """
    layers, heads, F = last_block.shape
    blocks = block_sizes(F)
    cache = {
        "format": "atlas",
        "schema_version": 1,
        "prompt": prompt,
        "seed": 42,
        "num_frames": F,
        "num_frame_per_block": RUN.num_frame_per_block,
        "block_sizes": blocks,
        "frame_seq_length": MODELS[RUN.model].tokens_per_frame(RUN.height, RUN.width),
        "num_heads": heads,
        "model": "Wan2.1-T2V-1.3B",
        "weights": "published",
        "weights_file": "self_forcing_dmd.pt",
        "weights_sha256": None,
        "is_logits": True,
        "layers": list(range(layers)),
        "pass_timesteps": [1000.0],
        "pass_steps": [0],
        "pass_is_clean": [False],
        "last_block_frame_logits": torch.from_numpy(last_block)[:, None],
    }
    precision, missing = "the last block's mean is exact", "mass, key curves and other passes"
    for index, top in zip(indices, vmax, strict=True):
        matrix, error = dequantise(index, top)
        if belongs(matrix[..., block_frames(blocks, -1), :].mean(-2), last_block, error):
            means = torch.from_numpy(matrix).masked_fill(later_block(blocks), float("nan"))
            cache |= {
                "frame_logits": means[:, None].half(),
                "frame_logits_error": torch.from_numpy(error + HALF * top).float(),
            }
    if "frame_logits" in cache:
        precision += f", the frame matrix within vmax/{COLOURS} of each layer and float16's rounding"
    else:
        missing = f"the frame matrix, {missing}"
    return cache | {"notes": [f"published data, {SOURCE}: {precision}; not there: {missing}"]}


def dequantise(index: np.ndarray, vmax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the middle of each colour [layers, H, F, F] of a map from -vmax to vmax, and its error [layers].

    Zero lies between two colours, so the sign of every value is exact.
    """
    top = vmax.astype(np.float64)[:, None, None, None]
    return (index + 0.5) / COLOURS * 2 * top - top, vmax.astype(np.float64) / COLOURS


def belongs(mean: np.ndarray, exact: np.ndarray, error: np.ndarray) -> bool:
    """Compare means [layers, H, F] with the exact values, within error [layers] and rounding."""
    apart = np.abs(mean - exact.astype(np.float64))
    return bool((apart <= error[:, None, None] + np.abs(np.spacing(exact))).all())


def mark_clipped(table: str) -> str:
    """Add a column to the digitised table: the curves that leave the plot at that frame."""
    header, *rows = table.splitlines()
    lines = [f"{header},clipped"]
    for row in rows:
        clipped = [name for name in header.split(",")[1:] if (row.split(",")[0], name) in CLIPPED]
        lines.append(f"{row},{' '.join(clipped)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(run)
