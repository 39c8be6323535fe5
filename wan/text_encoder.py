"""Prompts to prompt embeddings: transformers' umT5 with the text handling of Wan2.1."""

import html
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wan.checkpoint import (
    DOWNLOAD_HINT,
    CheckpointError,
    StateDict,
    assign,
    file_or_index,
    is_native,
    read_component_config,
    read_safetensors,
    read_torch_file,
    require_dir,
    require_file,
)
from wan.errors import library_reads, short_repr

if TYPE_CHECKING:  # takes a second to import: only where a prompt is encoded
    from transformers import UMT5Config, UMT5EncoderModel

# The original release has no config of umT5, and holds the real model.
UMT5_FILE, TOKENIZER_DIR = "models_t5_umt5-xxl-enc-bf16.pth", "google/umt5-xxl"
UMT5_XXL = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "dropout_rate": 0.0,
}

USUAL_SIZES = {  # transformers', where a config does not say
    "vocab_size": 250112,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "relative_attention_num_buckets": 32,
}

# native -> transformers, inside blocks.N. of the one and encoder.block.N.layer. of the other
UMT5_BLOCK_NAMES = {
    "norm1.": "0.layer_norm.",
    "norm2.": "1.layer_norm.",
    "attn.q.": "0.SelfAttention.q.",
    "attn.k.": "0.SelfAttention.k.",
    "attn.v.": "0.SelfAttention.v.",
    "attn.o.": "0.SelfAttention.o.",
    "pos_embedding.embedding.": "0.SelfAttention.relative_attention_bias.",
    "ffn.gate.0.": "1.DenseReluDense.wi_0.",
    "ffn.fc1.": "1.DenseReluDense.wi_1.",
    "ffn.fc2.": "1.DenseReluDense.wo.",
}


def umt5_to_transformers(native: StateDict) -> StateDict:
    """Rename native umT5 weights to those of UMT5EncoderModel."""
    state: StateDict = {}
    for name, tensor in native.items():
        if name == "token_embedding.weight":
            new = "shared.weight"
        elif in_block := re.match(r"blocks\.(\d+)\.", name):
            rest = name[in_block.end() :]
            old = next((old for old in UMT5_BLOCK_NAMES if rest.startswith(old)), "")
            new = f"encoder.block.{in_block[1]}.layer.{UMT5_BLOCK_NAMES.get(old, '')}{rest[len(old) :]}"
        else:
            new = name.replace("norm.", "encoder.final_layer_norm.", 1)
        state[new] = tensor
    return state


def encoder_file(ckpt_dir: str | Path) -> Path:
    """Return umT5's weights in a directory of either layout; an index where they are in shards."""
    if is_native(ckpt_dir):
        return require_file(Path(ckpt_dir) / UMT5_FILE, DOWNLOAD_HINT)
    return file_or_index(require_dir(Path(ckpt_dir) / "text_encoder") / "model.safetensors")


def _settings(ckpt_dir: str | Path) -> dict[str, Any]:
    return UMT5_XXL if is_native(ckpt_dir) else read_component_config(encoder_file(ckpt_dir).parent)


def encoder_sizes(ckpt_dir: str | Path) -> dict[str, int]:
    """Return umT5's sizes without transformers, whose import takes seconds. CheckpointError for others."""
    sizes = {name: _settings(ckpt_dir).get(name, usual) for name, usual in USUAL_SIZES.items()}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise CheckpointError(f"umT5 of {ckpt_dir}: {name} is {short_repr(size)}; get its config again")
    return sizes


def encoder_config(ckpt_dir: str | Path) -> "UMT5Config":
    from transformers import UMT5Config

    with library_reads(f"umT5's config of {ckpt_dir}", CheckpointError, "get it again"):
        return UMT5Config.from_dict(_settings(ckpt_dir))


def load_umt5(
    ckpt_dir: str | Path, config: "UMT5Config", dtype: torch.dtype, device: torch.device | str = "cpu"
) -> "UMT5EncoderModel":
    """Load umT5 of the given sizes from a directory of either layout; weights are mapped, not read twice."""
    from transformers import UMT5EncoderModel

    path = encoder_file(ckpt_dir)
    state = umt5_to_transformers(read_torch_file(path)) if is_native(ckpt_dir) else read_safetensors(path)
    with torch.device("meta"):
        model = UMT5EncoderModel(config)
    embedding = ("shared.weight", "encoder.embed_tokens.weight")  # one tensor; a file may have one name
    tokens = next((state[name] for name in embedding if name in state), None)
    if tokens is not None:
        state |= dict.fromkeys(embedding, tokens)
    assign(model, state, path, dtype, device)
    model.tie_weights()
    return model


def tokenizer_dir(ckpt_dir: str | Path) -> Path:
    return Path(ckpt_dir) / (TOKENIZER_DIR if is_native(ckpt_dir) else "tokenizer")


def encoder_files(ckpt_dir: str | Path) -> list[Path]:
    """Return all files that prompt embeddings depend on: umT5's weights and the tokenizer."""
    tokenizer = sorted(path for path in require_dir(tokenizer_dir(ckpt_dir)).iterdir() if path.is_file())
    return [encoder_file(ckpt_dir), *tokenizer]


def clean_prompt(text: str) -> str:
    """Mend broken unicode, unescape HTML twice, collapse white space, as Wan2.1 does before tokenising."""
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


class TextEncoder(nn.Module):
    """umT5 encoder with its tokenizer; called with prompts, it returns states [B, text_len, text_dim]."""

    def __init__(self, encoder: "UMT5EncoderModel", tokenizer: Any, text_len: int):
        super().__init__()
        self.encoder, self.tokenizer, self.text_len = encoder, tokenizer, text_len

    @classmethod
    def from_pretrained(
        cls,
        ckpt_dir: str | Path,
        text_len: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> "TextEncoder":
        """Load umT5 and its tokenizer from a model directory of either layout."""
        from transformers import AutoTokenizer

        folder = require_dir(tokenizer_dir(ckpt_dir))
        with library_reads(f"the tokenizer {folder}", CheckpointError, "get it again"):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with library_reads(f"the text encoder of {ckpt_dir}", CheckpointError, "get it again"):
            return cls(load_umt5(ckpt_dir, encoder_config(ckpt_dir), dtype, device), tokenizer, text_len)

    def tokenize(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask, [B, text_len] each. Warn where a prompt is longer, with what was cut."""
        with library_reads("the prompt with this tokenizer", CheckpointError, "get the tokenizer again"):
            texts = [clean_prompt(prompt) for prompt in prompts]
            for text in texts:
                ids = self.tokenizer(text).input_ids
                if len(ids) > self.text_len:
                    cut = self.tokenizer.decode(ids[self.text_len - 1 :], skip_special_tokens=True)
                    read = f"the prompt has {len(ids)} tokens, the model reads {self.text_len}"
                    warnings.warn(f"{read}; cut: {short_repr(cut, 300)}", stacklevel=2)
            batch = self.tokenizer(
                texts, padding="max_length", truncation=True, max_length=self.text_len, return_tensors="pt"
            )
            words, known = int(batch.input_ids.max()), self.encoder.config.vocab_size
        if words >= known or int(batch.input_ids.min()) < 0:
            raise CheckpointError(
                f"the tokenizer gives word {words}, the text encoder knows {known}; get both again"
            )
        return batch.input_ids, batch.attention_mask

    def words(self, prompt: str) -> list[str]:
        """Return the text of each token of a prompt, as cross-attention sees them, without padding."""
        ids, mask = self.tokenize([prompt])
        return self.tokenizer.convert_ids_to_tokens(ids[0, : int(mask.sum())].tolist())

    @torch.no_grad()
    def forward(self, prompts: Sequence[str]) -> Tensor:
        """Return states [B, text_len, text_dim]; rows past a prompt's end are zero."""
        ids, mask = (x.to(self.encoder.device) for x in self.tokenize(prompts))
        with library_reads("the text encoder's config", CheckpointError, "get it again"):
            states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return states * mask[..., None].to(states.dtype)
