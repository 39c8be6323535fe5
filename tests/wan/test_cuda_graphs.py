"""Layers that are replayed from graphs: the same bits, and eager wherever somebody can tell the difference.

Without a GPU a replay makes its call again, with whatever lies at the addresses that were recorded.
"""

import gc
import warnings
from dataclasses import replace

import pytest
import torch
from helpers import parallel_rollouts
from helpers.parallel_rollouts import small_model

from wan.activations import SiteCapture
from wan.capture import CaptureRequest
from wan.interventions import Ablate, Knockout, Move, Steer, intervene
from wan.model import CausalWanModel
from wan.policies import make_policy
from wan.sites import watched
from wan.wings import graphs as cuda_graphs
from wan.wings.graphs import apply_cuda_graphs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 2, "text_dim": 16, "text_len": 8}
FRAMES, TEXT = CaptureRequest(granularity="frame"), CaptureRequest(granularity="frame", kinds=("cross",))
LOGITS, BANDS = replace(FRAMES, mass=False), replace(FRAMES, rope_bands=True, layers=[1], steps=[1, 2])
CURVES = CaptureRequest(granularity="key", layers=[0], blocks=[1])
POLICIES = {
    "full": {"name": "full"},
    "relative": {"name": "relative", "window": 6, "sink": 1},  # its clean pass keeps keys without RoPE
    "memory_bank": {"name": "memory_bank", "window": 9, "sink": 3, "bank": 2, "interval": 1},
}


def roll_out(model, policy="full", seed=1, requests=(), **more):
    """Latents and captured values."""
    policy, options = make_policy(**POLICIES[policy]), {"frames": 10, "seed": seed, "first": True}
    latents, calls = parallel_rollouts.roll_out(model, policy, *requests, **options, **more)
    return latents, [values for call in calls for values in call.values.values()]


def both(dtype=torch.float32, **options):
    """The small model without graphs and with them."""
    eager, model = (small_model().to(DEVICE, dtype) for _ in range(2))
    apply_cuda_graphs(model, **options)
    return eager, model


@pytest.fixture
def replays(monkeypatch) -> list[int]:
    """How often a graph was recorded, and replayed."""
    counts, record = [0, 0], cuda_graphs.Recorder.record

    def counted(recorder, call):
        replay = record(recorder, call)
        counts[0] += 1

        def replayed():
            counts[1] += 1
            replay()

        return replayed

    monkeypatch.setattr(cuda_graphs.Recorder, "record", counted)
    return counts


def assert_equal(found, expected):
    (latents, values), (wanted, wanted_values) = found, expected
    assert torch.equal(latents, wanted) and len(values) == len(wanted_values)
    for value, like in zip(values, wanted_values, strict=True):
        torch.testing.assert_close(value, like, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_bits(policy, replays):
    eager, model = both(torch.bfloat16)
    for seed in (1, 2):  # another prompt, at other addresses
        assert_equal(roll_out(model, policy, seed), roll_out(eager, policy, seed))
    captured = [roll_out(of, policy, 3, [FRAMES], batch=2) for of in (model, eager)]
    assert_equal(*captured)
    shapes = 4  # two batch sizes, blocks of 1 and of 3 frames
    assert replays[0] == shapes * 2 * len(model.blocks)
    assert replays[1] > replays[0]


@pytest.mark.parametrize(
    "requests", [(), (FRAMES,), (LOGITS, BANDS)], ids=["plain", "frames", "two requests"]
)
def test_whole_passes_are_replayed(requests, replays, monkeypatch):
    """From the third pass of a block on, with what a capture asks for, and nothing of what another asked."""
    monkeypatch.setattr(cuda_graphs.ReplayedPass, "AFTER", 1)
    eager, model = both(torch.bfloat16, whole=True)
    whole = vars(model)["run_layers"]
    for seed in (1, 2):
        assert_equal(*(roll_out(of, seed=seed, requests=requests) for of in (model, eager)))
    assert len(whole.passes) >= 4 and None not in whole.passes.values()  # blocks of frames 0, 1-3, 4-6, 7-9
    # Who needs Python has it: hooks, edits, curves; each is heard in every pass.
    for more in (FRAMES, CURVES):
        assert_equal(*(roll_out(of, requests=[more]) for of in (model, eager)))
    with intervene(Knockout(frames="first", heads=[1], passes="all")) as active:
        assert_equal(*(roll_out(of, requests=requests) for of in (model, eager)))
    assert all(active.changed)
    for of in (model, eager):
        of.blocks[1].register_forward_hook(lambda block, given, x: x + 1.0)
    assert_equal(*(roll_out(of, requests=requests) for of in (model, eager)))
    model.double().bfloat16()
    assert not whole.passes


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernels and products of a block of the 1.3B are a GPU's")
def test_the_same_bits_of_wide_layers(replays):
    eager, model = (CausalWanModel(**WIDE).eval().requires_grad_(False) for _ in range(2))
    model.load_state_dict(eager.state_dict())
    eager, model = (m.to(DEVICE, torch.bfloat16) for m in (eager, model))
    apply_cuda_graphs(model)
    for policy in ("full", "relative"):
        assert_equal(*(roll_out(m, policy, requests=[FRAMES], size=(60, 104)) for m in (model, eager)))
    assert replays[1] > replays[0] > 0


@pytest.mark.parametrize("in_place", [True, False])
def test_hooks_between_layers_are_heard(in_place, replays):
    """What the next layer projects came before the hook."""
    eager, model = both()

    def steer(block, given, x):
        return x.add_(1.0) if in_place else x + 1.0

    for each in (eager, model):
        each.blocks[0].register_forward_hook(steer)
        each.blocks[1].register_forward_pre_hook(lambda block, given: (given[0] * 2, *given[1:]))
    for seed in (1, 2):
        assert_equal(roll_out(model, seed=seed), roll_out(eager, seed=seed))
    assert replays[1] > replays[0] > 0


def test_who_sees_the_text_or_edits_what_graphs_hold_runs_without(replays):
    """Whole calls of self-attention, and z, lie between the graphs: their edits go with them."""
    eager, model = both()
    assert_equal(roll_out(model, requests=[TEXT]), roll_out(eager, requests=[TEXT]))
    for of_graphs in (Steer("resid_post", torch.ones(48), passes="all"), Knockout(tokens=[1], passes="all")):
        with intervene(of_graphs):
            assert_equal(roll_out(model), roll_out(eager))
    assert replays == [0, 0]
    key, turn = Knockout(frames="first", heads=[1], passes="all"), Move("first", offset=2, passes="clean")
    with intervene(key, turn, Ablate("zero", heads=[0], passes="denoise")) as active:
        assert_equal(roll_out(model), roll_out(eager))
    assert replays[1] > replays[0] > 0 and all(active.changed)
    for _ in range(2):
        assert_equal(roll_out(model), roll_out(eager))
    one = CaptureRequest(granularity="frame", kinds=("self", "cross"), layers=[1])
    assert_equal(roll_out(model, requests=[one]), roll_out(eager, requests=[one]))
    before = list(replays)
    x, t = torch.zeros(1, 3, 16, 4, 6, device=DEVICE), torch.ones(1, device=DEVICE)
    text = model.text_keys_values(torch.zeros(1, 3, 16, device=DEVICE))
    assert torch.equal(model(x, t, text), eager(x, t, text))  # no cache: training's
    assert replays == before and before[1] > 0


def test_the_first_video_runs_without_and_weights_may_move(replays):
    """Blocks of 1, 3, 3 and 3 frames; weights that moved have other addresses, so all is recorded again."""
    eager, model = both(after=3 * 3)  # calls of a shape: all of the first video's blocks of 3
    layers = len(model.blocks)
    assert_equal(roll_out(model, seed=1), roll_out(eager, seed=1))
    assert replays == [0, 0]
    assert_equal(roll_out(model, seed=2), roll_out(eager, seed=2))
    recorded = replays[0]
    assert recorded == 2 * layers
    model.double().float()  # the same bits elsewhere
    assert_equal(roll_out(model, seed=3), roll_out(eager, seed=3))
    assert replays[0] > recorded


def test_activations_are_captured_where_graphs_wait(replays):
    """Of one step: the others are replayed, which is said once; z and x0 stand beside the graphs."""
    eager, model = both()
    assert_equal(roll_out(model), roll_out(eager))
    counts, seen = [], []
    cuda_graphs.say_that_graphs_wait.cache_clear()
    for sites in (("resid_post", "mlp_pre"), ("z", "x0")):
        before = replays[1]
        for each in (eager, model):
            capture = SiteCapture(sites, steps=[1])
            with warnings.catch_warnings(record=True) as said, watched(capture):
                warnings.simplefilter("always")
                assert_equal(roll_out(each), roll_out(eager))
            seen.append([one.value for one in capture.kept])
        counts.append(replays[1] - before)
        assert len(said) == (sites[0] == "resid_post") and all(map(torch.equal, *seen[-2:]))
    assert 0 < counts[0] < counts[1]


on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="graphs are recorded on a GPU alone")


@on_gpu
def test_graphs_of_a_dropped_model_are_freed_outside_a_recording(monkeypatch):
    """The collector frees a dropped model, a reference cycle, in the middle of the next one's recording."""
    record = cuda_graphs.Recorder.record

    def collecting(recorder, call):
        return record(recorder, lambda: (gc.collect(), call()))

    monkeypatch.setattr(cuda_graphs.Recorder, "record", collecting)
    for _ in range(3):
        eager, model = both()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_equal(roll_out(model), roll_out(eager))
        del model


@on_gpu
def test_a_failed_recording_falls_back_to_the_eager_path():
    eager, model = both()
    finish = cuda_graphs.OnOneGPU.finish

    def synchronising(self, *given):
        finish(self, *given)
        torch.cuda.synchronize()  # which no recording may

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.warns(UserWarning, match="without CUDA graphs") as told,
    ):
        patch.setattr(cuda_graphs.OnOneGPU, "finish", synchronising)
        assert_equal(roll_out(model), roll_out(eager))
    assert len([one for one in told if "without CUDA graphs" in str(one.message)]) == 1
    apply_cuda_graphs(eager)  # the process still has its GPU
    assert_equal(roll_out(eager), roll_out(model))
