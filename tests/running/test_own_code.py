"""The blocks of the README, docs/own_code.md and docs/recipes.md run as they stand, and show what they say;
what one's own code may ask for, and what it is refused.
"""

import linecache
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import ROOT
from diffusers import WanPipeline
from helpers.checkpoints import small_wan_pipeline
from matplotlib.figure import Figure

from experiments import at, capture, compare, intervene, load, run_extraction_all, x0_lens
from experiments.caches import load_cache
from experiments.caches.activations import Activations
from experiments.caches.files import CacheError
from experiments.running import cli
from experiments.session import CAPTURES
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.errors import ConfigError
from wan.files import read_yaml
from wan.interventions import Ablate, Patch, Source
from wan.policies import POLICIES

BLOCK = re.compile(r"```python\n(.*?)```", re.S)
SHOWN = re.compile(r"^(.+?)  # -> (.+)$")


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
def test_the_readmes_block_runs_from_any_folder(elsewhere):
    names: dict = {}
    for block in BLOCK.findall((ROOT / "README.md").read_text().partition("## Five lines")[2]):
        exec(block, names)
    assert not torch.equal(names["run"].latents, names["edited"].latents)
    assert Path("outputs/edited.mp4").is_file()
    assert names["run"].latents.shape == (1, 21, 16, 8, 8) and names["run"].video.shape == (81, 64, 64, 3)
    cache = load_cache("cache/mine.pt", expect=("atlas",))
    assert cache["layers"] == [1, 5] and cache["prompt"].startswith("a red circle")
    assert isinstance(names["atlas"].plot(layer=5), Figure)


@patch.dict(POLICIES)  # a page adds one
@pytest.mark.parametrize("page", ["own_code", "recipes"])
def test_the_pages_blocks_run_and_show_what_they_say(page, elsewhere, monkeypatch):
    monkeypatch.setattr(WanPipeline, "from_pretrained", lambda name: small_wan_pipeline())
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
    assert shown == {"own_code": 18, "recipes": 22}[page]
    if page == "recipes":
        assert len(blocks) == 13 and all(block.count("\n") <= 12 for block in blocks)
        assert Path("ablated.mp4").stat().st_size > 1000


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
    assert windowed.policy.name == "full"
    with pytest.raises(ConfigError, match="leave them out where cache_policy is given"):
        load("wan_mini", cache_policy="full", local_attn_size=9)


def edited(pipe, edit):
    with intervene(edit):
        pipe.generate("a red circle", seed=3)


REFUSED = {
    "wan_maxi is no config, .*, or a directory of weights; did you mean wan_mini": lambda _: load("wan_maxi"),
    r"^num_frame is no setting of a run; did you mean num_frames\?": lambda _: load("wan_mini", num_frame=6),
    "'deep' is no .* did you mean deep_sink": lambda _: load("wan_mini", cache_policy="deep"),
    "num_frames .many. is not int in 1": lambda _: load("wan_mini", num_frames="many"),
    "'resid_past' is no site; did you mean resid_post": lambda pipe: capture(pipe, "resid_past").__enter__(),
    "head 2 is not in": lambda pipe: capture(pipe, "z", heads=[2]).__enter__(),
    "seed '3' is not int in": lambda pipe: pipe.generate(seed="3"),
    "2 prompts and 3 seeds": lambda pipe: pipe.generate(["a", "b"], seeds=[1, 2, 3]),
    "is the run itself": lambda pipe: edited(pipe, Patch("z", Source(seed=3), passes="all")),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_asked_for_is_refused_in_one_line(pipe, message):
    with pytest.raises(ConfigError, match=message) as error:
        REFUSED[message](pipe)
    assert "\n" not in str(error.value)


def test_a_capture_inside_a_capture_is_refused(pipe, tiny):
    said = "captured already; ask one capture for all"
    with capture(pipe, [0]), pytest.raises(ConfigError, match=said), capture(pipe, [1]):
        pass
    with capture(pipe, [1]) as seen, capture(load(tiny.path), [0]):
        assert (
            CAPTURES.get()[id(pipe)] is seen
        )  # one of another pipe is no matter; a refused one left nothing


def test_a_batch_is_the_runs_alone_and_each_has_its_own_captures(pipe):
    with capture(pipe, "mlp_out", layers=[1], steps=[0]) as seen:
        first, second = pipe.generate(["a red circle", "a blue square"], seeds=[3, 4])
        alone = pipe.generate("a blue square", seed=4)
    for of in (lambda run: run.latents, lambda run: run.activations["mlp_out"].stack()):
        torch.testing.assert_close(of(second), of(alone), atol=1e-4, rtol=0)
    assert len(seen.runs) == 3 and first.config.seed == 3
    assert len(pipe.generate("a red circle", seeds=[1, 2])) == 2
    with capture(pipe, layers=[1]):
        of_batch = pipe.generate(["a red circle", "a blue square"], seeds=[3, 4])[1]
    with capture(pipe, layers=[1]):
        expected = pipe.generate("a blue square", seed=4)
    for one, other in zip(of_batch.records, expected.records, strict=True):
        torch.testing.assert_close(one["frame_mass"], other["frame_mass"], atol=1e-5, rtol=0)


def test_activations_come_back_from_files_and_folders(pipe, tmp_path):
    chosen = {"layers": [0, 1], "heads": [1, 0], "frames": [1, 4]}
    with capture(pipe, "z", "x0", **chosen, stream_to=tmp_path / "blocks") as seen:
        pipe.generate(seed=1)
    assert len([*(tmp_path / "blocks").glob("*_seed1/shard_*.safetensors")]) == 2
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
    nnsight = pytest.importorskip("nnsight")
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
