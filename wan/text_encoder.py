"""Prompts to prompt embeddings: transformers' umT5 with the text handling of Wan2.1."""

import html
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ftfy
import torch
from torch import Tensor, nn

from wan import checkpoint, errors

if TYPE_CHECKING:  # takes a second to import: only where a prompt is encoded
    from transformers import UMT5EncoderModel


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
        """Load umT5 and its tokenizer from a model directory of either layout; weights are mapped."""
        from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

        # 1. The tokenizer.
        weights, folder = checkpoint.encoder_files(ckpt_dir)
        with errors.library_reads(f"the tokenizer {folder}", errors.CheckpointError, "get it again"):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with errors.library_reads(f"the text encoder of {ckpt_dir}", errors.CheckpointError, "get it again"):
            # 2. The encoder without weights.
            with torch.device("meta"):
                encoder = UMT5EncoderModel(UMT5Config.from_dict(checkpoint.encoder_config(ckpt_dir)))
            # 3. Its weights. One tensor has two names, of which a file may have one.
            state = checkpoint.read_part(ckpt_dir, "text_encoder")
            names = ("shared.weight", "encoder.embed_tokens.weight")
            tokens = [state[name] for name in names if name in state]
            if tokens:
                state |= dict.fromkeys(names, tokens[0])
            checkpoint.assign(encoder, state, weights, dtype, device)
            encoder.tie_weights()
        return cls(encoder, tokenizer, text_len)

    def tokenize(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask, [B, text_len] each. Warn where a prompt is longer, with what was cut."""
        with errors.library_reads(
            "the prompt with this tokenizer", errors.CheckpointError, "get the tokenizer again"
        ):
            # As Wan2.1 does: mend broken unicode, unescape HTML twice, collapse white space
            mended = [html.unescape(html.unescape(ftfy.fix_text(prompt))) for prompt in prompts]
            texts = [" ".join(text.split()) for text in mended]
            for text in texts:
                ids = self.tokenizer(text).input_ids
                if len(ids) > self.text_len:
                    cut = self.tokenizer.decode(ids[self.text_len - 1 :], skip_special_tokens=True)
                    read = f"the prompt has {len(ids)} tokens, the model reads {self.text_len}"
                    warnings.warn(f"{read}; cut: {errors.short_repr(cut, 300)}", stacklevel=2)
            batch = self.tokenizer(
                texts, padding="max_length", truncation=True, max_length=self.text_len, return_tensors="pt"
            )
        return batch.input_ids, batch.attention_mask

    def words(self, prompt: str) -> list[str]:
        """Return the text of each token of a prompt, as cross-attention sees them, without padding."""
        ids, mask = self.tokenize([prompt])
        return self.tokenizer.convert_ids_to_tokens(ids[0, : int(mask.sum())].tolist())

    @torch.no_grad()
    def forward(self, prompts: Sequence[str]) -> Tensor:
        """Return states [B, text_len, text_dim]; rows past a prompt's end are zero."""
        ids, mask = (x.to(self.encoder.device) for x in self.tokenize(prompts))  # [B, text_len]
        with errors.library_reads("the text encoder's config", errors.CheckpointError, "get it again"):
            states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        # Wan was trained with zeros behind the prompt, not with umT5's states of padding.
        return states * mask[..., None].to(states.dtype)
