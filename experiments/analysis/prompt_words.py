"""Tokens of a prompt and its words, whatever the tokenizer: sentencepiece, byte-level BPE or CLIP.

    tokens_of_words(["▁a", "▁cir", "cle", "</s>"], ["circle"])  # ((1, 2),)
    words_of(["▁a", "▁cir", "cle", "</s>"])                     # ["a", "circle", "(end)"], [0, 1, 1, 2]

A tokenizer names its tokens: "▁cine", "matic" of sentencepiece, "Ġcine" of byte-level BPE, "matic</w>" of
CLIP, "<0xE7>" of a single byte. Special tokens such as "</s>" are of no word of the prompt.
"""

import re
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from wan.errors import ConfigError, short_repr

# First and last characters of scripts that write words without spaces: Thai to Tibetan, Burmese, Khmer, and
# all from the radicals of Chinese on. Korean has spaces, but its particles stand at the word.
UNSPACED = (("\u0e00", "\u0fff"), ("\u1000", "\u109f"), ("\u1780", "\u17ff"), ("\u2e80", "\U0010ffff"))
ACCENTS = "\u0300-\u036f"

Numbers = Sequence[tuple[tuple[int, ...], ...]]  # of tokens, by prompt and word


def tokens_of_words(
    tokens: Sequence[str], words: Sequence[str], prompt: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the tokens of each word, at every place where it stands in the prompt.

    tokens are those that the model reads of a prompt, by name, "" for what is not the prompt's own. Case does
    not count. Raises ConfigError for a word that is absent, and for special tokens, which are no words.
    """
    if not tokens:
        raise ConfigError("words= needs the tokens of the prompt, which are not known here")
    text, tokens_of_character = _text_of(tokens)
    numbers = []
    for word in words:
        places = places_of_word(text, word)
        if not places and places_of_word(_normalised(prompt), word):
            raise ConfigError(
                f"the word {short_repr(word)} is not among the {len(tokens)} tokens that the model reads of "
                "the prompt: it is cut off, or the tokenizer does not know it"
            )
        if not places:
            raise ConfigError(f"the word {short_repr(word)} is not in the prompt; {_words_in(text)}")
        tokens_of_word = set[int]()
        for start, stop in places:
            tokens_of_word.update(*tokens_of_character[start:stop])
        numbers.append(tuple(sorted(tokens_of_word)))
    return tuple(numbers)


def words_of(tokens: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Join tokens ["▁cine", "matic"] to words, with the number of the word that each token belongs to.

    Special tokens are words of their own, in brackets: "(end)".
    """
    is_byte_level = _is_byte_level(tokens)
    words: list[bytes] = []
    word_of_token = []
    begins_word = True
    for token in tokens:
        is_special = _is_special(token)
        piece = _bytes_of(token, is_byte_level)
        if is_special:
            piece = _special_in_words(token).encode()
        if begins_word or is_special or piece[:1].isspace():
            words.append(b"")
        words[-1] += piece.strip()
        word_of_token.append(len(words) - 1)
        ends_word = bool(piece.strip()) and piece[-1:].isspace()
        begins_word = is_special or ends_word
    return [word.decode(errors="replace") for word in words], np.array(word_of_token)


def mass_of_words(mass: np.ndarray, tokens: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Sum mass on tokens [..., tokens] by word -> words, and their mass [..., words]."""
    words, word_of_token = words_of(tokens)
    of_words = np.zeros((len(words), *mass.shape[:-1]), np.float32)
    np.add.at(of_words, word_of_token, np.moveaxis(mass, -1, 0))
    return words, np.moveaxis(of_words, 0, -1)


def require_words(prompt: str, words: Sequence[str]) -> None:
    """Raise ConfigError for a word that does not stand in a prompt."""
    text = _normalised(prompt)
    for word in words:
        if not places_of_word(text, word):
            raise ConfigError(f"the word {short_repr(word)} is not in the prompt; {_words_in(text)}")


def place_in(tokens: Sequence[str], of_prompt: Sequence[str]) -> range:
    """Return where a prompt's tokens stand among those of a text around it: the last place; none if absent.

    The end of the prompt may be cut off. Its first token may have another name within a text.
    """
    end = len(tokens)
    while end and _is_special(tokens[end - 1]):
        end -= 1
    whole, cut_off = range(0), range(0)
    for start in range(end):
        length = min(len(of_prompt), end - start)
        if length == 0 or tokens[start].strip("▁Ġ") != of_prompt[0].strip("▁Ġ"):
            continue
        if list(tokens[start + 1 : start + length]) != list(of_prompt[1:length]):
            continue
        if length == len(of_prompt):
            whole = range(start, start + length)
        elif not cut_off:
            cut_off = range(start, start + length)
    if whole:
        return whole
    return cut_off


def places_of_word(text: str, word: str) -> list[tuple[int, int]]:
    """Return first and last + 1 character of each place where a word stands, whole, in a normalised text.

    In scripts that write words without spaces a part of a longer one counts.
    """
    pattern = r"\s+".join(re.escape(part) for part in _normalised(word).split())
    is_spaced = not any(first <= character <= last for character in word for first, last in UNSPACED)
    if is_spaced:
        pattern = rf"(?<!\w){pattern}(?![\w{ACCENTS}])"
    return [match.span() for match in re.finditer(pattern, text, re.IGNORECASE)]


def _words_in(text: str) -> str:
    composed = unicodedata.normalize("NFKC", text)
    words = ", ".join(dict.fromkeys(re.findall(r"\w+", composed)))
    return f"its words are {textwrap.shorten(words, 300, placeholder=' ...')}"


def _normalised(text: str) -> str:
    """Return a text in which "ﬁsh" is "fish", as in sentencepiece, and accents are separate characters."""
    return unicodedata.normalize("NFKD", text)


class LateNumbers(Sequence[tuple[tuple[int, ...], ...]]):
    """Numbers of tokens that are found when attention first asks for them.

    A pipeline tokenizes its prompts while it runs. find() returns them for so many prompts.
    """

    def __init__(self, num_prompts: int, find: Callable[[], Numbers]):
        self.num_prompts, self.find = num_prompts, find

    @cached_property
    def numbers(self) -> Numbers:
        return self.find()

    def __len__(self) -> int:
        return self.num_prompts

    def __getitem__(self, item: Any) -> Any:
        return self.numbers[item]


# --- The text of tokens
def _text_of(tokens: Sequence[str]) -> tuple[str, list[set[int]]]:
    """Return the text of tokens, and the tokens of each of its characters."""
    # 1. In bytes, as a token may hold a part of a character.
    is_byte_level = _is_byte_level(tokens)
    content, token_of_byte = b"", list[int]()
    for number, token in enumerate(tokens):
        piece = _bytes_of(token, is_byte_level)
        content += piece
        token_of_byte += [number] * len(piece)
    # 2. In characters.
    text, tokens_of_character, place = "", list[set[int]](), 0
    for character in content.decode("utf-8", errors="surrogateescape"):
        size = len(character.encode("utf-8", errors="surrogateescape"))
        normalised = _normalised(character)
        text += normalised
        tokens_of_character += [{*token_of_byte[place : place + size]}] * len(normalised)
        place += size
    return text, tokens_of_character


def _is_special(token: str) -> bool:
    return re.fullmatch(r"<[^<>]*>|\[[A-Z]+\]", token) is not None and _single_byte(token) is None


SPECIAL = {"</s>": "(end)", "<|endoftext|>": "(end)", "[SEP]": "(end)", "<s>": "(start)"}
SPECIAL |= {"<|startoftext|>": "(start)", "[CLS]": "(start)", "<pad>": "(padding)", "[PAD]": "(padding)"}


def _special_in_words(token: str) -> str:
    """Return a special token as a reader takes it."""
    return SPECIAL.get(token, f"({token.strip('<>[]|/')})")


def _single_byte(token: str) -> bytes | None:
    """Return the byte of a token "<0xE7>"."""
    match = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    if match is None:
        return None
    return bytes.fromhex(match[1])


def _is_byte_level(tokens: Sequence[str]) -> bool:
    return any(token.startswith(("Ġ", "Ċ")) for token in tokens)


def _bytes_of(token: str, is_byte_level: bool) -> bytes:
    """Return the text of a token, a space in front where a word begins; nothing for a special token."""
    byte = _single_byte(token)
    if byte is not None:
        return byte
    if _is_special(token):
        return b""
    if is_byte_level:
        return bytes(BYTES[character] for character in token if character in BYTES)
    if token.endswith("</w>"):
        token = token.removesuffix("</w>") + " "
    return token.replace("▁", " ").encode("utf-8")


def _byte_of_character() -> dict[str, int]:
    """Return which byte each character of byte-level BPE stands for, as GPT-2's tokenizer numbers them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTES = _byte_of_character()
