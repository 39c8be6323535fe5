"""Every sibling's checkpoint at small size, with its own keys and containers; and what is no such file."""

import pytest
import torch
from conftest import golden_arrays
from helpers.checkpoints import GOLDEN_MODEL
from safetensors.torch import save_file

from wan.checkpoint import (
    CheckpointError,
    LoRA,
    check_sizes,
    describe_sizes,
    merge_lora,
    prefixes_of,
    read_checkpoint,
    read_lora,
    sizes_of,
    to_diffusers_names,
)


@pytest.fixture(scope="module")
def native() -> dict[str, torch.Tensor]:
    return dict(golden_arrays("weights"))


def led(state, lead="model."):
    return {f"{lead}{name}": tensor for name, tensor in state.items()}


def zeros(state):
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


DIM, FFN = GOLDEN_MODEL.dim, GOLDEN_MODEL.ffn_dim
FSDP = "model._fsdp_wrapped_module."
SIBLINGS = {  # name -> the file's content, whether EMA is wanted, what the report says
    "self_forcing": (
        lambda s: {"generator": led(zeros(s)), "generator_ema": led(s), "critic": led(zeros(s))},
        True,
        f"150 tensors of generator_ema; dim {DIM}, ffn_dim {FFN}, 5 layers, in_dim 16; native names; "
        "without the prefix model.* of 150; ignored: generator (150), critic (150)",
    ),
    "causal_forcing": (lambda s: {"generator": led(s)}, False, "150 tensors of generator; "),
    "rolling_forcing": (
        lambda s: {"generator_ema": led(s, FSDP), "generator": led(zeros(s), FSDP), "step": 3000},
        True,
        "without the prefix _fsdp_wrapped_module.* of 150, model.* of 150; ignored: generator (150), step",
    ),
    "infinite_forcing": (lambda s: {"generator_ema": led(s, FSDP)}, True, "tensors of generator_ema"),
    "reward_forcing": (led, True, "150 tensors of the file itself"),
    "longlive_base": (lambda s: {"generator": led(s)}, False, "nothing ignored"),
    "causvid": (lambda s: {"generator": led(s), "critic": {}, "step": 1}, False, "ignored: critic (0), step"),
    "wrapped_layers": (
        lambda s: led({k.replace("blocks.", "blocks._checkpoint_wrapped_module."): v for k, v in s.items()}),
        True,
        "_checkpoint_wrapped_module.* of 135, model.* of 150",
    ),
    "model": (lambda s: {"model": led(s, "module."), "optimizer": {}}, True, "150 tensors of model"),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_sibling_is_read(tmp_path, native, name):
    made, use_ema, said = SIBLINGS[name]
    torch.save(made(native), tmp_path / "w.pt")
    state, report = read_checkpoint(tmp_path / "w.pt", use_ema)
    assert state.keys() == native.keys() and all(torch.equal(state[k], native[k]) for k in native)
    report.sizes = describe_sizes(sizes_of(state))
    assert said in str(report) and report.loaded == 150


@pytest.mark.parametrize("rename", [led, to_diffusers_names], ids=["native", "diffusers"])
def test_safetensors_are_read(tmp_path, native, rename):
    """Krea's 14B: one file under model., and a transformer/ of diffusers beside it."""
    save_file(rename(native), tmp_path / "w.safetensors")
    state, report = read_checkpoint(tmp_path / "w.safetensors")
    assert state.keys() == native.keys() and all(torch.equal(state[k], native[k]) for k in native)
    assert report.names == ("diffusers'" if rename is to_diffusers_names else "native")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda s: {f"model.{k}" if "ffn" in k else k: v for k, v in s.items()},
            "mixes prefixes of keys: 130 with none, 20 with model.; it was put together from two files",
        ),
        (
            lambda s: s | led({"head.head.bias": s["head.head.bias"]}, "_orig_mod."),
            "two keys for head.head.bias, such as _orig_mod.head.head.bias",
        ),
        (
            lambda s: {
                "encoder.conv1.weight": torch.ones(2),
                "encoder.conv2.weight": torch.ones(2),
                "d.w": torch.ones(1),
            },
            r"no known layout of a Wan transformer; its keys begin with encoder.convN \(2\), d.w \(1\)",
        ),
        (lambda s: {"generator": {}}, "holds no state dict of tensors"),
        (lambda s: {"generator": led(s) | {"extra": 3}}, "holds no state dict of tensors"),
    ],
    ids=["mixed", "twice", "unknown", "empty", "a number"],
)
def test_other_files_are_refused(tmp_path, native, spoil, message):
    torch.save(spoil(dict(native)), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(tmp_path / "w.pt", use_ema=False)
    assert "\n" not in str(caught.value)


def test_prefixes_are_counted():
    keys = [f"encoder.blocks.{i}.w" for i in range(3)] + [f"{c}.x" for c in "abcdef"]
    assert prefixes_of(keys).startswith("encoder.blocks (3), a.x (1)") and prefixes_of(keys).endswith(
        "and 2 more"
    )


def test_a_model_of_other_sizes_is_named(native):
    wide = dict(native) | {"patch_embedding.weight": torch.empty(5120, 36, 1, 2, 2, device="meta")}
    message = rf"holds a model of dim 5120, ffn_dim {FFN}, 5 layers, in_dim 36 \(an image-to-video model\)"
    with pytest.raises(CheckpointError, match=message):
        check_sizes("w.pt", wide, GOLDEN_MODEL)
    check_sizes("w.pt", native, GOLDEN_MODEL)
    assert sizes_of(wide)["num_heads"] == 40 and "num_heads" not in sizes_of(native)


# -- LoRA ----------------------------------------------------------------------------------------------------

LAYERS = ("blocks.0.self_attn.q", "blocks.0.ffn.0", "blocks.3.cross_attn.o", "blocks.4.ffn.2")


def lora(
    native, rank=4, lead="base_model.model.", names=("lora_A", "lora_B"), scale=0.05
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for layer in LAYERS:
        out, size = native[f"{layer}.weight"].shape
        made[f"{lead}{layer}.{names[0]}.weight"] = scale * torch.randn(rank, size, generator=generator)
        made[f"{lead}{layer}.{names[1]}.weight"] = scale * torch.randn(out, rank, generator=generator)
    return made


@pytest.mark.parametrize(
    "wrap",
    [
        lambda n: {"generator_lora": lora(n)},
        lora,
        lambda n: lora(n, lead="diffusion_model.", names=("lora_down", "lora_up")),
        lambda n: lora(
            n, lead="model.base_model.model._fsdp_wrapped_module.", names=("lora_A.default", "lora_B.default")
        ),
    ],
    ids=["longlive", "bare", "comfy", "fsdp"],
)
def test_a_lora_is_the_explicit_sum(tmp_path, native, wrap):
    torch.save(wrap(native), tmp_path / "lora.pt")
    found = read_lora(tmp_path / "lora.pt", rank=4, alpha=8)
    merged = merge_lora(native, found, "base.pt")
    plain = lora(native)
    for layer in LAYERS:
        A, B = (plain[f"base_model.model.{layer}.{half}.weight"].double() for half in ("lora_A", "lora_B"))
        expected = native[f"{layer}.weight"].double() + torch.einsum("or,ri->oi", B, A) * (8 / 4)
        assert merged[f"{layer}.weight"].dtype == torch.float32
        torch.testing.assert_close(merged[f"{layer}.weight"].double(), expected, atol=1e-7, rtol=1e-6)
    changed = {f"{layer}.weight" for layer in LAYERS}
    assert all(merged[name] is native[name] for name in native.keys() - changed)
    assert str(found) == "lora.pt merged into 4 layers (rank 4, alpha 8)"


def test_a_lora_in_the_names_of_diffusers(tmp_path, native):
    state = {"transformer.blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, DIM)}
    state |= {"transformer.blocks.0.attn1.to_q.lora_B.weight": torch.ones(DIM, 2)}
    torch.save({k.removeprefix("transformer."): v for k, v in state.items()}, tmp_path / "lora.pt")
    assert list(read_lora(tmp_path / "lora.pt", alpha=2).pairs) == ["blocks.0.self_attn.q"]


def without(state, part):
    return {k: v for k, v in state.items() if part not in k}


def changed(state, layer, half, value):
    return state | {f"base_model.model.{layer}.{half}.weight": value}


@pytest.mark.parametrize(
    ("spoil", "rank", "alpha", "message"),
    [
        (lambda s: s, 8, 8, "has rank 4, not 8 as lora_rank says"),
        (lambda s: s, 4, None, "does not say its alpha; give lora_alpha"),
        (
            lambda s: without(s, "0.ffn.0.lora_B"),
            4,
            4,
            "half a LoRA: 1 of 4 layers have one half, such as blocks.0.ffn.0",
        ),
        (lambda s: without(s, "lora_A"), 4, 4, "half a LoRA: 4 of 4 layers"),
        (
            lambda s: changed(s, LAYERS[0], "lora_A", torch.ones(3, DIM)),
            None,
            4,
            rf"\[3, {DIM}\] and lora_B \[{DIM}, 4\], which do not",
        ),
        (lambda s: changed(s, LAYERS[0], "lora_A", torch.ones(4)), None, 4, "which do not multiply"),
        (
            lambda s: s | lora_of_rank("blocks.1.self_attn.q", 2),
            None,
            4,
            "different ranks: 4 of .* 2 of blocks.1",
        ),
        (lambda s: changed(s, LAYERS[0], "lora_A", torch.full((4, DIM), torch.nan)), 4, 4, "not finite"),
        (
            lambda s: changed(s, LAYERS[0], "lora_A", torch.ones(4, DIM, dtype=torch.int8)),
            4,
            4,
            "not of floating point",
        ),
        (
            lambda s: s | {"blocks.0.ffn.0.alpha": torch.tensor(torch.nan)},
            4,
            None,
            "alpha nan, not a number above 0",
        ),
        (lambda s: s | {"blocks.0.ffn.0.alpha": torch.tensor(2.0)}, 4, 4, "different alphas: 2, 4"),
        (lambda s: {"generator": s}, 4, 4, "generator is no tensor; not a LoRA"),
        (
            lambda s: {"unet.w": torch.ones(1)},
            4,
            4,
            r"unet.w is not of a LoRA's names; its keys begin with unet.w \(1\)",
        ),
        (lambda s: {}, 4, 4, "holds no LoRA"),
    ],
)
def test_a_lora_that_is_none_is_refused(tmp_path, native, spoil, rank, alpha, message):
    torch.save(spoil(lora(native)), tmp_path / "lora.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        read_lora(tmp_path / "lora.pt", rank, alpha)
    assert "\n" not in str(caught.value)


def lora_of_rank(layer: str, rank: int) -> dict[str, torch.Tensor]:
    lead = f"base_model.model.{layer}"
    return {f"{lead}.lora_A.weight": torch.ones(rank, DIM), f"{lead}.lora_B.weight": torch.ones(DIM, rank)}


def test_a_lora_of_another_model_is_refused(native):
    for layer, size, message in (
        ("blocks.7.self_attn.q", DIM, "changes blocks.7.self_attn.q, which base.pt does not have"),
        (
            "blocks.0.self_attn.q",
            64,
            rf"changes blocks.0.self_attn.q \[{DIM}, {DIM}\] by \[64, 64\]: it is of another model",
        ),
    ):
        pair = torch.ones(2, size), torch.ones(size, 2)
        with pytest.raises(CheckpointError, match=message):
            merge_lora(native, LoRA("lora.pt", {layer: pair}, 2, 2.0), "base.pt")


def test_a_base_that_holds_the_lora_already_is_noticed(tmp_path, native):
    torch.save(lora(native), tmp_path / "lora.pt")
    found = read_lora(tmp_path / "lora.pt", alpha=4)
    merged = merge_lora(native, found, "base.pt")
    with pytest.raises(CheckpointError, match=r"merged.pt holds lora.pt already: 1.\d\d times|0.9\d times"):
        merge_lora(merged, found, "merged.pt")


def test_too_small_a_lora_cannot_be_noticed_and_is_merged(tmp_path, native):
    torch.save(lora(native, scale=1e-4), tmp_path / "lora.pt")
    found = read_lora(tmp_path / "lora.pt", alpha=4)
    merge_lora(merge_lora(native, found, "base.pt"), found, "merged.pt")
