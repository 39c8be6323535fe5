"""Small things of own code: step -1, prompts by seeds, hooks of one argument, means, own policies."""

import warnings
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.refusals import refused
from matplotlib.figure import Figure
from PIL import Image

from experiments import Atlas, Knockout, at, capture, gradients, intervene, load, run_extraction_maps, x0_lens
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.configs import find_config
from experiments.running import cli
from wan.errors import ConfigError
from wan.policies import POLICIES, WindowedPolicy

PROMPTS = ["a red circle", "a blue square"]


@pytest.fixture(scope="module")
def pipe(tiny):
    return load(tiny.path, num_frames=6)


def captured_step(pipe, steps):
    with capture(pipe, "z", layers=[0], steps=steps) as seen:
        pipe.generate(PROMPTS[0], seed=1)
    return seen["z"]


def test_step_minus_one_is_the_last_denoising_step(pipe):
    last = captured_step(pipe, -1)
    assert {place.step for place in last.places} == {1} and not last.places[0].is_clean_pass
    assert torch.equal(last.stack(), captured_step(pipe, [1]).stack())
    assert {place.step for place in captured_step(pipe, [-1, 0]).places} == {0, 1}
    with capture(pipe, layers=[0], steps=[-1], granularity="key") as seen:
        pipe.generate(PROMPTS[0], seed=1)
    assert {call.at.step for call in seen.calls} == {1}
    with gradients(pipe, "z", layers=[0], steps=-1) as grads:
        pipe.generate(PROMPTS[0], seed=1)
        grads.backward(lambda x0: x0.mean())
    assert {place.step for place in grads["z"].places} == {1}


def test_prompts_by_seeds_in_one_call(pipe):
    runs = pipe.generate(PROMPTS, seeds=[1, 2], product=True)
    made = [(run.config.prompt, run.config.seed) for run in runs]
    assert made == [(prompt, seed) for prompt in PROMPTS for seed in (1, 2)]
    three = pipe.generate(PROMPTS[0], seeds=[1, 2, 3], product=True)
    assert [run.config.seed for run in three] == [1, 2, 3]
    with pytest.raises(ConfigError, match="one for all, or product=True"):
        pipe.generate(PROMPTS, seeds=[1, 2, 3])


@pytest.mark.parametrize("hook", [lambda x: 2 * x, lambda x, where: 2 * x, lambda x, by=2: by * x])
def test_hooks_of_one_argument_or_two(pipe, hook):
    with intervene(at("z", layers=[0]), hook):
        edited = pipe.generate(PROMPTS[0], seed=1)
    with intervene(at("z", layers=[0]), lambda x, where: x + x):
        wanted = pipe.generate(PROMPTS[0], seed=1)
    assert torch.equal(edited.latents, wanted.latents)


def test_modules_builtins_and_reductions_are_hooks(pipe):
    twice = torch.nn.Linear(16, 16, bias=False)
    twice.weight.data = 2 * torch.eye(16)
    for hook, same in ((twice, lambda x: 2 * x), (torch.relu, lambda x: x.relu())):
        made = []
        for each in (hook, same):
            with intervene(at("z", layers=[0]), each):
                made.append(pipe.generate(PROMPTS[0], seed=1).latents)
        torch.testing.assert_close(*made)
    with capture(pipe, "z", layers=[0], reduce=lambda x: x.mean()) as seen:
        pipe.generate(PROMPTS[0], seed=1)
    assert seen["z"].values[0].ndim == 0


def test_a_hook_that_only_reads_is_not_warned_of(pipe):
    norms = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with intervene(at("z", layers=[0]), lambda z: norms.append(z.norm())):
            read = pipe.generate(PROMPTS[0], seed=1)
    assert len(norms) == 2 * 3 and torch.equal(read.latents, pipe.generate(PROMPTS[0], seed=1).latents)
    said = pytest.warns(UserWarning, match=r"changed its copy of z and returned None.*return x")
    with said, intervene(at("z", layers=[0]), zero):
        pipe.generate(PROMPTS[0], seed=1)
    with pytest.warns(UserWarning, match="no call was edited by"), intervene(at("z"), lambda z: None):
        pass  # nothing was generated


def zero(x):
    x.zero_()


def test_what_is_printed_says_edits_policy_and_branch(tiny):
    """print() of a session, a capture, a run and an atlas, each in a few lines."""
    session = load(tiny.path, num_frames=6)
    with capture(session, layers=[1]) as plain:
        session.generate(PROMPTS[0], seed=1)
    for thing in (session, plain, plain.runs[0]):
        assert "the whole KV cache" in repr(thing) and "no edit" in repr(thing)
    windowed = load(tiny.path, num_frames=6, cache_policy="window,window=4,sink=1")
    knockout = Knockout(frames="past", layers=[1], heads=[0])
    with capture(windowed) as captured, intervene(knockout):
        windowed.generate(PROMPTS[0], seed=1)
    policy, edit = "cache policy window,window=4,sink=1", f"edited by {knockout}"
    assert policy in repr(windowed) and policy in repr(load(tiny.path, local_attn_size=4, sink_size=1))
    for thing in (captured, captured.runs[0], captured.atlas()):
        assert policy in repr(thing) and edit in repr(thing) and "branch" not in repr(thing)
    assert repr(plain).startswith("Captured: 1 run, attention\n") and "layers: 1\n" in repr(plain.atlas())
    # What a file does not say is not claimed
    old = {name: value for name, value in captured.atlas().items() if name != "config"}
    assert "  edited by " in repr(Atlas(old)) and "cache" not in repr(Atlas(old)).splitlines()[1]
    assert "layers: 0–1\n" in repr(captured.atlas())
    assert repr(captured.calls[0]) == (
        "CapturedCall: self-attention of layer 0, block 0, step 0; frame_logits [1, 2, 3, 3], frame_mass "
        "[1, 2, 3, 3]"
    )
    lens = x0_lens(session, PROMPTS[0], seed=1, layers=[1])
    assert repr(lens).startswith("Lens: layers [1], blocks [0, 1], steps [0, 1] of Run: tiny, ")
    for thing in (captured.atlas().layer(1), captured.atlas().view()):
        assert len(repr(thing)) < 400 and "layer" in repr(thing)


def test_what_users_of_other_tools_type_first(pipe):
    """Each is answered, or told in one line how it is called here."""
    with capture(pipe, layers=[1]) as seen:
        pipe.generate(PROMPTS[0], seed=1)
    atlas = seen.atlas()
    assert atlas.layers == [1] and list(seen) == seen.keys() == []
    assert isinstance(atlas.plot(1, quantity="frame_mass"), Figure)
    assert atlas.view(quantity="frame_logits").quantity == "mean_logit"
    with capture(pipe, "z", "resid_post", layers=range(1)) as sites:
        pipe.generate(PROMPTS[0], seed=1)
    assert sites.keys() == ["resid_post", "z"] or sites.keys() == ["z", "resid_post"]
    assert "z" in sites and "k" not in sites
    wrong = {
        r"atlas\[1\]: a layer is atlas.layer\(5\), .*known ones: frame_logits, frame_mass": lambda: atlas[1],
        "an atlas has no 'pattern'; known ones: frame_logits, frame_mass": lambda: atlas["pattern"],
    }
    for message, call in wrong.items():
        with refused(message, CacheError):
            call()
    wrong = {
        r"captured\['frame_mass'\]: attention was captured, which": lambda: seen["frame_mass"],
        "takes no layer of a causal run": lambda: seen.atlas(layer=1),
        "takes no branch of a causal run": lambda: seen.atlas(branch="uncond"),
        "'wan_mini' is a name: open it first": lambda: capture("wan_mini").__enter__(),
        "CausalWanModel is the model of a session": lambda: capture(pipe.model).__enter__(),
        r"sites are arguments of their own: capture\(session, 'z', 'q'\)": (
            lambda: capture(pipe, ["z", "q"]).__enter__()
        ),
        "'blocks.5.attn.hook_z' is no site; did you mean z, layers": (
            lambda: capture(pipe, "blocks.5.attn.hook_z").__enter__()
        ),
        r"such as \[0, 5\] or range\(3\), not slice": lambda: capture(pipe, layers=slice(2)).__enter__(),
        "layer -1 is not in 0..1": lambda: capture(pipe, layers=-1).__enter__(),
        "gpt2 is no config, its path, or a directory of weights; known ones: causal_forcing": (
            lambda: load("gpt2")
        ),
        "a pipeline of diffusers is opened first": lambda: load("Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    }
    for message, call in wrong.items():
        with refused(message):
            call()


def test_devices_and_dtypes_may_be_torchs(tiny):
    session = load(tiny.path, device=torch.device("cpu"), dtype=torch.float32)
    assert (session.config.device, session.config.dtype) == ("cpu", "float32")
    with refused("dtype 'float64' should be 'auto', 'bfloat16'"):
        load(tiny.path, dtype=torch.float64)


def test_load_lists_models_alone():
    """configs/ holds other settings too, such as those of kinds of heads."""
    with refused("taxonomy is no config, its path, or a directory of weights") as caught:
        load("taxonomy")
    names = str(caught.value).partition("known ones: ")[2].split(", ")
    assert {"wan_mini", "self_forcing_dmd"} < {*names} and "taxonomy" not in names
    for name in names:
        assert find_config(name, {}).model


def test_one_head_and_means_of_atlases_are_drawn(pipe):
    with capture(pipe) as seen:
        runs = pipe.generate(PROMPTS, seeds=[1, 2], product=True)
    atlases = [seen.atlas(run) for run in runs]
    assert isinstance(atlases[0].plot(layer=1, head=1), Figure)
    every, mean_of_one = atlases[0].plot(quantity="mass"), atlases[0].plot(1, 0, "mass", head="mean")
    shown = [np.ma.filled(figure.axes[n].images[0].get_array(), np.nan)
             for figure, n in ((every, 1), (mean_of_one, 0))]  # fmt: skip
    expected = atlases[0]["frame_mass"][:, 0].float().mean(1)[1].numpy()
    for image in shown:  # of layer 1
        np.testing.assert_allclose(image, expected, rtol=1e-5)
    assert [axis.get_title(loc="left") for axis in every.axes[:2]] == ["L0", "L1"]
    with pytest.raises(CacheError, match="head 2 is not in this cache; it has 0, 1"):
        atlases[0].plot(layer=1, head=2)
    mean = Atlas.mean(atlases)
    masses = torch.stack([atlas["frame_mass"] for atlas in atlases]).float()
    torch.testing.assert_close(mean["frame_mass"], masses.mean(0), equal_nan=True)
    torch.testing.assert_close(mean.std("frame_mass"), masses.std(0), equal_nan=True)
    low, high = mean.interval("frame_mass")  # Student's t, 3 degrees of freedom
    torch.testing.assert_close(high - low, 2 * 3.18245 * masses.std(0) / 2, equal_nan=True)
    assert repr(mean).startswith("MeanAtlas: 4 runs of tiny, layers [0, 1]\n  frame_logits [2, 3, 2, 6, 6]")
    for head in (None, 1):
        figure = mean.plot(layer=1, head=head)
        axis = figure.axes[0 if head else 1]
        drawn = [bar.get_height() for bar in axis.containers[0]]
        wanted = torch.stack([torch.from_numpy(atlas.view().key_profile(1)) for atlas in atlases]).mean(0)
        torch.testing.assert_close(torch.tensor(drawn), wanted[1], equal_nan=True, check_dtype=False)
    with pytest.raises(CacheError, match="head 9 is not in this cache"):
        mean.plot(layer=1, head=9)


def keeps_a_slot_of_an_empty_cache(cache, block):
    cache.keep([7])
    cache.append(block)


def keeps_half_a_slot(cache, block):
    cache.append(block)
    cache.keep([0.0])


def keeps_a_negative_slot(cache, block):
    cache.append(block)
    cache.keep([-1])


def appends_nothing(cache, block):
    pass


def appends_twice(cache, block):
    cache.append(block)
    cache.append(block)


@patch.dict(POLICIES)  # a policy is known from its class on
@pytest.mark.parametrize(
    ("admit", "message"),
    [
        (keeps_a_slot_of_an_empty_cache, r"slot 7 is not in 0\.\.-1"),
        (keeps_half_a_slot, r"slot 0\.0 is not in 0\.\.2"),
        (keeps_a_negative_slot, r"slot -1 is not in 0\.\.2"),
        (appends_nothing, r"admit\(\) gave it no slots; call cache.append\(block\)"),
        (appends_twice, r"slot 5 is not there"),
    ],
)
def test_errors_of_own_policies_name_the_slot_and_the_block(tiny, admit, message):
    @dataclass
    class Wrong(WindowedPolicy):
        name = "wrong"

        def admit(self, cache, block):
            admit(cache, block)

    session = load(tiny.path, num_frames=6, cache_policy=Wrong(window=3, sink=0))
    with refused(f"cache_policy wrong, block of frames 0 to 2: {message}"):
        session.generate(PROMPTS[0], seed=1)


def test_a_mask_on_the_video_names_the_queries(pipe):
    tokens = torch.zeros(6, 4, 4, dtype=torch.bool)
    tokens[4, 1:3, 2] = tokens[1, 0, 0] = True
    pixels = tokens.repeat_interleave(16, 1).repeat_interleave(16, 2)
    video = torch.cat([pixels[:1], pixels[1:].repeat_interleave(4, 0)])
    found = []
    for mask in (tokens, pixels.numpy(), video):
        with capture(pipe, layers=[1], heads=[0], steps=-1, queries=mask) as seen:
            pipe.generate(PROMPTS[0], seed=1)
        assert [call.values["map_queries"].tolist() for call in seen.calls] == [[[1, 0]], [[4, 6], [4, 10]]]
        found.append(seen.calls[1].values["map_mass"])
    assert found[0].shape == (1, 1, 2, 6 * 16) and torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for mask, said in (
        (tokens.float(), r"boolean.* 4 x 4 tokens or 64 x 64 pixels, not torch.float32 \[6, 4, 4\]"),
        (tokens[:5], r"\[6 or 21 frames\]"),
        (torch.zeros_like(tokens), "half of no token"),
    ):
        with pytest.raises(ConfigError, match=said), capture(pipe, queries=mask):
            pass


def test_a_mask_is_read_from_an_image(tiny, tmp_path, capsys):
    image = Image.new("L", (32, 32))
    image.paste(255, (16, 8, 24, 24))  # column 2, rows 1 and 2 of 4 x 4
    image.save(tmp_path / "drawn.png")
    flags = ["--config_path", tiny.path, "--num_frames", "6", "--quiet", "--prompt", PROMPTS[0]]
    out = ["--output_path", str(tmp_path / "maps.pt")]
    cli.main(run_extraction_maps.run, [*flags, *out, "--query_mask", f"4,{tmp_path / 'drawn.png'}"])
    (block,) = load_cache(tmp_path / "maps.pt")["blocks"]
    assert block["queries"].tolist() == [[4, 1, 2], [4, 2, 2]]
    (tmp_path / "other.png").write_bytes(b"no image")
    for mask, said in (("9,drawn.png", "frame 9 is not in 0..5"), ("other.png", "is no image")):
        folder = mask.replace("drawn", f"{tmp_path}/drawn").replace("other", f"{tmp_path}/other")
        with pytest.raises(SystemExit) as stopped:
            cli.main(run_extraction_maps.run, [*flags, *out, "--query_mask", folder])
        assert stopped.value.code == 2 and said in capsys.readouterr().err
