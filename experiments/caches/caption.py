"""What a figure says about the numbers it draws: quantity, pass and queries, frames to point out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

NOTHING: Mapping[str, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True)
class Caption:
    """Goes with frame profiles or matrices from a view to every drawing function."""

    quantity: str  # mean_logit, mass or mean_prob
    subtitle: str  # pass and queries, for titles: "pass 0 (t = 1000), query frames 18–20"
    highlighted_frames: Mapping[str, Sequence[int]] = field(
        default_factory=lambda: NOTHING
    )  # legend -> frames
    unit: str = "latent"  # what the frame axis counts: latent or video frames
    averages: int = 0  # columns after the frames: averages of frames that are gone


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0–2, 5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def pass_name(step: int | None, timestep: float | None, is_clean: bool | None) -> str:
    """What a pass is called: "pass 0 (t = 1000)", "clean pass (t = 0)"; a denoising one at t = 0 says so."""
    name = "clean pass" if is_clean else f"pass {step}"
    if timestep == 0 and is_clean is False:
        name += ", denoising"
    return name if timestep is None else f"{name} (t = {timestep:g})"


def subtitle(pass_label: str, query_frames: Sequence[int]) -> str:
    """Pass and queries in one line: "clean pass (t = 0), query frame 3"."""
    return f"{pass_label}, query frame{'s' if len(query_frames) > 1 else ''} {ranges(query_frames)}"


def noise_label(timestep: float | None, levels: Iterable[float | None] = ()) -> str:
    """Legend entry of the queries' own block in a noisy pass, or of a window at several noise levels."""
    known = {level for level in levels if level is not None}
    if len(known) > 1:
        return f"window (noise from t = {min(known):.4g} to {max(known):.4g})"
    return "own block (noise)" if timestep is None else f"own block (noise at t = {timestep:g})"
