"""Cross-attention mass per word of the prompt: tokens of a sentencepiece tokenizer put together to words."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.caches.view import Profiles

NO_CROSS = (
    "Mass per prompt word: absent in this cache; capture it with: "
    "python experiments/run_extraction_all.py --cross"
)


def words_of(tokens: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Tokens -> words, and which word each token belongs to: ["▁cine", "matic", "▁light"] -> ["cinematic",
    "light"], [0, 0, 1].

    "▁" begins a word; a control token such as </s> is a word of its own.
    """
    words: list[str] = []
    place = []
    for token in tokens:
        control = token.startswith("<") and token.endswith(">")
        if control or token.startswith("▁") or not words or words[-1].startswith("<"):
            words.append("")
        words[-1] += token.removeprefix("▁")
        place.append(len(words) - 1)
    return words, np.array(place)


def word_mass(cache: Mapping[str, Any], view: Profiles, layer: int) -> tuple[list[str], np.ndarray] | None:
    """Words of the prompt and their mass [H, words] in a layer, mean over the view's query frames in its
    pass; None where the atlas has none. A row sums to the share of all mass that is on the prompt: the rest
    is on the padding after it."""
    if "cross_mass" not in cache:
        return None
    p = list(cache.get("pass_steps", range(len(cache["pass_timesteps"])))).index(view.step)
    tokens = (
        cache["cross_mass"][view.layers.index(layer), p][:, list(view.query_frames)].float().mean(1).numpy()
    )
    words, place = words_of(cache.get("cross_tokens", [str(i) for i in range(tokens.shape[-1])]))
    mass = np.zeros((len(tokens), len(words)), np.float32)
    np.add.at(mass.T, place, tokens.T)
    return words, mass
