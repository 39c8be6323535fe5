"""Weights from files: names, strictness, and one clear line for what does not fit."""

import json
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, golden_arrays, golden_config, golden_model
from helpers.checkpoints import GOLDEN_MODEL, diffusers_model, write_transformer
from safetensors.torch import save_file

from wan import checkpoint
from wan import checkpoint as weight_names
from wan.checkpoint import CheckpointError, read_self_forcing_state
from wan.config import MODELS
from wan.model import CausalWanModel, WanModel


@pytest.fixture
def native() -> dict[str, torch.Tensor]:
    return dict(golden_arrays("weights"))


def test_the_name_table_is_the_published_one():
    table = golden_config()["native_to_diffusers"]
    assert table["top"] == weight_names.TOP_NAMES and table["block"] == weight_names.BLOCK_NAMES


def test_the_keys_of_the_real_model():
    """825 keys and shapes of Wan2.1-T2V-1.3B, built without memory."""
    published = json.loads((GOLDEN / "wan2.1_t2v_1.3b_state_dict.json").read_text())
    with torch.device("meta"):
        state = CausalWanModel(**vars(MODELS["Wan2.1-T2V-1.3B"])).state_dict()
    ours = {name: list(value.shape) for name, value in state.items()}
    expected = dict(published["top_level"])
    for i in range(published["num_blocks"]):
        expected |= {
            published["block_prefix"].format(i=i) + name: shape
            for name, shape in published["per_block"].items()
        }
    assert ours == expected and len(ours) == published["num_keys"] == 825


def test_names_there_and_back(native):
    theirs = weight_names.to_diffusers_names(native)
    diffusers_model().load_state_dict(theirs, strict=True)
    back = weight_names.to_native_names(theirs)
    assert back.keys() == native.keys() and all(back[name] is native[name] for name in native)


def test_diffusers_computes_the_same_flow(native):
    """A second oracle for the bidirectional model, with weights that went through the name table."""
    theirs = diffusers_model()
    theirs.load_state_dict(
        {name: value.float() for name, value in weight_names.to_diffusers_names(native).items()}
    )
    generator = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, 16, 4, 6, 10, generator=generator), torch.randn(2, 32, 64, generator=generator)
    t = torch.tensor([999.0, 140.0])
    with torch.no_grad():
        expected = theirs(x, t, text, return_dict=False)[0]
        found = golden_model(WanModel)(x, t, text)
    assert (found - expected).abs().max() < 1e-4  # measured 5e-5: diffusers' sinusoid is float32


@pytest.mark.parametrize("shards", [1, 3])
def test_a_diffusers_directory(tmp_path, native, shards):
    write_transformer(tmp_path, weight_names.to_diffusers_names(native), shards)
    assert checkpoint.read_model_config(tmp_path) == GOLDEN_MODEL
    state = checkpoint.read_transformer_state(tmp_path)
    assert state.keys() == native.keys() and all(torch.equal(state[name], native[name]) for name in native)
    model = checkpoint.build_model(CausalWanModel, GOLDEN_MODEL, state, tmp_path, torch.float32)
    assert torch.equal(model.blocks[4].ffn[2].bias, native["blocks.4.ffn.2.bias"].float())
    assert len(checkpoint.file_sha256(checkpoint.weights_file(tmp_path, None))) == 64


def test_text_len_is_512_where_the_directory_does_not_say(tmp_path, native):
    write_transformer(tmp_path, weight_names.to_diffusers_names(native))
    path = tmp_path / "transformer" / "config.json"
    config = json.loads(path.read_text())
    del config["text_len"]
    path.write_text(json.dumps(config))
    assert checkpoint.read_model_config(tmp_path).text_len == 512


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"generator_ema": {f"model.{k}": v for k, v in s.items()}, "generator": {}},
        lambda s: {"generator": {f"model._fsdp_wrapped_module.{k}": v for k, v in s.items()}},
        lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
        lambda s: {k.replace("blocks.", "blocks._checkpoint_wrapped_module."): v for k, v in s.items()},
    ],
    ids=["ema", "generator only", "bare", "checkpoint wrapped"],
)
def test_self_forcing_checkpoints(tmp_path, native, wrap):
    torch.save(wrap(native), tmp_path / "sf.pt")
    state = read_self_forcing_state(tmp_path / "sf.pt")
    assert state.keys() == native.keys() and all(torch.equal(state[name], native[name]) for name in native)


def test_ema_or_not(tmp_path, native):
    torch.save(
        {"generator_ema": {"model.head.a": torch.ones(1)}, "generator": {"model.head.a": torch.zeros(1)}},
        tmp_path / "sf.pt",
    )
    assert read_self_forcing_state(tmp_path / "sf.pt", use_ema=True)["head.a"] == 1
    assert read_self_forcing_state(tmp_path / "sf.pt", use_ema=False)["head.a"] == 0


@pytest.mark.parametrize(("there", "use_ema"), [("generator", True), ("generator_ema", False)])
def test_the_only_one_there_is_used_and_said(tmp_path, there, use_ema):
    torch.save({there: {"model.head.a": torch.ones(1)}}, tmp_path / "sf.pt")
    with pytest.warns(UserWarning, match=rf"sf.pt holds no generator\w*; its {there} is used"):
        assert read_self_forcing_state(tmp_path / "sf.pt", use_ema)["head.a"] == 1


def test_all_that_does_not_fit_is_reported(native):
    native["lora"] = native.pop("head.head.bias")
    native["head.modulation"] = torch.ones(3)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.build_model(CausalWanModel, GOLDEN_MODEL, native, "sf.pt")
    assert str(caught.value) == (
        "sf.pt does not fit the model: 1 of 150 keys missing: head.head.bias; "
        "1 of 150 keys unexpected: lora; "
        f"1 of 150 keys of another shape: head.modulation [3] instead of {[1, 2, GOLDEN_MODEL.dim]}"
    )


def test_weights_are_mapped_not_copied(tmp_path, native):
    """On the CPU in the file's dtype a model's parameters are the pages of the file themselves."""
    save_file(native, tmp_path / "w.safetensors")
    state = checkpoint.read_safetensors(tmp_path / "w.safetensors")
    model = checkpoint.build_model(
        CausalWanModel, GOLDEN_MODEL, state, "w", next(iter(native.values())).dtype
    )
    maps = [
        line.split()[0]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith("w.safetensors")
    ]
    spans = [tuple(int(end, 16) for end in span.split("-")) for span in maps]
    assert spans and all(any(start <= p.data_ptr() < end for start, end in spans) for p in model.parameters())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("head.head.bias"), "1 of 150 keys missing: head.head.bias"),
        (lambda s: s.update(lora=torch.ones(1)), "1 of 150 keys unexpected: lora"),
        (lambda s: s.update({"head.head.bias": torch.ones(3)}), r"head.head.bias \[3\] instead of \[64\]"),
        (lambda s: [s.pop(k) for k in list(s) if "ffn" in k], "20 of 150 keys missing: .* and 17 more"),
    ],
)
def test_what_does_not_fit_is_named(native, spoil, message):
    spoil(native)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.build_model(CausalWanModel, GOLDEN_MODEL, native, "sf.pt")
    assert str(caught.value).startswith("sf.pt does not fit the model")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"no_such.pt not found; run: bash experiments/download_weights.sh.*--no_checkpoint",
    ):
        checkpoint.weights_file(tmp_path, tmp_path / "no_such.pt")
    with pytest.raises(
        CheckpointError, match=r"model directory .* not found; run: bash experiments/download_weights.sh"
    ):
        checkpoint.read_model_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config.json not found"):
        checkpoint.read_model_config(tmp_path)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"generator": Evil()}, tmp_path / "sf.pt")
    said = r"cannot be read as a checkpoint of tensors.*it holds a \S+open, which is neither tensor nor plain"
    with pytest.raises(CheckpointError, match=said):
        read_self_forcing_state(tmp_path / "sf.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 truncated"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "sf.pt").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_self_forcing_state(tmp_path / "sf.pt")
    assert "\n" not in str(caught.value)
