"""What was asked for is what comes: in its order, with its numbers, whole, or refused in one line."""

import pytest
import torch
from helpers.refusals import refused

from experiments import ActivationStore, capture, gradients, load, x0_lens
from experiments.extraction import cache_builders
from wan.capture import CaptureRequest
from wan.config import RunConfig

PROMPT = "a red circle"


@pytest.fixture(scope="module")
def session(tiny):
    return load(tiny.path, num_frames=6)


def captured(session, *sites, **chosen):
    with capture(session, *sites, **chosen) as seen:
        session.generate(PROMPT, seed=1)
    return seen


# --- Order and names of what was asked for
CHOSEN = {"layers": [1, 0], "heads": [1, 0], "steps": [1, 0], "frames": [5, 3, 1]}


@pytest.mark.parametrize("streams", [False, True], ids=["in memory", "in a store"])
def test_activations_come_in_the_asked_order_and_say_their_numbers(session, tmp_path, streams):
    whole = captured(session, "z")["z"].at(block=1).stack()  # [layer, block, step, B, L, H, D]
    folder = {"stream_to": tmp_path / "store"} if streams else {}
    seen = captured(session, "z", **CHOSEN, **folder)
    table = seen["z"].at(block=1)
    by_frame = whole[[1, 0]][:, :, [1, 0]].unflatten(4, (3, -1))[:, :, :, :, [2, 0]]  # frames 5 and 3
    assert torch.equal(table.stack(), by_frame.flatten(4, 5)[..., [1, 0], :])
    assert table.coordinates == {"layer": [1, 0], "block": [1], "step": [1, 0]}
    assert table.heads == [1, 0] and table.frames == [5, 3]
    read = ActivationStore(tmp_path / "store").runs[0].read("z", block=1) if streams else table
    assert torch.equal(read.stack(), table.stack()) and read.heads == table.heads
    path = seen.save(tmp_path / "z.safetensors")
    from experiments.caches import load_cache

    opened = load_cache(path)["z"].at(block=1)
    assert torch.equal(opened.stack(), table.stack()) and opened.frames == table.frames


def test_an_atlas_a_lens_and_gradients_have_their_layers_in_the_asked_order(session):
    atlas = captured(session, layers=[1, 0]).atlas()
    ascending = captured(session, layers=[0, 1]).atlas()
    assert atlas["layers"] == [1, 0]
    torch.testing.assert_close(
        atlas["frame_mass"], ascending["frame_mass"][[1, 0]], rtol=0, atol=0, equal_nan=True
    )
    lens = x0_lens(session, PROMPT, 1, layers=[1, 0])
    ascending = x0_lens(session, PROMPT, 1, layers=[0, 1])
    assert lens.layers == [1, 0] and torch.equal(lens.distance, ascending.distance[[1, 0]])
    with gradients(session, "z", layers=[1, 0], blocks=[1], steps=[0]) as grads:
        session.generate(PROMPT, seed=1)
        grads.backward(lambda x0: x0.mean())
    table = grads["z"]
    assert table.coordinates["layer"] == [1, 0]
    assert torch.equal(table.stack()[0], table.at(layer=1).stack()[0])


@pytest.mark.parametrize("name", ["layers", "heads", "blocks", "steps", "frames"])
def test_a_number_that_comes_twice_is_refused(session, name):
    with refused(rf"{name} \[0, 1, 0\] name 0 twice"), capture(session, "z", **{name: [0, 1, 0]}):
        pass


@pytest.mark.parametrize("name", ["layers", "blocks", "steps"])
def test_attention_calls_in_another_order_than_the_rollouts_are_refused(session, name):
    with refused(rf"{name} \[1, 0\] must ascend"), capture(session, granularity="key", **{name: [1, 0]}):
        pass


def test_step_minus_one_beside_its_own_number_is_refused(session):
    with refused("name 1 twice"), capture(session, "z", steps=[1, -1]):
        pass


@pytest.mark.parametrize(
    "ask",
    [
        lambda config: RunConfig(layer_indices=[5, 5]),
        lambda config: CaptureRequest(granularity="map", heads=(5, 5)),
        lambda config: cache_builders.map_requests(config, (4, 4), heads=[1, 1]),
        lambda config: cache_builders.map_requests(config, (4, 4), steps=[1, 1]),
        lambda config: cache_builders.inference_requests(config, blocks=[-1, 1]),
    ],
    ids=["layers of a config", "heads of a request", "heads of maps", "steps of maps", "the last block"],
)
def test_numbers_of_scripts_that_come_twice_are_refused(session, ask):
    with refused("twice|once"):
        ask(session.config)


def test_rows_of_a_store_come_once_and_in_order(session, tmp_path):
    captured(session, "z", stream_to=tmp_path)
    store = ActivationStore(tmp_path)
    for chosen in ({"frames": [3, 1]}, {"steps": [1, 0]}, {"steps": [-1, 0]}):
        with refused("must ascend: rows come in the order of the run"):
            store.rows("z", 0, **chosen)
    with refused("name 0 twice"):
        store.rows("z", 0, runs=[0, 0])
