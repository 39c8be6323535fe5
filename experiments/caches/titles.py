"""Words of titles: edits, as Edit.to_dict() of wan/interventions.py writes them, and ranges of numbers.

edit_in_words({"edit": "knockout", "frames": "past", "layers": [3, 4], "passes": "denoise"})
# "keys of past frames left out, in layers 3–4, in denoising passes"
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wan.errors import one_line

FRAMES = {"first": "the first frame", "sink": "the sink", "past": "past frames", "own": "the own block"}
SITES = {
    "z": "outputs of heads",
    "cross_z": "outputs of cross-attention",
    "resid_post": "the residual stream",
}
ABLATED = {
    "zero": "set to 0",
    "mean": "set to their mean over prompts",
    "frame_mean": "set to a frame's mean",
}
ABLATED["resample"] = "taken from another run"
PASSES = {"denoise": "denoising passes", "clean": "clean passes"}
LONGEST = 160  # letters of edits in a title


def edits_in_words(interventions: Mapping[str, Any] | None) -> str:
    """Return what the interventions of a cache did in plain words; "" for an unedited run."""
    if not interventions:
        return ""
    words = "; ".join(edit_in_words(edit) for edit in interventions.get("edits", ()))
    words = words or str(interventions.get("words", "not said"))
    if len(words) > LONGEST:
        words = f"{words[: LONGEST - 1].rstrip()}…"
    return words


def edit_in_words(edit: Mapping[str, Any]) -> str:
    """Return one edit, as a cache or YAML has it, in plain words."""
    words = _change_in_words(edit)
    for name in ("layers", "heads", "blocks", "steps"):
        if edit.get(name) is not None:
            words += f", in {counted(name.removesuffix('s'), edit[name])}"
    if edit.get("passes") in PASSES:
        words += f", in {PASSES[edit['passes']]}"
    return words


def _change_in_words(edit: Mapping[str, Any]) -> str:
    """Return what an edit changes, and how."""
    kind = edit["edit"]
    keys = f"keys of {frames_in_words(edit.get('frames', 'past'))}"
    if edit.get("tokens") is not None:
        keys = counted("prompt token", edit["tokens"])
    if kind == "knockout":
        return f"{keys} left out"
    if kind == "bias":
        return f"logits of {keys} {edit['b']:+g}"
    if kind == "ablate":
        return f"{site_in_words(edit.get('site', 'z'))} {ABLATED[edit['how']]}"
    if kind == "patch":
        taken = {"kv": f"keys and values of {frames_in_words(edit.get('frames', 'past'))}"}
        taken["qk"] = "queries and keys"
        source = ", ".join(f"{name} “{value}”" for name, value in edit["source"].items())
        return f"{taken.get(edit['what'], site_in_words(edit['what']))} taken from {source}"
    if kind == "move":
        if edit.get("offset") is not None:
            return f"{keys} moved by {edit['offset']:+d} frames"
        return f"{keys} moved to position {edit['position']}"
    if kind == "jitter":
        return f"RoPE's base of every head jittered by {edit.get('scale', 0.8):g}"
    if kind == "band":
        change = f"turned by {edit.get('phase', 0):g} rad, scaled by {edit.get('scale', 1):g}"
        return f"{counted('RoPE band', edit['bands'])} {change}"
    if kind == "steer":
        return f"{site_in_words(edit['site'])} steered by {edit.get('scale', 1):g} times a direction"
    sites = " and ".join(site_in_words(site) for site in edit.get("sites", ()))
    return f"{sites or 'activations'} changed by {edit.get('function', kind)}"


def with_article(noun: str) -> str:
    """Return "an atlas cache", "a layer cache"."""
    if noun[0] in "aeiou":
        return f"an {noun}"
    return f"a {noun}"


def prompt_in_words(prompt: str | None) -> str:
    """Return a prompt in quotes, on one line."""
    if not prompt:
        return "prompt not recorded"
    return f"“{one_line(prompt)}”"


def seed_in_words(seed: int | None) -> str:
    """Return "seed 42"; a pipeline that drew its noise without a generator tells no seed."""
    if seed is None:
        return "seed not recorded"
    return f"seed {seed}"


def site_in_words(site: str) -> str:
    """Return the name of a site in words, or as it is."""
    return SITES.get(site, site)


def frames_in_words(frames: Any) -> str:
    """Return names and numbers of frames in words: "past" -> "past frames", [0, 1] -> "frames 0–1"."""
    chosen = list(frames) if isinstance(frames, list | tuple) else [frames]
    numbers = [frame for frame in chosen if isinstance(frame, int)]
    words = [FRAMES.get(frame, frame) for frame in chosen if not isinstance(frame, int)]
    if numbers:
        words.insert(0, counted("frame", numbers))
    return " and ".join(words)


def counted(noun: str, numbers: Any) -> str:
    """Return a noun with its numbers: "layer 3", "layers 3–5"."""
    if isinstance(numbers, list | tuple) and len(numbers) > 1:
        return f"{noun}s {ranges(numbers)}"
    if isinstance(numbers, list | tuple):
        numbers = numbers[0]
    return f"{noun} {numbers}"


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0–2, 5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    texts = []
    for first, last in parts:
        texts.append(f"{first}–{last}")
        if first == last:
            texts[-1] = str(first)
    return ", ".join(texts)


def policy_in_words(settings: Mapping[str, Any], num_blocks: int) -> str:
    """Return what the KV cache kept, in the words of load(cache_policy=...); "" where it is unknown."""
    policy = settings.get("cache_policy")
    window = settings.get("local_attn_size", -1)
    if policy is None and window != -1:
        policy = {"name": "window", "window": window, "sink": settings.get("sink_size", 0)}
    if isinstance(policy, Mapping):
        values = [f"{name}={value}" for name, value in policy.items() if name != "name"]
        return f"cache policy {','.join([str(policy.get('name')), *values])}"
    if "local_attn_size" in settings and num_blocks > 1:
        return "the whole KV cache"
    return ""


def conditions_of(cache: Mapping[str, Any], branches: Iterable[str | None] = ()) -> str:
    """Return edits, cache policy and branches of guidance in a line, of a cache or of a run's fields."""
    # 1. Edits, with the number of calls that each has changed
    parts = ["no edit"]
    interventions = cache.get("interventions")
    if interventions:
        calls = " + ".join(str(count) for count in interventions.get("calls", ()))
        words = f"edited by {interventions.get('words', 'edits that are not recorded')}"
        parts = [f"{words} ({calls} calls)" if calls else words]
    # 2. The KV cache
    policy = policy_in_words(cache.get("config") or {}, len(cache.get("block_sizes", ())))
    if policy:
        parts.append(policy)
    # 3. Of guidance
    names = sorted({branch for branch in branches if branch is not None})
    if names:
        parts.append(f"branch {' and '.join(names)}")
    # 4. Of a compiled pipeline that was watched
    if cache.get("uncompiled"):
        parts.append(f"{' and '.join(cache['uncompiled'])} ran uncompiled")
    return "; ".join(parts)
