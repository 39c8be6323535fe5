"""Numbers that cannot be right stop a run, and the message says where."""

from types import SimpleNamespace

import pytest
import torch
from helpers.refusals import refused

from experiments import run_extraction_all, run_extraction_figure4
from experiments.caches.files import RunError
from experiments.extraction import causal, rollout
from experiments.extraction.prompt_embeds import PROMPTS_AT_ONCE
from wan.capture import CapturedCall, CaptureRequest, Pass, Site
from wan.config import load_config


@pytest.mark.slow
def test_latents_that_are_not_finite_stop_the_run(tiny, tmp_path, monkeypatch, capfd):
    original = causal.load_pipeline

    def broken(*args):
        pipeline = original(*args)
        pipeline.model.blocks[1].self_attn.q.bias.fill_(float("nan"))
        return pipeline

    monkeypatch.setattr(causal, "load_pipeline", broken)
    flags = ["--config_path", tiny.path, "--output_path", tmp_path / "out.pt"]
    said = "block 0: the latents are not finite, nor is the weight .*"
    said += "blocks.1.self_attn.q.bias: get the file of the weights again$"
    refused(run_extraction_figure4, flags, capfd, said, code=1)
    assert not list(tmp_path.iterdir())


def call_of(**values) -> CapturedCall:
    at = Pass(query_frames=(3, 4, 5), block=1, step=2, timestep=500.0)
    shape = (1, 15, 3, 8)
    return CapturedCall(site=Site(7, "self"), at=at, values=values, q_shape=shape, k_shape=shape, layout=None)


ROWS = torch.full((1, 3, 2, 4), 0.25)
NAN = float("nan")
HEADS = ROWS.clone()
HEADS[:, 1, :, 0] = NAN  # a head that does not see a frame


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"frame_logits": ROWS / 0}, "layer 7, block 1, step 2: frame_logits is not finite; try --device"),
        ({"frame_logits": ROWS.masked_fill(torch.eye(2, 4).bool(), NAN)}, "frame_logits is not finite"),
        ({"frame_logits": ROWS * NAN}, "frame_logits is not finite"),
        ({"token_logits": ROWS.half() / 0}, "token_logits is not finite in float16; --capture probabilities"),
        ({"frame_mass": ROWS * 1.01}, r"rows of frame_mass sum to 1 ± 0\.01, not to 1"),
        ({"cross_mass": ROWS[..., 1:]}, "rows of cross_mass sum to 1 ± 0.25"),
        ({"token_probabilities": ROWS * 0.99}, "rows of token_probabilities sum to 1 ± 0.01"),
        ({"slot_mass": ROWS * 1.01, "frame_mass": ROWS}, "rows of slot_mass"),
        ({"frame_logits": -ROWS / 0, "attended": ROWS > 0}, "frame_logits is not finite"),
    ],
)
def test_captured_numbers_that_cannot_be_right(values, message):
    with pytest.raises(RunError, match=message):
        rollout.check_values([call_of(frame_logits=ROWS), call_of(**values)])


@pytest.mark.parametrize(
    "values",
    [
        {"frame_logits": HEADS, "frame_mass": HEADS},  # heads with keys of their own
        {"frame_logits": ROWS * NAN, "attended": ROWS > 0},  # left out by an intervention
        {"frame_mass": ROWS / 2, "slot_mass": ROWS},  # averages, which are no frames, have the rest
        {"frame_mass": ROWS * 1.0009, "key_curve": ROWS, "map_queries": ROWS / 0},
    ],
)
def test_captured_numbers_that_can(values):
    rollout.check_values([call_of(**values)])


def test_a_directory_that_holds_another_model_than_its_config_names(tmp_path, capfd):
    flags = ["--ckpt_dir", "checkpoints/wan-mini", "--output_path", tmp_path / "out.pt"]
    said = "checkpoints/wan-mini is not Wan2.1-T2V-1.3B: num_layers 8 instead of 30"
    refused(run_extraction_all, flags, capfd, said)
    assert not list(tmp_path.iterdir())


def test_looking_changes_no_bit_of_the_latents(tiny):
    looked = causal.extract_next(tiny.session, tiny.config, [CaptureRequest(granularity="frame")])
    assert torch.equal(looked.latents, tiny.session.rollout(tiny.config))


def test_graphs_are_forgotten_before_weights_leave_for_the_encoder(monkeypatch):
    """A graph that knows where weights were would compute with whatever lies there now."""
    config, done = load_config("configs/wan_mini.yaml", {"num_frames": 6, "device": "cpu"}), []
    model = SimpleNamespace(to=lambda device: done.append(str(device)))
    pipeline = SimpleNamespace(model=model, weights="", quantised="")

    def encode(config, prompts, *given):
        done.append(f"encoded {len(prompts)}")
        return dict.fromkeys(prompts)

    monkeypatch.setattr(causal, "choose_device", lambda *given: torch.device("meta"))
    monkeypatch.setattr(causal, "forget_cuda_graphs", lambda model: done.append("forgotten"))
    monkeypatch.setattr(causal, "load_pipeline", lambda *given: pipeline)
    monkeypatch.setattr(causal, "encode_prompts", encode)
    prompts = [str(i) for i in range(PROMPTS_AT_ONCE + 1)]
    loaded = causal.prepare(config, [], prompts)
    loaded.texts[prompts[-1]]
    assert done == [f"encoded {PROMPTS_AT_ONCE}", "forgotten", "cpu", "encoded 1", "meta"]
