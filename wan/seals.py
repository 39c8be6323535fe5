"""Checksums of what we write and read back: every file of ours has one, and one function makes it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def checksum(*parts: Any) -> bytes:
    """Return the SHA-256 of bytes and buffers: what files of our own hold beside their content."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def sealed(report: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return a report as JSON with the checksum of its content, for unsealed(); a line without an indent."""
    plain = json.loads(json.dumps(report))
    seal = checksum(json.dumps(plain, sort_keys=True).encode()).hex()
    return json.dumps({**plain, "sha256": seal}, ensure_ascii=False, indent=indent).encode() + b"\n"


def unsealed(text: str) -> dict[str, Any]:
    """Return the report of sealed(); ValueError where it was changed. Older ones have no seal."""
    report = json.loads(text)
    if not isinstance(report, dict):
        raise ValueError(f"it holds a {type(report).__name__}")
    seal = report.pop("sha256", None)
    if seal not in (None, checksum(json.dumps(report, sort_keys=True).encode()).hex()):
        raise ValueError("it is not as it was written")
    return report
