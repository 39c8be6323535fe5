"""What a file holds, and whether it may be replaced: the one rule of every writer.

    replaced = require_replaceable(path, Contents("video", ...), read=video_contents, overwrite=False)

A file is replaced if this program wrote it, nobody changed it since, and the new one lacks nothing that it
has. Another prompt or seed may take its place. Any other file is replaced where --overwrite asks for it.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.caches import files
from experiments.caches.titles import with_article
from wan.errors import library_writes

MARK = "wan-attention"  # Creator of SVG and PDF, Software of PNG, comment of mp4, generator of HTML
CHOICE = "choose another name, or --overwrite replaces it (in Python overwrite=True)"

UNKNOWN = ("", "unknown", None)  # of an older cache that does not say it

CHECKSUM = re.compile(rb"urn:sha256:([0-9a-f]{64})")
NO_CHECKSUM = "urn:sha256:" + "0" * 64  # of a file that is being made
SIGNATURES = {  # how our mark stands in a file, by its suffix
    ".svg": f"<dc:title>{MARK}</dc:title>".encode(),
    ".pdf": f"/Creator ({MARK})".encode(),
    ".png": f"Software\0{MARK}".encode(),
    ".html": f'<meta name="generator" content="{MARK}">'.encode(),
}
BEGINNINGS = {".svg": b"<svg", ".pdf": b"%PDF", ".html": b"<html", ".png": b"\x89PNG"}
MAX_MARKED_BYTES = 1 << 28  # of a figure or a page; ours are smaller


Items = Collection[int | str | tuple[int, ...]]  # numbers, names, places


@dataclass(frozen=True)
class Contents:
    """What a file holds, as far as replacing it could lose something."""

    kind: str  # such as "atlas cache", "video"
    facts: Mapping[str, str | None] = field(default_factory=dict)  # model and weights; None: not recorded
    parts: Mapping[str, Items] = field(default_factory=dict)  # layers, steps, frames, fields
    about: str = ""  # its prompt and seed, in words

    def __str__(self) -> str:
        if self.about:
            return f"the {self.kind} of {self.about}"
        return with_article(self.kind)

    def lost(self, new: "Contents") -> str:
        """Return what a new file in its place would lose, in words; "" for nothing."""
        if self.kind != new.kind:
            return f"is {with_article(self.kind)}, not {with_article(new.kind)}"
        for name, value in self.facts.items():
            other = new.facts.get(name)
            if value is not None and other is not None and value != other:
                return f"has {name} {value}, not {other}"
        missing = []
        for name, items in self.parts.items():
            if name in new.parts:
                absent = sorted(set(items) - set(new.parts[name]))
                if absent:
                    missing.append(f"{name} {numbers_in_words(absent)}")
        if missing:
            return f"has {' and '.join(missing)}, which the new file would lack"
        return ""


def numbers_in_words(values: list[Any]) -> str:
    """Return 9..20 for numbers that follow one another, else the values, of many the first."""
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) > 2 and values == [*range(numbers[0], numbers[0] + len(values))]:
        return f"{numbers[0]}..{numbers[-1]}"
    return files.in_words(values)


Read = Callable[[Path], Contents | None]  # None: of a file that is not ours


def facts_of_model(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return model, weights and LoRAs of a cache's fields; None for what an older file does not say."""
    facts = {name: values.get(name) for name in ("model", "weights")}
    sha256, (_, *loras) = values.get("weights_sha256"), str(values.get("weights_file") or "").split(" + ")
    facts["SHA-256 of weights"] = sha256
    facts["LoRA"] = None
    if sha256:  # else the file may not say either
        facts["LoRA"] = ", ".join(loras) or "none"
    return {name: None if value in UNKNOWN else value for name, value in facts.items()}


def not_ours(path: Path) -> None:
    """Read a file of a kind that carries no mark: a CSV, an .npz, a JSON."""


def require_replaceable(
    path: str | Path, new: Contents, read: Read = not_ours, overwrite: bool = False
) -> Contents | None:
    """Return what stands at a path and may be replaced; None where nothing does.

    Raises CacheError, unless overwrite, for a file that is not ours, and for one that has what new lacks.
    """
    with library_writes(path, files.CacheError):  # such as a name that is too long
        target = files.target_of(path)
    if not target.exists() or not target.stat().st_size:
        return None
    old = read(target)
    if overwrite:
        return old or Contents("file of another kind")
    if old is None:
        raise files.CacheError(
            f"{path} exists, and this program did not write it, or it changed since; {CHOICE}"
        )
    loss = old.lost(new)
    if loss:
        raise files.CacheError(f"{path} {loss}; {CHOICE}")
    return old


# --- Files that tell whether they were changed since they were written
def with_checksum(content: bytes) -> bytes:
    """Return a file's content with its SHA-256 in the place of the first NO_CHECKSUM in it."""
    checksum = f"urn:sha256:{hashlib.sha256(content).hexdigest()}"
    return content.replace(NO_CHECKSUM.encode(), checksum.encode(), 1)


def is_unchanged(content: bytes) -> bool | None:
    """Compare a content with the checksum in it; None where it has none, True where it is being made."""
    place = CHECKSUM.search(content)
    if place is None:
        return None
    plain = content[: place.start()] + NO_CHECKSUM.encode() + content[place.end() :]
    expected = b"urn:sha256:" + hashlib.sha256(plain).hexdigest().encode()
    return place[0] in (NO_CHECKSUM.encode(), expected)


def require_unchanged(path: Path, remedy: str) -> None:
    """Raise CacheError for a file that with_checksum() did not make, or that was changed since.

    A file that is not there may be written, and one that still has NO_CHECKSUM written again.
    """
    if not path.exists():
        return
    unchanged = is_unchanged(path.read_bytes())
    if unchanged is None:
        raise files.CacheError(f"{path} was not written by this program; {remedy}")
    if not unchanged:
        raise files.CacheError(f"{path} was changed since this program wrote it; {remedy}")


def marked_contents(path: Path) -> Contents | None:
    """Read a figure or page; None for one without our mark, and for one that was changed since."""
    suffix = path.suffix.lower()
    if suffix not in SIGNATURES or path.stat().st_size > MAX_MARKED_BYTES:
        return None
    content = path.read_bytes()
    is_ours = is_unchanged(content)
    if suffix == ".png" or (suffix == ".pdf" and is_ours is None):  # has no checksum
        is_ours = SIGNATURES[suffix] in content
    # A checksum that fits is a mark too: figures of version 2.0 have no other
    if not is_ours or BEGINNINGS[suffix] not in content[:1000]:
        return None
    return marked(path)


def marked(path: str | Path) -> Contents:
    """Return what a figure or page at this path holds: it can be drawn again from its cache."""
    return Contents(f"{Path(path).suffix.lower().removeprefix('.')} file")


def require_redrawable(path: str | Path, overwrite: bool = False) -> None:
    """Raise CacheError, unless overwrite, where a file that is no figure or page of ours is at its path."""
    require_replaceable(path, marked(path), marked_contents, overwrite)
