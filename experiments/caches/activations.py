"""Activations that were captured at named sites: a table of calls, its safetensors file, a store of runs.

table = load_activations("cache/activations.safetensors")["z"]
table.at(layer=5, step=0).stack()       # a tensor, whose axes are table.axes

capture(session, ..., stream_to=FOLDER) writes a store, which ActivationStore(FOLDER) reads:

    FOLDER/RUN/block_00000.safetensors ...   the calls of a block, or of a pipeline's step, at all sites
    FOLDER/RUN/latents.safetensors           site "x0", one call: the whole video, [1, F, C, h, w]; comes last

RUN is FINGERPRINT_seedSEED. Each file is one of save_activations: tensors SITE/NNNNNN, one a call, and as
metadata, in JSON: "about" the run, "sites" with the place and the SHA-256 of each call, and "sha256" of these
two. Every file is written whole. A run without latents was interrupted; its blocks are whole.
"""

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby, product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from experiments.caches import outputs
from experiments.caches.files import (
    ONLY,
    CacheError,
    Record,
    replacing,
    require_held,
    require_suffix,
    settings_and_text,
)
from experiments.caches.titles import prompt_in_words, seed_in_words
from wan import errors
from wan.identity import UNNAMED
from wan.sites import SITES

FORMAT = "activations"
COORDINATES = ("layer", "block", "step", "evaluation", "branch", "model")
OF_SOME = ("evaluation", "branch", "model")  # which are no axis where one value is all
CHOSEN = ("layers", "blocks", "steps", "frames", "heads")  # numbers that a capture may choose
LATENTS, OF_1_0 = "latents.safetensors", "activations.json"
NEW = ".new"  # ends the folder of a run that replaces an earlier one once it is complete
RUN_NAME = re.compile(rf"[0-9a-f]{{32}}_seed(-?\d+|None)({re.escape(NEW)})?")
SETTINGS = 16  # digits of a fingerprint with ONLY that are of a run's settings; 8 of a text follow
NO_TEXT = "f" * 8
OF_A_MODEL: tuple[str, ...] = ("model", "weights", "weights_file", "weights_sha256", "quantised", "dtype")
OF_A_MODEL += ("num_heads", "head_dim", "frame_seq_length")
NOT_OF_A_FILE = ("changed", "pipeline")  # weights that a fingerprint of those in memory tells apart
IN_ORDER = "rows come in the order of the run"
ROW_AXES = ("L", "T", "F")  # what a row may be of: a token, a prompt token, a frame
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
DTYPES |= {"U8": torch.uint8, "BOOL": torch.bool}


@dataclass(frozen=True)
class Place:
    """Where an activation was: its layer (None for x_t, flow and x0), pass and frames."""

    layer: int | None
    block: int
    step: int
    frames: tuple[int, ...]
    is_clean_pass: bool
    timestep: float
    branch: str | None = "cond"
    evaluation: int = 0  # of the same model, block, step and branch: 1 for its second forward
    model: str | None = None  # of two experts the one that ran

    def fits(self, where: Mapping[str, Any]) -> bool:
        """Return whether it has these values, by the names of its fields. CacheError: other names."""
        names = [item.name for item in fields(Place) if item.name != "frames"]
        for name in where:
            errors.require_known(name, names, "activations have no {}", CacheError)
        return all(getattr(self, name) == wanted for name, wanted in where.items())


@dataclass(frozen=True, eq=False)
class Activations(Sequence[Tensor]):
    """The activations of one site, a tensor a call, and where each was.

    chosen has the numbers that were asked for, in their order, by name: layers, blocks, steps, frames, heads.
    What it does not name is all that there is.
    """

    site: str
    places: tuple[Place, ...]
    values: tuple[Tensor, ...]
    is_reduced: bool = False  # by a user's function: axes have no names then
    chosen: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def at(self, **where: Any) -> "Activations":
        """Return the calls of a layer, block, step, is_clean_pass or branch: at(layer=5, step=0)."""
        rows = [n for n, place in enumerate(self.places) if place.fits(where)]
        if not rows:
            raise CacheError(f"{self.site}: no call of {where} was captured")
        places, values = [self.places[n] for n in rows], [self.values[n] for n in rows]
        return replace(self, places=tuple(places), values=tuple(values))

    @property
    def coordinates(self) -> dict[str, list[Any]]:
        """The layers, blocks and steps of the calls, in the asked order; what else tells them apart.

        That is evaluations and branches where there are several, and experts that ran at the same step.
        """
        coordinates = dict[str, list[Any]]()
        for name in COORDINATES:
            values = {getattr(place, name) for place in self.places}
            if None in values or (len(values) == 1 and name in OF_SOME):
                continue
            if name == "model":  # experts follow each other, and each step has one
                passes = [[getattr(place, other) for other in coordinates] for place in self.places]
                if len({tuple(at) for at in passes}) == len(self.places):
                    continue
            coordinates[name] = sorted(values)
            order = self.chosen.get(f"{name}s", ())
            if values <= {*order}:
                coordinates[name] = [number for number in order if number in values]
        return coordinates

    @property
    def heads(self) -> list[int] | None:
        """The numbers of the heads on axis H, in its order; None for a site without heads, and reduced."""
        axes = SITES[self.site].split()
        if "H" not in axes or self.is_reduced:
            return None
        if "heads" in self.chosen:
            return list(self.chosen["heads"])
        return list(range(self.values[0].shape[axes.index("H")]))

    @property
    def frames(self) -> list[int]:
        """The numbers of the latent frames that the calls have, each once, in the order of the calls."""
        return list(dict.fromkeys(frame for place in self.places for frame in place.frames))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes of stack()."""
        names = SITES[self.site].split()
        if self.is_reduced:
            names = [str(n) for n in range(self.values[0].ndim)]
        return (*self.coordinates, *names)

    def stack(self) -> Tensor:
        """Stack all calls to one tensor, whose axes have the names axes; CacheError where shapes differ."""
        coordinates = self.coordinates
        by_key = dict[tuple[Any, ...], Tensor]()
        for place, value in zip(self.places, self.values, strict=True):
            key = tuple(getattr(place, name) for name in coordinates)
            if key in by_key:
                raise CacheError(
                    f"{self.site}: two calls are of {dict(zip(coordinates, key, strict=True))}, and nobody "
                    "told what else they are of; choose some by at(...), or take them one by one"
                )
            by_key[key] = value
        # A tensor needs every combination of coordinates once, each of one shape
        keys = [*product(*coordinates.values())]
        shapes = {tuple(value.shape) for value in self.values}
        if len(shapes) > 1 or len(by_key) < len(keys):
            raise CacheError(
                f"{self.site}: {len(by_key)} of {len(keys)} calls, of {len(shapes)} shapes, make no tensor; "
                "choose some by at(block=...)"
            )
        lengths = [len(values) for values in coordinates.values()]
        return torch.stack([by_key[key] for key in keys]).unflatten(0, lengths)

    def __repr__(self) -> str:
        numbers = dict[str, Any](self.coordinates)
        numbers |= {name: self.chosen[name] for name in ("frames", "heads") if name in self.chosen}
        calls = ", ".join(f"{name} {list(values)}" for name, values in numbers.items())
        shapes = {str(list(value.shape)) for value in self.values}
        return f"Activations: {self.site}, {len(self)} calls ({calls}) of shape {' or '.join(sorted(shapes))}"


def chosen_numbers(request: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the numbers that a capture chose, by name (Activations.chosen)."""
    return {name: list(request[name]) for name in CHOSEN if request[name] is not None}


# --- A file
class StoredCall(NamedTuple):
    """An activation in a file: its place, and where its numbers are."""

    path: Path
    name: str
    start: int  # byte of the file
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str  # "" in older files

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        """Compare the numbers with their SHA-256, of an older file all of it. CacheError: damaged."""
        if not self.sha256:
            load_activations(self.path)
            return
        with reading(self.path), self.path.open("rb") as file:
            file.seek(self.start)
            numbers = file.read(self.num_bytes)
            require_equal(call_sha256(self.name, self.dtype, self.shape, numbers), self.sha256)


def reading(path: str | Path) -> AbstractContextManager[None]:
    """Turn an error of reading a file into one line that says what to do."""
    return errors.library_reads(f"{path}: activations", CacheError, "remove it and capture that run again")


def call_sha256(name: str, dtype: torch.dtype, shape: Sequence[int], numbers: Any) -> str:
    """Return the SHA-256 of a call: its name, dtype and shape, and its numbers as bytes."""
    digest = hashlib.sha256(f"{name} {dtype} {list(shape)}".encode())
    digest.update(numbers)
    return digest.hexdigest()


def bytes_of(x: Tensor) -> Any:
    """Return the numbers of a contiguous tensor on the CPU as bytes, without a copy."""
    return x.reshape(-1).view(torch.uint8).numpy().data  # a tensor without axes has no view as bytes


def require_equal(checksum: object, written: object) -> None:
    """Raise ValueError where a checksum is not the one that was written."""
    if checksum != written:
        raise ValueError("its content is not what was written")


def head_sha256(metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of what a file says of its run and calls."""
    return hashlib.sha256(json.dumps([metadata["about"], metadata["sites"]]).encode()).hexdigest()


def content_sha256(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a file of version 2.0: what its metadata says, and its tensors by name."""
    digest = hashlib.sha256(json.dumps([metadata["about"], metadata["sites"]]).encode())
    for name, x in tensors.items():
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(bytes_of(x))
    return digest.hexdigest()


def save_activations(
    path: str | Path, tables: Mapping[str, Activations], about: Mapping[str, Any], overwrite: bool = False
) -> Path:
    """Write tables by site, whole or not at all, with facts about their run.

    CacheError where it cannot, and, unless overwrite, for a file there that must stay (outputs.py).
    """
    path = Path(path)
    require_suffix(path, ".safetensors")
    # A tensor a call; what safetensors has no type for goes into its metadata, as JSON
    tensors: dict[str, Tensor] = {}
    sites = {}
    for site, table in tables.items():
        calls = {f"{site}/{n:06d}": x.cpu().contiguous() for n, x in enumerate(table)}
        sites[site] = {
            "places": [asdict(place) for place in table.places],
            "is_reduced": table.is_reduced,
            "chosen": {name: list(numbers) for name, numbers in table.chosen.items()},
            "sha256": [call_sha256(name, x.dtype, x.shape, bytes_of(x)) for name, x in calls.items()],
        }
        tensors |= calls
    metadata = {"format": FORMAT, "about": json.dumps(dict(about)), "sites": json.dumps(sites)}
    metadata["sha256"] = head_sha256(metadata)
    with errors.library_writes(path, CacheError):
        if not overwrite:
            outputs.require_replaceable(path, contents_of_tables(tables, about), activations_contents)
        with replacing(path) as file:
            save_file(tensors, file.name, metadata)
    return path


def contents_of_tables(tables: Mapping[str, Activations], about: Mapping[str, Any]) -> outputs.Contents:
    """Return what a file of tables holds, as far as replacing it could lose something."""
    places = [(site, place) for site, table in tables.items() for place in table.places]
    parts: dict[str, outputs.Items] = {"sites": {*tables}}
    parts["frames"] = {frame for _, place in places for frame in place.frames}
    parts["calls (site, layer, block, step)"] = {
        f"{site} {place.layer} {place.block} {place.step}" for site, place in places
    }
    return outputs.Contents("file of activations", {"model": about.get("model")}, parts)


def activations_contents(path: Path) -> outputs.Contents | None:
    """Return what a file of activations holds; None for any other file."""
    try:
        content = load_activations(path)
    except CacheError:
        return None
    tables = {site: table for site, table in content.items() if isinstance(table, Activations)}
    return contents_of_tables(tables, content)


def load_activations(path: str | Path) -> dict[str, Any]:
    """Read what save_activations wrote: format, facts about the run, and tables by site.

    Raises CacheError for a damaged file.
    """
    with reading(path), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CacheError(f"{path} holds no activations of this program")
        content: Record = {"format": FORMAT, **json.loads(metadata["about"])}
        tensors: dict[str, Tensor] = {}
        is_older = False
        for site, table in json.loads(metadata["sites"]).items():
            places = tuple(place_of(values) for values in table["places"])
            calls = {f"{site}/{n:06d}": file.get_tensor(f"{site}/{n:06d}") for n in range(len(places))}
            chosen = table.get("chosen", {})  # which files of 2.0 lack
            values = tuple(calls.values())
            content[site] = Activations(site, places, values, bool(table["is_reduced"]), chosen)
            tensors |= calls
            if "sha256" not in table:
                is_older = True
                continue
            sums = [call_sha256(name, x.dtype, x.shape, bytes_of(x)) for name, x in calls.items()]
            require_equal(sums, table["sha256"])
        # A file of 2.0 has one checksum of all; those from before 0.2 have none
        if not is_older:
            require_equal(head_sha256(metadata), metadata.get("sha256"))
        elif "sha256" in metadata:
            require_equal(content_sha256(metadata, tensors), metadata["sha256"])
    return content


def place_of(values: Mapping[str, Any]) -> Place:
    """Return a place as a file's metadata has it."""
    return Place(**{**values, "frames": tuple(values["frames"])})


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, list[StoredCall]]]:
    """Read what a file of a store says about its run, and its calls by site. CacheError: damaged."""
    with reading(path):
        with safe_open(path, "pt") as file:  # compares the header with the length of the file
            metadata = file.metadata() or {}
        # https://huggingface.co/docs/safetensors: 8 bytes of length, the header, the numbers
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        calls: dict[str, list[StoredCall]] = {}
        sites = json.loads(metadata["sites"])
        is_older = any("sha256" not in table for table in sites.values())
        if not is_older:
            require_equal(head_sha256(metadata), metadata["sha256"])
        for site, table in sites.items():
            calls[site] = []
            for n, values in enumerate(table["places"]):
                name = f"{site}/{n:06d}"
                call = StoredCall(
                    path=path,
                    name=name,
                    start=8 + length + header[name]["data_offsets"][0],
                    place=place_of(values),
                    shape=tuple(header[name]["shape"]),
                    dtype=DTYPES[header[name]["dtype"]],
                    sha256="" if is_older else table["sha256"][n],
                )
                calls[site].append(call)
        return json.loads(metadata["about"]), calls


# --- A run of a store
@dataclass(eq=False)
class StoredRun:
    """A run of a store: its folder, and facts about it.

    Attributes:
        path: its folder.
        about: facts such as prompt, seed, fingerprint and num_frames.

    Examples:
        >>> stored = ActivationStore("cache/acts").runs[0]
        >>> stored.about["prompt"], stored.tables["resid_post"].stack().shape
    """

    path: Path
    about: Record
    count: int = 0  # of the blocks that write() wrote

    def __repr__(self) -> str:
        prompt, seed = prompt_in_words(self.about.get("prompt")), seed_in_words(self.about.get("seed"))
        return f"StoredRun: {prompt}, {seed}, {self.path}"

    @property
    def name(self) -> str:
        """The name of its folder, by its identity."""
        return f"{self.about['fingerprint']}_seed{self.about['seed']}"

    @property
    def order(self) -> tuple[Any, ...]:
        """By which runs are sorted: seed, those without one last; prompt, and the name of the folder."""
        seed, prompt = self.about["seed"], self.about["prompt"]
        return seed is None, seed or 0, prompt or "", self.path.name

    @property
    def is_complete(self) -> bool:
        """True where the last file was written, which counts the others, and none is missing."""
        count = self.about.get("blocks")
        return count is not None and all(self.block(n).is_file() for n in range(count))

    @property
    def blocks(self) -> list[Path]:
        """The files of its activations, in the order of the run."""
        if "blocks" in self.about:
            return [self.block(n) for n in range(self.about["blocks"])]
        return sorted(self.path.glob("block_*.safetensors"))

    def block(self, number: int) -> Path:
        """Return the path of a file of activations by its number in the run."""
        return self.path / f"block_{number:05d}.safetensors"

    @property
    def tables(self) -> dict[str, Activations]:
        """All its activations by site, read into memory. CacheError where a file is damaged."""
        tables: dict[str, Activations] = {}
        for path in self.blocks:
            content = load_activations(path)
            self.require_own(path, content)
            # Calls of later blocks follow those of earlier ones, site by site
            for site, table in content.items():
                if isinstance(table, Activations):
                    earlier = tables.get(site, replace(table, places=(), values=()))
                    places, values = earlier.places + table.places, earlier.values + table.values
                    tables[site] = replace(table, places=places, values=values)
        return tables

    @property
    def latents(self) -> Tensor:
        """The video's latents [1, F, C, h, w], of a run that is complete."""
        content = load_activations(self.path / LATENTS)
        if "x0" not in content:
            raise CacheError(f"{self.path}: this run has no latents: nobody told them when it was made")
        return content["x0"][0]

    def read(self, site: str, **where: Any) -> Activations:
        """Read the calls of a site.

        Args:
            site: the name of the site.
            **where: layer, block, step and so on, as Activations.at() names them.

        Raises:
            CacheError: where there is no such call, and for a file that was changed.
        """
        calls = [call for call in self.calls(site) if call.place.fits(where)]
        if not calls:
            raise CacheError(f"{site}: no call of {where} is in {self.path}")
        values = []
        for call in calls:
            call.check()
            with reading(call.path), safe_open(call.path, "pt") as file:
                values.append(file.get_tensor(call.name))
        request = self.about["request"]
        return Activations(
            site=site,
            places=tuple(call.place for call in calls),
            values=tuple(values),
            is_reduced=request["reduce"] is not None,
            chosen=chosen_numbers(request),
        )

    def calls(self, site: str) -> list[StoredCall]:
        """Return the calls of a site, by the headers of its files. CacheError where one is damaged."""
        sites = self.about["request"]["sites"]
        errors.require_known(site, sites, f"no {{}} in {self.path}, but {', '.join(sites)}", CacheError)
        calls = list[StoredCall]()
        for path in self.blocks:
            about, by_site = read_header(path)
            self.require_own(path, about)
            calls += by_site.get(site, ())
        return calls

    def require_own(self, path: Path, about: Mapping[str, Any]) -> None:
        """Raise CacheError for a file of another run in its folder."""
        with reading(path):
            if begun_as(about) != begun_as(self.about):
                raise ValueError("it is of another run than its folder")

    def write(self, tables: Mapping[str, Activations]) -> None:
        """Add a block."""
        save_activations(self.block(self.count), tables, self.about, overwrite=True)
        self.count += 1

    def finish(self, latents: Tensor | None, facts: Mapping[str, Any] | None = None) -> None:
        """Write the latents, where they are known: the run is complete, and replaces an earlier one.

        facts are those of the run at its end, under which it is filed: edits may have come while it ran.
        """
        if facts is not None:
            self.file_as(facts)
        tables = {}
        if latents is not None:
            place = Place(None, 0, 0, tuple(range(latents.shape[1])), True, 0.0)
            tables["x0"] = Activations("x0", (place,), (latents.cpu(),))
        self.about["blocks"] = self.count
        save_activations(self.path / LATENTS, tables, self.about, overwrite=True)
        if self.path.suffix == NEW:
            self.replace_earlier()
            warnings.warn(
                f"{self.path} was made again and replaces the earlier run: its function has no name, so that "
                'runs are not known to be equal; named("...", function) keeps them',
                stacklevel=3,
            )

    def file_as(self, facts: Mapping[str, Any]) -> None:
        """Say what a run turned out to be, and move it to the folder of that name."""
        about = about_of(self.about["request"], facts, self.about["batch"])
        about["begun_as"] = begun_as(self.about)  # as its blocks say
        if settings_and_text(about["fingerprint"]) == settings_and_text(self.about["fingerprint"]):
            self.about = about | {"fingerprint": self.about["fingerprint"]}
            return
        self.about = about
        path = self.path.with_name(self.name)
        with errors.library_writes(path, CacheError):
            if path.exists():  # the same run, or what was left of it
                shutil.rmtree(path)
            self.path = self.path.rename(path)

    def replace_earlier(self) -> None:
        """Put a complete run in the place of an earlier one."""
        earlier = self.path.with_suffix("")
        with errors.library_writes(earlier, CacheError):
            if earlier.exists():
                shutil.rmtree(earlier)
            self.path = self.path.rename(earlier)


def texts_by_name(edits: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the hashes of the source texts of a run's functions and classes with names, by name."""
    records = (edits or {}).get("edits", ())
    texts = {}
    for record in records:
        name = record.get("function", record.get("class"))
        if name is not None and UNNAMED not in record:
            texts[name] = record["text_sha256"]
    return texts


def model_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return which model a run's facts are of, its LoRA by a hash too."""
    names = str(facts.get("weights_file", "")).split(" + ")
    files = [file for file in facts.get("files") or () if file["name"] in names]
    model = {name: facts.get(name) for name in OF_A_MODEL} | {"files": files}
    if facts.get("weights") in NOT_OF_A_FILE:
        model["live_weights"] = facts.get("live_weights")
    return model


def begun_as(about: Mapping[str, Any]) -> str:
    """Return under which name a run was begun, which its first and its last file say alike."""
    return about.get("begun_as") or f"{about['fingerprint']}_seed{about['seed']}"


def about_of(request: Mapping[str, Any], facts: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Return what files of a run say about it."""
    about = {name: facts[name] for name in ("prompt", "seed", "fingerprint", "num_frames")}
    policy = facts.get("config", {}).get("cache_policy")
    about |= model_of(facts) | {"policy": policy, "edits": facts.get("interventions")}
    if "uncompiled" in facts:
        about["uncompiled"] = facts["uncompiled"]
    return about | {"batch": batch, "request": dict(request)}


# --- A store of runs
class ActivationStore:
    """A folder of activations of any number of runs of one model, for one request.

    runs looks at headers; read() and rows() read what is asked for, and compare it with its SHA-256; check()
    reads all.

    Args:
        path: the folder that capture(..., stream_to=FOLDER) wrote.

    Raises:
        CacheError: for any other folder.

    Examples:
        >>> store = ActivationStore("cache/acts")
        >>> [(run.about["prompt"], run.about["seed"]) for run in store.runs]
        >>> store.runs[0].read("resid_post", layer=5, step=0).stack().shape  # [layer, block, step, B, L, dim]
        [1, 2, 1, 1, 48, 192]
        >>> rows = store.rows("resid_post", 5, steps=[0, -1])  # of all runs; rows[0] is [192]
        >>> for x in DataLoader(rows, batch_size=4096, shuffle=True):
        ...     loss = train(x)  # [4096, 192]
    """

    def __init__(self, path: str | Path):
        if not isinstance(path, str | os.PathLike) or not str(path).strip():
            raise CacheError(f"a store of activations is a folder, not {errors.short_repr(path)}")
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"ActivationStore({str(self.path)!r})"

    def require_folder(self) -> None:
        """Make the folder. Raise CacheError, before anything is generated, where it cannot be written."""
        with errors.library_writes(self.path, CacheError):
            self.path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=self.path).close()

    @cached_property
    def runs(self) -> list[StoredRun]:
        """Its complete runs by seed and prompt, each once, as they were when it was first asked for them."""
        by_fingerprint = {run.about["fingerprint"]: run for run in self.all_runs if run.is_complete}
        runs = list(by_fingerprint.values())  # of two the newer, which has not replaced the earlier one yet
        if not runs:
            raise CacheError(
                f"{self.path} has no complete run; give a folder in which "
                "capture(session, ..., stream_to=FOLDER) has generated one"
            )
        return runs

    @property
    def all_runs(self) -> list[StoredRun]:
        """Its runs by seed and prompt, those that were interrupted too; a copy under another name is none.

        In the order of their fingerprints, the first run would be another one on another machine.
        """
        runs = list(self._stored())
        names = {run.path.name for run in runs}
        originals = [run for run in runs if run.path.name.startswith(run.name) or run.name not in names]
        return sorted(originals, key=lambda run: run.order)

    def _stored(self, pattern: str = "*") -> Iterator[StoredRun]:
        """Yield its runs in any order, by the header of the last file of each."""
        if not os.path.isdir(self.path):
            return
        if (self.path / OF_1_0).exists() or any(self.path.glob("block_*.safetensors")):
            raise CacheError(
                f"{self.path} holds activations of version 1 or older; capture them again in another folder"
            )
        for path in self.path.glob(pattern):
            files = [path / LATENTS, *sorted(path.glob("block_*.safetensors"), reverse=True)]
            files = [file for file in files if file.is_file()]
            # A run that was interrupted in its first block has none
            if RUN_NAME.fullmatch(path.name) and files:
                about, _ = read_header(files[0])
                yield StoredRun(path, about)

    def check(self) -> None:
        """Read every file of complete runs once. CacheError for the first that is not what was written."""
        for run in self.runs:
            for path in [*run.blocks, run.path / LATENTS]:
                run.require_own(path, load_activations(path))

    # --- For capture(..., stream_to=)
    def require(self, request: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
        """Raise CacheError where runs are of another request, or of another model than a run's facts."""
        run = next(self._stored(), None)
        if run is None:
            return
        pairs = [("request", run.about["request"], request)]
        if facts is not None:
            pairs.append(("model", model_of(run.about), model_of(facts)))
        for part, stored, wanted in pairs:
            wanted = json.loads(json.dumps(wanted))
            for name in sorted({*wanted, *stored}, key=lambda name: (name == "live_weights", name)):
                if wanted.get(name) == stored.get(name):
                    continue
                values = f"{errors.short_repr(stored.get(name))}, not {errors.short_repr(wanted.get(name))}"
                remedy = "choose another folder"
                if name == "reduce":
                    remedy += ', or give each function a name of its own, named("...", function)'
                raise CacheError(
                    f"{self.path} holds another {part}'s activations: {name} is {values}; {remedy}"
                )

    def begin(self, request: Mapping[str, Any], facts: Mapping[str, Any], batch: int) -> StoredRun:
        """Return the run of these facts, to be written unless it is complete. CacheError as require().

        facts are the fields that a run's caches share (Session.common); batch is how many videos are made
        together. A run with a function without a name is made again each time: the new run replaces an
        earlier one of the same settings and text; CacheError where the text is another one, or not known.
        """
        self.require(request, facts)
        fingerprint, about = facts["fingerprint"], about_of(request, facts, batch)
        path = self.path / begun_as(about)
        about["begun_as"] = path.name
        self._require_texts(texts_by_name(about["edits"]))
        for run in self._stored(path.name):
            if run.name != path.name:
                raise CacheError(f"{path} is a copy of the run {run.name}; remove it, or move it elsewhere")
        reduce = request["reduce"] or {}
        if not fingerprint.startswith(ONLY) and UNNAMED not in reduce:
            # 1. Where all functions have names, a complete run stays
            for run in self._stored(path.name):
                if run.is_complete:
                    return run
        else:
            # 2. A run with a function that has none replaces one of the same settings and text
            has_text = (
                not settings_and_text(fingerprint).endswith(NO_TEXT)
                and reduce.get("text_sha256", "") is not None
            )
            for run in self._stored(f"{fingerprint[:SETTINGS]}*_seed{facts['seed']}*"):
                if not has_text or run.about["fingerprint"] != fingerprint:
                    raise CacheError(
                        f"{run.path} holds a run of the same settings, with a function that has no name and "
                        'another text, or none: give each function a name, named("...", function)'
                    )
                if run.is_complete and run.path.name.endswith(NEW):
                    run.replace_earlier()  # of a process that ended before it did so
            if any(run.is_complete for run in self._stored(path.name)):
                path = path.with_name(path.name + NEW)
        # 3. An interrupted run is written again, from its first block on
        if path.exists():
            with errors.library_writes(path, CacheError):
                shutil.rmtree(path)
        return StoredRun(path, about)

    def _require_texts(self, texts: Mapping[str, str]) -> None:
        """Raise CacheError where a run has a function of one of these names, and of another text."""
        if not texts:
            return
        for run in self._stored():
            for name, text in texts_by_name(run.about["edits"]).items():
                if texts.get(name, text) != text:
                    raise CacheError(
                        f"{run.path} holds a run with another function of the name {name!r}: give this one "
                        "another name, named(...)"
                    )

    # --- Rows of all runs
    def rows(
        self,
        site: str,
        layer: int | None,
        *,
        frames: int | Collection[int] | None = None,
        steps: int | Collection[int] | None = None,
        runs: Collection[int] | None = None,
        unchecked: bool = False,
    ) -> "ActivationRows":
        """Return the rows [d] of a site and layer as a torch Dataset, run after run, call after call.

        A row is a token (of sites without tokens a frame) with all that it has there, heads one after
        another. All rows are compared with their SHA-256 first.

        Args:
            site: the name of the site.
            layer: the number of the layer; None of sites that belong to none.
            frames: latent frames of the video; None: all.
            steps: denoising steps; -1 is the last that was captured.
            runs: indices of some of its runs, such as those to train on.
            unchecked: leave the comparison out, as behind check(): a large store is read once less.
        """
        # 1. The calls, which have rows of one length and type
        chosen_runs, chosen_frames = self.runs, errors.as_numbers("frames", frames)
        errors.require_ascending("frames", chosen_frames, IN_ORDER)
        numbers = errors.as_numbers("runs", runs)
        if numbers is not None:
            for run in numbers:
                require_held("run", run, range(len(self.runs)), self.path)
            chosen_runs = [self.runs[run] for run in numbers]
        calls = self._calls(site, layer, chosen_runs, errors.as_numbers("steps", steps))
        request, axes, first = self.runs[0].about["request"], SITES[site].split(), 2
        if request["reduce"] is not None:
            first = -1  # its function named no axes: a row is the last one
            if frames is not None:
                raise CacheError(f"{self.path}: what reduce= made has no frames to choose; leave frames out")
        elif axes[1] not in ROW_AXES:
            raise CacheError(f"{site} has no rows of one length ({SITES[site]}): read(...) each run")
        kinds = {(math.prod(call.shape[first:]), call.dtype) for call in calls}
        if len(kinds) > 1:
            raise CacheError(f"rows of several lengths or types make no batch: {errors.short_repr(kinds)}")
        [(width, dtype)] = kinds
        if not unchecked:
            for call in calls:
                call.check()
        # 2. The rows that lie together in a file: of all frames, or of each that is chosen
        pieces = []
        for call in calls:
            count = math.prod(call.shape) // width
            # A capture of some frames has kept these alone
            captured = [n for n in call.place.frames if request["frames"] is None or n in request["frames"]]
            is_by_frame = axes[1] == "L" or (axes[1] == "F" and count == len(captured))
            if chosen_frames is None:
                pieces.append(RowPiece(call.path, call.start, count))
            elif is_by_frame:
                of_frame = count // len(captured)
                for n, frame in enumerate(captured):
                    if frame in chosen_frames:
                        start = call.start + n * of_frame * width * dtype.itemsize
                        pieces.append(RowPiece(call.path, start, of_frame))
            elif not set(chosen_frames).isdisjoint(captured):  # all its frames share the rows
                pieces.append(RowPiece(call.path, call.start, count))
        if not pieces:
            raise CacheError(
                f"{self.path}: frames {errors.short_repr(chosen_frames)} are in no call of {site}"
            )
        return ActivationRows(pieces, width, dtype)

    def _calls(
        self, site: str, layer: int | None, runs: Sequence[StoredRun], steps: list[int] | None
    ) -> list[StoredCall]:
        """Return the calls of a site, layer and steps, run after run. CacheError where there is none."""
        # 1. Those of the layer; of all layers of many runs they would take more memory than a batch
        calls, layers = [], set()
        for run in runs:
            for call in run.calls(site):
                layers.add(call.place.layer)
                if call.place.layer == layer:
                    calls.append(call)
        require_held(f"{site} of layer", layer, sorted(layers), self.path)
        if steps is None:
            return calls
        # 2. Those of the steps; -1 is the last that denoises
        last = max((call.place.step or 0 for call in calls if not call.place.is_clean_pass), default=-1)
        chosen = errors.as_numbers("steps", [last if step == -1 else step for step in steps])
        errors.require_ascending("steps", chosen, IN_ORDER)
        captured = {call.place.step for call in calls}
        for step in chosen or ():
            require_held(f"{site} of step", step, sorted(captured), self.path)
        return [call for call in calls if call.place.step in {*(chosen or ())}]


# --- Rows of a store, for torch.utils.data
class RowPiece(NamedTuple):
    """Rows that lie one after another in a file."""

    path: Path
    start: int  # byte of the file
    num_rows: int


class ActivationRows(Dataset[Tensor]):
    """Rows of width numbers, read from the files of a store as they are asked for (ActivationStore.rows).

    >>> for x in DataLoader(rows, batch_size=4096, shuffle=True, num_workers=2):
    ...     loss = train(x)  # [4096, width]

    A shuffle of all rows holds their numbers, 40 bytes a row; of a billion take
    sampler=RandomSampler(rows, replacement=True, num_samples=...) in its place. Files are not mapped: pages
    of a map count as the process's memory as long as it is there, so that shuffled rows would take as much as
    the store has, and a map of a file that becomes shorter ends the process.
    """

    def __init__(self, pieces: Sequence[RowPiece], width: int, dtype: torch.dtype):
        self.width, self.dtype = width, dtype
        self.row_bytes = width * dtype.itemsize
        self.paths = list(dict.fromkeys(piece.path for piece in pieces))
        numbers = {path: n for n, path in enumerate(self.paths)}
        self.files = np.array([numbers[piece.path] for piece in pieces])
        self.starts = np.array([piece.start for piece in pieces])
        self.counts = np.array([piece.num_rows for piece in pieces])
        self.ends = self.counts.cumsum()  # of each piece, in rows of the dataset

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Read rows, file by file: a DataLoader asks for those of a batch at once."""
        pieces = np.searchsorted(self.ends, indices, side="right")
        offsets = np.asarray(indices) - self.ends[pieces] + self.counts[pieces]
        files = self.files[pieces].tolist()
        starts = (self.starts[pieces] + offsets * self.row_bytes).tolist()
        rows = np.empty((len(indices), self.row_bytes), np.uint8)
        order = np.lexsort((starts, files)).tolist()
        for file, numbers in groupby(order, key=files.__getitem__):
            path = self.paths[file]
            with reading(path), path.open("rb", buffering=0) as stream:
                for n in numbers:
                    if os.preadv(stream.fileno(), [rows[n]], starts[n]) < self.row_bytes:
                        raise ValueError("it is shorter than its header says")
        return list(torch.from_numpy(rows).view(self.dtype))
