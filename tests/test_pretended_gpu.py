"""On a pretended GPU: what waits for the device, which a real one would have to answer."""

from dataclasses import replace

import pytest
import torch
from conftest import golden_model
from helpers.pretended_gpu import pretended_gpu, waited
from helpers.rollouts import TWO_STEPS

from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest
from wan.interventions import Ablate, Bias, Knockout, Move, intervene, record_head_outputs
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
FRAMES = CaptureRequest(granularity="frame", kinds=("self", "cross"))
MAPS = CaptureRequest(granularity="map", queries=((-1, -1), (3, -1), (3, 2), (4, 1)), heads=(2, 0))
CHOSEN = {"name": "participative", "window": 9, "sink": 3, "budget": 7, "recent": 3}
BANK = {"name": "memory_bank", "window": 9, "sink": 3, "bank": 2, "interval": 1}


def two_layers(gpu) -> CausalWanModel:
    """The golden model's first two: what waits for a GPU waits in the first already."""
    model = golden_model()
    del model.blocks[2:]
    model.config = replace(model.config, num_layers=2)
    return model.to(gpu)


@pytest.mark.parametrize("policy", [{"name": "full"}, BANK, CHOSEN], ids=lambda policy: policy["name"])
def test_a_rollout_waits_for_the_gpu_only_where_its_capture_ends(policy):
    with pretended_gpu() as gpu:
        x, text = torch.randn(1, 12, 16, 4, 6).to(gpu), torch.randn(1, 32, 64).to(gpu)
        options = {"cache_policy": make_policy(**policy)} | TWO_STEPS
        pipeline = CausalInferencePipeline(two_layers(gpu), **options)
        waited.clear()
        with ATTENTION_WEIGHT_CAPTURE.capture(FRAMES, *([] if policy is CHOSEN else [MAPS])) as calls:
            pipeline.inference(x, prompt_embeds=text, renoise=x[None])
            assert bool(waited) == (policy is CHOSEN)  # whose tokens it has to know
        layouts = [call.layout for call in calls if call.layout and call.layout.chosen]
        assert bool(layouts) == (policy is CHOSEN)
        assert not any(layout.chosen.frames.is_cuda for layout in layouts)  # memory of the GPU


def test_edited_calls_wait_for_nothing():
    """Of one head and of heads apart: what an edit needs of the host is sent ahead."""
    edits = [
        Knockout(frames=(0, 2), heads=(1,), passes="all"),
        Bias(0.5, frames="first", heads=(0, 2), passes="all"),
        Move("first", offset=1, heads=(0, 2), passes="all"),
        Ablate("zero", heads=(0, 2), passes="all"),
        Ablate("frame_mean", heads=(3,), passes="denoise"),
        Knockout(tokens=(1, 2), heads=(1,), passes="all"),
    ]
    with pretended_gpu() as gpu:
        x, text = torch.randn(1, 6, 16, 4, 6).to(gpu), torch.randn(1, 32, 64).to(gpu)
        pipeline = CausalInferencePipeline(two_layers(gpu), **TWO_STEPS)
        with record_head_outputs() as outputs:
            pipeline.inference(x, prompt_embeds=text, renoise=x[None])
        with intervene(*edits, data={edits[4]: outputs}) as session:
            waited.clear()
            pipeline.inference(x, prompt_embeds=text, renoise=x[None])
            assert not waited
        assert all(session.changed)
