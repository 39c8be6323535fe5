"""The blocks of the README, docs/own_code.md and docs/recipes.md run as they stand, and show what they say;
what one's own code may ask for, and what it is refused.
"""

import copy
import inspect
import linecache
import pickle
import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from doctest import DocTestParser
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import ROOT
from diffusers import WanPipeline
from helpers.checkpoints import small_wan_pipeline
from helpers.policies import POLICIES as POLICY_ROWS
from helpers.refusals import refused
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

import experiments
from experiments import Atlas, at, capture, compare, intervene, load, run_extraction_all, x0_lens
from experiments.caches import load_cache
from experiments.caches.activations import Activations
from experiments.caches.files import CacheError
from experiments.running import cli
from experiments.runs import CAPTURES
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest
from wan.errors import ConfigError
from wan.files import read_yaml
from wan.interventions import Ablate, Edit, Patch, Source
from wan.policies import POLICIES, policy_of
from wan.sites import SITES

BLOCK = re.compile(r"```python\n(.*?)```", re.S)
SHOWN = re.compile(r"^(.+?)  # -> (.+)$")


class TinyVideos(WanPipeline):
    """A pipeline whose videos are small unless more is said."""

    def __call__(self, prompt, **more):
        small = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2}
        return super().__call__(prompt, **small | {"output_type": "latent"} | more)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Some folder that is not the project's."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def pipe(tiny):
    return load(tiny.path, num_frames=6)


def test_what_a_rollout_takes_anew_is_honoured(pipe, monkeypatch):
    plain = pipe.generate("a red circle", seed=3)
    schedule = [{"frame": 3, "prompt": "a blue square"}]
    monkeypatch.setattr(pipe, "config", replace(pipe.config, seed=3, prompt_schedule=schedule))
    switched = pipe.generate("a red circle")
    assert torch.equal(switched.latents[:, :3], plain.latents[:, :3])
    assert not torch.equal(switched.latents, plain.latents)
    config = switched.config
    assert torch.equal(pipe.rollout(config), switched.latents)
    pipe.config.prompt_schedule.clear()
    assert torch.equal(pipe.generate("a red circle").latents, plain.latents)
    pipe.config.denoising_step_list.append(0)  # in place
    with pytest.raises(ConfigError, match=r"denoising_step_list is .* load it again"):
        pipe.generate("a red circle")
    pipe.config.denoising_step_list.pop()


@pytest.mark.beside
def test_the_readmes_block_runs_from_any_folder(elsewhere, monkeypatch):
    monkeypatch.setattr("experiments.session.load", partial(load, num_frames=6))
    names: dict = {"pipe": small_wan_pipeline(TinyVideos)}
    for block in BLOCK.findall((ROOT / "README.md").read_text().partition("## Five lines")[2]):
        exec(block, names)
    assert not torch.equal(names["run"].latents, names["edited"].latents)
    assert Path("outputs/edited.mp4").is_file()
    assert names["run"].latents.shape == (1, 6, 16, 8, 8) and names["run"].video.shape == (21, 64, 64, 3)
    cache = load_cache("cache/mine.pt", expect=("atlas",))
    assert cache["layers"] == [1, 5] and cache["prompt"].startswith("a red circle")
    assert isinstance(names["atlas"].plot(layer=5), Figure)
    theirs = load_cache("cache/theirs.pt", expect=("atlas",))
    assert theirs["layers"] == [1] and theirs["prompt"] == cache["prompt"] and theirs["pass_steps"] == [0, 1]


@patch.dict(POLICIES)  # a page adds one
@pytest.mark.parametrize("page", ["own_code", "recipes", "miniature"])
def test_the_pages_blocks_run_and_show_what_they_say(page, elsewhere, monkeypatch):
    monkeypatch.setattr(WanPipeline, "from_pretrained", lambda name: small_wan_pipeline(heads=12))
    names: dict = {"__name__": page}
    shown, blocks = 0, BLOCK.findall((ROOT / f"docs/{page}.md").read_text())
    for block in blocks:
        for part in re.split(r"(?m)^(.+  # -> .+)$", block):
            if found := SHOWN.match(part):
                shown += 1
                assert eval(found[1], names) == eval(found[2], names), part
            else:
                file = f"{page} {hash(part)}"  # nnsight reads the source of its blocks
                linecache.cache[file] = len(part), None, part.splitlines(keepends=True), file
                exec(compile(part, file, "exec"), names)
    assert shown == {"own_code": 13, "recipes": 15, "miniature": 1}[page]
    if page == "recipes":
        assert len(blocks) == 13 and all(block.count("\n") <= 12 for block in blocks)
        assert Path("ablated.mp4").stat().st_size > 1000


def test_the_public_names_are_listed_and_there():
    """dir() has them for completion; each comes from the module that HOMES names, documented."""
    assert dir(experiments) == sorted(experiments.__all__)
    assert sorted(name for names in experiments.HOMES.values() for name in names) == dir(experiments)
    for name in dir(experiments):
        assert getattr(experiments, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Knockot'"):
        _ = experiments.Knockot


def reference_objects():
    """Return the objects of the API reference and their members, by path."""
    site = runpy.run_path(str(ROOT / "docs/site/reference.py"))
    objects = {}
    for page in site["PAGES"]:
        for path, members in site["objects_of"](page).items():
            module, _, name = path.rpartition(".")
            objects[path] = getattr(import_module(module), name)
            objects |= {f"{path}.{member}": getattr(objects[path], member) for member in members}
    return objects


def test_parameters_of_the_reference_are_those_of_the_code():
    """What griffe warns of, without griffe; and each parameter of a public function is described."""
    wrong = []
    for path, thing in reference_objects().items():
        text = inspect.getdoc(thing) or ""
        described = re.findall(r"^    \*{0,2}(\w+): ", section(text, "Args"), re.MULTILINE)
        signature = inspect.signature(thing) if callable(thing) else None
        names = [name for name in signature.parameters if name != "self"] if signature else []
        if is_dataclass(thing):
            names = [setting.name for setting in fields(thing)]
        wrong += [f"{path}: no {name}" for name in described if name not in names]
        if described and not isinstance(thing, type):
            wrong += [f"{path}: {name} is not described" for name in names if name not in described]
        prose = re.sub(r"`[^`]*`", "", text.partition("Examples:")[0])
        wrong += [f"{path}: {link} reads as a link" for link in re.findall(r"\]\[\S*", prose)]
    assert not wrong
    tables = [name for name in dir(experiments) if section(getattr(experiments, name).__doc__, "Args")]
    functions = [name for name in dir(experiments) if not isinstance(getattr(experiments, name), type)]
    assert {*functions} <= {*tables}


def section(docstring: str, name: str) -> str:
    """Return a Google section of a docstring, its lines indented by four."""
    found = re.search(rf"^{name}:\n((?:    .*\n|\n)*)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.beside
@patch.dict(POLICIES)  # a block of recipes.md adds one
def test_the_examples_of_the_reference_run(elsewhere):
    """Those in docstrings of the public objects, which show what they say, and those that the site adds."""
    site = runpy.run_path(str(ROOT / "docs/site/reference.py"))
    names: dict = {"train": torch.sum, "DataLoader": DataLoader}
    exec(BLOCK.findall((ROOT / "docs/recipes.md").read_text())[0], names)
    public = {}
    for page in site["PAGES"]:
        for path in site["objects_of"](page):
            module, _, name = path.rpartition(".")
            public[name] = getattr(import_module(module), name)
    assert {*experiments.__all__} <= {*public}
    lacking = [name for name, shown in public.items() if ">>>" not in (shown.__doc__ or "")]
    assert [name for name in lacking if name not in site["EXAMPLES"]] == []  # each has an example
    names |= public
    with capture(names["session"]) as names["captured"]:
        names["edited"] = names["session"].generate([names["prompt"], names["other"]], seeds=[1, 2])[0]
    names["atlas"] = names["captured"].atlas(names["edited"])
    names["atlas"].save("cache/atlas.pt")
    with capture(names["session"], "resid_post", layers=[5], stream_to="cache/acts"):
        names["session"].generate(seed=1)
    plain = partial(re.sub, r"torch\.Size|[()\[\] ]", "")
    shown = 0
    for documented in public.values():
        for example in DocTestParser().get_examples(documented.__doc__ or ""):
            if example.want:
                shown += 1
                assert plain(str(eval(example.source, names))) == plain(str(eval(example.want))), (
                    example.source
                )
            else:
                exec(example.source, names)
    for example in site["EXAMPLES"].values():
        exec(example, names)
    assert shown == 11 and Path("cache/attribution.pt").is_file() and Path("circle.mp4").is_file()


def test_wrappers_of_the_whole_model_are_one_line_that_says_what_to_do(pipe, monkeypatch):
    with pytest.raises(ConfigError, match=r"--gpus N, several by --workers N"):
        pipe.model._replicate_for_data_parallel()  # as nn.DataParallel does on several GPUs
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ConfigError, match=r"cannot follow a rollout's cache: .*ffn\.compile\(\)"):
        pipe.generate("a red circle", seed=3)


def test_the_atlas_has_the_bytes_that_the_script_writes(elsewhere, pipe, tiny):
    with capture(pipe, key_curve=True, cross=True, rope_bands=True) as seen:
        first = pipe.generate("a red circle", seed=7)
    seen.atlas().save("ours/deep/atlas.pt")
    assert "  key_curve [layers 2, passes 3, heads 2, key tokens 96]: q·k/√D of" in repr(seen.atlas())
    flags = ["--config_path", tiny.path, "--num_frames", "6", "--quiet", "--seed", "7"]
    flags += ["--prompt", "a red circle", "--key_curve", "--cross", "--rope_bands"]
    cli.main(run_extraction_all.run, [*flags, "--output_path", "theirs.pt"])
    assert (elsewhere / "ours/deep/atlas.pt").read_bytes() == (elsewhere / "theirs.pt").read_bytes()
    assert torch.equal(pipe.generate("a red circle", seed=7).latents, first.latents)  # nobody looks now
    assert not torch.equal(pipe.generate("a red circle", seed=8).latents, first.latents)
    assert len(seen.runs) == 1


def test_models_and_policies_are_given_by_name_file_or_settings(elsewhere):
    sources = "wan_mini", ROOT / "configs/wan_mini.yaml", ROOT / "checkpoints/wan-mini"
    by_name, by_path, by_folder = (load(source, num_frames=6) for source in sources)
    assert by_name.config == by_path.config == by_folder.config
    published = ROOT / "configs/policies/deep_sink.yaml"
    relative = "configs/policies/deep_sink.yaml"  # below the project, as a config's paths are
    by_name, *others = (load("wan_mini", cache_policy=p) for p in ("deep_sink", relative, published))
    assert by_name.config.cache_policy == read_yaml(published)
    assert all(pipe.config == by_name.config for pipe in others)
    windowed = load("wan_mini_lora", cache_policy={"name": "full"}).config  # that config has a window
    assert windowed == load("wan_mini_lora", cache_policy="full").config
    assert policy_of(windowed).name == "full"
    with pytest.raises(ConfigError, match="leave them out where cache_policy is given"):
        load("wan_mini", cache_policy="full", local_attn_size=9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"num_frame": 6}, r"'num_frame' is no setting of a run; did you mean num_frames\?", id="setting"
        ),
        pytest.param({"cache_policy": "deep"}, "'deep' is no .* did you mean deep_sink", id="policy"),
    ],
)
def test_load_names_the_nearest_word(settings, message):
    with refused(message):
        load("wan_mini", **settings)


@pytest.mark.parametrize(
    ("sites", "options", "message"),
    [
        pytest.param("resid_past", {}, "'resid_past' is no site; did you mean resid_post", id="site"),
        pytest.param("z", {"heads": [2]}, "head 2 is not in", id="head"),
        pytest.param("attn_out", {"heads": [0]}, "attn_out has no heads", id="heads of a sum"),
        pytest.param("flow", {"layers": [0]}, "flow belongs to no layer", id="layer of the output"),
        pytest.param(None, {"queries": "x"}, "a mask of queries cannot be read", id="mask"),
    ],
)
def test_capture_refuses_what_the_model_has_not(pipe, sites, options, message):
    with refused(message):
        capture(pipe, sites, **options).__enter__()


def test_steps_from_the_end_need_blocks_that_end_alike(pipe):
    first_block = pipe.config.denoising_step_list[:1]
    uneven = load(pipe.config, first_block_steps=first_block)
    with refused(r"the last steps of blocks are \[0, 1\]"):
        capture(uneven, "x0", steps=-1).__enter__()


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        pytest.param(["a", "b"], {"seeds": [1, 2, 3]}, "2 prompts and 3 seeds", id="unequal"),
        pytest.param([], {"seeds": [1], "product": True}, "0 prompts and", id="none"),
    ],
)
def test_a_batch_has_a_seed_for_each_prompt(pipe, prompts, settings, message):
    with refused(message):
        pipe.generate(prompts, **settings)


def takes_nothing():
    return 0


def returns_nothing(x):
    return None


def returns_a_float(x, where):
    return x.mean().item()


def returns_an_array(x, where):
    return x.numpy()


def returns_a_sparse_tensor(x):
    return x.to_sparse()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (takes_nothing, "z: .*this one takes nothing"),
        (returns_nothing, "reduce at z: .* returned None, not a tensor"),
        (returns_a_float, "reduce at z: .* returned .*, not a tensor"),
        (returns_an_array, "reduce at z: .* returned .*, not a tensor"),
        (returns_a_sparse_tensor, "reduce at z: .* returned .*, not a tensor"),
    ],
)
def test_reduce_takes_a_tensor_and_returns_one(pipe, function, message):
    with refused(message), capture(pipe, "z", reduce=function):
        pipe.generate("a red circle", seed=3)


def test_no_video_begins_inside_a_function_of_another(pipe):
    def generate(x):
        return pipe.generate().latents

    def roll_out(x):
        return pipe.rollout(pipe.config)

    for function in (generate, roll_out):
        with refused("another video was asked for"), capture(pipe, "z", reduce=function):
            pipe.generate("a red circle", seed=3)


def test_a_capture_and_requests_are_not_mixed(pipe):
    with refused("leave requests out"), capture(pipe):
        pipe.generate("a red circle", requests=[CaptureRequest()])


def test_an_edit_has_an_apply_of_its_own():
    with refused("Edit has no apply"):
        Edit()


def test_a_patch_comes_from_another_run(pipe):
    same_seed = Patch("z", Source(seed=3), passes="all")
    with refused("is the run itself"), intervene(same_seed):
        pipe.generate("a red circle", seed=3)


def test_a_capture_inside_a_capture_is_refused(pipe, tiny):
    said = "captured already; ask one capture for all"
    with capture(pipe, [0]), pytest.raises(ConfigError, match=said), capture(pipe, [1]):
        pass
    with capture(pipe, [1]) as seen, capture(load(tiny.path), [0]):
        assert (
            dict(CAPTURES.get())[id(pipe)] is seen
        )  # one of another pipe is no matter; a refused one left nothing


def test_a_batch_is_the_runs_alone_and_each_has_its_own_captures(pipe):
    with capture(pipe, "mlp_out", layers=[1], steps=[0]) as seen:
        first, second = pipe.generate(["a red circle", "a blue square"], seeds=[3, 4])
        alone = pipe.generate("a blue square", seed=4)
    assert torch.equal(second.latents, alone.latents)  # to the bit, on a CPU
    assert torch.equal(second.activations["mlp_out"].stack(), alone.activations["mlp_out"].stack())
    assert len(seen.runs) == 3 and first.config.seed == 3
    assert len(pipe.generate("a red circle", seeds=[1, 2])) == 2
    with capture(pipe, layers=[1]):
        of_batch = pipe.generate(["a red circle", "a blue square"], seeds=[3, 4])[1]
    with capture(pipe, layers=[1]):
        expected = pipe.generate("a blue square", seed=4)
    for one, other in zip(of_batch.records, expected.records, strict=True):
        torch.testing.assert_close(one["frame_mass"], other["frame_mass"], atol=1e-5, rtol=0)


class Centred(Edit):
    sites = ("z",)

    def apply(self, x, where, data=None):
        return x - x.mean()


def test_functions_see_each_video_of_a_batch_alone(pipe):
    """As reduce, and as an edit; one that mixes its whole input shows it."""
    scale = lambda z: z * (1 + z.mean())  # noqa: E731
    asked = {"reduce": lambda x, where: x.mean((0, 1)), "layers": [1], "steps": [0]}
    with capture(pipe, "z", "mod_gate", **asked) as seen, intervene(at("z"), scale):
        together = pipe.generate(["a red circle", "a blue square"], seeds=[3, 4])
        alone = [pipe.generate("a red circle", seed=3), pipe.generate("a blue square", seed=4)]
    assert len(seen.runs) == 4 and together[1].activations["z"][0].shape == (2, 16)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.latents, other.latents, atol=1e-5, rtol=0)
        for site in ("z", "mod_gate"):
            found, expected = (run.activations[site].stack() for run in (one, other))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    Centred.__module__ = "__main__"  # where a notebook defines one
    with intervene(Centred(layers=[1], passes="all")):
        assert torch.equal(
            pipe.generate("a red circle", seeds=[3, 4])[0].latents,
            pipe.generate("a red circle", seed=3).latents,
        )


def nearly(found, expected, where):
    """Equal within 1e-5 of the largest number, NaN in the same places; half precision within its own step."""
    assert found.shape == expected.shape, where
    if not found.is_floating_point():
        assert torch.equal(found, expected), where
    elif found.numel():
        step = 1e-3 if found.dtype == torch.float16 else 1e-5
        size = max(expected.double().nan_to_num(0, 0, 0).abs().max().item(), 1)
        close = partial(torch.testing.assert_close, atol=step * size, rtol=0, equal_nan=True)
        close(found, expected, msg=lambda text: f"{where}: {text}")


ROWS = {row["name"]: row for row in POLICY_ROWS} | {"by head": "mini_triattention_small"}  # of the miniature


@pytest.mark.parametrize("policy", ROWS.values(), ids=ROWS)
def test_a_batch_is_a_list_of_runs_for_every_request_policy_and_site(tiny, policy):
    by_heads = policy == "mini_triattention_small"
    session = load("wan_mini" if by_heads else tiny.path, cache_policy=policy, num_frames=9)
    prompts = [f"a {what} over a dark blue background" for what in ("red circle moving right", "blue square")]
    every = {"cross": True} | ({} if by_heads else {"key_curve": True, "rope_bands": True})

    def made(*sites, **asked):
        with capture(session, *sites, **asked) as seen:
            runs = session.generate(prompts, seeds=[3, 4])
            alone = [
                session.generate(prompt, seed=seed) for prompt, seed in zip(prompts, (3, 4), strict=True)
            ]
        return seen, list(zip(runs, alone, strict=True))

    # 1. Attention, as calls and as an atlas: the layouts of the keys, too.
    seen, pairs = made(layers=[1], **every)
    for one, other in pairs:
        assert torch.equal(one.latents, other.latents)
        for call, expected in zip(one.records, other.records, strict=True):
            assert {*call} == {*expected} and call["key_frames"] == expected["key_frames"]
            for name in ("slot_frame", "slot_position", "q_shape", "k_shape"):
                assert call[name] == expected[name], (name, expected.at)
            for name, value in expected.values.items():
                nearly(call.values[name], value, (name, expected.site, expected.at))
        atlas, expected_atlas = seen.atlas(one), seen.atlas(other)
        assert {*atlas} == {*expected_atlas}
        for name, value in expected_atlas.items():
            if isinstance(value, torch.Tensor):
                nearly(atlas[name], value, name)
    # 2. Every site in the last block.
    for one, other in made(*SITES, layers=[1], blocks=[2], steps=[0, session.config.num_passes - 1])[1]:
        for site in SITES:
            assert one.activations[site].places == other.activations[site].places
            for value, expected in zip(one.activations[site], other.activations[site], strict=True):
                nearly(value, expected, site)


def test_a_layer_of_an_atlas_is_saved_in_one_line_for_older_notebooks(elsewhere):
    path = ROOT / "cache/published/self_forcing_dmd_eagle_21f.pt"
    Atlas.open(path).layer(20).save("cache/layer20.pt")
    older = torch.load("cache/layer20.pt")  # as they read it
    matrix, last = older["full_frame_attention"].numpy(), older["last_block_query_frames"]
    assert (older["layer_index"], older["num_heads"], older["num_frames"]) == (20, 12, 21)
    atlas = load_cache(path)
    assert np.array_equal(matrix, atlas["frame_logits"][20, 0].float().numpy(), equal_nan=True)
    profile = older["last_block_frame_attention"].float().numpy()
    assert last == [18, 19, 20] and np.allclose(profile, atlas["last_block_frame_logits"][20, 0], atol=1e-3)
    with pytest.raises(CacheError, match="layer 30 is not in"):
        Atlas.open(path).layer(30)


def test_an_atlas_is_read_only_and_its_copies_are_whole(pipe, tmp_path):
    with capture(pipe) as seen:
        pipe.generate("a red circle", seed=3)
    atlas = seen.atlas()
    name, new = "frame_logits", 2 * atlas["frame_logits"]
    for change in (
        lambda: atlas.__setitem__(name, new),
        lambda: atlas.update({name: new}),
        lambda: atlas.pop(name),
        lambda: atlas.__ior__({name: new}),
    ):
        with pytest.raises(CacheError, match="read-only"):
            change()
    for other in (copy.copy(atlas), copy.deepcopy(atlas), pickle.loads(pickle.dumps(atlas))):
        assert type(other) is Atlas and torch.equal(other[name].nan_to_num(), atlas[name].nan_to_num())
    changed = Atlas({**atlas, name: new})
    changed.save(tmp_path / "changed.pt")
    assert torch.equal(Atlas.open(tmp_path / "changed.pt")[name].nan_to_num(), new.nan_to_num())


def test_a_mean_is_of_one_model_and_schedule(pipe, tiny):
    def atlas(session, seed, prompt="a red circle"):
        with capture(session) as seen:
            session.generate(prompt, seed=seed)
        return seen.atlas()

    own = atlas(pipe, 3)
    assert Atlas.mean([own, atlas(pipe, 4, "a blue square")]).count == 2
    others = [
        load(tiny.path, num_frames=6, **changed)
        for changed in (
            {"denoising_step_list": [1000, 250]},
            {"timestep_shift": 3.0},
            {"cache_policy": "window,window=4,sink=1"},
        )
    ]
    with intervene(at("z"), lambda z: 2 * z):
        edited = atlas(pipe, 5)
    weights = Atlas({**own, "fingerprint": "0" * 32, "weights_sha256": "0" * 64})
    for other in (*(atlas(session, 4) for session in others), edited, weights):
        with pytest.raises(CacheError, match="of one model and schedule, which differ in prompt and seed: "):
            Atlas.mean([own, other])
    with pytest.raises(CacheError, match="every run once"):
        Atlas.mean([own, atlas(pipe, 4), own])


def test_copies_of_a_session_have_its_model_as_it_is(tiny):
    session = load(tiny.path, num_frames=3)
    assert copy.deepcopy(session).pipeline is None and pickle.loads(pickle.dumps(session)).pipeline is None
    plain = session.generate("a red circle", seed=3)
    with torch.no_grad():
        session.model.blocks[0].ffn[0].weight.mul_(2)
    changed = session.generate("a red circle", seed=3)
    deep, shallow = copy.deepcopy(session), copy.copy(session)
    assert shallow.model is session.model and deep.model is not session.model
    with torch.no_grad():
        session.model.blocks[0].ffn[0].weight.div_(2)
    again = deep.generate("a red circle", seed=3)  # elsewhere in memory, where products round differently
    torch.testing.assert_close(again.latents, changed.latents, atol=1e-5, rtol=0)
    assert (again.latents - plain.latents).abs().max() > 1e-3
    for same in (session, shallow, pickle.loads(pickle.dumps(session))):
        assert torch.equal(same.generate("a red circle", seed=3).latents, plain.latents)


def test_activations_come_back_from_files_and_folders(pipe, tmp_path):
    chosen = {"layers": [0, 1], "heads": [1, 0], "frames": [1, 4]}
    with capture(pipe, "z", "x0", **chosen, stream_to=tmp_path / "blocks") as seen:
        pipe.generate(seed=1)
    assert len([*(tmp_path / "blocks").glob("*_seed1/block_*.safetensors")]) == 2
    with capture(pipe, "z", "x0", **chosen) as whole:
        pipe.generate(seed=1)
    for table in (seen, load_cache(whole.save(tmp_path / "all.safetensors"))):
        for site in ("z", "x0"):
            assert torch.equal(table[site].stack(), whole[site].stack())
            assert table[site].places == whole[site].places
    assert whole["z"].stack().shape == (2, 2, 3, 1, 16, 2, 16) and whole["x0"].axes[:2] == ("block", "step")
    (tmp_path / "bad.safetensors").write_bytes(b"0" * 100)
    for path in ("bad.safetensors", "none.safetensors"):
        with pytest.raises(CacheError, match=r"\.safetensors"):
            load_cache(tmp_path / path)
    with pytest.raises(CacheError, match="no call of"):
        whole["z"].at(layer=7)
    table = whole["z"].at(step=0)
    with pytest.raises(CacheError, match="3 of 4 calls"):
        Activations("z", table.places[:3], table.values[:3]).stack()


def test_hooks_of_torch_see_and_change_what_capture_sees(pipe):
    with capture(pipe, "resid_post", layers=[1], to=None) as seen:
        plain = pipe.generate("a red circle", seed=3)
    found, block = [], pipe.model.blocks[1]
    with block.register_forward_hook(lambda block, inputs, x: found.append(x.clone())):
        again = pipe.generate("a red circle", seed=3)
    assert torch.equal(again.latents, plain.latents)
    assert len(found) == len(seen["resid_post"]) == 6  # 2 blocks of 3 passes
    assert all(map(torch.equal, found, seen["resid_post"]))
    with block.register_forward_hook(lambda block, inputs, x: 2 * x):
        assert not torch.equal(pipe.generate("a red circle", seed=3).latents, plain.latents)


def test_nnsight_sees_and_changes_what_capture_sees(pipe):
    nnsight = pytest.importorskip("nnsight", reason='nnsight is not installed: pip install -e ".[dev]"')
    with capture(pipe, "resid_post", layers=[1], to=None) as seen:
        plain = pipe.generate("a red circle", seed=3)
    model = nnsight.NNsight(pipe.model)
    with model.trace("a red circle", seed=3, fn=pipe.generate) as tracer:
        found = nnsight.save([])
        for _ in tracer.iter[:6]:
            found.append(model.blocks[1].output)
    assert len(found) == len(seen["resid_post"]) == 6
    assert all(map(torch.equal, found, seen["resid_post"]))
    with model.trace("a red circle", seed=3, fn=pipe.generate) as tracer:
        model.blocks[1].output = 2 * model.blocks[1].output  # of the first pass
        edited = nnsight.save(tracer.result.latents)
    assert not torch.equal(edited, plain.latents)


def test_the_lens_ends_at_the_runs_own_x0(pipe):
    lens = x0_lens(pipe, "a red circle", seed=3, layers=[0, 1])
    run = pipe.generate("a red circle", seed=3)
    assert torch.equal(lens.run.latents, run.latents)
    found = torch.cat([lens.latents[1, block, 1] for block in (0, 1)], 1)
    assert torch.equal(found, run.latents) and (lens.distance[0] > 0).all()
    assert torch.equal(lens.frames(1, 1, 1), run.video[9:])


def test_the_lens_reads_the_steps_that_each_block_has(tiny):
    """With first_block_steps blocks differ, and their steps are numbered over both lists."""
    steps = {"denoising_step_list": [1000, 500], "first_block_steps": [1000, 750, 250]}
    session = load(tiny.path, num_frames=6, **steps)
    lens = x0_lens(session, "a red circle", seed=3, layers=[1])
    by_block = [sorted(step for _, block, step in lens.latents if block == number) for number in (0, 1)]
    assert [*map(len, by_block)] == [3, 2] and by_block != [[0, 1, 2], [0, 1]]
    for block, of_block in enumerate(by_block):
        assert torch.equal(
            lens.latents[1, block, of_block[-1]], lens.run.latents[:, 3 * block : 3 * block + 3]
        )


def test_an_edit_of_ones_own_is_in_the_record(pipe):
    plain = pipe.generate(seed=3)
    with intervene(at("z", layers=[1]), lambda z, where: 0 * z):
        by_function = pipe.generate(seed=3)
    with intervene(Ablate("zero", layers=[1], passes="all")):
        by_edit = pipe.generate(seed=3)
    assert torch.equal(by_function.latents, by_edit.latents) and not plain.edits
    (edit,) = by_function.common["interventions"]["edits"]
    assert "<lambda>" in edit["function"] and edit["sites"] == ["z"] and edit["layers"] == 1
    both = compare(plain, by_function)
    assert "no edit, seed 3 | Custom(" in repr(both) and both.video.shape == (21, 64, 192, 3)
    assert compare(plain, plain).psnr.isinf().all()


def test_pipes_in_threads_do_not_see_each_other(pipe, tiny):
    pipes = pipe, load(tiny.path, num_frames=6)

    def work(number):
        torch.set_num_threads(1)
        one, edit = pipes[number % 2], at("resid_post", layers=[number % 2])
        seeing = capture(one, "z", layers=[0], steps=[0])
        also = ATTENTION_WEIGHT_CAPTURE.capture(layers=[1], granularity="frame")
        with seeing as seen, also as calls, intervene(edit, lambda x, where: x * (1.01 + number)):
            run = one.generate(seed=number % 2)
        mass = torch.stack([call["frame_mass"].diagonal(dim1=-2, dim2=-1) for call in calls])
        return (run.latents, seen["z"].stack(), mass), len(seen.runs)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, range(4)))
    for found, alone in zip(together, map(work, range(4)), strict=True):
        assert all(map(torch.equal, found[0], alone[0])) and found[1] == alone[1] == 1
