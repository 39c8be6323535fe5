"""Path patching: everything patched is the other run, nothing is no change, and parts lie where they must."""

import pytest
from helpers.rollouts import TWO_STEPS

from experiments.extraction import causal
from experiments.studies.hidden_shapes import unnamed_captions
from experiments.studies.paired_prompts import PairedRuns, RecordedCalls, Tracer, pairs_of, trace
from wan.config import load_config


@pytest.fixture(scope="module")
def tracer():
    """One pair, as if its shape was hidden in block 1 and returned in block 2."""
    config = load_config("configs/wan_mini.yaml", {"num_frames": 9} | TWO_STEPS)
    pairs = pairs_of(unnamed_captions(1, {}))
    session = causal.prepare(config, [], pairs[0].texts)
    return Tracer(PairedRuns(config, session, pairs), first_hidden=1, back=2)


def test_pairs_differ_in_the_colour_of_block_0_alone(tracer):
    (pair,) = tracer.paths.pairs
    one, other = (set(caption.split()) for caption in pair.captions)
    assert len(one - other) == len(other - one) == 1 and pair.scene.unnamed_color
    assert tracer.visible == (0, 1, 2) and tracer.hidden == (3, 4, 5)


def test_all_of_the_past_is_the_other_run_and_its_parts_lie_between(tracer):
    past = tracer.visible + tracer.hidden
    heads = [(layer, head) for layer in range(8) for head in range(12)]
    found = tracer.read({"all": (None, past), "by head": (heads, past), "head": ([(3, 6)], past)})
    assert found["all"] == pytest.approx([1], abs=1e-4) == found["by head"]
    assert abs(found["head"][0]) < 0.9
    own = RecordedCalls(0)
    tracer.paths.rollout(0, own)
    assert tracer.read({"own": (None, past)}, own)["own"] == pytest.approx([0], abs=1e-5)


def test_writers_reach_deeper_layers_alone(tracer):
    heads = [(5, head) for head in range(12)]
    record = tracer.written(heads)
    shallow, deep = [(n, h) for n in range(6) for h in range(12)], [(6, 0), (7, 3)]
    found = tracer.read({"shallow": (shallow, tracer.visible), "deep": (deep, tracer.visible)}, record)
    assert found["shallow"] == pytest.approx([0], abs=1e-5) and abs(found["deep"][0]) > 1e-5
    assert tracer.read({"": (None, tracer.visible)}, tracer.relayed())[""] == pytest.approx([0], abs=1e-5)


def test_a_trace_names_the_strongest(tracer, monkeypatch):
    monkeypatch.setattr(PairedRuns, "blocks_of_hiding", lambda self, vae, pool: [(1, 2)])
    monkeypatch.setattr(Tracer, "read", lambda self, patches, source=None: {n: [len(n)] for n in patches})
    monkeypatch.setattr(Tracer, "written", lambda self, heads: None)
    found = trace(tracer.paths.config, tracer.paths.session, None, None, tracer.paths.pairs)
    assert found["pairs"] == found["of"] == 1 and found["returns in block"] == 2
    assert len(found["readers"]) == 8 + 96 and len(found["writers"]) == 8 + 1 + 12
