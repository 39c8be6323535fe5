"""A spoilt checkpoint through a script: one line, exit code 2, nothing run, nothing left behind."""

import json
import re
import shutil

import pytest
import torch
from conftest import ROOT, golden_arrays
from helpers.checkpoints import GOLDEN_MODEL, write_transformer
from safetensors.torch import save_file

from experiments import run_extraction_all
from experiments.caches import load_cache
from experiments.running import cli
from wan import checkpoint

DIM = GOLDEN_MODEL.dim


def save_checkpoint(path, state):
    torch.save({"generator_ema": {f"model.{name}": tensor for name, tensor in state.items()}}, path)


@pytest.fixture
def real(tmp_path, monkeypatch):
    """The flags of a run of a small model of the original layout in shards, with sf.pt and prompt states."""
    monkeypatch.chdir(ROOT)
    weights = dict(golden_arrays("weights"))
    (tmp_path / "wan").mkdir()
    write_transformer(tmp_path / "wan", weights, 3, "native")
    save_checkpoint(tmp_path / "sf.pt", weights)
    states = torch.randn(1, GOLDEN_MODEL.text_len, GOLDEN_MODEL.text_dim)
    torch.save({"prompt_embeds": states}, tmp_path / "states.pt")
    (tmp_path / "c.yaml").write_text("model: small\nheight: 4\nwidth: 4\nnum_frames: 3\nembeds_dir: null\n")
    flags = {"config_path": "c.yaml", "ckpt_dir": "wan", "prompt_embeds": "states.pt"}
    paths = [word for name, path in flags.items() for word in (f"--{name}", str(tmp_path / path))]
    return [*paths, "--device", "cpu", "--output_path", str(tmp_path / "out/atlas.pt")]


def shard(folder):
    return checkpoint.shards(checkpoint.transformer_file(folder / "wan"))[1]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def code_in_a_pickle(path):
    class Evil:
        def __reduce__(self):
            return open, (str(path.parent / "ran"), "w")

    torch.save({"generator_ema": {"model.a": Evil()}}, path)


def header(path, **tensor):
    """A .safetensors file that says it holds this tensor, and holds 8 bytes."""
    said = json.dumps({"model.head.head.bias": {"dtype": "BF16", **tensor}}).encode()
    path.write_bytes(len(said).to_bytes(8, "little") + said + bytes(8))


def index(folder):
    return checkpoint.transformer_file(folder / "wan")


SPOILT = {  # what is said -> the checkpoint ("" the base), and what happens to its file
    "00002.*safetensors not found": ("", lambda f: shard(f).unlink()),
    "00002.*safetensors cannot be read": ("", lambda f: truncate(shard(f))),
    "not an index": ("", lambda f: index(f).write_text('{"weight_map": {}}')),
    "sf.pt not found; run": ("sf.pt", lambda f: (f / "sf.pt").unlink()),
    "sf.pt cannot be read": ("sf.pt", lambda f: truncate(f / "sf.pt")),
    "it holds a .*open, which is neither": ("sf.pt", lambda f: code_in_a_pickle(f / "sf.pt")),
    "w.safetensors cannot be read": (
        "w.safetensors",
        lambda f: header(f / "w.safetensors", shape=[1 << 40, 1 << 40], data_offsets=[0, 8]),
    ),
    "149 of 150 keys missing": (
        "w.safetensors",
        lambda f: header(f / "w.safetensors", shape=[4], data_offsets=[0, 8]),
    ),
}


@pytest.mark.parametrize("said", SPOILT)
def test_a_spoilt_transformer(tmp_path, real, capfd, said):
    file, spoil = SPOILT[said]
    if file == "w.safetensors":  # as Krea ships one
        save_file(torch.load(tmp_path / "sf.pt", weights_only=True)["generator_ema"], tmp_path / file)
    spoil(tmp_path)
    flags = ["--checkpoint_path", str(tmp_path / file)] if file else ["--no_checkpoint"]
    refused(tmp_path, [*real, *flags], capfd, said)


def lora(path, rank=2, **spoilt):
    """A LoRA of one layer; spoilt replaces a half."""
    name = "base_model.model.blocks.0.self_attn.q.lora_{}.weight"
    pair = {"A": torch.ones(rank, DIM), "B": torch.zeros(DIM, rank)} | spoilt
    torch.save({name.format(half): value for half, value in pair.items() if value is not None}, path)


@pytest.mark.parametrize(
    ("more", "spoil", "message"),
    [
        ("", code_in_a_pickle, "lora.pt cannot be read as a checkpoint of tensors: it holds a"),
        ("lora_rank: 3\n", lora, "has rank 2, not 3"),
    ],
)
def test_a_spoilt_lora(tmp_path, real, capfd, more, spoil, message):
    lora(tmp_path / "lora.pt")
    with (tmp_path / "c.yaml").open("a") as file:
        file.write(f"lora_path: {tmp_path / 'lora.pt'}\nlora_alpha: 2\n{more}")
    spoil(tmp_path / "lora.pt")
    refused(tmp_path, [*real, "--checkpoint_path", str(tmp_path / "sf.pt")], capfd, message)


def refused(folder, argv, capfd, message):
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_all.run, argv)
    errors = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert ended.value.code == 2 and len(errors) == 1 and errors[0].startswith("error: "), errors
    assert re.search(message, errors[0]), errors[0]
    left = [path for path in sorted(folder.rglob("*")) if path not in before and path != folder / "out"]
    assert left == []  # no cache, lock or part, and no code ran


@pytest.mark.slow
def test_what_is_whole_runs_and_a_lora_is_kept_in_the_provenance(tmp_path, real, capsys):
    run_extraction_all.run([*real, "--no_checkpoint", "--quiet"])
    base = load_cache(tmp_path / "out/atlas.pt")
    flags = [*real, "--checkpoint_path", str(tmp_path / "sf.pt"), "--overwrite"]
    run_extraction_all.run(flags)
    plain = load_cache(tmp_path / "out/atlas.pt")
    assert torch.equal(base["frame_logits"].nan_to_num(), plain["frame_logits"].nan_to_num())
    lora(tmp_path / "lora.pt", B=torch.ones(DIM, 2))
    with (tmp_path / "c.yaml").open("a") as file:
        file.write(f"lora_path: {tmp_path / 'lora.pt'}\nlora_alpha: 2\n")
    run_extraction_all.run(flags)
    tuned, said = load_cache(tmp_path / "out/atlas.pt"), capsys.readouterr().out
    assert "150 tensors of generator_ema" in said and "lora.pt merged into 1 layers (rank 2, alpha 2)" in said
    assert not torch.equal(plain["frame_logits"], tuned["frame_logits"])
    assert tuned["weights_file"] == "sf.pt + lora.pt" and tuned["config"]["lora_alpha"] == 2
    assert "lora.pt" in [file["name"] for file in tuned["files"]] and "lora_alpha" not in plain["config"]
    shutil.rmtree(tmp_path / "out")
