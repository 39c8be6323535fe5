"""Path patching: everything patched is the other run, nothing is no change; effects of heads and a budget."""

import json

import numpy as np
import pytest

from experiments import measure_head_effects as script
from experiments.studies.hidden_shapes import unnamed_captions
from experiments.studies.paired_prompts import (
    HeadEffects,
    PairedRuns,
    RecordedCalls,
    Tracer,
    budget_rows,
    pairs_of,
    read_pairs,
    trace,
)
from wan.errors import ConfigError

HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.fixture(scope="module")
def tracer(tiny):
    """One pair, as if its shape was hidden in block 1 and returned in block 2."""
    pairs = pairs_of(unnamed_captions(1, {}))
    return Tracer(PairedRuns(tiny.config, tiny.session, pairs), first_hidden=1, back=2)


def test_all_of_the_past_is_the_other_run_and_its_parts_lie_between(tracer):
    (pair,) = tracer.paths.pairs
    one, other = (set(caption.split()) for caption in pair.captions)
    assert len(one - other) == len(other - one) == 1 and pair.scene.unnamed_color
    assert tracer.visible == (0, 1, 2) and tracer.hidden == (3, 4, 5)
    past = tracer.visible + tracer.hidden
    found = tracer.read({"all": (None, past), "by head": (HEADS, past), "head": ([(1, 1)], past)})
    assert found["all"] == pytest.approx([1], abs=1e-4) == found["by head"]
    assert abs(found["head"][0]) < 0.9
    own = RecordedCalls(0)
    tracer.paths.rollout(0, own)
    assert tracer.read({"own": (None, past)}, own)["own"] == pytest.approx([0], abs=1e-5)


def test_writers_reach_deeper_layers_alone(tracer):
    record, seen = tracer.written([(0, 0), (0, 1)]), tracer.visible
    found = tracer.read({"shallow": (HEADS[:2], seen), "deep": ([(1, 0)], seen)}, record)
    assert found["shallow"] == pytest.approx([0], abs=1e-5) and abs(found["deep"][0]) > 1e-5
    assert tracer.read({"": (None, seen)}, tracer.relayed())[""] == pytest.approx([0], abs=1e-5)


def test_a_trace_names_the_strongest(tracer, monkeypatch):
    monkeypatch.setattr(PairedRuns, "blocks_of_hiding", lambda self, vae, pool: [(1, 2)])
    paths = tracer.paths
    found = trace(paths.config, paths.session, None, None, paths.pairs, most=1)
    assert found["pairs"] == found["of"] == 1 and found["returns in block"] == 2
    assert len(found["readers"]) == 2 + 4 and len(found["writers"]) == 2 + 1 + 2
    best = max((name for name in found["readers"] if "head" in name), key=lambda n: found["readers"][n])
    assert found["whole"]["strongest readers"] == pytest.approx(found["readers"][best], abs=1e-6)


def test_budget_rows_cost_what_they_say():
    rows = np.array(budget_rows(np.arange(96.0).reshape(8, 12), 9, 6, 3, 21))
    assert rows[:, 2].mean() <= 9 < rows[:, 2].mean() + 15 / 96 and set(rows[rows[:, 2] == 6, 3]) == {3}
    assert {tuple(row[:2]) for row in rows if row[2] == 21} == {divmod(n, 12) for n in range(77, 96)}


def test_pairs_of_a_file(tmp_path):
    pairs = read_pairs("configs/paired_prompts.yaml")
    assert len(pairs) == 16 and all(len(set(pair.texts)) == 3 for pair in pairs)
    assert [pair.seed for pair in pairs] == [*range(16)]
    (tmp_path / "pairs.yaml").write_text("pairs: [{prompts: [a], then: b}]")
    with pytest.raises(ConfigError, match=r"write pairs: \[\{prompts: \[A, B\]"):
        read_pairs(tmp_path / "pairs.yaml")


@pytest.mark.parametrize("how", ["knockout", "patch"])
def test_a_command_from_pairs_to_a_video_with_the_budget(how, tiny, tmp_path, monkeypatch):
    (tmp_path / "pairs.yaml").write_text("pairs: [{prompts: [a red fox, a blue fox], then: a fox}]")
    flags = ["--config_path", tiny.path, "--pairs", f"{tmp_path}/pairs.yaml", "--measure", how, "--quiet"]
    flags += ["--budget", "5", "--window", "4", "--sink", "1", "--folder", f"{tmp_path}/kept"]
    script.run([*flags, "--output_path", f"{tmp_path}/heads.csv"])
    report = json.loads((tmp_path / "heads.json").read_text())
    effects, rows = np.array(report["effects"]), (tmp_path / "heads.csv").read_text().splitlines()
    assert effects.shape == (2, 2) and (effects > 0).all() and (how == "knockout" or effects.max() < 3)
    assert rows[0] == "layer,head,window,sink" and sum(row.endswith(",4,1") for row in rows) == 4
    assert report["seconds with budget"] > 0 and 0 < report["distance / standard deviation"] < 2
    monkeypatch.setattr(HeadEffects, "make", lambda *_: pytest.fail("measured again"))
    script.run([*flags, "--output_path", f"{tmp_path}/heads.csv"])
