"""Prompts to text states: transformers' umT5 with the text handling of Wan2.1."""

import html
import warnings
from collections.abc import Sequence
from pathlib import Path

import ftfy
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, UMT5EncoderModel

from wan import native
from wan.checkpoint import is_native, require_dir


def clean_prompt(text: str) -> str:
    """Mend broken unicode, unescape HTML twice, collapse white space, as Wan2.1 does before tokenising."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


class TextEncoder(nn.Module):
    """umT5 encoder with its tokenizer; called with prompts, it returns states [B, text_len, text_dim]."""

    def __init__(self, encoder: UMT5EncoderModel, tokenizer, text_len: int):
        super().__init__()
        self.encoder, self.tokenizer, self.text_len = encoder, tokenizer, text_len

    @classmethod
    def from_pretrained(cls, ckpt_dir: str | Path, text_len: int, dtype: torch.dtype = torch.bfloat16,
                        device: torch.device | str = "cpu") -> "TextEncoder":
        """From a model directory of either layout: the umT5 files and the tokenizer beside them."""
        ckpt_dir = Path(ckpt_dir)
        if is_native(ckpt_dir):
            encoder, tokenizer_dir = native.load_umt5(ckpt_dir, dtype, device), ckpt_dir / native.TOKENIZER_DIR
        else:
            encoder = UMT5EncoderModel.from_pretrained(require_dir(ckpt_dir / "text_encoder"), dtype=dtype)
            tokenizer_dir = ckpt_dir / "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(require_dir(tokenizer_dir))
        return cls(encoder.to(device).eval().requires_grad_(False), tokenizer, text_len)

    def tokenize(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask, [B, text_len] each; warns where a prompt is longer and says what was cut."""
        texts = [clean_prompt(prompt) for prompt in prompts]
        for text in texts:
            ids = self.tokenizer(text, add_special_tokens=True).input_ids
            if len(ids) > self.text_len:
                cut = self.tokenizer.decode(ids[self.text_len - 1:], skip_special_tokens=True)
                warnings.warn(f"the prompt has {len(ids)} tokens, the model reads {self.text_len}; cut: {cut!r}", stacklevel=2)
        batch = self.tokenizer(texts, padding="max_length", truncation=True, max_length=self.text_len,
                               add_special_tokens=True, return_attention_mask=True, return_tensors="pt")
        return batch.input_ids, batch.attention_mask

    def words(self, prompt: str) -> list[str]:
        """The text of each token of a prompt, as cross-attention sees them; padding left out."""
        ids, mask = self.tokenize([prompt])
        return self.tokenizer.convert_ids_to_tokens(ids[0, :int(mask.sum())].tolist())

    @torch.no_grad()
    def forward(self, prompts: Sequence[str]) -> Tensor:
        """States [B, text_len, text_dim]; rows past a prompt's end are zero."""
        ids, mask = (x.to(self.encoder.device) for x in self.tokenize(prompts))
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return states * mask[..., None].to(states.dtype)
