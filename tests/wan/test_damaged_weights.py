"""A native directory and a checkpoint with something wrong, through a script:
one line, exit code 2, nothing left behind.
"""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from helpers.checkpoints import GOLDEN_MODEL
from safetensors.torch import save_file

from experiments import run_extraction_all
from experiments.benchmarks import random_weights
from experiments.caches import load_cache
from experiments.extraction import memory as memory_estimate
from experiments.running import cli
from wan import checkpoint
from wan import text_encoder as native

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """wan/ in the native layout in shards, sf.pt and prompt embeddings, all small and whole."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_weights, "SHARD_BYTES", 1 << 18)
        random_weights.make_transformer(folder / "wan", GOLDEN_MODEL, torch.bfloat16, CPU)
    random_weights.make_checkpoint(folder / "sf.pt", GOLDEN_MODEL, torch.bfloat16, CPU)
    states = torch.randn(1, GOLDEN_MODEL.text_len, GOLDEN_MODEL.text_dim)
    torch.save({"prompt_embeds": states}, folder / "states.pt")
    return folder


@pytest.fixture
def real(whole, tmp_path, monkeypatch):
    """The flags of a run of a copy of it."""
    monkeypatch.chdir(ROOT)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "c.yaml").write_text("model: small\nheight: 4\nwidth: 4\nnum_frames: 3\nembeds_dir: null\n")
    return [
        "--config_path",
        str(tmp_path / "c.yaml"),
        "--ckpt_dir",
        str(tmp_path / "wan"),
        "--device",
        "cpu",
        "--output_path",
        str(tmp_path / "out/atlas.pt"),
    ]


def shard(folder):
    return checkpoint.shards(checkpoint.transformer_file(folder / "wan"))[1]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def other_model(path):
    save_file({"unet.conv_in.weight": torch.ones(3)}, path)


def code_in_a_pickle(path):
    class Evil:
        def __reduce__(self):
            return open, (str(path.parent / "ran"), "w")

    torch.save({"generator_ema": {"model.a": Evil()}}, path)


def states_flags(folder):
    return ["--prompt_embeds", str(folder / "states.pt")]


BASE, TUNED = ["--no_checkpoint"], ["--checkpoint_path", "sf.pt"]


@pytest.mark.parametrize(
    ("flags", "spoil", "message"),
    [
        (
            BASE,
            lambda f: shard(f).unlink(),
            "model-00002.safetensors not found; run: bash experiments/download_weights.sh",
        ),
        (BASE, lambda f: truncate(shard(f)), "model-00002.safetensors cannot be read: "),
        (BASE, lambda f: other_model(shard(f)), "1 of 150 keys unexpected: unet.conv_in.weight"),
        (BASE, lambda f: shard(f).write_bytes(b""), "model-00002.safetensors cannot be read: "),
        (
            BASE,
            lambda f: checkpoint.transformer_file(f / "wan").write_text('{"weight_map": {}}'),
            "not an index of shards",
        ),
        (BASE, lambda f: checkpoint.transformer_file(f / "wan").write_text("{"), "is not JSON"),
        (
            TUNED,
            lambda f: (f / "sf.pt").unlink(),
            "sf.pt not found; run: bash experiments/download_weights.sh",
        ),
        (TUNED, lambda f: truncate(f / "sf.pt"), "sf.pt cannot be read as a checkpoint of tensors"),
        (TUNED, lambda f: code_in_a_pickle(f / "sf.pt"), "sf.pt cannot be read as a checkpoint of tensors"),
        (
            TUNED,
            lambda f: torch.save({"generator": {"model.unet.w": torch.ones(2)}}, f / "sf.pt"),
            r"no known layout of a Wan transformer; its keys begin with unet.w \(1\)",
        ),
        (
            TUNED,
            lambda f: torch.save({"critic": {"a": torch.ones(2)}}, f / "sf.pt"),
            "holds no state dict of tensors, but: critic",
        ),
    ],
)
def test_transformers(tmp_path, real, capfd, flags, spoil, message):
    spoil(tmp_path)
    flags = [str(tmp_path / flag) if flag == "sf.pt" else flag for flag in flags]
    refused(tmp_path, [*real, *flags, *states_flags(tmp_path)], capfd, message)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: None, f"{native.UMT5_FILE} not found; run: bash experiments/download_weights.sh"),
        (
            lambda path: torch.save({"blocks.0.norm1.weight": torch.ones(2)}, path),
            "keys missing: shared.weight.* of another shape",
        ),
        (code_in_a_pickle, f"{native.UMT5_FILE} cannot be read as a checkpoint of tensors"),
        (
            lambda path: (torch.save({"a": torch.ones(999)}, path), truncate(path)),
            "cannot be read as a checkpoint of tensors",
        ),
        (
            lambda path: (torch.save({}, path), shutil.rmtree(path.parent / native.TOKENIZER_DIR)),
            "umt5-xxl not found; run",
        ),
    ],
)
def test_text_encoders(tmp_path, real, monkeypatch, capfd, spoil, message):
    monkeypatch.setattr(
        memory_estimate, "free_host_bytes", lambda: 10**12
    )  # these are the real sizes, and never loaded
    shutil.copytree(random_weights.TOKENIZER, tmp_path / "wan" / native.TOKENIZER_DIR)
    spoil(tmp_path / "wan" / native.UMT5_FILE)
    refused(tmp_path, [*real, *BASE], capfd, message)


def as_safetensors(folder, spoil=lambda path: None):
    """The checkpoint as Krea ships one, spoilt -> its flags."""
    state = torch.load(folder / "sf.pt", weights_only=True)["generator_ema"]
    save_file(state, folder / "w.safetensors")
    spoil(folder / "w.safetensors")
    return ["--checkpoint_path", str(folder / "w.safetensors"), *states_flags(folder)]


def header(path, **tensor):
    """A .safetensors file that says it holds this tensor, and holds 8 bytes."""
    said = json.dumps({"model.head.head.bias": {"dtype": "BF16", **tensor}}).encode()
    path.write_bytes(len(said).to_bytes(8, "little") + said + bytes(8))


def test_a_safetensors_checkpoint_runs(tmp_path, real, capsys):
    run_extraction_all.run([*real, *as_safetensors(tmp_path)])
    assert "w.safetensors: 150 tensors of the file itself" in capsys.readouterr().out
    assert load_cache(tmp_path / "out/atlas.pt")["weights_file"] == "w.safetensors"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "w.safetensors cannot be read"),
        (lambda path: path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}"), "cannot be read"),
        (lambda path: header(path, shape=[1 << 40, 1 << 40], data_offsets=[0, 8]), "cannot be read"),
        (lambda path: header(path, shape=[4], data_offsets=[0, 1 << 50]), "cannot be read"),
        (lambda path: torch.save({"a": torch.ones(2)}, path), "cannot be read"),
        (lambda path: header(path, shape=[4], data_offsets=[0, 8]), "149 of 150 keys missing"),
        (lambda path: save_file({"vae.w": torch.ones(2)}, path), "no known layout of a Wan transformer"),
    ],
)
def test_hostile_safetensors_are_one_line(tmp_path, real, capfd, spoil, message):
    refused(tmp_path, [*real, *as_safetensors(tmp_path, spoil)], capfd, message)


def lora(path, rank=2, **spoilt):
    """A LoRA of one layer; spoilt replaces a half."""
    dim, name = GOLDEN_MODEL.dim, "base_model.model.blocks.0.self_attn.q.lora_{}.weight"
    pair = {"A": torch.ones(rank, dim), "B": torch.zeros(dim, rank)} | spoilt
    torch.save({name.format(half): value for half, value in pair.items() if value is not None}, path)


DIM = GOLDEN_MODEL.dim


@pytest.mark.parametrize(
    ("more", "spoil", "message"),
    [
        ("", lambda path: path.unlink(), "lora.pt not found"),
        ("", truncate, "lora.pt cannot be read as a checkpoint of tensors"),
        ("", lambda path: path.write_bytes(b""), "lora.pt cannot be read as a checkpoint of tensors"),
        ("", code_in_a_pickle, "lora.pt cannot be read as a checkpoint of tensors: it holds a"),
        ("", lambda path: lora(path, B=None), "half a LoRA"),
        ("", lambda path: lora(path, A=torch.full((2, DIM), torch.inf)), "values that are not finite"),
        ("", lambda path: lora(path, A=torch.ones(2, DIM, dtype=torch.int64)), "not of floating point"),
        ("", lambda path: lora(path, A=torch.ones(2, 7)), "it is of another model"),
        ("", lambda path: lora(path, A=torch.ones(0, DIM), B=torch.ones(DIM, 0)), "do not multiply"),
        ("", lambda path: torch.save([torch.ones(2)], path), "holds a list, not a state dict"),
        ("", lambda path: torch.save({"a": {"b": torch.ones(2)}}, path), "is no tensor; not a LoRA"),
        ("lora_rank: 3\n", lora, "has rank 2, not 3"),
        ("lora_alpha: .nan\n", lora, "lora_alpha must be above 0"),
        ("lora_alpha: -1\n", lora, "lora_alpha must be above 0"),
        ("lora_rank: 100000000000\n", lora, "lora_rank must be above 0"),
        ("lora_rank: two\n", lora, "lora_rank"),
    ],
)
def test_loras(tmp_path, real, capfd, more, spoil, message):
    lora(tmp_path / "lora.pt")
    alpha = "" if "alpha" in more else "lora_alpha: 2\n"
    with (tmp_path / "c.yaml").open("a") as file:
        file.write(f"lora_path: {tmp_path / 'lora.pt'}\n{alpha}{more}")
    spoil(tmp_path / "lora.pt")
    flags = ["--checkpoint_path", str(tmp_path / "sf.pt"), *states_flags(tmp_path)]
    refused(tmp_path, [*real, *flags], capfd, message)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_another_size_is_one_line(tmp_path, real, capfd):
    other = replace(GOLDEN_MODEL, num_layers=2, ffn_dim=48)
    random_weights.make_checkpoint(tmp_path / "sf.pt", other, torch.bfloat16, CPU)
    flags = ["--checkpoint_path", str(tmp_path / "sf.pt"), *states_flags(tmp_path)]
    refused(tmp_path, [*real, *flags], capfd, "sf.pt holds a model of dim .* it has ffn_dim 48, num_layers 2")


def refused(folder, argv, capfd, message):
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_all.run, argv)
    errors = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert ended.value.code == 2 and len(errors) == 1 and errors[0].startswith("error: "), errors
    assert re.search(message, errors[0]), errors[0]
    assert [
        p for p in sorted(folder.rglob("*")) if p not in before and p != folder / "out"
    ] == []  # no cache, lock or part


def test_what_is_whole_runs(tmp_path, real):
    for flags in (BASE, ["--checkpoint_path", str(tmp_path / "sf.pt")]):
        run_extraction_all.run([*real, *flags, *states_flags(tmp_path), "--quiet"])
        assert (tmp_path / "out/atlas.pt").is_file()
    assert json.loads(checkpoint.transformer_file(tmp_path / "wan").read_text())["weight_map"]


def test_a_lora_is_merged_said_and_kept_in_the_provenance(tmp_path, real, capsys):
    lora(tmp_path / "lora.pt", B=torch.ones(DIM, 2))
    flags = ["--checkpoint_path", str(tmp_path / "sf.pt"), *states_flags(tmp_path)]
    run_extraction_all.run([*real, *flags, "--quiet"])
    plain = load_cache(tmp_path / "out/atlas.pt")
    with (tmp_path / "c.yaml").open("a") as file:
        file.write(f"lora_path: {tmp_path / 'lora.pt'}\nlora_alpha: 2\n")
    run_extraction_all.run([*real, *flags, "--overwrite"])
    tuned, said = load_cache(tmp_path / "out/atlas.pt"), capsys.readouterr().out
    assert "needs" in said and "while merging the LoRA" in said
    assert "150 tensors of generator_ema" in said and "lora.pt merged into 1 layers (rank 2, alpha 2)" in said
    assert not torch.equal(plain["frame_logits"], tuned["frame_logits"])
    assert tuned["weights_file"] == "sf.pt + lora.pt" and tuned["config"]["lora_alpha"] == 2
    assert "lora.pt" in [file["name"] for file in tuned["files"]] and "lora_alpha" not in plain["config"]
