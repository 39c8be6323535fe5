"""Data of the transformer stages: latents of rendered clips, tokens of their captions, noise."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from hashlib import sha256

import torch
from diffusers import AutoencoderKLWan
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from experiments.miniature.moving_shapes import (
    BACKGROUNDS,
    COLORS,
    CORNERS,
    DIRECTIONS,
    SHAPES,
    Scene,
    sample_scenes,
)
from experiments.miniature.recipe import CAPTION_DROPOUT, StageRun
from experiments.miniature.vae_training import encode_scenes, set_layout

# The tokenizer is a unigram model laid out like umT5's: pad 0, </s> 1, byte fallback.
SPECIAL = ("<pad>", "</s>", "<s>", "<unk>")
WORD_START = "▁"
WORDS = (
    "a an the of in on and over with moving background fast slow small large big behind in front wall "
    "landmark two at to is it from through bright dark light black gray scene video shape object camera "
    "sky"
)
LETTER_GROUPS = (
    "ing ed er es ly al le re en in on an at or ar ic is it st th he nd nt ent ion tion ation ough igh "
    "ight ou ow ew ea ee oo ai ay oy ch sh ck ng nk ll ss tt pp ff mm rr un de dis con pro pre com ment "
    "ness ful less able ive ous ary ity ust ast est ist ound ing's all ell ill ine ate ite ure ture ain "
    "ace age ake ame ant ang ast ave ber ble can cap cl col com day der dra eag fe fl for gh gle gr ha ho "
    "ill im jes ju kle la li lo lu man ma me mo mu na ne no nu per pl po qu ra ri ro ru sc se si sk sl sm "
    "so sp str su ta te ter ti to tr tu ty va ve vi wa we wi wo ye"
)


def vocabulary() -> list[tuple[str, float]]:
    """Return (piece, log probability) by id; longer pieces win because every piece costs."""
    grammar = " ".join((*SHAPES, *COLORS, *BACKGROUNDS, *DIRECTIONS, *CORNERS))
    words = dict.fromkeys(WORD_START + w for w in f"{grammar} {WORDS}".split())
    groups = dict.fromkeys(mark + g for g in LETTER_GROUPS.split() for mark in (WORD_START, ""))
    letters = dict.fromkeys([WORD_START, *string.ascii_letters, *string.digits, *string.punctuation])
    pieces = [(p, 0.0) for p in SPECIAL] + [(f"<0x{b:02X}>", -20.0) for b in range(256)]
    seen = {p for p, _ in pieces}
    for new, score in ((words, -3.0), (groups, -6.0), (letters, -8.0)):
        pieces += [(p, score) for p in new if p not in seen]
        seen |= set(new)
    return pieces


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a fast tokenizer that takes any text; AutoTokenizer reads what its `save_pretrained` writes."""
    pad, end, _, unknown = SPECIAL
    tokenizer = Tokenizer(models.Unigram(vocabulary(), unk_id=SPECIAL.index(unknown), byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, unk_token=unknown, model_max_length=512
    )


class LatentClips:
    """Normalised latents [N, C, F, h, w] of random scenes on the device, and their captions."""

    def __init__(self, run: StageRun):
        device, seed = run.device, run.rank_seed + 2
        scenes = list(itertools.islice(sample_scenes(seed, kinds=run.recipe.kinds), run.clips))
        weights = (run.output_dir / "vae/diffusion_pytorch_model.safetensors").read_bytes()
        made_of = [seed, run.clips, list(run.recipe.kinds), sha256(weights).hexdigest()]
        saved = {}
        if run.latents_file.is_file():  # an earlier stage's
            saved = torch.load(run.latents_file, weights_only=True, map_location="cpu")
        if saved.get("made_of") != made_of:
            saved = {"made_of": made_of, "latents": _encoded(run, scenes)}
            torch.save(saved, run.latents_file)
        self.latents = saved["latents"].to(device)
        captions = ["", *(scene.caption for scene in scenes)]  # row 0 is the empty one
        tokens = build_tokenizer()(captions, padding=True, return_tensors="pt")
        self.ids, self.mask = tokens.input_ids.to(device), tokens.attention_mask.to(device)

    def batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw latents with token ids and mask [B, n]; some captions are empty, for guidance."""
        chosen = self.draw(size)
        row = torch.where(torch.rand(size, device=chosen.device) < CAPTION_DROPOUT, 0, chosen + 1)
        return self.latents[chosen], self.ids[row], self.mask[row]

    def draw(self, size: int) -> Tensor:
        """Draw numbers of clips; clip i has the caption in row i + 1 of ids and mask."""
        return torch.randint(len(self.latents), (size,), device=self.latents.device)


def _encoded(run: StageRun, scenes: Sequence[Scene]) -> Tensor:
    vae = AutoencoderKLWan.from_pretrained(run.output_dir / "vae").to(run.device, run.dtype)
    if run.device.type == "cuda":
        set_layout(vae, torch.channels_last, torch.channels_last_3d)
    mean, std = (
        torch.tensor(statistic, device=run.device).view(1, -1, 1, 1, 1)
        for statistic in (vae.config.latents_mean, vae.config.latents_std)
    )
    return ((encode_scenes(vae, scenes, run.device) - mean) / std).to(run.dtype)


def encode_text(encoder: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Return umT5 states [B, n, text_dim], zero beyond each caption's end."""
    return encoder(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None].to(encoder.dtype)


def draw(timesteps: Tensor, *shape: int) -> Tensor:
    """Draw entries of a table of timesteps."""
    return timesteps[torch.randint(len(timesteps), shape, device=timesteps.device)]


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return x_t of the flow path, in the dtype of x0; sigma broadcasts from the left."""
    sigma = sigma.view(*sigma.shape, *[1] * (x0.ndim - sigma.ndim))
    return ((1 - sigma) * x0 + sigma * noise).to(x0.dtype)
