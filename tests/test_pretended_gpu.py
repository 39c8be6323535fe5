"""The GPU that is not there refuses what a real one refuses, and computes what a CPU computes."""

import pytest
import torch
from conftest import golden_model
from helpers.pretended_gpu import pretended_gpu, waits

from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.capture import CaptureRequest
from wan.pipeline import CausalInferencePipeline

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def test_devices_do_not_mix():
    with pretended_gpu() as gpu:
        here, there = torch.arange(6.0).view(2, 3), torch.arange(6.0, device="cuda").view(2, 3)
        assert there.device == gpu and there.is_cuda and (there + 1).device == gpu
        for mixed in (lambda: here + there, lambda: torch.cat([there, here]), lambda: here[there[0].long()]):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert there[torch.tensor([1])].tolist() == [[3, 4, 5]]  # indices of the host are taken
        there[:, 1] = here[:, 0]
        assert there.cpu().tolist() == [[0, 0, 2], [3, 3, 5]] and here[0, 1] == 1


def test_a_module_moves_and_computes_the_same():
    layer, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    expected = layer(x)
    with pretended_gpu() as gpu:
        layer.to(gpu)
        assert layer.weight.is_cuda and torch.equal(layer(x.to(gpu)).cpu(), expected)
        with pytest.raises(RuntimeError, match="same device"):
            layer(x)
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_a_rollout_waits_for_the_gpu_once_where_it_is_captured():
    with pretended_gpu() as gpu, waits() as found:
        model, requests = (
            golden_model().to(gpu),
            [CaptureRequest(layers=[]), CaptureRequest(granularity="frame")],
        )
        x, text = torch.randn(1, 6, 16, 4, 6), torch.randn(1, 32, 64)
        noise, renoise, text = x.to(gpu), x.expand(3, *x.shape).to(gpu), text.to(gpu)
        assert found
        for request in requests:
            found.clear()
            with ATTENTION_WEIGHT_CAPTURE.capture(request):
                CausalInferencePipeline(model).inference(noise, prompt_embeds=text, renoise=renoise)
                assert not found
            assert len(found) == (request.granularity == "frame")
