"""The hook: what it promises to scripts, that looking changes nothing, and that leaving leaves nothing."""

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.pretended_gpu import pretended_gpu, waited
from helpers.rollouts import MODEL_LAYERS, rollout, tiny_pipeline

from wan import keys
from wan.attention import attention
from wan.capture import SMALL, Capture, CapturedCall, CaptureRequest, Site, call_index, move_to_cpu
from wan.interventions import Knockout, Move, intervene
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.sites import Pass

S = 5  # tokens of a frame of the tiny rollout
BOTH = ("self", "cross")
EVERYTHING = [
    CaptureRequest(kinds=BOTH),
    CaptureRequest(granularity="key", kinds=BOTH),
    CaptureRequest(granularity="map", kinds=BOTH, num_words=2),
    CaptureRequest(granularity="frame", kinds=BOTH, rope_bands=True, query_key_means=True),
]


# --- Looking changes nothing
@pytest.mark.real_gpu  # what these run on a pretended one, the tests of kernels, bands and policies run there
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_looking_changes_no_bit(dtype, device):
    """Of plain rollouts, and of edited ones."""
    pipeline = tiny_pipeline(dtype, device, local_attn_size=4, sink_size=1)
    edits = Knockout(frames="first", heads=[1], passes="all"), Move("sink", offset=2, passes="denoise")
    plain = rollout(pipeline, 6)
    with intervene(*edits):
        edited = rollout(pipeline, 6)
    for request in EVERYTHING if dtype == torch.float32 else EVERYTHING[-1:]:
        with ATTENTION_WEIGHT_CAPTURE.capture(request) as calls:
            assert torch.equal(plain, rollout(pipeline, 6))
            with intervene(*edits):
                assert torch.equal(edited, rollout(pipeline, 6))
        assert calls and all(x.device.type == "cpu" for call in calls for x in call.values.values())
    assert torch.equal(plain, rollout(pipeline, 6))
    last = [call for call in calls if call["kind"] == "self"][-1]
    assert last["key_frames"] == [0, 3, 4, 5] and last["query_frames"] == [3, 4, 5]


# --- What is asked for is what comes, as it is called
def test_selection_by_layer_block_step_and_kind_and_a_call_reads_like_a_dict():
    words = {"kinds": ("cross",), "granularity": "map", "num_words": 2, "heads": (1,)}
    requests = (
        CaptureRequest(layers=[2], blocks=[1], steps=[0, 4]),
        CaptureRequest(kinds=("cross",), blocks=[0], steps=[3], granularity="frame"),
        CaptureRequest(layers=[0], granularity="map", queries=((4, 2),), steps=[0]),
        CaptureRequest(layers=[1], blocks=[0], steps=[3], **words),
        CaptureRequest(layers=[1], blocks=[1], steps=[4], granularity="frame"),
    )
    with ATTENTION_WEIGHT_CAPTURE.capture(*requests) as calls:
        rollout(tiny_pipeline())
    found = [(c["layer"], c["block"], c["step"], c["kind"]) for c in calls]
    cross = [(layer, 0, 3, "cross") for layer in (0, 1, 1, 2, 3)]
    assert found == [*cross, *((layer, 1, step, "self") for layer, step in ((0, 0), (2, 0), (1, 4), (2, 4)))]
    maps, call = calls[5], calls[7]
    assert maps["map_mass"].shape == (1, 3, 1, 6 * S) and maps["map_queries"].tolist() == [[4, 2]]
    by_frame, by_word = sorted(calls[1:3], key=lambda one: "word_map" in one)
    assert by_word["word_map"].shape == (1, 1, 3 * S, 2) and not by_word.is_logits
    means = by_word["word_map"].float().unflatten(2, (3, S)).mean(3)
    torch.testing.assert_close(means, by_frame["cross_mass"][:, 1:2, :, :2], atol=1e-4, rtol=2**-10)
    assert {**call}.keys() == call.keys() == {name for name, _ in call.items()} and len(call) == len({**call})
    assert call["frame_logits"] is call.values["frame_logits"] and call == call and "none" not in call
    assert call.get("none", 3) == 3 and hash(call)
    assert call["frame_timesteps"] == {3: 0.0, 4: 0.0, 5: 0.0} and call["branch"] == "cond"
    assert call["slot_frame"] == call["slot_position"] == [*range(6)] and call["slot_tokens"] == [S] * 6


def test_maps_are_of_the_heads_and_queries_asked_for_in_their_order():
    queries = ((-1, -1), (4, -1), (3, 1), (1, 2))
    maps = CaptureRequest(layers=[1], granularity="map", queries=queries, heads=(2, 0), blocks=[1], steps=[0])
    tokens = CaptureRequest(layers=[1], blocks=[1], steps=[0])
    change = Knockout(frames=[0, 2], layers=[1], heads=[2], passes="denoise")
    with ATTENTION_WEIGHT_CAPTURE.capture(maps, tokens) as calls, intervene(change):
        rollout(tiny_pipeline())
    logits = calls[1]["token_logits"][:, [2, 0]].double()
    mass = logits.nan_to_num(nan=-torch.inf).softmax(-1)
    assert calls[0]["map_queries"].tolist() == [list(query) for query in queries[:3]]
    close = partial(torch.testing.assert_close, atol=2e-5, rtol=2**-10, equal_nan=True)
    for n, some in enumerate((slice(0, 15), slice(S, 2 * S), slice(1, 2))):
        close(calls[0]["map_logits"][:, :, n].double(), logits[:, :, some].mean(2))
        close(calls[0]["map_mass"][:, :, n].double(), mass[:, :, some].mean(2) * S)
    left_out = calls[0]["map_logits"].isnan()
    assert left_out[:, 0].any() and not left_out[:, 1].any()
    assert torch.equal(~calls[0]["attended"].expand_as(left_out), left_out)


# --- The older face
def test_captured_weights_of_the_older_interface():
    pipeline = tiny_pipeline()
    assert [call_index(Site(layer, kind)) for layer in (0, 3) for kind in BOTH] == [0, 1, 6, 7]
    ATTENTION_WEIGHT_CAPTURE.enable(layer_indices=[2, 7], capture_logits=True, num_layers=2 * MODEL_LAYERS)
    rollout(pipeline)
    calls = ATTENTION_WEIGHT_CAPTURE.captured_weights
    ATTENTION_WEIGHT_CAPTURE.disable()
    assert ATTENTION_WEIGHT_CAPTURE.captured_weights == [] and not ATTENTION_WEIGHT_CAPTURE.active
    assert [c["layer_idx"] for c in calls] == [2, 7] * (2 * 5)  # 2 blocks of 5 passes
    assert [(c["block"], c["step"]) for c in calls[::2]] == [(b, s) for b in range(2) for s in range(5)]
    last = calls[-2]
    assert last["attn_weights"].shape == (1, 3, 15, 30) and last["attn_weights"].dtype == torch.float32
    assert {"layer_idx", "attn_weights"} <= {*last}
    assert (last["q_shape"], last["k_shape"]) == ([1, 15, 3, 16], [1, 30, 3, 16])
    assert last["is_logits"] and last["is_clean_pass"] and last["timestep"] == 0.0
    assert (last["query_frames"], last["key_frames"]) == ([3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert calls[-1]["kind"] == "cross" and calls[-1]["attn_weights"].shape == (1, 3, 15, 7)
    assert [c["timestep"] for c in calls[:10:2]] == pytest.approx([1000, 937.5, 833.3333, 625, 0])


# --- Refusals
REFUSED = {
    "layer 4 is not in 0..3": {"layers": [4]},
    "step 5 is not in 0..4": {"steps": [0, 5]},
    "head 3 is not in 0..2": {"granularity": "map", "heads": (3,)},
    "token 5 is not in 0..4": {"granularity": "map", "queries": ((0, S),)},
    "pixel": {"granularity": "pixel"},
    "probabilities need granularity 'token'": {"granularity": "key", "is_logits": False},
    r"\(-2, -1\)": {"granularity": "map", "queries": ((-2, -1),)},
    "each once": {"granularity": "map", "queries": ((1, 2), (1, 2))},
    "rope_bands needs": {"granularity": "key", "rope_bands": True},
    "heads need granularity": {"granularity": "frame", "heads": (1,)},
    "num_layers=60.*num_layers=8": {"layer_indices": [0], "num_layers": 60},  # these two to the older face
    "call index 8 is not in 0..7": {"layer_indices": [8]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_request_that_makes_no_sense_or_lies_outside_the_rollout_is_refused(message):
    fields, pipeline = REFUSED[message], tiny_pipeline()
    with pytest.raises(ValueError, match=message), ExitStack() as leaving:
        if "layer_indices" in fields:
            leaving.callback(ATTENTION_WEIGHT_CAPTURE.disable)
            ATTENTION_WEIGHT_CAPTURE.enable(**fields)
        else:
            leaving.enter_context(ATTENTION_WEIGHT_CAPTURE.capture(**fields))
        rollout(pipeline, on_pass=pytest.fail)
    assert not ATTENTION_WEIGHT_CAPTURE.active


def test_frames_need_the_pass_of_a_call():
    q = torch.randn(1, 5, 3, 16)
    refused = pytest.raises(ValueError, match="need the pass of each call")
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame"), refused:
        attention(q, q, q, Site(0, "self"))


# --- Leaving leaves nothing
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("started", [False, True])
def test_what_was_captured_comes_to_the_cpu_as_it_was(started):
    """Each value is contiguous, and shares memory with small ones of its pass alone."""
    values = {"large": torch.rand(SMALL // 4, 5), "small": torch.rand(3, 4), "half": torch.rand(6, 2).half()}
    with pretended_gpu() as gpu:
        capture, call = Capture(()), SimpleNamespace(site=Site(0, "self"), at=None, check=None, beside=())
        on_gpu = {n: v.to(gpu).mT for n, v in values.items()}
        if started:
            capture._keep(call, on_gpu, (), (), None, None)
        else:
            capture.calls.append(CapturedCall(call.site, None, on_gpu, (), ()))
        passes = [Pass(query_frames=(n,)) for n in range(2)]
        of_passes = [CapturedCall(call.site, at, {"x": torch.ones(3).to(gpu)}, (), ()) for at in passes * 2]
        move_to_cpu([*capture.calls, *of_passes])
        (call,) = capture.calls
    memory = [one.values["x"].untyped_storage() for one in of_passes]
    assert [m.nbytes() for m in memory] == [24] * 4 and len({m.data_ptr() for m in memory}) == 2
    for name, value in values.items():
        found = call.values[name]
        assert found.device.type == "cpu" and found.is_contiguous() and torch.equal(found, value.mT)
        assert found.untyped_storage().nbytes() == value.nbytes


def test_the_gpu_that_values_set_off_from_is_waited_for_whichever_is_current():
    with pretended_gpu() as gpu:
        on_host = keys.to_host(torch.ones(3).to(gpu))
        waited.clear()
        keys.wait_for_host()
        assert waited == [f"synchronize {gpu}"] and on_host.device.type == "cpu"


def test_a_capture_may_be_entered_again_also_while_it_is_open():
    asked = ATTENTION_WEIGHT_CAPTURE.capture(granularity="token")
    q = torch.ones(1, 2, 1, 4)

    def attend():
        attention(q, q, q, Site(0, "self"))

    with asked as outer:
        attend()
        with asked as inner:
            attend()
            attend()
    with asked as later:
        pass
    assert [len(outer), len(inner), len(later)] == [1, 2, 0]
    assert not ATTENTION_WEIGHT_CAPTURE.active
