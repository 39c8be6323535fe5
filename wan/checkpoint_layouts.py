"""Checkpoints of the family, whatever their layout, under native names; and a report of what was found.

Containers, prefixes and their sources are listed in docs/models.md. A file is a .pt or .safetensors; nothing
in it is executed, and every key must be known in the end (wan/checkpoint.py's report_keys).
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from wan.checkpoint import CheckpointError, read_safetensors, read_torch_file
from wan.errors import named
from wan.weight_names import NATIVE_ROOTS, StateDict, is_diffusers, to_native_names

CONTAINERS = ("generator_ema", "generator", "model")  # what training scripts put a state dict into
WITHOUT_EMA = ("generator", "model", "generator_ema")
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # anywhere in a name
LEADS = ("module.", "model.", "generator.", "diffusion_model.")  # at its beginning, one after another
SHOWN = 5  # prefixes that a message names


@dataclass
class LoadReport:
    """What a file held, what of it was taken, and what was merged into it or left aside."""

    file: str
    container: str = "the file itself"
    prefixes: dict[str, int] = field(default_factory=dict)  # taken off, with the number of keys
    names: str = "native"  # or diffusers
    loaded: int = 0  # tensors
    sizes: str = ""
    merged: str = ""  # the LoRA
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        prefixes = ", ".join(f"{lead}* of {count}" for lead, count in self.prefixes.items())
        parts = [
            f"{self.file}: {self.loaded} tensors of {self.container}",
            self.sizes,
            f"{self.names} names",
            f"without the prefix {prefixes}" if prefixes else "",
            self.merged,
            f"ignored: {', '.join(self.ignored)}" if self.ignored else "nothing ignored",
        ]
        return "; ".join(filter(None, parts))


def read_self_forcing_state(path: str | Path, use_ema: bool = True) -> StateDict:
    """The generator of a checkpoint under native names: read_checkpoint() without its report."""
    return read_checkpoint(path, use_ema)[0]


def read_checkpoint(path: str | Path, use_ema: bool = True) -> tuple[StateDict, LoadReport]:
    """The generator of a checkpoint under native names, and what was found.

    The file holds a state dict, or one of CONTAINERS with one (a warning says so where it is not the one
    that use_ema asks for). Raises CheckpointError for any other file, naming the prefixes of its keys.
    """
    report = LoadReport(Path(path).name)
    state = _pick(path, read_weights_file(path), use_ema, report)
    state = without_prefixes(path, state, report)
    if not any(name.partition(".")[0] in NATIVE_ROOTS for name in state):
        raise CheckpointError(
            f"{path} has no known layout of a Wan transformer; its keys begin with {prefixes_of(state)}"
        )
    report.loaded = len(state)
    return state, report


def read_weights_file(path: str | Path) -> dict[str, Any]:
    """What a .pt, a .safetensors, or an index of .safetensors shards holds."""
    if str(path).endswith((".safetensors", ".safetensors.index.json")):
        return read_safetensors(Path(path))
    return read_torch_file(path)


def _pick(path: str | Path, content: dict[str, Any], use_ema: bool, report: LoadReport) -> StateDict:
    """The state dict that is wanted; the others are ignored."""
    order = CONTAINERS if use_ema else WITHOUT_EMA
    there = [name for name in order if isinstance(content.get(name), dict)]
    if there:
        chosen, state = there[0], content[there[0]]
        if "generator" in order[0] and chosen in ("generator", "generator_ema") and chosen != order[0]:
            warnings.warn(f"{path} holds no {order[0]}; its {chosen} is used", stacklevel=4)
        report.container = chosen
        report.ignored = tuple(_described(name, content[name]) for name in content if name != chosen)
    else:
        state = content
    if not state or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(
            f"{path} holds no state dict of tensors, but: {', '.join(map(named, list(content)[:SHOWN]))}"
        )
    return {str(name): tensor for name, tensor in state.items()}


def _described(name: Any, value: Any) -> str:
    return f"{named(name)} ({len(value)})" if isinstance(value, dict) else named(name)


def without_prefixes(path: str | Path, state: StateDict, report: LoadReport | None = None) -> StateDict:
    """Native names: without what training wrappers put before them. Raises CheckpointError for mixed ones."""
    leads: Counter[str] = Counter()
    found: StateDict = {}
    for name, tensor in state.items():
        bare, wrapped = name, [w for w in WRAPPERS if w in name]
        for wrapper in wrapped:
            bare = bare.replace(wrapper, "")
        lead = lead_of(bare)
        leads[lead] += 1
        if bare[len(lead) :] in found:
            raise CheckpointError(
                f"{path} has two keys for {named(bare[len(lead) :])}, such as {named(name)}"
            )
        found[bare[len(lead) :]] = tensor
        if report:
            for wrapper in wrapped:
                report.prefixes[wrapper] = report.prefixes.get(wrapper, 0) + 1
    if len(leads) > 1:
        parts = ", ".join(f"{n} with {lead or 'none'}" for lead, n in leads.most_common(SHOWN))
        raise CheckpointError(f"{path} mixes prefixes of keys: {parts}; it was put together from two files")
    if report:
        report.prefixes |= {lead: n for lead, n in leads.items() if lead}
    if is_diffusers(found):
        if report:
            report.names = "diffusers'"
        return to_native_names(found)
    return found


def lead_of(name: str) -> str:
    """What a training script put before a name: "model.diffusion_model." or nothing."""
    rest, more = name, True
    while more:
        lead = next((lead for lead in LEADS if rest.startswith(lead)), "")
        rest, more = rest[len(lead) :], bool(lead)
    return name[: len(name) - len(rest)]


def prefixes_of(names: Iterable[str]) -> str:
    """The beginnings of names with their numbers, the most frequent first: "encoder.blocks. (40), ..."."""
    starts = Counter(re.sub(r"\d+", "N", ".".join(name.split(".")[:2])) for name in names)
    shown = ", ".join(f"{named(start)} ({count})" for start, count in starts.most_common(SHOWN))
    return shown + (f" and {len(starts) - SHOWN} more" if len(starts) > SHOWN else "")
