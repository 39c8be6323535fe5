"""Layers that are replayed from graphs: the same bits, and eager wherever somebody can tell the difference.

Without a GPU a replay makes its call again, with whatever lies at the addresses that were recorded.
"""

import pytest
import torch
from conftest import golden_model
from helpers.processes import together

from wan import cuda_graphs
from wan.cuda_graphs import apply_cuda_graphs
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.cache_policies import make_policy
from wan.modules.capture import CaptureRequest
from wan.modules.edits import intervene
from wan.modules.interventions import Knockout
from wan.parallel import apply_head_parallel
from wan.pipeline import CausalInferencePipeline

FRAMES, TEXT = CaptureRequest(granularity="frame"), CaptureRequest(granularity="frame", kinds=("cross",))
POLICIES = {
    "full": {"name": "full"},
    "relative": {"name": "relative", "window": 6, "sink": 1},  # its clean pass keeps keys without RoPE
    "participative": {"name": "participative", "window": 9, "sink": 3, "budget": 7, "recent": 3},
    "memory_bank": {"name": "memory_bank", "window": 9, "sink": 3, "bank": 2, "interval": 1},
}


def roll_out(model, policy="full", seed=1, requests=(), batch=1, **more):
    generator = torch.Generator(model.device).manual_seed(seed)
    draw = {"generator": generator, "device": model.device}
    noise, renoise = torch.randn(batch, 10, 16, 4, 6, **draw), torch.randn(3, batch, 10, 16, 4, 6, **draw)
    embeds = torch.randn(batch, 32, 64, **draw)
    policy = make_policy(**POLICIES[policy])
    pipeline = CausalInferencePipeline(model, cache_policy=policy, independent_first_frame=True, **more)
    with ATTENTION_WEIGHT_CAPTURE.capture(*(requests or [CaptureRequest(layers=[])])) as calls:
        latents = pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise)[1]
    return latents, [values for call in calls for values in call.values.values()]


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    eager, model = golden_model().to(device), golden_model().to(device)
    apply_cuda_graphs(model)
    for seed in (1, 2):  # another prompt, at other addresses
        assert_equal(roll_out(model, policy, seed), roll_out(eager, policy, seed))
    captured = [roll_out(of, policy, 3, [FRAMES], batch=2) for of in (model, eager)]
    assert_equal(*captured)
    # Two batch sizes, blocks of 1 and of 3 frames. Where clean passes bring raw keys they are shapes of their
    # own, of which the one-frame block's comes once a rollout, and a first time records nothing.
    shapes = 7 if policy in ("relative", "participative") else 4
    assert replays[0] == 2 * shapes * len(model.blocks)
    assert replays[1] > replays[0]


def test_who_sees_the_text_or_edits_runs_without(replays):
    eager, model = golden_model(), golden_model()
    apply_cuda_graphs(model)
    assert_equal(roll_out(model, requests=[TEXT]), roll_out(eager, requests=[TEXT]))
    with intervene(Knockout(frames="first", heads=[1], passes="all")):
        assert_equal(roll_out(model), roll_out(eager))
    assert replays == [0, 0]
    assert_equal(roll_out(model), roll_out(eager))
    before = list(replays)
    x, text = torch.zeros(1, 3, 16, 4, 6), model.text_keys_values(torch.zeros(1, 3, 64))
    assert torch.equal(model(x, torch.ones(1), text), eager(x, torch.ones(1), text))  # no cache: training's
    assert replays == before and before[1] > 0


def both_orders(group):
    eager, first, last = golden_model(), golden_model(), golden_model()
    apply_cuda_graphs(first)
    for model in (eager, first, last):
        apply_head_parallel(model, group)
    apply_cuda_graphs(last)
    return [roll_out(model, "relative", requests=[FRAMES], batch=2) for model in (eager, first, last)]


def test_on_several_gpus():
    for eager, *replayed in together(2, both_orders):
        for found in replayed:
            assert_equal(found, eager)
