"""What the rollout accepts and refuses; its numbers are in test_golden.py."""

import pytest
import torch
from conftest import golden_arrays, golden_model

from wan.errors import ConfigError
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch

ARRAYS = golden_arrays("causal")
NOISE, EMBEDS = ARRAYS["blocks9/noise"], ARRAYS["blocks9/prompt_embeds"]


def pipeline(**kwargs) -> CausalInferencePipeline:
    return CausalInferencePipeline(golden_model(), **kwargs)


def test_a_generator_draws_the_noise_between_steps():
    run = pipeline(denoising_step_list=[1000, 500])
    latents = [
        run.inference(NOISE[:, :3], prompt_embeds=EMBEDS, generator=torch.Generator().manual_seed(seed))[1]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(latents[0], latents[1]) and not torch.equal(latents[0], latents[2])


def test_text_encoder_and_vae_are_used_and_everybody_is_called():
    seen, passes, blocks = [], [], []

    class Vae:
        def decode(self, latents):
            seen.append(latents)
            return "video"

    run = pipeline(text_encoder=lambda prompts: seen.append(prompts) or EMBEDS, vae=Vae())
    callbacks = {"on_pass": lambda: passes.append(1), "on_block": lambda *block: blocks.append(block)}
    video, latents = run.inference(NOISE[:, :6], text_prompts=["a prompt"], **callbacks)
    assert video == "video" and seen[0] == ["a prompt"] and seen[1] is latents and len(passes) == 2 * 5
    assert [block for block, _ in blocks] == [0, 1]
    assert torch.equal(torch.cat([x0 for _, x0 in blocks], 1), latents)
    assert run.inference(NOISE[:, :3], text_prompts=["a prompt"], return_latents=False) == "video"


def test_a_batch_is_its_videos_one_by_one():
    noise, renoise = NOISE.repeat(2, 1, 1, 1, 1), torch.randn(3, 2, *NOISE.shape[1:])
    noise[1] = noise[1].flip(0)
    together = pipeline().inference(noise, prompt_embeds=EMBEDS.repeat(2, 1, 1), renoise=renoise)[1]
    for i in range(2):
        alone = pipeline().inference(noise[i : i + 1], prompt_embeds=EMBEDS, renoise=renoise[:, i : i + 1])[1]
        torch.testing.assert_close(together[i], alone[0], atol=2e-5, rtol=0)


def test_a_probe_denoises_a_block_again_and_leaves_no_trace():
    run, renoise, probed = pipeline(), torch.randn(3, 1, *NOISE.shape[1:]), {}

    def probe(block, denoise):
        probed[block] = denoise(), denoise(torch.zeros_like(NOISE[:, :3]))

    plain = run.inference(NOISE, prompt_embeds=EMBEDS, renoise=renoise)[1]
    latents = run.inference(NOISE, prompt_embeds=EMBEDS, renoise=renoise, probe=probe)[1]
    assert torch.equal(latents, plain)
    assert torch.equal(torch.cat([same for same, _ in probed.values()], 1), plain)
    assert not any(torch.equal(same, other) for same, other in probed.values())


SIX, GIVEN = NOISE[:, :6], NOISE[:, :3]


@pytest.mark.parametrize(
    ("noise", "arguments", "message"),
    [
        (NOISE[:, :8], {}, "8 frames do not fit blocks of 3; try 6 or 9"),
        (NOISE[0], {}, r"is not \[B, F, C, h, w\]"),
        (NOISE, {"prompt_embeds": EMBEDS[..., :5]}, "prompt embeddings of shape"),
        (NOISE, {"prompt_embeds": None}, "give prompt_embeds, or text_prompts and a text_encoder"),
        (NOISE[:, :8], {"initial_latent": NOISE[:, :1]}, "1 given frames end within a block; blocks end at"),
        (SIX, {"initial_latent": GIVEN[:, :, :8]}, "differ in more than their frames"),
    ],
)
def test_bad_input_is_refused(noise, arguments, message):
    with pytest.raises(ConfigError, match=message):
        pipeline().inference(noise, **{"prompt_embeds": EMBEDS} | arguments)


@pytest.mark.parametrize("batch", [1, 3])
def test_prompt_embeddings_of_another_batch_are_refused(batch):
    """The attention op takes them without an error, and reads memory that is not theirs."""
    noise, fitting, other = NOISE.repeat(2, 1, 1, 1, 1), EMBEDS.repeat(2, 1, 1), EMBEDS.repeat(batch, 1, 1)
    message = f"prompt embeddings of batch {batch} for latents of batch 2; give each video its own"
    for embeds, schedule in ((other, []), (fitting, [PromptSwitch(3, prompt_embeds=other)])):
        options = {"prompt_embeds": embeds, "prompt_schedule": schedule}
        with pytest.raises(ConfigError, match=message):
            pipeline().inference(noise, **options, on_pass=lambda: pytest.fail("too late"))
