"""plt_fig4.ipynb from top to bottom on caches of each kind it takes: what it prints, writes, and says when it
cannot."""

import re

import numpy as np
import pytest
import torch
from helpers import executed, synthetic_caches

from experiments.analysis import reports
from experiments.analysis.head_measures import choose_heads
from experiments.analysis.measures import head_statistics
from experiments.caches import load_cache, save_cache
from experiments.caches.view import open_profiles


def run(tmp_path, **parameters):
    return executed.run("plt_fig4.ipynb", tmp_path, **parameters)


def figure_files(*layers):
    per_layer = {f"figure4_layer{N}_{name}.svg" for N in layers for name in ("per_head_grid", "all_heads")}
    whole = ("reproduction", "layer_comparison", "layers_together", "statistics")
    return per_layer | {f"figure4_{name}.svg" for name in whole}


def test_figure4_cache(tmp_path):
    cache = synthetic_caches.figure4(H=4)
    save_cache(tmp_path / "c.pt", cache)
    printed = run(tmp_path, CACHE_PATH=str(tmp_path / "c.pt"), HEADS=[[1, 1, "L1H1"], [5, 3, "L5H3"]])
    assert {p.name for p in (tmp_path / "figures").iterdir()} == figure_files(1, 5)
    for name in figure_files(1, 5):
        assert f"{tmp_path / 'figures' / name}\n" in printed
    assert "Pass: pass 0 (t = 1000)" in printed
    assert "Captured: full, all frames so far; queries of frames 18–20 on keys of frames 0–20" in printed
    assert "key frames 18–20 are noise in this pass" in printed
    assert "Shown: L1H1, L5H3" in printed
    # the numbers, by another route: float64 means straight from the tokens
    tokens = cache["attention_weights"][1]["attn_logits"][0, 3].double().numpy()  # layer 5, head 3: [48, 336]
    frame = tokens.reshape(48, 21, 16).mean((0, 2))
    middle = frame[1:20].mean()
    line = (
        f"  H 3: first={frame[0]:7.3f}, mid={middle:7.3f}, last={frame[20]:7.3f}, "
        f"sink={frame[0] - middle:+7.3f}, "
        f"first/mid={frame[0] / middle:7.2f}, first-last={frame[0] - frame[20]:+8.3f}, max@{frame.argmax()}, "
        f"(max-min)/|mean|={(frame.max() - frame.min()) / abs(frame.mean()):6.2f}"
    )
    assert line in printed.split("Layer 5,")[1]
    assert b"max@" in (tmp_path / "figures/figure4_reproduction.svg").read_bytes()


def test_atlas_pass_and_absent_layers(tmp_path):
    save_cache(tmp_path / "c.pt", synthetic_caches.atlas(layers=(0, 1, 3), steps=(0, 4)))
    printed = run(
        tmp_path, CACHE_PATH=str(tmp_path / "c.pt"), STEP=4, HEADS=[[1, 1, "L1H1"], [5, 10, "L5H10"]]
    )
    assert "Pass: clean pass (t = 0)" in printed
    assert "noise" not in printed
    assert (
        "Note: L5H10 (layer 5, head 10) not in this cache, which has layers 0–1, 3 with heads 0–2; "
        "shown: L1H1, L0H0"
    ) in printed
    assert {p.name for p in (tmp_path / "figures").iterdir()} == figure_files(0, 1)


def test_inference_window_of_probabilities(tmp_path):
    save_cache(tmp_path / "c.pt", synthetic_caches.inference(window=[0, 4, 5, 6, 7, 8]))
    printed = run(tmp_path, CACHE_PATH=str(tmp_path / "c.pt"))
    assert "Captured: a sliding window; queries of frames 6–8 on keys of frames 0, 4–8" in printed
    assert "Quantity: mass" in printed
    assert "not attended" in (tmp_path / "figures" / "figure4_reproduction.svg").read_text()


@pytest.mark.parametrize("F", [21, pytest.param(72, marks=pytest.mark.beside)])
def test_published_data_over_the_papers_curve(tmp_path, F):
    printed = run(tmp_path, CACHE_PATH=f"../cache/published/self_forcing_dmd_eagle_{F}f.pt")
    words = re.sub(r"<[^>]*>", "", (tmp_path / "figures" / "figure4_reproduction.svg").read_text())
    assert {p.name for p in (tmp_path / "figures").iterdir()} == figure_files(1, 5)
    assert "not there: mass" in printed and "Shown: L1H1, L5H10" in printed
    view = open_profiles(
        load_cache(executed.NOTEBOOKS.parent / f"cache/published/self_forcing_dmd_eagle_{F}f.pt")
    )
    delta = view.profiles()[..., 0] - view.profiles()[..., 1:-1].mean(-1)
    assert (
        f"All 360 heads: first − middle {delta.mean():+.2f} on average, above 2 for {(delta > 2).sum()}\n"
        in printed
    )
    highest = (view.profiles().argmax(-1) >= F - 3).sum()
    assert f"{highest} of 360 heads are highest there" in printed
    (line,) = [
        line
        for line in printed.split("\n")
        if line.startswith("L1H1, layer 1, head 1: a wave at 1 rad/frame")
    ]
    assert f"first − middle {delta[1, 1]:+.2f}" in line and abs(float(line.split("equal distance ")[1])) < 0.5
    if F == 72:
        assert "excess at equal distance +0.44 on average, above 2 for 15\n" in printed
        assert "they have 21 frames, this cache has 72" in printed and "read off the paper" not in words
        return
    shown = re.findall(r"shown: layer \d+, head \d+: r = (0\.\d{3}), RMS \d\.\d\d, rank 1 of 360\n", printed)
    assert len(shown) == 2 and min(map(float, shown)) >= 0.98
    assert printed.count("WARNING, counted from 1 it would be: layer 0, head 0") == 1
    assert all(f"r = {r}" in words for r in shown)
    assert "read off the paper" in words and "cut off by the paper's plot" in words.replace("&#x27;", "'")


def test_a_reference_can_be_switched_off(tmp_path):
    save_cache(tmp_path / "c.pt", synthetic_caches.atlas(layers=(0, 4), H=3))
    printed = run(
        tmp_path,
        CACHE_PATH=str(tmp_path / "c.pt"),
        REFERENCE_CSV=None,
        HEADS=[[0, 0, "L1H1"], [4, 2, "L5H3"]],
    )
    assert "none was asked for" in printed and "r = " not in printed
    assert {p.name for p in (tmp_path / "figures").iterdir()} == figure_files(0, 4)


@pytest.mark.parametrize(("cache", "message"), [
    (None, "../cache/none.pt not found; "
     "run: python experiments/run_extraction_figure4.py --output_path cache/none.pt"),
    (synthetic_caches.layer(), "is a cache of format layer: open it with "
     "notebooks/extract_all_attention.ipynb"),
])  # fmt: skip
def test_what_cannot_be_shown_is_said_in_one_line(tmp_path, cache, message):
    path = "../cache/none.pt"
    if cache:
        path = str(tmp_path / "layer.pt")
        save_cache(path, cache)
    said = run(tmp_path, CACHE_PATH=path)
    assert message in said and "\n" not in said
    assert not (tmp_path / "figures").exists()


def test_heads_that_are_not_there():
    view = open_profiles(synthetic_caches.figure4(layers=(0, 4), H=3, S=4))
    choice = choose_heads(view, [(1, 1, "L1H1"), (5, 10, "L5H10"), (9, 0, "third")])
    panels, note = choice.panels, reports.choice_note(choice, view)
    assert [(p.layer, p.head, p.label) for p in panels] == [(0, 0, "L0H0"), (4, 0, "L4H0")]
    assert "third (layer 9, head 0) not in this cache" in note
    choice = choose_heads(view, [(4, 2, "mine")])
    assert [(p.layer, p.head, p.label) for p in choice.panels] == [(4, 2, "mine")]
    assert reports.choice_note(choice, view) == "Shown: mine"
    panels = choice.panels
    np.testing.assert_allclose(panels[0].curve.reshape(21, 4).mean(1), panels[0].profile, atol=1e-6)


def test_a_windows_curve_lies_where_its_frames_are():
    view = open_profiles(synthetic_caches.figure4(layers=(1,), H=3, S=4, keys=[0, 17, 18, 19, 20]))
    (panel,) = choose_heads(view, [(1, 2, "x")]).panels
    by_frame = panel.curve.reshape(21, 4)
    assert np.isnan(by_frame[1:17]).all()
    np.testing.assert_allclose(by_frame.mean(1), panel.profile, atol=1e-6)


def test_what_it_shows_says_what_is_absent():
    view = open_profiles(synthetic_caches.figure4(H=3, S=4, granularity="frame"))
    panels = choose_heads(view, [(1, 1, "x")]).panels
    assert "Excess at equal distance: absent" in reports.finding_lines(view, panels)
    mass = open_profiles(synthetic_caches.figure4(H=3, S=4), quantity="mass")
    assert reports.finding_lines(mass, panels).endswith("of this cache, it holds mass")
    alone = open_profiles(synthetic_caches.atlas(blocks=[9]))
    assert reports.finding_lines(alone, []).endswith("its queries see no earlier block")
    clean = open_profiles(synthetic_caches.atlas(), step=4)
    assert "noise" not in reports.finding_lines(clean, []).lower()


def test_what_it_shows_tells_a_wave_from_a_sink():
    """Two made-up layers: waves that crest on frame 0, and true sinks; first − middle is high in both."""
    cache = synthetic_caches.atlas(layers=(0, 1), F=21, H=2, curve=False)
    distance = torch.arange(21)[:, None] - torch.arange(21)[None]
    cache["frame_logits"][0] = torch.where(
        cache["frame_logits"][0].isnan(), torch.nan, 4 * torch.cos(distance - 19.0)
    )
    cache["frame_logits"][1] = torch.where(
        cache["frame_logits"][1].isnan(), torch.nan, 4.0 * (torch.arange(21) == 0)
    )
    lines = reports.finding_lines(open_profiles(cache), []).split("\n")
    assert "above 2 for 4" in lines[1] and "above 2 for 2" in lines[2]
    assert (
        lines[4]
        == "  of 2 heads above 2 by the first alone, distance by itself gives more than half of it for 2"
    )


def test_lines_and_ranges():
    lines = reports.head_lines(
        head_statistics(np.array([[4.27, 1, 0.98, 7.281], [1, -2, 0, 3], [np.nan] * 4]))
    )
    assert lines.split("\n")[0].startswith(
        "  H 0: first=  4.270, mid=  0.990, last=  7.281, sink= +3.280, first/mid=   4.31"
    )
    assert "first/mid=    N/A" in lines.split("\n")[1]
    assert "first=    N/A" in lines.split("\n")[2]
    assert reports.ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
