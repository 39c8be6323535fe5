"""umT5 of the original release against its definition; prompts that are too long, words of a prompt."""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from transformers import UMT5Config, UMT5EncoderModel

from wan import checkpoint
from wan.checkpoint import UMT5_FILE, CheckpointError
from wan.names import UMT5_TO_TRANSFORMERS, renamed
from wan.text_encoder import TextEncoder

MINI = ROOT / "checkpoints/wan-mini"
SIZES = {"vocab_size": 50, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 3, "num_heads": 2}
SMALL_UMT5 = UMT5Config(**SIZES, relative_attention_num_buckets=32, dropout_rate=0.0)


def random_umt5(config: UMT5Config) -> dict[str, torch.Tensor]:
    """Weights under the names of models_t5_umt5-xxl-enc-bf16.pth."""
    generator = torch.Generator().manual_seed(0)
    dim, inner, heads = config.d_model, config.num_heads * config.d_kv, config.num_heads
    shapes = {"token_embedding.weight": (config.vocab_size, dim), "norm.weight": (dim,)}
    for i in range(config.num_layers):
        block = {"norm1": (dim,), "norm2": (dim,), "attn.o": (dim, inner), "ffn.gate.0": (config.d_ff, dim)}
        block |= {"pos_embedding.embedding": (config.relative_attention_num_buckets, heads)}
        block |= {"ffn.fc1": (config.d_ff, dim), "ffn.fc2": (dim, config.d_ff)}
        block |= {f"attn.{part}": (inner, dim) for part in "qkv"}
        shapes |= {f"blocks.{i}.{name}.weight": shape for name, shape in block.items()}
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def plain_umt5(w: dict[str, torch.Tensor], config: UMT5Config, ids, mask) -> torch.Tensor:
    """Pre-norm, T5 attention without scaling, a relative bias in every layer, gated GELU."""

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
        parts = ((y @ p[f"attn.{part}.weight"].T).unflatten(-1, (config.num_heads, -1)) for part in "qkv")
        q, k, v = (part.transpose(1, 2) for part in parts)
        logits = q @ k.mT + p["pos_embedding.embedding.weight"][buckets].permute(2, 0, 1)
        out = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + out.transpose(1, 2).flatten(2) @ p["attn.o.weight"].T
        y = norm(x, p["norm2.weight"])
        gated = F.gelu(y @ p["ffn.gate.0.weight"].T, approximate="tanh") * (y @ p["ffn.fc1.weight"].T)
        x = x + gated @ p["ffn.fc2.weight"].T
    return norm(x, w["norm.weight"])


def test_umt5_computes_what_its_definition_says(tmp_path, monkeypatch):
    """From a directory of the original release; a file that lacks a name is refused."""
    (tmp_path / "config.json").write_text("{}")
    shutil.copytree(MINI / "tokenizer", tmp_path / checkpoint.TOKENIZER_DIR)
    monkeypatch.setattr(checkpoint, "UMT5_XXL", SMALL_UMT5.to_dict())
    weights = random_umt5(SMALL_UMT5)
    torch.save(weights, tmp_path / UMT5_FILE)
    encoder = TextEncoder.from_pretrained(tmp_path, 40, torch.float32).encoder
    ids = torch.randint(2, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 9:] = 0
    found = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    expected = plain_umt5(weights, SMALL_UMT5, ids, mask)
    assert ((found - expected)[mask.bool()]).abs().max() < 1e-5 * expected.abs().max()
    for name in ("norm.weight", "token_embedding.weight"):
        torch.save({key: x for key, x in weights.items() if key != name}, tmp_path / UMT5_FILE)
        theirs = next(iter(renamed({name: torch.ones(1)}, UMT5_TO_TRANSFORMERS)))
        with pytest.raises(CheckpointError, match=rf"keys missing: {theirs}"):
            TextEncoder.from_pretrained(tmp_path, 40, torch.float32)


def test_sizes_are_those_of_transformers():
    usual = UMT5Config()
    assert {name: getattr(usual, name) for name in checkpoint.USUAL_SIZES} == checkpoint.USUAL_SIZES
    config = UMT5Config.from_dict(checkpoint.encoder_config(MINI))
    assert config.d_model < usual.d_model and config.is_gated_act


def test_the_real_umt5_has_these_keys():
    """Every parameter of the xxl encoder is filled from native names, without the memory for it."""
    tiny = UMT5Config(vocab_size=2, d_model=2, d_kv=1, d_ff=2, num_layers=24, num_heads=1)
    with torch.device("meta"):
        names = UMT5EncoderModel(UMT5Config(**checkpoint.UMT5_XXL)).state_dict()
    ours = renamed(random_umt5(tiny), UMT5_TO_TRANSFORMERS)
    assert {*ours, "encoder.embed_tokens.weight"} == names.keys()
    assert names["shared.weight"].shape == (256384, 4096)


def test_prompts_of_the_miniature(tmp_path):
    encoder = TextEncoder.from_pretrained(MINI, 8, torch.float32)
    wide = TextEncoder(encoder.encoder, encoder.tokenizer, 32)
    assert wide.words("a  red\n salt &amp;amp; schÃ¶n ") == wide.words("a red salt & schön")
    with pytest.warns(UserWarning, match="tokens, the model reads 8; cut: "):
        states = encoder(["a red circle moving right and a blue square moving left", "a"])
    assert states.shape[:2] == (2, 8) and not states[1, -1].any() and states[0].abs().sum(-1).all()
    shutil.copytree(MINI, tmp_path / "m")
    shutil.rmtree(tmp_path / "m/tokenizer")
    with pytest.raises(CheckpointError, match="tokenizer not found; run"):
        TextEncoder.from_pretrained(tmp_path / "m", 8)
