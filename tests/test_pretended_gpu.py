"""On a pretended GPU: what waits for the device, which a real one would have to answer."""

from functools import partial

import pytest
import torch
from conftest import golden_model
from helpers.pretended_gpu import pretended_gpu, waits
from helpers.rollouts import TWO_STEPS

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CaptureRequest
from wan.interventions import Ablate, Bias, Knockout, Move, intervene
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy
from wan.recorders import record_head_outputs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


FRAMES, TEXT = (CaptureRequest(granularity="frame", kinds=kinds) for kinds in (("self",), ("self", "cross")))
MAPS = [
    CaptureRequest(granularity="map"),
    CaptureRequest(granularity="map", queries=((-1, -1), (3, -1), (3, 2), (4, 1)), heads=(2, 0)),
    CaptureRequest(granularity="map", kinds=("cross",), num_words=5, heads=(1,)),
]
CHOSEN = {"name": "participative", "window": 9, "sink": 3, "budget": 7, "recent": 3}


@pytest.mark.parametrize(
    ("policy", "requests", "frames"),
    [
        ({"name": "full"}, [CaptureRequest(layers=[])], 6),
        ({"name": "full"}, [FRAMES, *MAPS], 6),
        ({"name": "memory_bank", "window": 9, "sink": 3, "bank": 2, "interval": 1}, [FRAMES], 12),
        (CHOSEN, [TEXT], 12),
    ],
    ids=["nothing", "frames and maps", "memories", "chosen"],
)
def test_a_rollout_waits_for_the_gpu_only_where_its_capture_ends(policy, requests, frames):
    with pretended_gpu() as gpu, waits() as found:
        model = golden_model().to(gpu)
        x, text = torch.randn(1, frames, 16, 4, 6), torch.randn(1, 32, 64)
        noise, renoise, text = x.to(gpu), x.expand(1, *x.shape).to(gpu), text.to(gpu)
        assert found
        found.clear()
        pipeline = CausalInferencePipeline(model, **TWO_STEPS, cache_policy=make_policy(**policy))
        with ATTENTION_WEIGHT_CAPTURE.capture(*requests) as calls:
            pipeline.inference(noise, prompt_embeds=text, renoise=renoise)
            assert bool(found) == (policy is CHOSEN)  # whose tokens it has to know
        assert bool(found) == bool(calls)
        order = [(call.at.block, call.at.step, call.site.layer) for call in calls]
        assert order == sorted(order)
        layouts = [call.layout for call in calls if call.layout and call.layout.chosen]
        assert bool(layouts) == (policy is CHOSEN)
        assert not any(layout.chosen.frames.is_cuda for layout in layouts)  # memory of the GPU


@torch.no_grad()
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
        pipeline = CausalInferencePipeline(golden_model().to(gpu), **TWO_STEPS)
        run = partial(pipeline.inference, x, prompt_embeds=text, renoise=x[None])
        with record_head_outputs() as outputs:
            run()
        capture = ATTENTION_WEIGHT_CAPTURE.capture(FRAMES, MAPS[1])
        with intervene(*edits, data={edits[4]: outputs}) as session, waits() as found, capture:
            run()
            assert not found
        assert all(session.changed) and found
