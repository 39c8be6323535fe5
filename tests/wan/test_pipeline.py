"""What the rollout accepts and refuses; its numbers are in test_golden.py."""

import pytest
import torch
from conftest import golden_arrays, golden_model

from wan.errors import ConfigError
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch

ARRAYS = golden_arrays("causal")
NOISE, EMBEDS = ARRAYS["blocks9/noise"], ARRAYS["blocks9/prompt_embeds"]


def pipeline(**kwargs) -> CausalInferencePipeline:
    return CausalInferencePipeline(golden_model(), **kwargs)


def test_pass_timesteps():
    assert pipeline().pass_timesteps == pytest.approx([1000, 937.5, 833.3333, 625, 0])
    assert pipeline(warp_denoising_step=False, denoising_step_list=[1000, 500]).pass_timesteps == [
        1000,
        500,
        0,
    ]


def test_a_generator_draws_the_noise_between_steps():
    run = pipeline()
    latents = [
        run.inference(NOISE, prompt_embeds=EMBEDS, generator=torch.Generator().manual_seed(seed))[1]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(latents[0], latents[1]) and not torch.equal(latents[0], latents[2])


def test_text_encoder_and_vae_are_used():
    seen = []

    class Vae:
        def decode(self, latents):
            seen.append(latents)
            return "video"

    run = pipeline(text_encoder=lambda prompts: seen.append(prompts) or EMBEDS, vae=Vae())
    video, latents = run.inference(NOISE[:, :3], text_prompts=["a prompt"])
    assert video == "video" and seen[0] == ["a prompt"] and seen[1] is latents
    assert run.inference(NOISE[:, :3], text_prompts=["a prompt"], return_latents=False) == "video"


def test_the_given_beginning_is_returned_unchanged():
    given = ARRAYS["extend/initial_latent"]
    _, latents = pipeline().inference(NOISE[:, :6], prompt_embeds=EMBEDS, initial_latent=given)
    assert latents.shape[1] == 9 and torch.equal(latents[:, :3], given)


def test_a_batch_is_its_videos_one_by_one():
    noise, renoise = NOISE.repeat(2, 1, 1, 1, 1), torch.randn(3, 2, *NOISE.shape[1:])
    noise[1] = noise[1].flip(0)
    together = pipeline().inference(noise, prompt_embeds=EMBEDS.repeat(2, 1, 1), renoise=renoise)[1]
    for i in range(2):
        alone = pipeline().inference(noise[i : i + 1], prompt_embeds=EMBEDS, renoise=renoise[:, i : i + 1])[1]
        torch.testing.assert_close(together[i], alone[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise": NOISE[:, :8], "prompt_embeds": EMBEDS}, "8 frames do not fit blocks of 3; try 6 or 9"),
        ({"noise": NOISE[0], "prompt_embeds": EMBEDS}, r"is not \[B, F, C, h, w\]"),
        ({"noise": NOISE[:, :, :8], "prompt_embeds": EMBEDS}, "16 channels"),
        ({"noise": NOISE[..., :11], "prompt_embeds": EMBEDS}, "do not split into patches of 2 x 2"),
        ({"noise": NOISE, "prompt_embeds": EMBEDS[..., :5]}, "prompt embeddings of shape"),
        ({"noise": NOISE}, "give prompt_embeds, or text_prompts and a text_encoder"),
        (
            {"noise": NOISE[:, :8], "prompt_embeds": EMBEDS, "initial_latent": NOISE[:, :1]},
            "1 given and 8 generated frames do not each fill whole blocks of 3; 0 and 9 or 3 and 6 would",
        ),
        (
            {"noise": NOISE[:, :4], "prompt_embeds": EMBEDS, "initial_latent": NOISE[:, :2]},
            "2 given and 4 generated frames .* blocks of 3; 3 and 3 or 0 and 6 would",
        ),
        (
            {"noise": NOISE[:, :6], "prompt_embeds": EMBEDS, "initial_latent": NOISE[:, :3, :8]},
            "differ in more than their frames",
        ),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        pipeline().inference(**arguments)


def test_prompts_and_batch_must_agree():
    with pytest.raises(ConfigError, match="1 prompts for noise of batch 2"):
        pipeline(text_encoder=lambda prompts: EMBEDS).inference(
            NOISE.repeat(2, 1, 1, 1, 1), text_prompts=["one"]
        )


@pytest.mark.parametrize("batch", [1, 3])
def test_prompt_embeddings_of_another_batch_are_refused(batch):
    """The attention op takes them without an error, and reads memory that is not theirs."""
    noise, fitting, other = NOISE.repeat(2, 1, 1, 1, 1), EMBEDS.repeat(2, 1, 1), EMBEDS.repeat(batch, 1, 1)
    message = f"prompt embeddings of batch {batch} for latents of batch 2; give each video its own"
    for embeds, schedule in ((other, []), (fitting, [PromptSwitch(3, prompt_embeds=other)])):
        with pytest.raises(ConfigError, match=message):
            pipeline().inference(
                noise, prompt_embeds=embeds, prompt_schedule=schedule, on_pass=lambda: pytest.fail("too late")
            )


def test_a_window_too_small_for_the_blocks_is_refused_when_built():
    with pytest.raises(ConfigError, match="must be at least 5"):
        CausalInferencePipeline(golden_model(local_attn_size=4, sink_size=2))
    with pytest.raises(ConfigError, match="sink_size"):
        CausalWanModel(dim=24, ffn_dim=8, num_heads=1, num_layers=1, sink_size=-1)
