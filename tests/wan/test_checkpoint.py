"""Weights from files: every sibling's layout, strictness, LoRAs, streaming, one line for what is wrong."""

import hashlib
import io
import json
import re
import shutil
import tempfile
from functools import partial
from mmap import ALLOCATIONGRANULARITY
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from conftest import GOLDEN, golden_arrays, golden_config, golden_model
from helpers.checkpoints import GOLDEN_MODEL, diffusers_model, native_config, write_transformer
from helpers.rollouts import TWO_STEPS, drawn, golden_inputs
from hypothesis import given, settings, strategies
from safetensors.torch import save_file

from wan import checkpoint, names
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.checkpoint import CheckpointError, read_checkpoint, to_diffusers_names
from wan.config import MODELS
from wan.files import MAPPED_BYTES, UnreadableError, load_tensors
from wan.model import CausalWanModel, WanModel
from wan.pipeline import CausalInferencePipeline
from wan.wings import offload


@pytest.fixture(scope="module")
def native() -> dict[str, torch.Tensor]:
    return dict(golden_arrays("weights"))


def equal(state, other) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in other)


def test_the_keys_of_the_real_model():
    """825 keys and shapes of Wan2.1-T2V-1.3B, built without memory; and diffusers' names."""
    table = golden_config()["native_to_diffusers"]
    assert table["top"] == names.TOP_NAMES and table["block"] == names.BLOCK_NAMES
    published = json.loads((GOLDEN / "wan2.1_t2v_1.3b_state_dict.json").read_text())
    with torch.device("meta"):
        state = CausalWanModel(**vars(MODELS["Wan2.1-T2V-1.3B"])).state_dict()
    expected = dict(published["top_level"])
    for i in range(published["num_blocks"]):
        block = published["block_prefix"].format(i=i)
        expected |= {block + name: shape for name, shape in published["per_block"].items()}
    assert {name: list(value.shape) for name, value in state.items()} == expected and len(state) == 825


def test_diffusers_computes_the_same_flow(native):
    """A second oracle for the bidirectional model, with weights that went through the name table."""
    renamed = to_diffusers_names(native)
    assert equal(checkpoint.to_native_names(renamed), native)
    theirs = diffusers_model()
    theirs.load_state_dict({name: value.float() for name, value in renamed.items()}, strict=True)
    x, text, t = drawn(2, 16, 4, 6, 10), drawn(2, 32, 64), torch.tensor([999.0, 140.0])
    with torch.no_grad():
        expected = theirs(x, t, text, return_dict=False)[0]
        found = golden_model(WanModel)(x, t, text)
    assert (found - expected).abs().max() < 1e-4  # measured 5e-5: diffusers' sinusoid is float32


@pytest.mark.parametrize("layout, shards", [("diffusers", 1), ("native", 3)])
def test_a_model_directory(tmp_path, native, layout, shards):
    write_transformer(tmp_path, native, shards, layout)
    assert checkpoint.read_model_config(tmp_path) == GOLDEN_MODEL
    state = checkpoint.read_transformer_state(tmp_path)
    assert equal(state, native) and checkpoint.is_native(tmp_path) == (layout == "native")
    model = checkpoint.build_model(CausalWanModel, GOLDEN_MODEL, state, tmp_path, torch.float32)
    assert torch.equal(model.blocks[4].ffn[2].bias, native["blocks.4.ffn.2.bias"].float())
    assert len(checkpoint.file_sha256(checkpoint.weights_file(tmp_path, None)).result()) == 64


def test_the_hash_of_a_file_is_of_its_bytes(tmp_path, monkeypatch):
    """It is mapped in parts, an empty one not at all; a missing file fails in result()."""
    monkeypatch.setattr(checkpoint, "HASHED_AT_ONCE", ALLOCATIONGRANULARITY)
    for size in (0, 5, ALLOCATIONGRANULARITY, 2 * ALLOCATIONGRANULARITY + 7):
        content = bytes(n % 251 for n in range(size))
        (tmp_path / "weights.pt").write_bytes(content)
        found = checkpoint.file_sha256(tmp_path / "weights.pt").result(60)
        assert found == hashlib.sha256(content).hexdigest()
    with pytest.raises(FileNotFoundError):
        checkpoint.file_sha256(tmp_path / "none.pt").result(60)


@pytest.mark.parametrize("change", [{"num_layers": 10**9}, {"dim": 0}, {"patch_size": [1, 2]}], ids=str)
def test_sizes_that_no_model_has(tmp_path, change):
    (name,) = change
    (tmp_path / "config.json").write_text(json.dumps(native_config() | change | {"heads": 3}))
    with pytest.raises(CheckpointError, match=rf"config.json is not the config .*: {name} "):
        checkpoint.read_model_config(tmp_path)


def led(state, lead="model."):
    return {f"{lead}{name}": tensor for name, tensor in state.items()}


def zeros(state):
    return {name: 0 * tensor for name, tensor in state.items()}


FSDP = "model._fsdp_wrapped_module."


# What other projects write: each function returns the content of their file for a native state dict
def self_forcing(state):
    return {"generator": led(zeros(state)), "generator_ema": led(state), "critic": led(zeros(state))}


def rolling_forcing(state):
    return {"generator_ema": led(state, FSDP), "generator": led(zeros(state), FSDP), "step": 3000}


def reward_forcing(state):
    return led(state)


def causvid(state):
    return {"generator": led(state), "critic": {}, "step": 1}


def wrapped_layers(state):
    return led({k.replace("blocks.", "blocks._checkpoint_wrapped_module."): v for k, v in state.items()})


def parallel_model(state):
    return {"model": led(state, "module."), "optimizer": {}}


def compiled(state):
    return led(state, "_orig_mod.")


def diffusers_layout(state):
    return to_diffusers_names(state)


def state_dict(state):
    return {"state_dict": state, "epoch": 3}


def nested_ema(state):
    return {"ema": {"shadow": led(state, "module."), "decay": 0.99}}


def numbers_of_numpy(state):
    return {"generator": led(state) | {"step": np.int64(5), "loss": np.float32(0.5)}}


def shadow(state):
    return led(state, "ema.shadow.") | {"step": np.float64(7)}


def transformer(state):
    return led(state, "transformer.")


def dit(state):
    return led(state, "dit.")


def generator_model(state):
    return led(state, "generator.model.")


def diffusion_model(state):
    return led(state, "model.diffusion_model.")


@pytest.mark.parametrize(
    ("content", "use_ema", "report"),
    [
        (
            self_forcing,
            True,
            "150 tensors of generator_ema; native names; "
            "without the prefix model.* of 150; ignored: generator (150), critic (150)",
        ),
        (
            rolling_forcing,
            True,
            "without the prefix _fsdp_wrapped_module.* of 150, model.* of 150; "
            "ignored: generator (150), step",
        ),
        (reward_forcing, True, "150 tensors of the file itself"),
        (causvid, False, "ignored: critic (0), step"),
        (wrapped_layers, True, "_checkpoint_wrapped_module.* of 135, model.* of 150"),
        (parallel_model, True, "150 tensors of model"),
        (compiled, True, "native names"),
        (diffusers_layout, True, "diffusers' names"),
        # As people have them
        (state_dict, True, "150 tensors of state_dict"),
        (nested_ema, True, "150 tensors of ema.shadow"),
        (numbers_of_numpy, False, "150 tensors of generator"),
        (shadow, True, "150 tensors of the file itself"),
        (transformer, True, "native names"),
        (dit, True, "native names"),
        (generator_model, True, "native names"),
        (diffusion_model, True, "native names"),
    ],
)
def test_the_file_of_a_sibling_is_read_and_its_report_says_how(
    tmp_path, native, content, use_ema, report, recwarn
):
    if content in (compiled, diffusers_layout):
        path = tmp_path / "w.safetensors"
        save_file(content(dict(native)), path)
    else:
        path = tmp_path / "w.pt"
        torch.save(content(dict(native)), path)
    state, found = read_checkpoint(path, use_ema)
    assert equal(state, native) and report in str(found) and found.loaded == 150 and not recwarn


def test_ema_or_not(tmp_path):
    both = {"generator_ema": {"model.head.a": torch.ones(1)}, "generator": {"model.head.a": torch.zeros(1)}}
    path = tmp_path / "sf.pt"
    for there, use_ema in (("generator", True), ("generator_ema", False)):
        torch.save(both, path)
        assert checkpoint.read_self_forcing_state(path, use_ema)["head.a"] == use_ema
        torch.save({there: both[there]}, path)
        with pytest.warns(UserWarning, match=rf"sf.pt holds no generator\w*; its {there} is used"):
            checkpoint.read_self_forcing_state(path, use_ema)


def test_weights_are_mapped_not_copied(tmp_path, native):
    """On the CPU in the file's dtype a model's parameters are the pages of the file themselves."""
    save_file(native, tmp_path / "w.safetensors")
    state = checkpoint.read_weights_file(tmp_path / "w.safetensors")
    dtype = next(iter(native.values())).dtype
    model = checkpoint.build_model(CausalWanModel, GOLDEN_MODEL, state, "w", dtype)
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [line.split()[0].split("-") for line in lines if line.endswith("w.safetensors")]
    spans = [(int(start, 16), int(end, 16)) for start, end in maps]
    assert spans and all(any(start <= p.data_ptr() < end for start, end in spans) for p in model.parameters())


def test_all_that_does_not_fit_is_reported(native):
    state = {name: tensor for name, tensor in native.items() if "ffn" not in name} | {"lora": torch.ones(1)}
    state |= {"head.modulation": torch.ones(3), "head.head.bias": torch.ones(64, dtype=torch.int64)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.build_model(CausalWanModel, GOLDEN_MODEL, state, "sf.pt")
    said = "sf.pt .*20 of 150 keys missing: blocks.0.ffn.0.weight.*unexpected: lora.*point: head.head.bias"
    assert re.match(rf"{said}.*head.modulation \[3\]", str(caught.value))


def test_umt5_in_scaled_fp8(tmp_path):
    """ComfyUI's umT5: what the transformer's reader makes of scaled weights."""
    folder = Path(shutil.copytree("checkpoints/wan-mini", tmp_path / "mini"))
    plain = checkpoint.read_part(folder, "text_encoder")
    state = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, x in plain.items():
        scale = x.float().abs().max() / 448
        scaled = x.ndim == 2 and "shared" not in name
        state[name] = (x.float() / scale).to(torch.float8_e4m3fn) if scaled else x
        state |= {f"{name.removesuffix('.weight')}.scale_weight": scale} if scaled else {}
    save_file(state, folder / "text_encoder/model.safetensors")
    found = checkpoint.read_part(folder, "text_encoder")
    assert found.keys() == plain.keys() and not any(x.dtype in checkpoint.FP8 for x in found.values())
    for name, x in plain.items():
        torch.testing.assert_close(found[name].float(), x.float(), rtol=0.07, atol=float(x.abs().max()) / 400)


def test_umt5_of_comfy_within_a_container_and_with_its_tokenizer(tmp_path):
    folder = Path(shutil.copytree("checkpoints/wan-mini", tmp_path / "mini"))
    plain = checkpoint.read_part(folder, "text_encoder")
    (folder / "text_encoder/model.safetensors").unlink()
    content = {"state_dict": plain | {"spiece_model": torch.ones(9, dtype=torch.uint8)}, "epoch": 1}
    torch.save(content, folder / "text_encoder/model.safetensors")
    assert equal(checkpoint.read_part(folder, "text_encoder"), plain)
    torch.save({"a": {"b": torch.ones(1)}}, folder / "text_encoder/model.safetensors")
    with pytest.raises(CheckpointError, match="holds no state dict of tensors, but: a;"):
        checkpoint.read_part(folder, "text_encoder")


BIAS = "head.head.bias"


def two_native_keys(state):
    return state | led({BIAS: state[BIAS]}, "_orig_mod.")


def keys_of_both_layouts(state):
    return to_diffusers_names(state) | {BIAS: state[BIAS]}


def a_list_among_tensors(state):
    return {"generator": led(state) | {"extra": [3]}}


def a_list(state):
    return [torch.ones(1)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (two_native_keys, f"two keys for {BIAS}"),
        (keys_of_both_layouts, f"two keys for {BIAS}, such as"),
        (a_list_among_tensors, "holds no state dict of tensors"),
        (a_list, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_weights_of_one_name_each_is_refused(tmp_path, native, content, problem):
    torch.save(content(dict(native)), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=rf"\A.*w\.pt.*{problem}.*\Z"):
        read_checkpoint(tmp_path / "w.pt", use_ema=False)


# --- Quantised files
def comfy(native, lead="model.diffusion_model.", end=".scale_weight"):
    """ComfyUI's scaled FP8: linear weights of the blocks in e4m3 with a scale each, the rest in float16."""
    state = {f"{lead}scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in native.items():
        if name.startswith("blocks.") and tensor.ndim == 2:
            scale = tensor.abs().max() / 448
            state[lead + name] = (tensor / scale).to(torch.float8_e4m3fn)
            state[lead + name.removesuffix(".weight") + end] = scale
        else:
            state[lead + name] = tensor.half()
    return state


@pytest.mark.parametrize(
    ("lead", "end"), [("model.diffusion_model.", ".scale_weight"), ("", ".weight_scale")]
)
def test_fp8_is_dequantised_and_said(tmp_path, native, lead, end):
    path, exact = tmp_path / "fp8.safetensors", comfy(native, lead, end)
    save_file(exact, path)
    state, report = read_checkpoint(path)
    assert set(state) == set(native) and "float8_e4m3fn dequantised to bfloat16" in str(report)
    for name, tensor in state.items():
        error, wanted = (tensor.float() - native[name].float()).abs(), native[name].float().abs()
        assert (error <= 0.07 * wanted + 1e-2 * wanted.max()).all(), name
        if exact[lead + name].dtype == torch.float8_e4m3fn:
            of_scale = lead + name.removesuffix(".weight") + end
            product = exact[lead + name].float() * exact[of_scale]
            assert torch.equal(tensor, product.to(torch.bfloat16))


Q = "blocks.0.self_attn.q"
SCALES = {  # what is said -> entries beside or in place of those of a file with one scale a weight
    rf"the scale of {Q}.weight is \[1, 192\]": {f"{Q}.scale_weight": torch.ones(1, 192)},
    rf"the scale of {Q}.weight is \[2, 2\]": {f"{Q}.scale_weight": torch.ones(2, 2)},
    rf"the scale of {Q}.weight is \[\], or not finite": {f"{Q}.scale_weight": torch.tensor(float("inf"))},
    f"{Q}.\\w+ is of no weight, or of one with two scales": {f"{Q}.weight_scale": torch.ones(())},
    "blocks.9.x.scale_weight is of no weight": {"blocks.9.x.scale_weight": torch.ones(())},
}


@pytest.mark.parametrize("problem", SCALES)
def test_scales_of_fp8_that_do_not_fit_are_refused(tmp_path, native, problem):
    """The weight is square: a scale a column would be taken for one a row."""
    assert native[f"{Q}.weight"].shape == (192, 192)
    save_file(comfy(native, "") | SCALES[problem], tmp_path / "fp8.safetensors")
    with pytest.raises(CheckpointError, match=rf"fp8.safetensors: .*{problem}.*; take FP8 with one scale"):
        read_checkpoint(tmp_path / "fp8.safetensors")


@pytest.mark.parametrize("shape", [(192,), (192, 1), (1,), (1, 1)])
def test_a_scale_a_row_or_one_of_all(tmp_path, native, shape):
    scale = drawn(192, 1).abs()[: shape[0]].reshape(shape)
    rounded = native[f"{Q}.weight"].to(torch.float8_e4m3fn)
    save_file(
        native | {f"{Q}.weight": rounded, f"{Q}.weight_scale": scale, "scaled_fp8": rounded[0].clone()},
        tmp_path / "fp8.safetensors",
    )
    state, _ = read_checkpoint(tmp_path / "fp8.safetensors")
    expected = rounded.double() * scale.double().reshape(-1, 1)
    torch.testing.assert_close(state[f"{Q}.weight"].double(), expected, rtol=2**-8, atol=0)


def test_a_lora_in_place_of_a_checkpoint_is_named(tmp_path, native):
    save_file({f"{Q}.lora_A.weight": torch.ones(2, 192)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"holds a LoRA \(.*lora_A.weight\); give it as lora_path"):
        read_checkpoint(tmp_path / "w.safetensors")


@pytest.mark.real_gpu  # its streams of copies
def test_streamed_layers_compute_the_same_bits(device, native, dtype=torch.bfloat16):
    """Of which two at a time are beside the layers that stay."""
    made = partial(checkpoint.build_model, CausalWanModel, GOLDEN_MODEL, dict(native), "golden")
    streamed, model = made(None, "cpu"), made(dtype, device)
    offload.apply_offload(streamed, dtype, device)
    inputs = {name: x.to(device, dtype) for name, x in golden_inputs(6).items()}

    def run(model):
        with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", kinds=("self", "cross")) as calls:
            latents = CausalInferencePipeline(model, **TWO_STEPS).inference(**inputs)[1]
        return [latents, *(value for call in calls for value in call.values.values())]

    resident = run(model)
    assert len(resident) > GOLDEN_MODEL.num_layers * 2 * 3 * 3
    for found in (run(streamed), run(streamed)):
        assert len(found) == len(resident) and all(map(torch.equal, found, resident))
    weights = [*streamed.blocks.parameters()]
    assert len({value.untyped_storage().data_ptr() for value in weights}) == 2
    assert not any(value.data_ptr() % offload.ALIGNMENT for value in weights if value.is_cuda)


# --- Archives of tensors
def test_a_compressed_file_is_read_as_any_other(tmp_path):
    """The published caches are deflated: as torch.save writes them they take four times the room."""
    content = {"values": torch.arange(6.0).reshape(2, 3), "name": "x"}
    stored, packed, large = (tmp_path / f"{name}.pt" for name in ("stored", "packed", "large"))
    torch.save(content, stored)
    with ZipFile(stored) as archive, ZipFile(packed, "w", ZIP_DEFLATED) as smaller:
        for record in archive.infolist():
            smaller.writestr(record.filename, archive.read(record))
    found = load_tensors(packed)
    assert torch.equal(found["values"], content["values"]) and found["name"] == "x"
    packed.write_bytes(packed.read_bytes()[:-40] + bytes(40))
    with pytest.raises(UnreadableError):
        load_tensors(packed)
    with ZipFile(large, "w", ZIP_DEFLATED) as bomb:
        bomb.writestr("large/data.pkl", bytes(MAPPED_BYTES + 1))
    with pytest.raises(UnreadableError, match="not as torch"):
        load_tensors(large)


@settings(max_examples=40)
@given(strategies.integers(0, 2**20), strategies.sampled_from(["", "end", "whole end", "twice", "zeros"]))
def test_a_flipped_bit_of_an_archive_is_found_whatever_was_added(bit, added):
    file = io.BytesIO()
    torch.save({"w": torch.arange(64.0)}, file)
    content = bytearray(file.getvalue())
    end = {"end": b"PK\x05\x06", "whole end": content[-22:], "twice": content, "zeros": bytes(30), "": b""}
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        path.write_bytes(content + end[added])
        try:
            found = load_tensors(path)
        except UnreadableError:
            return
    # A bit that is in no value, such as the date of a record
    assert added in ("", "twice", "whole end") and torch.equal(found["w"], torch.arange(64.0))
