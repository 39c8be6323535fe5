"""Every notebook from top to bottom: which figures it draws, the numbers it prints, and errors in a line.

Their cells run in this process, in an IPython that is emptied before each: a kernel would load torch again
and draw every figure twice. Kernels run a notebook per layer.
"""

import base64
import io
import json
import re
import sys
from contextlib import chdir
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GOLDEN, ROOT
from helpers import synthetic_caches
from helpers.forked import stopping_after
from helpers.synthetic_caches import OLDER_LAYER_FIELDS
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from PIL import Image

from experiments import (
    run_extraction,
    run_extraction_all,
    run_extraction_each,
    run_extraction_maps,
)
from experiments.analysis import effects, results, rope_waves
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.formats import SCHEMA_VERSION
from experiments.caches.store import layer_from_atlas
from experiments.captured import policy_atlas
from experiments.figures import style
from experiments.figures.folder import FigureFolder
from experiments.running import cli
from experiments.running.parameters import check_parameters, parameter_types
from wan.errors import ConfigError, UserError
from wan.keys import later_block

PUBLISHED = ROOT / "cache/published"


@cache
def ipython() -> InteractiveShell:
    shell = InteractiveShell(cache_size=0)  # keeps no outputs, and no search for garbage after each notebook
    shell.colors = "nocolor"
    shell.history_manager.enabled = False
    return shell


def run(name, folder, cache=None, parameter="CACHE_PATH", writes=True, **parameters):
    """Printed text and the words of every figure, by its path, of a notebook over a cache.

    An error's text comes last. Figures are neither laid out, which takes most of the time, nor drawn again to
    be shown: both is for tests/figures. Nor are they written, unless writes.
    """
    if cache is not None:
        save_cache(folder / "c.pt", cache, overwrite=True)
        parameters[parameter] = str(folder / "c.pt")
    source = load_notebook_node(str(ROOT / f"notebooks/{name}.ipynb"))
    notebook = parameterize_notebook(source, {"SAVE_DIR": str(folder / "figures")} | parameters)
    with chdir(ROOT / "notebooks"), pytest.MonkeyPatch.context() as patch, capture_output() as printed:
        # IPython takes the place of __main__, which processes that are spawned later import again
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        # "none" in place of None would have matplotlib draw each figure twice
        patch.setattr(style, "lay_out", lambda figure: figure.set_layout_engine(None) is None)
        patch.setattr(style.StyledFigure, "_ipython_display_", lambda figure: None)
        if not writes:
            patch.setattr(FigureFolder, "save", lambda self, figure, name: figure)
        ipython().reset(new_session=True)
        for cell in notebook.cells:
            if cell.cell_type == "code" and not (done := ipython().run_cell(cell.source)).success:
                break
    error = done.error_before_exec or done.error_in_exec
    assert error is None or isinstance(error, UserError), f"{error!r}\n{printed.stdout}"
    drawn = {str(path.relative_to(folder / "figures")): path for path in folder.glob("figures/**/*.svg")}
    said = printed.stdout if error is None else printed.stdout.rstrip("\n")
    return said, {name: words(path.read_bytes()) for name, path in drawn.items()}


def words(svg):
    """The words of an SVG, which are text."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", svg.decode()))


def row_of(printed, *start):
    """The cells of the line that begins with some words."""
    (row,) = [line.split() for line in printed.splitlines() if line.split()[: len(start)] == list(start)]
    return row


def test_stored_figures():
    """SVG, or PNG of all colours."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
        pngs = [base64.b64decode(x["image/png"]) for x in shown if "image/png" in x]
        pictures = [Image.open(io.BytesIO(png)) for png in pngs]
        assert all(picture.mode in ("RGB", "RGBA") for picture in pictures), path.name
        assert pictures or any("image/svg+xml" in x for x in shown), path.name


def test_an_older_layer_cache_prints_the_older_notebooks_numbers(tmp_path):
    """Older files have no format, float16, and zeros for what was not attended."""
    now = layer_from_atlas(load_cache(PUBLISHED / "self_forcing_dmd_eagle_21f.pt"), 20)
    matrix = now["full_frame_attention"].masked_fill(later_block(now["block_sizes"]), 0)
    older = {name: now[name] for name in OLDER_LAYER_FIELDS} | {"full_frame_attention": matrix.half()}
    older["last_block_frame_attention"] = now["last_block_frame_attention"].half()
    torch.save(older, tmp_path / "layer20.pt")
    printed, drawn = run("extract_all_attention", tmp_path, CACHE_PATH=str(tmp_path / "layer20.pt"))
    for h, head in enumerate(np.load(GOLDEN / "published_21f_layer20.npy").astype(np.float32)):
        expected = head[0], head[1:-1].mean(), head[-1], head[0] - head[1:-1].mean()
        assert row_of(printed, str(h))[1:5] == [f"{value:.3f}" for value in expected]
    assert "Matrix [heads, query, key] [12, 21, 21], -" in printed
    assert re.search(r"self-attention\)  7\.9\d+\nFrame 0 mean +1\.4", printed)
    names = {name: f"layer20/layer20_{name}.svg" for name in ("2d_heatmap_all_heads", "perhead_grid")}
    assert drawn.keys() == set(names.values()) and all(name in printed for name in names.values())
    assert "H2, Δ = +3.28" in drawn[names["perhead_grid"]] and "Shown     21 latent frames" in printed
    assert "not attended" in drawn[names["2d_heatmap_all_heads"]]
    of_atlas, _ = run(
        "extract_all_attention", tmp_path, writes=False
    )  # by default the layer is taken out of this atlas
    assert [row_of(of_atlas, str(h)) for h in range(12)] == [row_of(printed, str(h)) for h in range(12)]
    # It has the first pass alone; another is not drawn as if it were that
    said, _ = run("extract_all_attention", tmp_path, CACHE_PATH=str(tmp_path / "layer20.pt"), STEP=2)
    assert "pass 2 is not in this cache; it has 0" in said


def test_video_frames_some_queries_and_the_other_branch(tmp_path):
    """A layer of the base model: one block of six latent frames, 21 video frames, both branches."""
    cache = synthetic_caches.layer(N=4, F=6, H=3, blocks=[6])
    cache |= {"orig_num_frames": 21, "vae_stride_t": 4, "guidance_scale": 6.0}
    cache |= {"last_block_query_frames": [3, 4, 5]}
    cache["last_block_frame_attention"] = cache["full_frame_attention"][:, 3:].mean(1)
    cache["full_frame_attention_uncond"] = -cache["full_frame_attention"]
    chosen = {"QUERY_FRAMES": [0, 1, 2, 20], "BRANCH": "uncond"}
    printed, drawn = run("extract_all_attention", tmp_path, cache, **chosen)
    rows = -cache["full_frame_attention"].numpy()[:, [0, 1, 1, 5]].mean(1)
    assert row_of(printed, "2")[1] == f"{rows[2, 0]:.3f}" and "query frames 0–2, 20 (video)" in printed
    assert all("pass 0 (t = 1000), unconditional branch" in text for text in (printed, *drawn.values()))
    assert "Key frame (video)" in drawn["layer4/layer4_perhead_grid.svg"]


def test_probabilities_of_a_window_of_logits_and_of_an_atlas(tmp_path):
    cache = synthetic_caches.inference(window=[0, 4, 5, 6, 7, 8], steps=(0, 4), H=3)
    printed, drawn = run("plot_figure4", tmp_path, cache, WEIGHT_INDEX=3, HEAD=2)
    tokens = cache["attention_weights"][3]["attn_weights"][0, 2].double()  # [15, 30]
    frames = tokens.mean(0).unflatten(0, (6, 5)).mean(1)
    high = [0, 4, 5, 6, 7, 8][frames.argmax()]
    assert f"frame {high}: {frames.max():.3g}" in drawn["figure4_reproduction.svg"]
    of_heads = printed.split("(max")[1]  # the table of calls comes first
    assert float(row_of(of_heads, "2")[1]) == pytest.approx(float(frames[0]), abs=1e-4)
    assert row_of(printed, "3", "5")[2:] == ["clean", "(t", "=", "0)", "6–8", "0,", "4–8"]
    names = ("reproduction", "multihead", "heatmap", "head_averaged")
    assert drawn.keys() == {f"figure4_{name}.svg" for name in names}
    assert "L5H2" in drawn["figure4_reproduction.svg"] and "not attended" in drawn["figure4_reproduction.svg"]
    of_layer = [text for name, text in drawn.items() if name != "figure4_reproduction.svg"]
    assert all("ayer 5" in text and "not attended" in text for text in of_layer)
    atlas = synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4), F=9, H=3, S=5)
    mass = atlas["frame_mass"][2, 1, 2, -3:].double().mean(0)  # layer 5, clean pass, head 2, last block
    chosen = {"WEIGHT_INDEX": 5, "HEAD": 2, "QUANTITY": "mass"}
    printed, _ = run("plot_figure4", tmp_path, atlas, writes=False, **chosen)
    stored_in_half = float(row_of(printed.split("(max")[1], "2")[1])
    assert stored_in_half == pytest.approx(float(mass[0]), abs=1e-3)
    said, _ = run("plot_figure4", tmp_path, atlas, WEIGHT_INDEX=6)
    assert said.endswith("CacheError: call 6 is not in the layers and passes of this atlas; it has 0..5")


def figure_files(*layers):
    per_layer = {f"figure4_layer{N}_{name}.svg" for N in layers for name in ("per_head_grid", "all_heads")}
    whole = ("reproduction", "layer_comparison", "layers_together", "statistics")
    return per_layer | {f"figure4_{name}.svg" for name in whole}


def test_figure4_of_tokens(tmp_path):
    cache = synthetic_caches.figure4(H=4)
    chosen = {"HEADS": [[1, 1, "L1H1"], [5, 3, "L5H3"]], "TITLE": "Mine", "TOKENS_PER_BAR": 8}
    printed, drawn = run("plt_fig4", tmp_path, cache, **chosen)
    assert drawn.keys() == figure_files(1, 5) and "Mine" in drawn["figure4_reproduction.svg"]
    assert "mean of 8 key tokens" in drawn["figure4_reproduction.svg"]
    tokens = cache["attention_weights"][1]["attn_logits"][0, 3].double().numpy()  # layer 5, head 3: [48, 336]
    frame = tokens.reshape(48, 21, 16).mean((0, 2))
    expected = [frame[0], frame[1:20].mean(), frame[20], frame[0] - frame[1:20].mean()]
    shown = [float(cell) for cell in row_of(printed.split("Layer 5,")[1], "3")[1:5]]
    assert shown == pytest.approx(expected, abs=6e-4)


def published(folder, layers):
    """Some layers of the published eagle."""
    cache = load_cache(PUBLISHED / "self_forcing_dmd_eagle_21f.pt", mmap=False)
    rows = [cache["layers"].index(layer) for layer in layers]
    tensors = {name: x[rows] for name, x in cache.items() if torch.is_tensor(x) and len(x) == 30}
    save_cache(folder / "eagle.pt", cache | tensors | {"layers": list(layers)})
    return str(folder / "eagle.pt")


def test_published_data_over_the_papers_curve(tmp_path):
    printed, drawn = run("plt_fig4", tmp_path, CACHE_PATH=published(tmp_path, (1, 5)))
    waves = {"figure4_by_block.svg", "figure4_in_parts.svg"}
    assert drawn.keys() == figure_files(1, 5) | waves and "Shown: L1H1, L5H10" in printed
    assert row_of(printed, "above", "2,")[2:5] == ["of", "all", "24"]
    for name, r in (("L1H1", "0.9928"), ("L5H10", "0.9874")):
        shown = row_of(printed, name, "shown")
        assert shown[5] == r and shown[7] == "1"
        assert f"r = {float(r):.3f}" in drawn["figure4_reproduction.svg"]
    assert "cut off by the paper's plot" in drawn["figure4_reproduction.svg"].replace("&#x27;", "'")


def always(layer):
    """Files of any atlas that has logits."""
    names = ("per_head_grid", "frame_maps", "passes", "logits_and_mass")
    whole = ["profile_strips", "measures", "first_frame", "placebos", "key_frames", "waves"]
    whole.append("kinds_of_heads")
    return {f"layer{layer}_{name}.svg" for name in names} | {f"{name}.svg" for name in whole}


def test_the_published_atlas(tmp_path):
    printed, drawn = run("layer_atlas", tmp_path, CACHE_PATH=published(tmp_path, (1, 20)))
    assert drawn.keys() == always(1)
    assert row_of(printed, "heads", "above", "all", "placebos")[-1] == "15"
    assert sum(map(int, row_of(printed, "anchor")[2:5])) == int(row_of(printed, "anchor")[1])
    assert "Wave of period 14.5" in drawn["waves.svg"]
    assert "published, Pyramid Forcing" in drawn["kinds_of_heads.svg"]
    assert "not drawn: attention mass (no mass in this cache)" in drawn["layer1_logits_and_mass.svg"]
    assert all(f"Layer {layer} " in drawn["profile_strips.svg"] for layer in (1, 20))


def test_an_own_atlas_with_everything(tmp_path):
    cache, shares = synthetic_caches.atlas(F=12, H=3, layers=(0, 1, 5)), torch.tensor([0.5, 0.3, 0.2])
    cache["frame_logits_by_band"] = cache["frame_logits"][..., None] * shares
    cache["rope_bands"] = ["time, period 6.28 frames", "height", "width"]
    N, P, H, F, _ = cache["frame_logits"].shape
    mass = (torch.arange(H)[:, None, None] + 1.0).expand(N, P, H, F, 4) / 100  # head h: (h + 1) / 100 a token
    cache |= {"cross_mass": mass.contiguous(), "cross_tokens": ["▁a", "▁cine", "matic", "</s>"]}
    printed, drawn = run("layer_atlas", tmp_path, cache, LAYER=5, HEAD=2, STEP=4)
    more = {"rope_bands_layer5_head2.svg", "layer5_prompt_words.svg", "first_frame_passes.svg"}
    assert drawn.keys() == always(5) | more and "Passes in this cache: 2" in printed
    assert row_of(printed, "cinematic")[1:] == ["0.04000", "0.06000", "2"]
    assert "published" not in drawn["kinds_of_heads.svg"] and "published for another model" in printed


def test_keys_of_a_cache_policy_along_positions(tiny, tmp_path):
    atlas = policy_atlas(tiny.path, {"name": "two_memories", "window": 6, "sink": 1}, 12)
    _, drawn = run("layer_atlas", tmp_path, atlas, KEY_AXIS="position", PUBLISHED=str(tmp_path))
    assert "average" in drawn["keys.svg"] and "survival.svg" in drawn
    assert "Temporal position" in drawn["layer1_frame_maps.svg"]


def test_a_sweep_over_a_folder(tmp_path):
    for name in ("a", "b", "d"):
        save_cache(tmp_path / f"{name}.pt", synthetic_caches.atlas())
    printed, drawn = run("sweep", tmp_path, SWEEP_DIR=str(tmp_path), HEADS=[[1, 2, "L1H2"]])
    assert "3 atlases: a, b, d\n" in printed
    assert [float(cell) for cell in row_of(printed, "First-frame", "effect", "s")[3:6]] == [1, 1, 1]
    assert drawn.keys() == {"sweep_measures.svg", "sweep_figure4.svg"}
    assert "L1H2: layer 1, head 2" in drawn["sweep_figure4.svg"]


# Interventions


N, H, F = 3, 4, 6


def causal_atlas(**changes):
    """Two prompts, the first with two seeds; effects count up over layers and heads; block 0 has none."""
    effect = torch.arange(N * H).view(1, N, H, 1).float().expand(3, N, H, F).clone()
    effect[..., :3] = torch.nan
    effect[2] *= 3
    runs = {"prompts": ["a", "a", "b"], "seeds": [0, 1, 0], "schema_version": SCHEMA_VERSION}
    runs |= {"effects": effect, "floor": torch.zeros(3, F), "between_seeds": torch.ones(3, F)}
    norms = {"head_norms": torch.rand(3, N, H, generator=torch.Generator().manual_seed(0))}
    return synthetic_caches.causal_atlas(F, range(N), H) | runs | norms | changes


def effects_cache():
    curves = {name: torch.arange(1.0, F + 1) for name in ("own_block", "total", "floor", "direct")}
    more = {"between_seeds": torch.full((F,), 2.0), "schema_version": SCHEMA_VERSION}
    return synthetic_caches.effects(F) | curves | more


def test_seeds_of_a_prompt_are_averaged_before_prompts(tmp_path):
    save_cache(tmp_path / "causal.pt", causal_atlas(), overwrite=True)
    study = effects.read_study(tmp_path / "causal.pt", tmp_path / "none.pt")
    assert study.effects.shape == (2, N, H) and not study.measures
    assert np.allclose(study.effect, 2 * np.arange(N * H).reshape(N, H))
    assert (study.effect.mean(), study.floor) == (11, 0)
    assert [one.name for one in study.maps()] == ["Direct effect of the edit"]
    study.measures["same"] = study.effect
    assert str(study.correlations()["same"][0]) == "1.00 [1.00, 1.00]"
    one = causal_atlas(each="layer", units=[0], head_norms=torch.ones(3, N, 1))
    save_cache(tmp_path / "layer.pt", one | {"effects": one["effects"][:, :, :1].contiguous()})
    assert effects.read_study(tmp_path / "layer.pt") is effects.read_study(tmp_path / "none.pt") is None


def test_an_edit_is_run_and_shown(tiny, tmp_path):
    save_cache(tmp_path / "causal.pt", causal_atlas(), overwrite=True)
    save_cache(tmp_path / "attribution.pt", synthetic_caches.attribution(F))
    chosen = {"MODEL": tiny.path, "LAYER": 1, "CAUSAL_ATLAS": str(tmp_path / "causal.pt")}
    chosen["ATTRIBUTION"] = str(tmp_path / "attribution.pt")
    chosen["EDIT"] = {"edit": "knockout", "frames": "first", "layers": 1, "passes": "denoise"}
    printed, drawn = run("interventions", tmp_path, effects_cache(), ATLAS="none.pt", **chosen)
    assert "Knockout(layers=1" in printed and row_of(printed, "direct") == ["direct", "1.750"]
    names = ("strips", "attention", "effects", "causal_atlas", "hidden_shapes", "head_budgets")
    names += ("attribution", "attribution_against")
    assert drawn.keys() == {f"{name}.svg" for name in names}
    edit = "keys of the first frame left out, in layer 1, in denoising passes"
    assert f"edited: {edit}" in drawn["attention.svg"] and edit in drawn["strips.svg"]


def test_policies_are_drawn(tmp_path):
    _, drawn = run("policies", tmp_path, POLICIES=["self_forcing_window"], NUM_FRAMES=6)
    assert drawn.keys() == {f"self_forcing_window_{name}.svg" for name in ("slots", "attention", "survival")}
    assert "layer 2" in drawn["self_forcing_window_attention.svg"]


def test_long_rollouts(tmp_path):
    content = io.BytesIO()
    Image.fromarray(np.zeros((8, 16, 3), np.uint8)).save(content, "PNG")
    row = {"right": 0.25, "png": base64.b64encode(content.getvalue()).decode()}
    strips = {"prompt": "a circle moving down behind a wall", "seed": 3}
    strips |= {"model": "wan-mini", "seconds": [0, 5], "rows": {"full": row, "frozen": row}}
    row = {"policy": "full", "effect": [0.6, 0.5, 0.7], "largest_placebo": 0.2}
    by_length = {"prompts": 4, "weights_sha256": "0123456789ab"}
    by_length["rows"] = [row | {"num_frames": length} for length in (21, 240)]
    files = {"STRIPS": strips, "EFFECTS": by_length}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    paths = {name: str(tmp_path / name) for name in files}
    printed, drawn = run("long_rollouts", tmp_path, KINDS=["wall", "crossing"], **paths)
    assert "wan-mini, 240 latent frames, 18 held-out prompts × 3 seeds" in printed
    assert row_of(printed, "window", "9/3")[2] == "0.76"
    names = ("strips", "right", "heads", "over_time", "motion", "sink_maps", "cost", "effect_by_length")
    assert drawn.keys() == {"rope.svg", *(f"{name}.svg" for name in names)}
    assert "mean of all heads, 4 prompts" in drawn["effect_by_length.svg"]
    shown = ("5 s", "(25 %)", "“a circle moving down behind a wall”, seed 3")
    assert all(text in drawn["strips.svg"] for text in shown)
    findings = results.LongRollouts.open(ROOT / "experiments/findings/long_rollouts/results.json")
    windows, sinks, values = findings.sink_map("window")
    assert windows == [6, 9, 12, 21] and sinks == [0, 3, 6, 9, 12, 15]
    assert np.isnan(values[0, 2]) and values[1, 1] > values[1, 0]
    with pytest.raises(CacheError, match="those of the repository are in experiments"):
        results.LongRollouts.open(tmp_path / "x.json")


def test_coherence_has_the_maxima_that_are_known():
    distances = np.arange(0, 260)
    values = rope_waves.rope_coherence(distances)
    assert values[0] == 1 and round(values[69], 3) == 0.565 and round(values[88], 3) == 0.548
    found = rope_waves.maxima(distances, values, beyond=100, count=2)
    assert [(place, round(value, 3)) for place, value in found] == [(201, 0.544), (132, 0.541)]


@pytest.fixture(scope="module")
def maps(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("maps") / "maps.pt"
    flags = f"--config_path {tiny.path} --quiet --layer_indices 1 --query_patch 7,1,2 --words --save_video"
    run_extraction_maps.run([*flags.split(), "--output_path", str(path)])
    return path


def test_on_the_video(maps, tmp_path):
    said, drawn = run("on_the_video", tmp_path, CACHE_PATH=str(maps), CAUSAL_ATLAS="none.pt")
    assert drawn.keys() == {"video_map.svg", "video_map_other.svg", "strip.svg", "words.svg"}
    assert all(b"data:image/png" in path.read_bytes() for path in (tmp_path / "figures").rglob("*.svg"))
    assert "no causal atlas is there" in said and "patch (1, 2) of frame 7" in drawn["strip.svg"]
    assert "own block, noise in this pass" in drawn["video_map.svg"]
    assert [len(list((tmp_path / "figures").glob(f"*.{kind}"))) for kind in ("pdf", "mp4")] == [4, 1]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("on_the_video", {"CACHE_PATH": "none.pt"}, "run: python experiments/run_extraction_maps.py"),
        ("on_the_video", {"HEADS": [[0, 1]]}, "layer 0 is not in this cache; it has 1"),
        ("on_the_video", {"VIDEO": "none.mp4"}, "none.mp4 is not there"),
        ("on_the_video", {"HEADS": "effects"}, 'HEADS must be "effect" or a list of (layer, head), not'),
        ("plt_fig4", {"CACHE_PATH": "none.pt"}, "run: python experiments/run_extraction_figure4.py"),
        ("plot_figure4", {}, "is a cache of format maps"),
    ],
)
def test_wrong_parameters_are_one_line(maps, tmp_path, name, parameters, message):
    said, _ = run(name, tmp_path, **({"CACHE_PATH": str(maps)} | parameters))
    assert message in said and "\n" not in said and not (tmp_path / "figures").exists()


# --- Parameters: a name that is unknown, a value of another kind, one that is not in this cache
ATLAS = str(PUBLISHED / "self_forcing_dmd_eagle_21f.pt")
BAD = [
    ("layer_atlas", {"LAYER": 99}, "LAYER = 99 is not in 0..29"),
    ("layer_atlas", {"LAYER": -1}, "LAYER = -1 is not in 0..29"),
    ("layer_atlas", {"HEAD": 12}, "HEAD = 12 is not in 0..11"),
    ("layer_atlas", {"HEAD": "a"}, "HEAD = 'a' is not int"),
    ("layer_atlas", {"HEAD": 1.5}, "HEAD = 1.5 is not int"),
    ("layer_atlas", {"HEAD": True}, "HEAD = True is not int"),
    ("layer_atlas", {"CACHE_PATH": 5}, "CACHE_PATH = 5 is not str"),
    ("layer_atlas", {"STEP": 99}, "pass 99 is not in this cache; it has "),
    ("layer_atlas", {"KEY_AXIS": "frames"}, "KEY_AXIS = 'frames' is not in frame, position"),
    ("layer_atlas", {"FIGURE_WIDTH": "colum"}, "size is column, page, or 1..40 inches, not 'colum'"),
    ("layer_atlas", {"FIGURE_WIDTH": 0}, "size is column, page, or 1..40 inches, not 0"),
    ("layer_atlas", {"LAYR": 3}, "layer_atlas.ipynb has no parameter LAYR; did you mean LAYER?"),
    ("layer_atlas", {"layer": 3}, "layer_atlas.ipynb has no parameter layer; did you mean LAYER?"),
    ("layer_atlas", {"DATA_PATH": "x.pt"}, "layer_atlas.ipynb has no parameter DATA_PATH"),
    ("plot_figure4", {"MULTI_HEADS": [0, 99]}, "MULTI_HEADS has 99, which is not in 0..11"),
    ("plot_figure4", {"MULTI_HEADS": [-1]}, "MULTI_HEADS has -1, which is not in 0..11"),
    ("plot_figure4", {"MULTI_HEADS": []}, "MULTI_HEADS = [] is not in 0..11"),
    ("plot_figure4", {"HEAD": 99}, "HEAD = 99 is not in 0..11"),
    ("plot_figure4", {"WEIGHT_INDEX": "0"}, "WEIGHT_INDEX = '0' is not int"),
    ("plot_figure4", {"WEIGHT_INDEX": 999}, "call 999 is not in the "),
    ("extract_all_attention", {"QUERY_FRAMES": []}, "QUERY_FRAMES = [] is not in 0..20"),
    ("extract_all_attention", {"QUERY_FRAMES": [-1]}, "QUERY_FRAMES has -1, which is not in 0..20"),
    ("extract_all_attention", {"QUERY_FRAMES": [20, 21]}, "QUERY_FRAMES has 21, which is not in 0..20"),
    ("extract_all_attention", {"LAYER": 99}, "layer 99 is not in this cache; it has "),
    ("extract_all_attention", {"BRANCH": "uncond"}, "this cache has no branch uncond; BRANCH must be cond"),
    ("plt_fig4", {"HEADS": [[1, 1]]}, "HEADS = [[1, 1]] is not list[tuple[int, int, str]] | str"),
    ("plt_fig4", {"HEADS": "all"}, "a list of (layer, head, label), not 'all'"),
    ("plt_fig4", {"HEADS": []}, "a list of (layer, head, label), not []"),
    ("plt_fig4", {"TITLE": 5}, "TITLE = 5 is not str | None"),
    ("plt_fig4", {"PDF": "no"}, "PDF = 'no' is not bool"),
    ("plt_fig4", {"FIGURE_HEIGHT": float("nan")}, "size is column, page, or 1..40 inches, not nan"),
    ("on_the_video", {"PICTURE": 4}, "PICTURE = 4 is not in 0..3"),
    ("on_the_video", {"QUERY": 18}, "QUERY = 18 is not list[int] | None"),
    ("sweep", {"STEP": "0"}, "STEP = '0' is not int | None"),
    ("activations", {"BLOCK": 9}, "BLOCK = 9 is not in 0..2"),
    ("activations", {"LAYERS": [0, 8]}, "LAYERS has 8, which is not in 0..7"),
    ("activations", {"STEERED_LAYER": 99}, "STEERED_LAYER = 99 is not in 0..7"),
    ("activations", {"CONFIG": "wan_minni"}, "wan_minni"),
    ("sae", {"LAYER": 8}, "LAYER = 8 is not in 0..7"),
    ("your_own_pipeline", {"LAYER": 8}, "LAYER = 8 is not in 0..7"),
    ("policies", {"LAYER": 99}, "LAYER = 99 is not in 0..7"),
    ("policies", {"STEP": 9}, "STEP = 9 is not in 0..4"),
    (
        "policies",
        {"POLICIES": ["deep_sinks"]},
        "POLICIES has 'deep_sinks', which is not in deep_forcing, deep_s",
    ),
    ("interventions", {"LAYER": 99}, "LAYER = 99 is not in 0..7"),
    ("interventions", {"EDIT": "knockout"}, "EDIT = 'knockout' is not dict"),
    ("interventions", {"EDIT": {"edit": "knockot", "passes": "all"}}, "knockot"),
    ("long_rollouts", {"KINDS": ["walls"]}, "KINDS has 'walls', which is not in "),
    ("models", {"MODELS": {"a": "wan_mini"}}, "is not dict[str, tuple[str, dict]]"),
    ("models", {"STEP": None}, "STEP = None is not int"),
]


def test_a_pipeline_of_ones_own_is_captured_and_edited(tmp_path):
    said, drawn = run("your_own_pipeline", tmp_path, NUM_FRAMES=5)
    assert "Atlas: WanPipeline (pipeline), “a red circle moving" in said
    assert "frames 2, frames 2]" in said and "16 calls were edited; pixels differ by 0.0" in said
    assert (
        {*drawn} == {"your_profiles.svg", "your_words.svg", "your_word_maps.svg"}
        and "circle" in drawn["your_words.svg"]
        and "(end)" in drawn["your_words.svg"]
    )
    assert not re.search("▁|</s>|&lt;/s", drawn["your_words.svg"])
    assert "WordMaps: red, background, [2, 4, 4], of 8 layers and 8 passes" in said


def test_an_autoencoder_of_a_stores_rows(tmp_path):
    small = {"CAPTIONS": 8, "NUM_FRAMES": 3, "FEATURES": 64, "EPOCHS": 2}
    said, drawn = run("sae", tmp_path, **small)
    assert "8 runs, 576 rows of 192 to train on" in said, said
    shares = {
        name: float(row_of(said, *name.split())[len(name.split())])
        for name in ("autoencoder", "principal components")
    }
    assert 0 < shares["autoencoder"] < 1 and 0 < shares["principal components"] < 1
    table = said.split("held-out captions, those")[1]
    assert table.count("the feature") == table.count("random") == table.count("plain") > 0
    assert {*drawn} == {f"sae_{name}.svg" for name in ("features", "frames", "steered")}


@pytest.mark.parametrize(("name", "parameters", "message"), BAD)
def test_a_wrong_parameter_is_named_in_one_line(tmp_path, name, parameters, message):
    opens_an_atlas = name in ("layer_atlas", "plot_figure4", "extract_all_attention", "plt_fig4")
    given = {"CACHE_PATH": ATLAS} if opens_an_atlas else {}
    if name == "plot_figure4" and "WEIGHT_INDEX" not in parameters:
        save_cache(tmp_path / "c.pt", synthetic_caches.inference(H=12))
        given["CACHE_PATH"] = str(tmp_path / "c.pt")
    said, _ = run(name, tmp_path, **(given | parameters))
    last = said.splitlines()[-1]
    assert last.startswith(("ConfigError: ", "CacheError: ")) and message in last, said
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_notebook_declares_its_parameters(path):
    """Each in a statement of its own, with a type where the default has none; checked once, by names."""
    notebook = load_notebook_node(str(path))
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.tags]
    types = parameter_types(path)
    assert list(types) == list(dict.fromkeys(re.findall(r"^([A-Z_0-9]+)\b", cell.source, re.MULTILINE)))
    assert not {"NoneType", "list", "tuple"} & {*types.values()}
    code = "".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert code.count(f'check_parameters("{path.stem}", globals()') >= 1


def test_a_parameter_becomes_what_its_type_says():
    given = {"CACHE_PATH": Path("a.pt"), "LAYER": np.int64(3), "FIGURE_WIDTH": 5, "STEP": None}
    check_parameters("layer_atlas", given)
    assert (given["CACHE_PATH"], given["LAYER"], given["FIGURE_WIDTH"]) == ("a.pt", 3, 5.0)
    assert type(given["LAYER"]) is int
    given = {"HEADS": [[1, 1, "L1H1"], (5, np.int64(10), "L5H10")]}
    check_parameters("plt_fig4", given)
    assert given["HEADS"] == [(1, 1, "L1H1"), (5, 10, "L5H10")]
    given = {"LAYERS": range(2)}
    check_parameters("activations", given)
    assert given["LAYERS"] == [0, 1]
    given = {"STEP": "any", "HEAD": 3}  # of a notebook of one's own
    check_parameters("mine", given, HEAD=range(12))
    with pytest.raises(ConfigError, match="HEAD = 3 is not in 0, 1"):
        check_parameters("mine", given, HEAD=range(2))


def test_a_kernel_that_goes_on_may_have_its_own_variables():
    given = {"SWEEP_DIR": "a", "HEADS": "auto", "STEP": None, "SAVE_DIR": "b", "PUBLISHED": "c"}
    given |= {"FIGURE_WIDTH": None, "PDF": False}
    check_parameters("sweep", given)
    check_parameters("sweep", given | {"views": 1, "MINE": 2})
    with pytest.raises(ConfigError, match="no parameter STEPS; did you mean STEP"):
        check_parameters("sweep", given | {"STEPS": 2})


# --- Caches of runs that were stopped show what is absent as absent
STOPPED = {  # of scripts and their flags, with notebooks and what they call the path
    "layer_atlas CACHE_PATH": (run_extraction_all, "--cross --key_curve --rope_bands"),
    "extract_all_attention CACHE_PATH": (run_extraction_each, ""),
    "plot_figure4 CACHE_PATH": (run_extraction, "--blocks 1 2 -1"),
}


@pytest.mark.parametrize("opened", STOPPED)
def test_a_notebook_says_where_the_run_was_stopped(opened, tiny, tmp_path, monkeypatch):
    script, flags = STOPPED[opened]
    notebook, path = opened.split()
    stopping_after(monkeypatch, 2)
    given = f"--config_path {tiny.path} --quiet --num_frames 12 {flags} --output_path".split()
    with pytest.raises(SystemExit) as ended:
        cli.main(script.run, [*given, str(tmp_path / "run.pt")])
    cache = load_cache(tmp_path / "run.pt", mmap=False)
    assert ended.value.code == 130 and cache["partial"]
    printed, drawn = run(notebook, tmp_path, cache, path)
    assert "partial: the run was stopped after 3 of 4 blocks; what comes later is absent" in printed and drawn
    assert not re.search(r"\bnan\b", " ".join([printed, *drawn.values()]), re.IGNORECASE)
    of_keys = [text for text in drawn.values() if "Key frame" in text]
    assert of_keys and all("not attended" in text for text in of_keys)
