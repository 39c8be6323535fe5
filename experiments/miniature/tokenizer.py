"""The miniature's tokenizer: a unigram model laid out like umT5's (pad 0, </s> 1, byte fallback), without
training.

Caption words are pieces of their own; other English falls into letter groups, and anything else into UTF-8
bytes.
"""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from experiments.miniature.moving_shapes import BACKGROUNDS, COLORS, CORNERS, DIRECTIONS, SHAPES

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
    """(piece, log probability) by id; longer pieces win because every piece costs."""
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
    """A fast tokenizer that any text passes through; `save_pretrained` makes it readable by AutoTokenizer."""
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
