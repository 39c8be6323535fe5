"""Our model and rollout against numbers of the public Self-Forcing / Wan2.1 implementation."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import golden_arrays, golden_config, golden_model

from wan import keys as rope
from wan import model as layers
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CapturedCall, CaptureRequest
from wan.model import WanModel
from wan.pipeline import CausalInferencePipeline, FlowSchedule

CASES = list(golden_config()["cases"])
ATOL = 2e-5  # tests/golden/README.md: the smallest real mistake moves the flow by 6e-5
LOGIT_ATOL = 5e-5
GRANULARITIES = ("token", "key", "frame")
close = partial(torch.testing.assert_close, rtol=0)


def run_case(case: str, on_flow=None):
    """Replay one golden rollout -> latents [F, C, h, w]; on_flow sees every forward's output."""
    setting = golden_config()["cases"][case]
    model = golden_model(
        local_attn_size=setting.get("local_attn_size", -1), sink_size=setting.get("sink_size", 0)
    )
    if on_flow:
        model.register_forward_hook(lambda module, args, flow: on_flow(flow))
    pipeline = CausalInferencePipeline(
        model, independent_first_frame=setting.get("independent_first_frame", False)
    )
    arrays = golden_arrays("causal")
    given = {name: arrays.get(f"{case}/{name}") for name in ("noise", "prompt_embeds", "initial_latent")}
    video, latents = pipeline.inference(**given, renoise=arrays[f"{case}/renoise"][:, None])
    assert video is None
    return latents


@pytest.mark.parametrize("case", CASES)
def test_rollout(case):
    flows = []
    latents = run_case(case, flows.append)
    arrays = golden_arrays("causal")
    close(latents, arrays[f"{case}/latents"], atol=ATOL)
    expected = arrays.get(f"{case}/call_flow")
    if expected is None:
        expected, flows = arrays[f"{case}/call_flow_last_block"], flows[-5:]
    assert len(flows) == len(expected)
    for flow, golden in zip(flows, expected, strict=True):
        close(flow[0], golden[: flow.shape[1]], atol=ATOL)


def captured(case: str, *requests: CaptureRequest) -> list[list[CapturedCall]]:
    """The calls of layers 0 and 4 that each request gets, which all look at one rollout."""
    some = [replace(request, layers=[0, 4]) for request in requests]
    with ATTENTION_WEIGHT_CAPTURE.capture(*some) as calls:
        run_case(case)
    return [calls[n :: len(requests)] for n in range(len(requests))]


@pytest.mark.parametrize("case", ["indep7", "win6_sink1_f12"])
def test_captured_frame_logits(case):
    """Every call of layers 0 and 4, and the frames a window shows, by global index."""
    by_token, by_key, by_frame = captured(case, *(CaptureRequest(granularity=n) for n in GRANULARITIES))
    golden = golden_arrays("capture")[f"{case}/all_calls_frame_logits"]  # [call, 2, H, q frame, k slot]
    assert len(by_token) == len(by_key) == len(by_frame) == golden.shape[0] * 2
    visible = golden_config()["cases"][case].get("visible_key_frames_per_block")
    for i, (call, keys, frames) in enumerate(zip(by_token, by_key, by_frame, strict=True)):
        expected = golden[i // 2, i % 2, :, : len(call["query_frames"]), : len(call["key_frames"])]
        of_keys = keys["key_curve"][0].unflatten(-1, (-1, 24)).mean(-1)  # averaged over all queries
        close(of_keys, expected.mean(1), atol=LOGIT_ATOL)
        close(frame_means(call["attn_weights"][0]), expected, atol=LOGIT_ATOL)
        close(frames["frame_logits"][0], expected, atol=LOGIT_ATOL)
        assert (call["layer"], call["layer_idx"]) == ((0, 4)[i % 2], (0, 8)[i % 2])
        assert call["is_clean_pass"] == (call["step"] == 4) == (call["timestep"] == 0)
        assert call["key_frames"] == frames["key_frames"]
        if visible:
            assert call["key_frames"] == visible[call["block"]]


def frame_means(tokens: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: 24 tokens a frame."""
    return tokens.double().unflatten(1, (-1, 24)).unflatten(3, (-1, 24)).mean((2, 4)).float()


def test_captured_probabilities_and_mass(case="blocks9"):
    """The golden mean_prob, from probabilities and from the mass that needs no matrix."""
    golden = golden_arrays("capture")[f"{case}/all_calls_frame_probs_mean"]
    requests = CaptureRequest(is_logits=False), CaptureRequest(granularity="frame")
    for i, (call, frames) in enumerate(zip(*captured(case, *requests), strict=True)):
        expected = golden[i // 2, i % 2, :, : len(call["query_frames"]), : len(call["key_frames"])]
        close(frame_means(call["attn_weights"][0]), expected, atol=1e-7)
        close(frames["frame_mass"][0] / 24, expected, atol=1e-7)
        close(frames["frame_mass"].sum(-1), torch.ones(1, 12, len(call["query_frames"])), atol=1e-5)


def test_bidirectional_model():
    arrays = golden_arrays("bidirectional")
    model = golden_model(WanModel)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0, 4]) as calls:
        flow = model(arrays["x"][None], arrays["t"], arrays["context"][None])
    close(flow[0], arrays["flow"], atol=ATOL)
    for call in calls:
        close(call["attn_weights"][0], arrays[f"logits_layer{call['layer']}"], atol=LOGIT_ATOL, rtol=0)


@pytest.mark.parametrize("head_dim", [16, 128])
def test_rope_tables_are_exact(head_dim):
    arrays = golden_arrays("tables")
    table = rope.RotaryTable(head_dim)
    positions = arrays["rope_positions"]
    turns = torch.cat([table.freqs_cis(axis, positions) for axis in range(3)], -1)
    assert torch.equal(turns.real, arrays[f"rope_table_d{head_dim}_real"])
    assert torch.equal(turns.imag, arrays[f"rope_table_d{head_dim}_imag"])
    for start in (0, 6):
        x, grid = (arrays[f"rope_apply_d{head_dim}_{part}"] for part in ("x", "grid"))
        frames, height, width = grid.tolist()
        turned = rope.rotate(x, *table(range(start, start + frames), height, width, x.device))
        close(turned, arrays[f"rope_apply_d{head_dim}_start{start}"], atol=5e-7)


@pytest.mark.parametrize("dim", [64, 256])
def test_time_embedding_is_exact(dim):
    arrays = golden_arrays("tables")
    embedding = layers.sinusoidal_embedding(arrays["time_embed_t"], dim)
    close(embedding, arrays[f"time_embed_dim{dim}"], atol=2.3e-16, rtol=0)  # an ulp of 1: CPUs differ


@pytest.mark.parametrize("shift", [5, 8])
def test_scheduler_tables_are_exact(shift):
    arrays = golden_arrays("tables")
    schedule = FlowSchedule(shift)
    assert torch.equal(schedule.sigmas, arrays[f"fm_shift{shift}_sigmas"])
    assert torch.equal(schedule.timesteps, arrays[f"fm_shift{shift}_timesteps"])
    warped = schedule.warp([1000, 750, 500, 250])
    assert torch.equal(warped, arrays[f"fm_shift{shift}_warped_1000_750_500_250"])
