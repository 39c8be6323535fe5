"""Numbers that cannot be right stop a run, and the message says where: layer, block, pass."""

from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from experiments import run_extraction_all, run_extraction_figure4
from experiments.extraction import causal, devices
from experiments.running import cli
from wan import reductions
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CaptureRequest
from wan.config import load_config

SHORT = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "6"]
ALL = [CaptureRequest(granularity="frame")]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def config():
    return replace(load_config("configs/wan_mini.yaml"), num_frames=6)


def said_by(script, flags, tmp_path, capfd, code) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(script.run, [*SHORT, *flags, "--output_path", str(tmp_path / "out.pt")])
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("block ")]
    assert ended.value.code == code and len(said) == 1 and not list(tmp_path.iterdir()), said
    return said[0]


def test_not_finite_in_the_middle_names_layer_block_and_pass(tmp_path, monkeypatch, capfd):
    """NaN enters at layer 3 of block 1 in pass 2: the weights are spoilt from there on."""
    original = causal.load_pipeline

    def broken(*args):
        pipeline = original(*args)

        def spoil(module, inputs):
            at = ATTENTION_WEIGHT_CAPTURE._pass
            if (at.block, at.step) == (1, 2):
                module.self_attn.q.bias.fill_(float("nan"))

        pipeline.model.blocks[3].register_forward_pre_hook(spoil)
        return pipeline

    monkeypatch.setattr(causal, "load_pipeline", broken)
    said = said_by(run_extraction_all, [], tmp_path, capfd, 1)
    assert said == (
        "error: layer 3, block 1, step 2 (t = 833.333): its output is not finite, nor is its weight "
        "self_attn.q.bias: get the file of the weights again"
    )


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (lambda model: model.blocks[5], "layer 5, block 0, step 0 (t = 1000)"),
        (lambda model: model.head, "head, block 0, step 0 (t = 1000)"),
    ],
)
def test_an_overflow_names_its_layer_whatever_is_captured(place, where, tmp_path, monkeypatch, capfd):
    original = causal.load_pipeline

    def broken(*args):
        pipeline = original(*args)
        place(pipeline.model).register_forward_hook(lambda module, inputs, output: output * float("inf"))
        return pipeline

    monkeypatch.setattr(causal, "load_pipeline", broken)
    said = said_by(run_extraction_figure4, ["--layer_indices", "1"], tmp_path, capfd, 1)
    assert said.startswith(f"error: {where}") and said.endswith(
        f"its output is not finite; {causal.checks.REMEDY}"
    )


def test_latents_that_spoil_between_passes(config, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("wan.pipeline.flow_to_x0", lambda flow, x, sigma: x / 0)
    said = said_by(run_extraction_figure4, [], tmp_path, capfd, 1)
    assert said.startswith("error: layer 0, block 0, step 1 (t = 937.5): its output is not finite")


def spoilt(monkeypatch, name, change):
    original = getattr(reductions, name)
    monkeypatch.setattr(reductions, name, lambda *args: change(original(*args)))


def without_a_word(mass):
    """Masses of keys; those of self-attention, whose keys are blocks of 48 tokens, stay."""
    return mass if mass.shape[-1] % 48 == 0 else mass[..., 1:]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "logits_of_sums",
            lambda x: x / 0,
            r"layer 0, block 0, step 0 (t = 1000): frame_logits is not finite",
        ),
        (
            "frame_mass",
            lambda x: x * 1.01,
            "layer 0, block 0, step 0 (t = 1000): rows of frame_mass sum to 1 ± 0.01, not to 1",
        ),
        ("token_mass", without_a_word, "rows of cross_mass sum to 1 ± "),
    ],
)
def test_captured_numbers_are_guarded(name, change, message, tmp_path, monkeypatch, capfd):
    spoilt(monkeypatch, name, change)
    assert message in said_by(run_extraction_all, ["--cross"], tmp_path, capfd, 1)


def test_float16_logits_that_overflow(tmp_path, monkeypatch, capfd):
    spoilt(monkeypatch, "token_matrix", lambda x: x * 1e5)
    said = said_by(run_extraction_figure4, [], tmp_path, capfd, 1)
    assert (
        "layer 1, block 1, step 0 (t = 1000): token_logits is not finite in float16; --capture probabilities"
        in said
    )


def test_layers_that_never_fired(tmp_path, monkeypatch, capfd):
    wants = CaptureRequest.wants
    monkeypatch.setattr(
        CaptureRequest, "wants", lambda self, site, at: site.layer != 4 and wants(self, site, at)
    )
    said = said_by(run_extraction_all, [], tmp_path, capfd, 1)
    assert "layer 4, block 0, step 0: its self-attention never reported frame_" in said
    assert "10 of 80 calls are missing" in said


def test_a_directory_that_holds_another_model_than_its_config_names(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(
            run_extraction_all.run,
            ["--ckpt_dir", "checkpoints/wan-mini", "--output_path", str(tmp_path / "out.pt")],
        )
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert "checkpoints/wan-mini is not Wan2.1-T2V-1.3B: num_layers 8 instead of 30" in capfd.readouterr().err


def test_guards_change_no_bit_and_wait_once_a_block(config, monkeypatch):
    """The latents are those of the bare pipeline; flags of a block's passes are read together."""
    session = causal.prepare(config, ALL)
    noise, renoise = causal.draw_noise(config, session.model_config, session.dtype, session.device)
    embeds = session.texts[config.prompt][0]
    with devices.threads_for(noise, session.model_config):
        bare = session.pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise)[1]
    reads, original = [], causal.checks.check_forwards

    def counted(model, forwards, latents):
        reads.append(len(forwards))
        original(model, forwards, latents)

    monkeypatch.setattr(causal.checks, "check_forwards", counted)
    result = causal.extract_next(session, config, ALL)
    assert torch.equal(result.latents, bare) and reads == [5, 5]  # passes
