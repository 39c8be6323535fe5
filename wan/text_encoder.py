"""Prompts to prompt embeddings: transformers' umT5 with the text handling of Wan2.1."""

import html
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wan import checkpoint as native
from wan.checkpoint import (
    DOWNLOAD_HINT,
    CheckpointError,
    is_native,
    read_component_config,
    read_safetensors,
    require_dir,
    require_file,
)
from wan.errors import library_reads, short_repr

if TYPE_CHECKING:  # takes a second to import: only where a prompt is encoded
    from transformers import UMT5Config, UMT5EncoderModel


def clean_prompt(text: str) -> str:
    """Mend broken unicode, unescape HTML twice, collapse white space, as Wan2.1 does before tokenising."""
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


def encoder_file(ckpt_dir: str | Path) -> Path:
    """umT5's weights in a directory of either layout; an index where they are in shards."""
    if is_native(ckpt_dir):
        return require_file(Path(ckpt_dir) / native.UMT5_FILE, DOWNLOAD_HINT)
    name = require_dir(Path(ckpt_dir) / "text_encoder") / "model.safetensors"
    index = name.with_name(name.name + ".index.json")
    return index if index.is_file() else require_file(name, DOWNLOAD_HINT)


def encoder_config(ckpt_dir: str | Path) -> "UMT5Config":
    """umT5's sizes; a native directory has none, and holds the real model."""
    from transformers import UMT5Config

    if is_native(ckpt_dir):
        return UMT5Config(**native.UMT5_XXL)
    folder = encoder_file(ckpt_dir).parent
    with library_reads(f"{folder}/config.json", CheckpointError, "get it again"):
        return UMT5Config.from_dict(read_component_config(folder))


def tokenizer_dir(ckpt_dir: str | Path) -> Path:
    return Path(ckpt_dir) / (native.TOKENIZER_DIR if is_native(ckpt_dir) else "tokenizer")


def encoder_files(ckpt_dir: str | Path) -> list[Path]:
    """All that prompt embeddings depend on: umT5's weights and the tokenizer."""
    return [
        encoder_file(ckpt_dir),
        *sorted(path for path in require_dir(tokenizer_dir(ckpt_dir)).iterdir() if path.is_file()),
    ]


class TextEncoder(nn.Module):
    """umT5 encoder with its tokenizer; called with prompts, it returns states [B, text_len, text_dim]."""

    def __init__(self, encoder: "UMT5EncoderModel", tokenizer, text_len: int):
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
        """From a model directory of either layout: the umT5 files and the tokenizer beside them."""
        from transformers import AutoTokenizer

        folder = require_dir(tokenizer_dir(ckpt_dir))
        with library_reads(f"the tokenizer {folder}", CheckpointError, "get it again"):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with library_reads(f"the text encoder of {ckpt_dir}", CheckpointError, "get it again"):
            if is_native(ckpt_dir):
                return cls(native.load_umt5(ckpt_dir, dtype, device), tokenizer, text_len)
            path, config = encoder_file(ckpt_dir), encoder_config(ckpt_dir)
            encoder = native.build_umt5(read_safetensors(path), config, path, dtype, device)
            return cls(encoder, tokenizer, text_len)

    def tokenize(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask, [B, text_len] each; warns where a prompt is longer and says what was cut."""
        with library_reads("the prompt with this tokenizer", CheckpointError, "get the tokenizer again"):
            ids, mask = self._tokenize([clean_prompt(prompt) for prompt in prompts])
            words, known = int(ids.max()), self.encoder.config.vocab_size
        if words >= known or int(ids.min()) < 0:
            raise CheckpointError(
                f"the tokenizer gives word {words}, the text encoder knows {known}; get both again"
            )
        return ids, mask

    def _tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        for text in texts:
            ids = self.tokenizer(text, add_special_tokens=True).input_ids
            if len(ids) > self.text_len:
                cut = self.tokenizer.decode(ids[self.text_len - 1 :], skip_special_tokens=True)
                warnings.warn(
                    f"the prompt has {len(ids)} tokens, the model reads {self.text_len}; cut: "
                    f"{short_repr(cut, 300)}",
                    stacklevel=3,
                )
        batch = self.tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self.text_len,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return batch.input_ids, batch.attention_mask

    def words(self, prompt: str) -> list[str]:
        """The text of each token of a prompt, as cross-attention sees them; padding left out."""
        ids, mask = self.tokenize([prompt])
        return self.tokenizer.convert_ids_to_tokens(ids[0, : int(mask.sum())].tolist())

    @torch.no_grad()
    def forward(self, prompts: Sequence[str]) -> Tensor:
        """States [B, text_len, text_dim]; rows past a prompt's end are zero."""
        ids, mask = (x.to(self.encoder.device) for x in self.tokenize(prompts))
        with library_reads("the text encoder's config", CheckpointError, "get it again"):
            states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return states * mask[..., None].to(states.dtype)
