"""Layers streamed from the host compute what resident ones do, bit for bit, capture included."""

import pytest
import torch
from conftest import golden_arrays
from helpers.checkpoints import GOLDEN_MODEL

from wan import checkpoint, offload
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline

pytestmark = pytest.mark.real_gpu  # its streams of copies


def model(device, dtype, **kwargs):
    state = dict(golden_arrays("weights"))
    return checkpoint.build_model(CausalWanModel, GOLDEN_MODEL, state, "golden", dtype, device, **kwargs)


def rolled_out(causal, device, dtype):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 6, GOLDEN_MODEL.in_dim, 6, 10, generator=generator).to(device, dtype)
    renoise = torch.randn(3, *noise.shape, generator=generator).to(device, dtype)
    text = torch.randn(1, GOLDEN_MODEL.text_len, GOLDEN_MODEL.text_dim, generator=generator).to(device, dtype)
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", kinds=("self", "cross")) as records:
        _, latents = CausalInferencePipeline(causal).inference(noise, prompt_embeds=text, renoise=renoise)
    captured = ("frame_logits", "frame_mass", "cross_mass")
    return latents, [record[name] for record in records for name in captured if name in record]


def test_the_same_bits(device, dtype=torch.bfloat16):
    streamed = model(device, dtype, offload=True)
    first, again, resident = (
        rolled_out(m, device, dtype) for m in (streamed, streamed, model(device, dtype))
    )
    assert len(resident[1]) == GOLDEN_MODEL.num_layers * 2 * 5 * 3
    for found in (first, again):
        assert torch.equal(found[0], resident[0]) and all(map(torch.equal, found[1], resident[1]))


def test_each_layer_has_its_own_weights_while_it_computes(device):
    weights = golden_arrays("weights")
    streamed = model(device, torch.float32, offload=True)
    for _ in range(2):
        for layer, block in enumerate(streamed.blocks):
            for name, value in block.named_parameters():
                assert torch.equal(value.cpu(), weights[f"blocks.{layer}.{name}"].float()), (layer, name)
                assert value.data_ptr() % (offload.ALIGNMENT if value.is_cuda else 1) == 0
    assert len(streamed.blocks) == GOLDEN_MODEL.num_layers
    assert len({value.untyped_storage().data_ptr() for value in streamed.blocks.parameters()}) == 2
