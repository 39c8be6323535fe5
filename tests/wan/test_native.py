"""The original release's directory layout, on small files of the same names and keys."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import SIZES, golden_arrays, golden_config
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from helpers.checkpoints import SMALL_UMT5
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

from wan import checkpoint
from wan import text_encoder as native
from wan import vae as native_vae
from wan.checkpoint import CheckpointError
from wan.config import MODELS, ModelConfig
from wan.vae import VAE

SMALL_VAE = {"base_dim": 8, "num_res_blocks": 2}


def native_config(**overrides) -> dict:
    """config.json as the release has it: no text_dim, no patch_size."""
    sizes = golden_config()["model"]
    names = ("dim", "ffn_dim", "freq_dim", "in_dim", "num_heads", "num_layers", "out_dim", "text_len", "eps")
    return (
        {"_class_name": "WanModel", "model_type": "t2v"} | {name: sizes[name] for name in names} | overrides
    )


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_transformer_needs_no_conversion(tmp_path, num_shards):
    weights = dict(golden_arrays("weights"))
    (tmp_path / "config.json").write_text(json.dumps(native_config(text_dim=64)))
    name = "diffusion_pytorch_model"
    if num_shards == 1:
        save_file(weights, tmp_path / f"{name}.safetensors")
    else:
        parts = {
            f"{name}-{i:05d}.safetensors": dict(list(weights.items())[i::num_shards])
            for i in range(num_shards)
        }
        for file, part in parts.items():
            save_file(part, tmp_path / file)
        index = {"weight_map": {key: file for file, part in parts.items() for key in part}}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint.is_native(tmp_path)
    assert checkpoint.read_model_config(tmp_path) == ModelConfig(
        **{key: golden_config()["model"][key] for key in SIZES}
    )
    state = checkpoint.read_transformer_state(tmp_path)
    assert state.keys() == weights.keys() and all(torch.equal(state[key], weights[key]) for key in weights)


def test_the_released_config_is_the_1_3b_model(tmp_path):
    released = {
        "dim": 1536,
        "eps": 1e-6,
        "ffn_dim": 8960,
        "freq_dim": 256,
        "in_dim": 16,
        "model_type": "t2v",
        "num_heads": 12,
        "num_layers": 30,
        "out_dim": 16,
        "text_len": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(released))
    assert checkpoint.read_model_config(tmp_path) == MODELS["Wan2.1-T2V-1.3B"]
    (tmp_path / "config.json").write_text(json.dumps({"dim": 1536}))
    with pytest.raises(CheckpointError, match="has no 'ffn_dim': not a WanModel"):
        checkpoint.read_model_config(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(native_config()))
    index = {"weight_map": {"head.head.bias": "diffusion_pytorch_model-00002.safetensors"}}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"model-00002.safetensors not found; run: bash experiments/download_weights.sh"
    ):
        checkpoint.read_transformer_state(tmp_path)


# -- umT5
# ------------------------------------------------------------------------------------------------------------


def random_umt5(config: UMT5Config) -> dict[str, torch.Tensor]:
    """Weights under the names of models_t5_umt5-xxl-enc-bf16.pth."""
    generator = torch.Generator().manual_seed(0)
    dim, inner, heads = config.d_model, config.num_heads * config.d_kv, config.num_heads
    shapes = {"token_embedding.weight": (config.vocab_size, dim), "norm.weight": (dim,)}
    for i in range(config.num_layers):
        block = {
            "norm1.weight": (dim,),
            "norm2.weight": (dim,),
            "attn.o.weight": (dim, inner),
            "pos_embedding.embedding.weight": (config.relative_attention_num_buckets, heads),
            "ffn.gate.0.weight": (config.d_ff, dim),
            "ffn.fc1.weight": (config.d_ff, dim),
            "ffn.fc2.weight": (dim, config.d_ff),
        }
        block |= {f"attn.{part}.weight": (inner, dim) for part in "qkv"}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def plain_umt5(
    w: dict[str, torch.Tensor], config: UMT5Config, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The encoder by its definition: pre-norm, T5 attention without scaling, a relative bias in every layer,
    gated GELU.
    """

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def bucket(distance: int) -> int:
        """16 buckets a side: exact up to 7, then logarithmic up to 128 (T5, arXiv 1910.10683)."""
        side, distance = (16, distance) if distance > 0 else (0, -distance)
        if distance < 8:
            return side + distance
        return side + min(15, 8 + int(math.log(distance / 8) / math.log(128 / 8) * 8))

    length = ids.shape[1]
    buckets = torch.tensor([[bucket(k - q) for k in range(length)] for q in range(length)])
    hidden = ~mask[:, None, None].bool()
    x = w["token_embedding.weight"][ids]
    for i in range(config.num_layers):
        p = {name.removeprefix(f"blocks.{i}."): t for name, t in w.items() if name.startswith(f"blocks.{i}.")}
        y = norm(x, p["norm1.weight"])
        q, k, v = (
            (y @ p[f"attn.{part}.weight"].T).unflatten(-1, (config.num_heads, -1)).transpose(1, 2)
            for part in "qkv"
        )
        logits = q @ k.mT + p["pos_embedding.embedding.weight"][buckets].permute(2, 0, 1)
        out = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + out.transpose(1, 2).flatten(2) @ p["attn.o.weight"].T
        y = norm(x, p["norm2.weight"])
        gated = F.gelu(y @ p["ffn.gate.0.weight"].T, approximate="tanh") * (y @ p["ffn.fc1.weight"].T)
        x = x + gated @ p["ffn.fc2.weight"].T
    return norm(x, w["norm.weight"])


def test_umt5_computes_what_its_definition_says(tmp_path):
    weights = random_umt5(SMALL_UMT5)
    torch.save(weights, tmp_path / native.UMT5_FILE)
    (tmp_path / "config.json").write_text("{}")
    encoder = native.load_umt5(tmp_path, SMALL_UMT5, torch.float32)
    ids = torch.randint(2, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 9:] = 0
    found = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    expected = plain_umt5(weights, SMALL_UMT5, ids, mask)
    assert ((found - expected)[mask.bool()]).abs().max() < 1e-5 * expected.abs().max()


def test_the_real_umt5_has_these_keys():
    """Every parameter of the xxl encoder is filled from native names, without the memory for it."""
    with torch.device("meta"):
        names = UMT5EncoderModel(UMT5Config(**native.UMT5_XXL)).state_dict()
        ours = native.umt5_to_transformers({k: torch.empty(1) for k in random_umt5_names(24)})
    assert {*ours, "encoder.embed_tokens.weight"} == names.keys()
    assert names["shared.weight"].shape == (256384, 4096)


def random_umt5_names(layers: int) -> list[str]:
    config = UMT5Config(vocab_size=2, d_model=2, d_kv=1, d_ff=2, num_layers=layers, num_heads=1)
    return list(random_umt5(config))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("norm.weight"), "keys missing: encoder.final_layer_norm.weight"),
        (
            lambda w: w.update({"blocks.0.attn.x.weight": torch.ones(1)}),
            "keys unexpected: encoder.block.0.layer.attn.x.weight",
        ),
        (
            lambda w: w.update({"token_embedding.weight": torch.ones(3, 24)}),
            r"of another shape: shared.weight \[3, 24\]",
        ),
    ],
)
def test_umt5_files_that_do_not_fit(tmp_path, spoil, message):
    weights = random_umt5(SMALL_UMT5)
    spoil(weights)
    torch.save(weights, tmp_path / native.UMT5_FILE)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=message):
        native.load_umt5(tmp_path, SMALL_UMT5, torch.float32)


# -- the VAE
# ------------------------------------------------------------------------------------------------------------


def native_vae_names(vae: AutoencoderKLWan) -> dict[str, str]:
    """diffusers name -> native name, found by asking diffusers' conversion about every name the release
    could have.
    """
    tails = [f"residual.{i}.{p}" for i in (0, 2, 3, 6) for p in ("gamma", "weight", "bias")]
    tails += [f"{part}.{p}" for part in ("shortcut", "time_conv", "resample.1") for p in ("weight", "bias")]
    middle = [f"middle.{i}.{t}" for i in (0, 2) for t in tails[:12]]
    middle += [
        f"middle.1.{t}" for t in ("norm.gamma", "to_qkv.weight", "to_qkv.bias", "proj.weight", "proj.bias")
    ]
    names = [f"conv{i}.{p}" for i in (1, 2) for p in ("weight", "bias")]
    for side, stack in (("encoder", "downsamples"), ("decoder", "upsamples")):
        names += [f"{side}.{rest}" for rest in middle]
        names += [f"{side}.conv1.{p}" for p in ("weight", "bias")] + [f"{side}.head.0.gamma"]
        names += [f"{side}.head.2.{p}" for p in ("weight", "bias")]
        names += [f"{side}.{stack}.{i}.{t}" for i in range(15) for t in tails]
    wanted = vae.state_dict()
    pairs = ((name, next(iter(convert_wan_vae_to_diffusers({name: 0})), None)) for name in names)
    return {theirs: name for name, theirs in pairs if theirs in wanted}


def test_the_vae_is_diffusers_own(tmp_path):
    torch.manual_seed(0)
    theirs = AutoencoderKLWan(**SMALL_VAE).eval()
    names = native_vae_names(theirs)
    assert names.keys() == theirs.state_dict().keys() and len(set(names.values())) == len(names)
    torch.save(
        {names[key]: value for key, value in theirs.state_dict().items()}, tmp_path / native_vae.VAE_FILE
    )
    ours = native_vae.load_native_vae(tmp_path, torch.float32, **SMALL_VAE)
    latents = torch.randn(1, 3, 16, 4, 4)
    assert torch.equal(VAE(ours).decode(latents), VAE(theirs).decode(latents))


def test_native_files_that_are_not_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for load in (native.encoder_file, lambda folder: native_vae.load_native_vae(folder, torch.float32)):
        with pytest.raises(CheckpointError, match="pth not found; run: bash experiments"):
            load(tmp_path)
