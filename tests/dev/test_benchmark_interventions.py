"""The benchmark of edits: rows that edit nothing keep the bits, an atlas goes on and is extrapolated."""

from dataclasses import replace

import pytest
from helpers.rollouts import TWO_STEPS

from experiments.dev import benchmark_interventions, measure_interventions
from experiments.dev.measure_capture import make_rollout
from experiments.studies import causal_atlas
from wan.config import load_config

FRAMES = 9


@pytest.fixture(scope="module")
def config():
    config = load_config("configs/wan_mini.yaml", {"num_frames": FRAMES} | TWO_STEPS)
    return replace(config, reference_prompts=config.reference_prompts[:1])


@pytest.fixture(scope="module")
def made(config):
    return make_rollout(config, random_weights=False)


def test_rows_say_what_was_edited_and_whether_bits_stayed(config, made):
    rollout, sizes = made
    every = measure_interventions.rows(config, sizes)
    assert next(iter(every)) == measure_interventions.PLAIN and len(every) == 9
    names = list(every)[:4]
    kept, said = [], []
    table = {name: every[name] for name in names}
    found = measure_interventions.measure(rollout, table, 1, kept.append, said.append)
    assert [list(rows) for rows in kept] == [names[: n + 1] for n in range(4)] and kept[-1] == found
    assert len(said) == 8 and said[0].endswith("not counted") and said[-1].startswith(f"{names[3]}: ")
    assert [found[name]["bit_identical"] for name in names] == [True, False, True, False]
    assert [bool(found[name]["edited_calls"]) for name in names] == [False, True, False, True]
    assert found[names[3]]["edited_calls"] == sizes.num_layers * 6  # two blocks with a past
    assert found[measure_interventions.PLAIN]["times_plain"] == 1


def test_an_atlas_goes_on_where_it_stopped(config, made, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.extraction.edits.FOLDER", tmp_path / "means")
    monkeypatch.setattr(causal_atlas.Study, "units", [0])  # of each layer's heads
    rollout, sizes = made
    session = measure_interventions.session_of(rollout, sizes, config, "weights")
    sweeps = [measure_interventions.sweep(session, config, 1, 0, tmp_path / "atlas") for _ in range(2)]
    assert [(one["layers_done_before"], one["layers_done_now"]) for one in sweeps] == [(0, 2), (2, 2)]
    assert not sweeps[0]["finished"] and sweeps[0]["heads"] == 96 and len(sweeps[0]["layer_seconds"]) == 1
    expected = sweeps[0]["first_layer_seconds"] + 7 * sweeps[0]["layer_seconds"][0]
    assert sweeps[0]["all_layers_seconds"] == pytest.approx(expected, abs=0.1)
    env = {"device": "a device", "torch": "2", "date": "today", "git": "0123456789", "command": "python x"}
    row = {"median_seconds": 1.5, "times_plain": 1.0, "edited_calls": 0, "bit_identical": True}
    report = {"model": "m", "random_weights": True, "num_frames": 6, "dtype": "float32", "environment": env}
    report["rows"] = {"plain": row}
    text = benchmark_interventions.table(report | {"sweep": sweeps[0]})
    assert "| plain | 1.500 | 1.000 | 0 | yes |" in text and "extrapolated" in text
    assert "2 of 8 layers" in text
    assert "extrapolated" not in benchmark_interventions.table(report | {"sweep": None})
    rest = sweeps[1] | {"finished": True}
    text = benchmark_interventions.table(report | {"rows": {}, "sweep": rest})
    assert "2 of 8 layers after 2 done before took" in text and "|" not in text and "extrapolated" not in text
