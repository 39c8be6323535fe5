"""The notebooks of one layer and of probabilities, from top to bottom; and how all notebooks are stored."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import GOLDEN, ROOT
from helpers import executed, synthetic_caches
from helpers.older_caches import OLDER_LAYER_FIELDS

from experiments.analysis.reports import layer_lines
from experiments.caches import load_cache, save_cache
from experiments.caches.store import layer_from_atlas
from experiments.caches.view import open_profiles
from wan.blocks import later_block

PUBLISHED = ROOT / "cache/published"
LAYER_20 = """\
  H 0: first=  1.787, mid=  1.454, last=  2.680, sink= +0.333
  H 1: first=  1.240, mid=  0.186, last=  5.461, sink= +1.055
  H 2: first=  4.270, mid=  0.990, last=  7.281, sink= +3.279
  H 3: first=  3.805, mid=  0.452, last=  7.125, sink= +3.352
  H 4: first=  3.789, mid=  3.106, last=  2.883, sink= +0.683
  H 5: first=  2.662, mid=  0.583, last=  6.707, sink= +2.079
  H 6: first=  4.168, mid=  3.730, last=  5.309, sink= +0.438
  H 7: first=  6.180, mid=  1.992, last= 10.375, sink= +4.188
  H 8: first=  0.476, mid= -0.379, last=  4.203, sink= +0.855
  H 9: first=  1.579, mid=  0.468, last=  3.674, sink= +1.111
  H10: first=  2.215, mid=  1.685, last=  3.797, sink= +0.530
  H11: first=  1.619, mid=  0.062, last=  5.547, sink= +1.557
"""


def older_layer(atlas, layer):
    """A layer of a published atlas as the older script wrote it: no format, float16, zeros for what was not
    attended."""
    now = layer_from_atlas(load_cache(PUBLISHED / atlas), layer)
    matrix = now["full_frame_attention"].masked_fill(later_block(now["block_sizes"]), 0)
    return {name: now[name] for name in OLDER_LAYER_FIELDS} | {
        "full_frame_attention": matrix.half(),
        "last_block_frame_attention": now["last_block_frame_attention"].half(),
    }


def older_lines(profiles):
    """The older notebook's way to its numbers: float32 all along."""
    for h, head in enumerate(profiles.astype(np.float32)):
        first, middle, last = head[0], head[1:-1].mean(), head[-1]
        sink = first - middle
        yield f"  H{h:2d}: first={first:7.3f}, mid={middle:7.3f}, last={last:7.3f}, sink={sink:+7.3f}"


def test_an_older_layer_cache_prints_the_older_notebooks_numbers(tmp_path):
    torch.save(older_layer("self_forcing_dmd_eagle_21f.pt", 20), tmp_path / "layer20.pt")
    printed = executed.run("extract_all_attention.ipynb", tmp_path, DATA_PATH=str(tmp_path / "layer20.pt"))
    assert LAYER_20 in printed
    golden = np.load(GOLDEN / "published_21f_layer20.npy")
    assert "\n".join(older_lines(golden)) + "\n" == LAYER_20
    assert re.search(
        r"Diagonal mean \(self-attention\): 7\.9\d\d\d\nFirst frame mean \(sink\): 1\.4\d\d\d\n  H 0", printed
    )
    assert "View: 21 latent frames\n" in printed and "Pass: pass 0 (t = 1000)" in printed
    drawn = executed.figures(tmp_path)
    assert drawn.keys() == {
        f"layer20/layer20_{name}.svg" for name in ("2d_heatmap_all_heads", "perhead_grid")
    }
    maps, grid = (
        executed.words(drawn[f"layer20/layer20_{name}.svg"])
        for name in ("2d_heatmap_all_heads", "perhead_grid")
    )
    assert (
        "H2 (sink=3.28)" in grid and "query frames 18–20" in grid and "own block (noise at t = 1000)" in grid
    )
    assert (
        "Layer 20, 12 heads: mean logit, query × key frames, pass 0 (t = 1000)" in maps
        and "not attended" in maps
    )
    for text in (maps, grid):
        assert "Mean logit q·k/√D" in text and "Key frame (latent)" in text
    for name in drawn:
        assert str(tmp_path / "figures" / name) in printed


def test_72_frames_without_a_matrix(tmp_path):
    """Prompt 2 at 72 frames: the last block's mean is published, the matrix is not."""
    older = older_layer("self_forcing_dmd_castle_72f.pt", 3)
    torch.save(older, tmp_path / "layer3.pt")
    printed = executed.run("extract_all_attention.ipynb", tmp_path, DATA_PATH=str(tmp_path / "layer3.pt"))
    assert "\n".join(older_lines(older["last_block_frame_attention"].numpy())) in printed
    assert "Diagonal mean (self-attention): N/A\n" in printed
    assert "absent: no frame matrix in this cache" in executed.words(
        executed.figures(tmp_path)["layer3/layer3_2d_heatmap_all_heads.svg"]
    )


@pytest.mark.parametrize("name", ["eagle_21f", "castle_21f", "eagle_72f", "castle_72f"])
def test_every_published_head_prints_the_older_numbers(name):
    view = open_profiles(load_cache(PUBLISHED / f"self_forcing_dmd_{name}.pt"))
    nothing = np.full((12, view.num_frames, view.num_frames), np.nan)
    for layer in view.layers:
        profile = view.frame_profile(layer)
        assert layer_lines(nothing, profile).split("\n")[2:] == list(older_lines(profile))


def test_the_means_of_a_layer_are_the_older_notebooks():
    """It printed 7.0851 and 1.2892 for the castle's layer 20; the published matrix is within vmax / 256 =
    0.06."""
    cache = layer_from_atlas(load_cache(PUBLISHED / "self_forcing_dmd_castle_21f.pt"), 20)
    diagonal, first = layer_lines(
        *(cache[name].numpy() for name in ("full_frame_attention", "last_block_frame_attention"))
    ).split("\n")[:2]
    assert float(diagonal.removeprefix("Diagonal mean (self-attention): ")) == pytest.approx(7.0851, abs=0.01)
    assert float(first.removeprefix("First frame mean (sink): ")) == pytest.approx(1.2892, abs=0.01)


def bidirectional():
    """A layer of the base model: one block of six latent frames, 21 video frames, both branches of
    guidance."""
    cache = synthetic_caches.layer(N=4, F=6, H=3, blocks=[6])
    return cache | {
        "orig_num_frames": 21,
        "vae_stride_t": 4,
        "guidance_scale": 6.0,
        "last_block_query_frames": [3, 4, 5],
        "last_block_frame_attention": cache["full_frame_attention"][:, 3:].mean(1),
        "full_frame_attention_uncond": -cache["full_frame_attention"],
    }


def test_video_frames_some_queries_and_the_other_branch(tmp_path):
    cache = bidirectional()
    save_cache(tmp_path / "layer4.pt", cache)
    parameters = {"DATA_PATH": str(tmp_path / "layer4.pt"), "QUERY_FRAMES": [0, 1, 2, 20], "BRANCH": "uncond"}
    printed = executed.run("extract_all_attention.ipynb", tmp_path, **parameters)
    assert (
        "View: 21 video frames; the VAE encodes frame 0 alone, then groups of 4: video frame i is in latent "
        "frame (i + 3) // 4, and shows its value\n"
    ) in printed
    rows = -cache["full_frame_attention"].numpy()[:, [0, 1, 1, 5]].mean(1)
    assert "\n".join(older_lines(rows)) in printed and "query frames 0–2, 20 (video)" in printed
    drawn = executed.figures(tmp_path)
    assert all(
        "pass 0 (t = 1000), unconditional branch" in text
        for text in (printed, *map(executed.words, drawn.values()))
    )
    assert "Key frame (video)" in executed.words(drawn["layer4/layer4_perhead_grid.svg"])


def test_probabilities_of_a_window(tmp_path):
    cache = synthetic_caches.inference(window=[0, 4, 5, 6, 7, 8], steps=(0, 4), H=3)
    save_cache(tmp_path / "c.pt", cache)
    parameters = {"CACHE_PATH": str(tmp_path / "c.pt"), "WEIGHT_INDEX": 3, "HEAD": 2}
    printed = executed.run("plot_figure4.ipynb", tmp_path, **parameters)
    tokens = cache["attention_weights"][3]["attn_weights"][0, 2].double()  # [15, 30]
    frame = dict(zip([0, 4, 5, 6, 7, 8], tokens.mean(0).unflatten(0, (6, 5)).mean(1).tolist(), strict=True))
    high, low = max(frame, key=frame.get), min(frame, key=frame.get)
    assert (
        f"Layer 5, head 2, mean_prob, clean pass (t = 0)\n  max: frame {high}, {frame[high]:.6f}\n"
        f"  min: frame {low}, {frame[low]:.6f}\n  first (frame 0): {frame[0]:.6f}\n"
        f"  last (frame 8): {frame[8]:.6f}\n"
        "  sum of mass over all key frames: 1.0000\n"
    ) in printed
    assert "  0: layer 1, pass 0 (t = 1000), queries of frames 6–8 on keys of frames 0, 4–8\n" in printed
    assert "Captured: a sliding window" in printed
    drawn = executed.figures(tmp_path)
    assert drawn.keys() == {
        f"figure4_{name}.svg" for name in ("reproduction", "multihead", "heatmap", "head_averaged")
    }
    text = executed.words(drawn["figure4_reproduction.svg"])
    assert f"max@{high}: {frame[high]:.3g}" in text and f"min@{low}: {frame[low]:.3g}" in text
    for svg in drawn.values():
        assert "ayer 5" in executed.words(svg) and "robability" in executed.words(svg)
        assert "clean pass (t = 0)" in executed.words(svg) and "not attended" in executed.words(svg)


def test_probabilities_of_a_figure4_cache_of_logits(tmp_path):
    cache = synthetic_caches.figure4(H=9, S=4)
    save_cache(tmp_path / "c.pt", cache)
    printed = executed.run("plot_figure4.ipynb", tmp_path, CACHE_PATH=str(tmp_path / "c.pt"), HEAD=50)
    tokens = cache["attention_weights"][0]["attn_logits"][0, 0].double().softmax(-1)
    assert f"  first (frame 0): {tokens[:, :4].mean():.6f}\n" in printed
    assert (
        "L1H50 (layer 1, head 50) not in this cache, which has layers 1 with heads 0–8; shown: L1H0"
        in printed
    )
    grid = executed.words(executed.figures(tmp_path)["figure4_multihead.svg"])
    assert "H7" in grid and "H8" not in grid


def test_mass_of_an_atlas_beside_its_probabilities(tmp_path):
    cache = synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4), F=9, H=3, S=5)
    save_cache(tmp_path / "c.pt", cache)
    parameters = {"CACHE_PATH": str(tmp_path / "c.pt"), "WEIGHT_INDEX": 5, "HEAD": 2}
    printed = executed.run("plot_figure4.ipynb", tmp_path, QUANTITY="mass", **parameters)
    mass = cache["frame_mass"][2, 1, 2, -3:].double().mean(0)  # layer 5, clean pass, head 2, last block
    assert "  0–2: layers 0–1, 5, pass 0 (t = 1000)\n  3–5: layers 0–1, 5, clean pass (t = 0)\n" in printed
    assert "Layer 5, head 2, mass, clean pass (t = 0)\n" in printed
    first = r"  first \(frame 0\): (0\.\d{6})"
    assert float(re.search(first, printed)[1]) == pytest.approx(float(mass[0]), abs=1e-3)  # stored in half
    assert "  sum of mass over all key frames: 1.0000\n" in printed
    probabilities = executed.run("plot_figure4.ipynb", tmp_path, **parameters)
    assert float(re.search(first, probabilities)[1]) == pytest.approx(float(mass[0]) / 5, abs=2e-4)
    parameters["WEIGHT_INDEX"] = 6
    said = executed.run("plot_figure4.ipynb", tmp_path, **parameters)
    assert said.endswith("CacheError: call 6 is not in 0..5, the layers and passes of this atlas")


@pytest.mark.parametrize(
    ("notebook", "parameter", "cache", "message"),
    [
        (
            "plot_figure4.ipynb",
            "CACHE_PATH",
            synthetic_caches.layer,
            "open it with notebooks/extract_all_attention.ipynb. Here it "
            "takes inference or figure4 or atlas, made by: python experiments/run_extraction.py",
        ),
        (
            "extract_all_attention.ipynb",
            "DATA_PATH",
            synthetic_caches.atlas,
            "open it with notebooks/layer_atlas.ipynb",
        ),
    ],
)
def test_a_wrong_kind_is_one_line(tmp_path, notebook, parameter, cache, message):
    save_cache(tmp_path / "c.pt", cache())
    said = executed.run(notebook, tmp_path, **{parameter: str(tmp_path / "c.pt")})
    assert message in said and "\n" not in said and not (tmp_path / "figures").exists()


DEFAULTS = {
    "plt_fig4": ['CACHE_PATH = "../cache/attention_cache_figure4.pt"', 'SAVE_DIR = "figure4"'],
    "plot_figure4": [
        'CACHE_PATH = "../cache/attention_cache.pt"',
        "WEIGHT_INDEX = 0",
        "HEAD = 0",
        'SAVE_DIR = "figure4_probabilities"',
    ],
    "extract_all_attention": [
        'DATA_PATH = "../cache/layer20.pt"',
        'SAVE_DIR = "attention_analysis"',
        "SAVE_SVG = True",
        "USE_ORIG_FRAMES = None",
        "ORIG_NUM_FRAMES",
        "TEMPORAL_STRIDE",
        "QUERY_FRAMES = None",
    ],
    "interventions": ['CACHE_PATH = "../cache/effects.pt"', "EDIT = ", 'SAVE_DIR = "interventions"'],
    "layer_atlas": ['CACHE_PATH = "../cache/atlas.pt"', "LAYER = ", 'SAVE_DIR = "layer_atlas"'],
}


@pytest.mark.parametrize("path", sorted(executed.NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_how_notebooks_are_stored(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]  # run from top to bottom, or not at all
    assert counts == [*range(1, len(code) + 1)] or not any(cell["outputs"] for cell in code)
    assert path.stat().st_size <= 300_000
    (parameters,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert all(default in "".join(parameters["source"]) for default in DEFAULTS.get(path.stem, []))
    for cell in code:
        assert len("".join(cell["source"]).split("\n")) <= 12
        assert not re.search(r"^\s*(def|class) ", "".join(cell["source"]), re.MULTILINE)
    headings = [
        line
        for cell in notebook["cells"]
        if cell["cell_type"] == "markdown"
        for line in "".join(cell["source"]).split("\n")
        if line.startswith("#")
    ]
    assert headings and all(re.search(r"[\u4e00-\u9fff].* · .*[A-Za-z]", heading) for heading in headings)
