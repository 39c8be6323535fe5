"""Prompt embeddings: remembered by all that their bits depend on, or given in a file;
the same caches byte for byte.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers.forked import refused

from experiments import prompts, run_extraction_all, run_extraction_figure4
from experiments.caches import load_cache
from wan import checkpoint
from wan.config import load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, Patch, Source

CPU = torch.device("cpu")


def state_file(config, prompt, *given):
    ((_, path, _),) = prompts.states_files(config, [prompt], *given)
    return path


@pytest.fixture
def short(tiny, tmp_path):
    """Flags of a short run that remembers prompt embeddings in a folder of its own."""
    config = tmp_path / "tiny.yaml"
    settings = yaml.safe_load(Path(tiny.path).read_text()) | {"embeds_dir": f"{tmp_path}/states"}
    config.write_text(yaml.safe_dump(settings))
    return ["--config_path", str(config), "--num_frames", "3"]


def no_encoder(monkeypatch):
    loaded = lambda *args: pytest.fail("umT5 was loaded")  # noqa: E731
    monkeypatch.setattr(prompts.TextEncoder, "from_pretrained", loaded)


def made(tmp_path, *flags, script=run_extraction_figure4) -> bytes:
    script.run([*flags, "--quiet", "--output_path", str(tmp_path / "out.pt")])
    return (tmp_path / "out.pt").read_bytes()


def test_the_same_bytes_with_remembered_states_and_without(tiny, tmp_path, short, monkeypatch):
    without = made(tmp_path, "--config_path", tiny.path, "--num_frames", "3")
    first = made(tmp_path, *short)
    (file,) = (tmp_path / "states").iterdir()
    states = file.read_bytes()
    other = torch.load(file) | {"prompt": "another", "fingerprint": "of another"}
    for spoil in (lambda: file.write_bytes(b"damaged"), lambda: torch.save(other, file)):  # or swapped
        spoil()
        assert made(tmp_path, *short) == first and file.read_bytes() == states
    with monkeypatch.context() as patch:
        no_encoder(patch)
        assert made(tmp_path, *short) == first == without


def test_a_name_for_all_that_the_bits_depend_on(tmp_path, monkeypatch):
    config = replace(load_config("configs/wan_mini.yaml"), embeds_dir=str(tmp_path))
    sizes = checkpoint.read_model_config(config.ckpt_dir)
    given = [("a", sizes, torch.float32), ("b", sizes, torch.float32), ("a", sizes, torch.bfloat16)]
    given.append(("a", replace(sizes, text_len=32), torch.float32))
    names = [state_file(config, *one, CPU) for one in given]
    others = {"describe_files": lambda paths: [], "NUMBERS": 10**6}
    for changed, value in others.items():
        with monkeypatch.context() as patch:
            patch.setattr(prompts, changed, value)
            names.append(state_file(config, "a", sizes, torch.float32, CPU))
    assert len(set(names)) == len(names)
    assert state_file(replace(config, embeds_dir=None), "a", sizes, torch.float32, CPU) is None
    asked = ["a", "b"], sizes, torch.float32, CPU
    for path in names[:2]:  # umT5 is needed until every prompt has its states
        assert prompts.needs_encoder(config, *asked)
        torch.save({"fingerprint": path.stem}, path)
    assert not prompts.needs_encoder(config, *asked)
    assert prompts.needs_encoder(replace(config, embeds_dir=None), *asked)


def test_a_file_takes_the_place_of_umt5_and_no_cache_holds_a_path(tiny, tmp_path, short, monkeypatch):
    def atlas(*flags):
        made(tmp_path, *short, "--cross", *flags, script=run_extraction_all)
        return load_cache(tmp_path / "out.pt", mmap=False)

    own = atlas()
    assert (own["device"], own["dtype"], own["config"]["timestep_shift"]) == ("cpu", "float32", 5.0)
    assert own["versions"]["torch"] == torch.__version__ and "diffusers" in own["versions"]
    (weights,) = [f for f in own["files"] if f["name"] == own["weights_file"]]
    path = Path(tiny.config.ckpt_dir) / "transformer" / own["weights_file"]
    assert (
        weights["size"] == path.stat().st_size
        and own["weights_sha256"] == checkpoint.file_sha256(path).result()
    )
    plain = str({name: value for name, value in own.items() if not isinstance(value, torch.Tensor)})
    assert str(tmp_path) not in plain and str(tiny.config.ckpt_dir) not in plain

    (file,) = (tmp_path / "states").iterdir()
    no_encoder(monkeypatch)
    given = atlas("--prompt_embeds", str(file))
    assert torch.equal(own["frame_mass"], given["frame_mass"]) and given["prompt"] == own["prompt"]
    assert torch.equal(own["cross_mass"], given["cross_mass"])
    assert own["cross_tokens"] == given["cross_tokens"]
    assert [f["name"] for f in given["files"]] == sorted([file.name, own["weights_file"]])
    torch.save({"prompt_embeds": torch.load(file)["prompt_embeds"][0]}, tmp_path / "bare.pt")
    bare = atlas("--prompt_embeds", str(tmp_path / "bare.pt"), "--prompt", "my words")
    assert bare["prompt"] == "my words" and torch.equal(bare["cross_mass"], own["cross_mass"])
    assert bare["cross_tokens"] == [str(i) for i in range(len(own["cross_tokens"]))]


def test_a_file_is_of_one_prompt(tmp_path):
    """Another prompt's states are never those of the file, whoever asks for them."""
    config = load_config("configs/wan_mini.yaml", {"prompt_embeds": str(tmp_path / "states.pt")})
    sizes = checkpoint.read_model_config(config.ckpt_dir)
    states = {"prompt_embeds": torch.ones(1, 5, 64)}
    for own, named in ("a cat", {"prompt": "a cat"}), (config.prompt, {}):
        torch.save(states | named, config.prompt_embeds)
        assert own in prompts.encode_prompts(config, [own], sizes, torch.float32, CPU)
        with pytest.raises(ConfigError, match="and this run needs those of 'a dog'; leave --prompt_embeds"):
            prompts.encode_prompts(config, ["a dog"], sizes, torch.float32, CPU)
    for edit in (Ablate("mean", passes="denoise"), Patch("z", Source("a dog"), passes="denoise")):
        with pytest.raises(ConfigError, match=r"holds the states of one prompt, and .* needs"):
            edit.check_source(config)
    for fits in (Ablate("frame_mean", passes="denoise"), Patch("z", Source(seed=1), passes="all")):
        fits.check_source(config)


STATES = {"prompt_embeds": torch.zeros(1, 5, 64)}


def test_files_that_do_not_fit_are_refused(tmp_path, capfd):
    path = tmp_path / "states.pt"
    for content, flags, message in (
        (None, [], "states.pt not found"),
        ({"prompt_embeds": torch.zeros(1, 5, 3)}, [], r"\[1, 5, 3\]; wanted \[1, at most 64, 64\]"),
        (
            {"prompt_embeds": torch.full((1, 5, 64), torch.nan)},
            [],
            "prompt_embeds are missing, or not finite numbers",
        ),
        (STATES | {"tokens": ["a"] * 6}, [], "tokens are not a list of at most 5 texts"),
        (STATES | {"prompt": 3}, [], "its prompt is 3, not a text"),
        (STATES | {"prompt": "a"}, ["--prompt", "b"], "--prompt is 'b', but .* the states of 'a'"),
        ([1], [], "cannot be read"),
    ):
        if content is not None:
            torch.save(content, path)
        given = ["--config_path", "configs/wan_mini.yaml", "--prompt_embeds", path, *flags]
        refused(run_extraction_figure4, [*given, "--output_path", tmp_path / "out.pt"], capfd, message)
    assert [p.name for p in tmp_path.iterdir()] == ["states.pt"]
