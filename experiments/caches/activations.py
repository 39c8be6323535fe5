"""Activations that were captured at named sites: a table of calls, its safetensors file, a folder of runs.

table = load_activations("cache/activations.safetensors")["z"]
table.at(layer=5, step=0).stack()       # a tensor, whose axes are table.axes

capture(session, ..., stream_to=FOLDER) writes a folder, which ActivationFolder reads and adds to:

    FOLDER/activations.json                  what all runs share: {"format", "model", "request"}
    FOLDER/RUN/manifest.json                 RUN is <16 digits of the fingerprint>_seed<seed>; its facts below
    FOLDER/RUN/shard_000.safetensors ...     calls in the order of the run, about a block each, all sites
    FOLDER/RUN/latents.safetensors           site "x0", one call: the whole video, [1, F, C, h, w]; comes last

A shard is a file of save_activations: tensors SITE/NNNNNN, one a call, whose places are in the metadata
"sites". A manifest has prompt, seed, fingerprint, model, num_frames, policy, edits, batch (how many videos
were made together), is_complete, and shards: {name: {"sha256", "blocks"}}, where sha256 is that of the
shard's content (content_sha256), which its own metadata has too. Every file is written whole. A run without
is_complete was interrupted; the shards that its manifest names are whole.
ActivationStore(FOLDER) reads single layers, and shuffled rows of all runs, from it.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from experiments.caches.files import CacheError, replacing, require_held, require_suffix
from wan.errors import (
    as_numbers,
    library_reads,
    library_writes,
    require_known,
    short_repr,
)
from wan.files import read_sealed
from wan.seals import checksum, sealed
from wan.sites import OF_FORWARD, SITES

FORMAT = "activations"
COORDINATES = ("layer", "block", "step", "branch")
SHARED, MANIFEST, LATENTS = "activations.json", "manifest.json", "latents.safetensors"
RUN_NAME = re.compile(r"[0-9a-f]{16}_seed-?\d+")
# Of a run's facts those of its model
OF_A_MODEL: tuple[str, ...] = ("model", "weights", "weights_file", "weights_sha256", "quantised", "dtype")
OF_A_MODEL += ("num_heads", "head_dim", "frame_seq_length")


@dataclass(frozen=True)
class Place:
    """Where an activation was: its layer (None for x_t, flow and x0), pass and frames."""

    layer: int | None
    block: int
    step: int
    frames: tuple[int, ...]
    is_clean_pass: bool
    timestep: float
    branch: str = "cond"


@dataclass(frozen=True, eq=False)
class Activations(Sequence[Tensor]):
    """The activations of one site, a tensor a call, and where each was."""

    site: str
    places: tuple[Place, ...]
    values: tuple[Tensor, ...]
    is_reduced: bool = False  # by a function of one's own: axes have no names then

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def at(self, **where: Any) -> "Activations":
        """Return the calls of a layer, block, step, is_clean_pass or branch: at(layer=5, step=0)."""
        known = [each.name for each in fields(Place) if each.name != "frames"]
        for name in where:
            require_known(name, known, f"{self.site}: at knows no {{}}", CacheError)
        rows = [
            (place, value)
            for place, value in zip(self.places, self.values, strict=True)
            if all(getattr(place, name) == wanted for name, wanted in where.items())
        ]
        if not rows:
            raise CacheError(f"{self.site}: no call of {where} was captured")
        places, values = zip(*rows, strict=True)
        return Activations(self.site, places, values, self.is_reduced)

    @property
    def coordinates(self) -> dict[str, list[Any]]:
        """The layers, blocks, steps, and branches where there are two, of the calls."""
        found: dict[str, list[Any]] = {}
        for name in COORDINATES:
            values = {getattr(place, name) for place in self.places}
            if None not in values and (len(values) > 1 or name != "branch"):
                found[name] = sorted(values)
        return found

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes of stack()."""
        own = [str(n) for n in range(self.values[0].ndim)] if self.is_reduced else SITES[self.site].split()
        return (*self.coordinates, *own)

    def stack(self) -> Tensor:
        """Stack all calls to one tensor, whose axes have the names axes; CacheError where shapes differ."""
        table, found = self.coordinates, {}
        for place, value in zip(self.places, self.values, strict=True):
            found[tuple(getattr(place, name) for name in table)] = value
        # A tensor needs every combination of coordinates once, each of one shape
        keys, shapes = [*product(*table.values())], {tuple(value.shape) for value in self.values}
        if len(shapes) > 1 or len(found) < len(keys):
            raise CacheError(
                f"{self.site}: {len(found)} of {len(keys)} calls, of {len(shapes)} shapes, make no tensor; "
                "choose some by at(block=...)"
            )
        return torch.stack([found[key] for key in keys]).unflatten(0, [len(each) for each in table.values()])

    def __repr__(self) -> str:
        there = ", ".join(f"{name} {values}" for name, values in self.coordinates.items())
        shape = list(self.values[0].shape) if self.values else []
        return f"Activations: {self.site}, {len(self)} calls ({there}) of shape {shape}"


# --- A file
def content_sha256(metadata: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of a file's content: what its metadata says, and its tensors by name."""
    parts: list[Any] = [json.dumps([metadata["about"], metadata["sites"]]).encode()]
    for name, x in tensors:  # a tensor without axes has no view as bytes
        parts += f"{name} {x.dtype} {list(x.shape)}".encode(), x.reshape(-1).view(torch.uint8).numpy()
    return checksum(*parts).hex()


def save_activations(path: str | Path, tables: Mapping[str, Activations], about: Mapping[str, Any]) -> Path:
    """Write tables by site, whole or not at all, with facts about their run. CacheError where it cannot."""
    path = Path(path)
    require_suffix(path, ".safetensors")
    # A tensor a call; what safetensors has no type for goes into its metadata, as JSON
    tensors = {
        f"{site}/{n:06d}": x.cpu().contiguous() for site, table in tables.items() for n, x in enumerate(table)
    }
    sites = {
        site: {"places": [asdict(place) for place in table.places], "is_reduced": table.is_reduced}
        for site, table in tables.items()
    }
    metadata = {"format": FORMAT, "about": json.dumps(dict(about)), "sites": json.dumps(sites)}
    metadata["sha256"] = content_sha256(metadata, tensors.items())
    with library_writes(path, CacheError), replacing(path) as file:
        save_file(tensors, file.name, metadata)
    return path


def load_activations(path: str | Path, sha256: str | None = None) -> dict[str, Any]:
    """Read what save_activations wrote: format, facts about the run, and tables by site.

    CacheError for a damaged file, and for one whose content is not that of sha256, where it is given.
    """
    with library_reads(f"{path}: activations", CacheError, "capture them again"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            found: dict[str, Any] = {"format": FORMAT, **json.loads(metadata["about"])}
            tensors = dict[str, Tensor]()
            for site, table in json.loads(metadata["sites"]).items():
                places = tuple(Place(**{**one, "frames": tuple(one["frames"])}) for one in table["places"])
                names = [f"{site}/{n:06d}" for n in range(len(places))]
                tensors |= {name: file.get_tensor(name) for name in names}
                values = tuple(tensors[name] for name in names)
                found[site] = Activations(site, places, values, bool(table["is_reduced"]))
        # Files from before 0.2 have no checksum
        wanted = {sha256, metadata.get("sha256")} - {None}
        if wanted and wanted != {content_sha256(metadata, tensors.items())}:
            raise ValueError("its content is not what was written")
    return found


def joined(tables: Iterator[Mapping[str, Any]]) -> dict[str, Activations]:
    """Return tables of several files as one of each site."""
    found: dict[str, Activations] = {}
    # Calls of later files follow those of earlier ones, site by site
    for table in tables:
        for site, part in table.items():
            if isinstance(part, Activations):
                before = found.get(site, Activations(site, (), (), part.is_reduced))
                both = before.places + part.places, before.values + part.values
                found[site] = Activations(site, *both, part.is_reduced)
    return found


# --- A folder of runs
def write_json_file(values: Mapping[str, Any], path: Path) -> None:
    """Write what read_sealed reads. CacheError where it cannot be written."""
    with library_writes(path, CacheError, "choose another folder"), replacing(path) as file:
        file.write(sealed(values))


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run of a folder of activations: its own folder, and what its manifest says.

    >>> run = ActivationFolder("cache/acts").runs[0]
    >>> run.manifest["prompt"], run.tables["resid_post"].stack().shape
    """

    path: Path
    manifest: dict[str, Any]

    @property
    def is_complete(self) -> bool:
        return bool(self.manifest.get("is_complete"))

    @property
    def shards(self) -> dict[Path, str]:
        """The files of its activations in the order of the run, and the SHA-256 of each's content."""
        return {self.path / name: each["sha256"] for name, each in sorted(self.manifest["shards"].items())}

    @property
    def tables(self) -> dict[str, Activations]:
        """All its activations by site, read into memory. CacheError where a shard is damaged."""
        return joined(load_activations(path, sha256) for path, sha256 in self.shards.items())

    @property
    def latents(self) -> Tensor:
        """The video's latents [1, F, C, h, w], of a run that is complete; a pipeline's has none."""
        found = load_activations(self.path / LATENTS, self.manifest.get("latents_sha256"))
        return found["x0"][0]

    def write(self, tables: Mapping[str, Activations]) -> None:
        """Add a shard, and then name it in the manifest."""
        name = f"shard_{len(self.manifest['shards']):03d}.safetensors"
        path = save_activations(self.path / name, tables, self._about)
        blocks = sorted({place.block for table in tables.values() for place in table.places})
        self.manifest["shards"][name] = {"sha256": sha256_of(path), "blocks": blocks}
        write_json_file(self.manifest, self.path / MANIFEST)

    def finish(self, latents: Tensor | None) -> None:
        """Write the latents, where they are known, and say that nothing is missing."""
        if latents is None:
            self.manifest.update(is_complete=True)
            write_json_file(self.manifest, self.path / MANIFEST)
            return
        whole = tuple(range(latents.shape[1]))
        table = Activations("x0", (Place(None, 0, 0, whole, True, 0.0),), (latents.cpu(),))
        path = save_activations(self.path / LATENTS, {"x0": table}, self._about)
        self.manifest.update(is_complete=True, latents_sha256=sha256_of(path))
        write_json_file(self.manifest, self.path / MANIFEST)

    @property
    def _about(self) -> dict[str, Any]:
        return {name: self.manifest[name] for name in ("model", "prompt", "seed", "fingerprint")}


def sha256_of(path: Path) -> str:
    """Return the checksum that a file of save_activations says of itself."""
    with safe_open(path, "pt") as file:
        return str(file.metadata()["sha256"])


class ActivationFolder:
    """The activations of any number of runs of one model, for one request.

    >>> folder = ActivationFolder("cache/acts")
    >>> [(run.manifest["prompt"], run.manifest["seed"]) for run in folder.runs]
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @property
    def shared(self) -> dict[str, Any]:
        """What its runs share: model and request. CacheError where it is no such folder."""
        remedy = f"give a folder that capture(session, ..., stream_to={str(self.path)!r}) wrote"
        found = read_sealed(self.path / SHARED, CacheError, remedy)
        if found.get("format") != FORMAT:
            raise CacheError(f"{self.path / SHARED} is of format {short_repr(found.get('format'))}; {remedy}")
        return found

    @property
    def runs(self) -> list[StoredRun]:
        """Its complete runs, by seed and prompt."""
        return [run for run in self.all_runs if run.is_complete]

    @property
    def all_runs(self) -> list[StoredRun]:
        """Its runs by seed and prompt, those that were interrupted too.

        Names are fingerprints, which change with the versions of code and packages: in their order the first
        run, and the shuffled rows of a seed, would be others on another machine.
        """
        self.shared  # noqa: B018 - refuses what is no such folder
        paths = (one for one in self.path.iterdir() if RUN_NAME.fullmatch(one.name))
        found = [run for path in paths if (run := self._stored(path))]
        return sorted(found, key=lambda r: (r.manifest["seed"], r.manifest["prompt"], r.path.name))

    def _stored(self, path: Path) -> StoredRun | None:
        if not (path / MANIFEST).exists():  # interrupted before its first shard
            return None
        manifest = read_sealed(path / MANIFEST, CacheError, f"remove {path} and capture that run again")
        if not isinstance(manifest.get("shards"), dict) or not {"fingerprint", "prompt", "seed"} <= {
            *manifest
        }:
            raise CacheError(
                f"{path / MANIFEST} names no shards, prompt or seed; remove {path} and capture that run again"
            )
        return StoredRun(path, manifest)

    def require(self, request: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
        """Raise CacheError where the folder is of another request, or of another model than a run's facts."""
        if not (self.path / SHARED).exists():
            if any(self.path.glob("block_*.safetensors")):
                raise CacheError(f"{self.path} holds files of an older capture; choose another folder")
            return
        asked = {"request": dict(request)} | ({"model": model_of(facts)} if facts else {})
        asked, found = json.loads(json.dumps(asked)), self.shared
        for part, values in asked.items():
            stored = found.get(part) or {}
            for name in sorted({*values, *stored}):
                if values.get(name) != stored.get(name):
                    said = f"{short_repr(stored.get(name))}, not {short_repr(values.get(name))}"
                    raise CacheError(
                        f"{self.path} holds another {part}'s activations: {name} is {said}; "
                        "choose another folder"
                    )

    def begin(self, request: Mapping[str, Any], facts: Mapping[str, Any], batch: int) -> StoredRun:
        """Return the run of these facts, which is made here unless it is complete. CacheError as require().

        facts are the fields that a run's caches share (Session.common).
        """
        # 1. The folder says what it is of before it holds anything
        self.require(request, facts)
        if not (self.path / SHARED).exists():
            shared = {"format": FORMAT, "model": model_of(facts), "request": dict(request)}
            write_json_file(shared, self.path / SHARED)
        # 2. What is complete stays; what was interrupted is written again, shard by shard
        path = self.path / f"{facts['fingerprint'][:16]}_seed{facts['seed']}"
        found = self._stored(path)
        if found and found.is_complete and found.manifest["fingerprint"] == facts["fingerprint"]:
            return found
        config = facts.get("config", {})
        names = ("prompt", "seed", "fingerprint", "model", "num_frames")
        return StoredRun(
            path,
            {name: facts[name] for name in names}
            | {"policy": config.get("cache_policy"), "edits": facts.get("interventions"), "batch": batch}
            | {"is_complete": False, "shards": {}},
        )

    def add(self, request: Mapping[str, Any], facts: Mapping[str, Any]) -> StoredRun:
        """Begin a run that nothing tells from others, such as a pipeline's; its seed is its number here."""
        number = len(self.all_runs) if (self.path / SHARED).exists() else 0
        words = json.dumps([facts["model"], facts["prompt"], number])
        known = {"seed": number, "fingerprint": hashlib.sha256(words.encode()).hexdigest()}
        return self.begin(request, {**facts, **known}, 1)


def model_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return which model a run's facts are of, its LoRA by a hash too."""
    own = str(facts.get("weights_file", "")).split(" + ")
    files = [each for each in facts.get("files") or () if each["name"] in own]
    return {name: facts.get(name) for name in OF_A_MODEL} | {"files": files}


# --- Rows of a folder, for torch.utils.data
ROW_AXES = ("L", "T", "F")  # what a row may be of: a token, a prompt token, a frame
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
DTYPES |= {"U8": torch.uint8, "BOOL": torch.bool}


@dataclass(frozen=True)
class StoredCall:
    """An activation in a shard: its file, where its numbers begin there, its place, shape and dtype."""

    path: Path
    start: int
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Return the activation. CacheError where its file is gone or shorter."""
        found = torch.empty(self.shape, dtype=self.dtype)
        with OpenShard(self.path) as shard:
            shard.read_into(found.view(-1).view(torch.uint8).numpy(), self.start)
        return found


class OpenShard:
    """A shard whose parts are read as they are asked for.

    It is not mapped: pages of a map count as the process's memory as long as it is there, so that shuffled
    rows would take as much as the store has, and a map of a file that became shorter ends the process.
    """

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> "OpenShard":
        with reads_shard(self.path):
            self.file = os.open(self.path, os.O_RDONLY)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.file)

    def read_into(self, target: np.ndarray, start: int) -> None:
        """Fill an array of bytes [n] with those of the file from start on."""
        view = target.data
        while len(view):  # a call reads 2 GB at most
            with reads_shard(self.path):
                count = os.preadv(self.file, [view], start)
                if not count:
                    raise ValueError("it is shorter than its header says")
            view, start = view[count:], start + count


def reads_shard(path: Path) -> AbstractContextManager[None]:
    """Say of a shard that cannot be read what to do."""
    return library_reads(
        f"{path}: activations", CacheError, f"remove {path.parent} and capture that run again"
    )


def calls_of(path: Path, sha256: str, site: str) -> list[StoredCall]:
    """Return the calls of a site in a shard, by its header. CacheError where it is not the one written."""
    calls = list[StoredCall]()
    with reads_shard(path):
        with safe_open(path, "pt") as file:  # which checks the header, and that the file has all that it says
            metadata = file.metadata() or {}
        if metadata.get("sha256") != sha256:
            raise ValueError("it is not the shard that the manifest names")
        # https://huggingface.co/docs/safetensors: 8 bytes of length, the header, the numbers
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for n, one in enumerate(json.loads(metadata["sites"]).get(site, {"places": []})["places"]):
            about = header[f"{site}/{n:06d}"]
            place = Place(**{**one, "frames": tuple(one["frames"])})
            start = 8 + length + about["data_offsets"][0]
            calls.append(StoredCall(path, start, place, tuple(about["shape"]), DTYPES[about["dtype"]]))
    return calls


class ActivationStore(ActivationFolder):
    """A folder of activations to train on: tensors of one run, shuffled rows of all.

    >>> store = ActivationStore("cache/acts")
    >>> store.tensor("resid_post", 5, run=0, step=-1).shape  # [blocks, L, dim]
    [2, 48, 192]
    >>> for x in store.batches("resid_post", 5, size=4096, steps=[0, -1]):
    ...     loss = train(x)  # [4096, 192]
    >>> DataLoader(store.batches("resid_post", 5), batch_size=None, num_workers=2)

    Its complete runs alone are read. tensor() and batches() look at headers and manifests, and read what is
    asked for, in memory of a batch; check() reads all bytes. Raises CacheError for what
    capture(..., stream_to=FOLDER) did not write.
    """

    def __init__(self, path: str | Path):
        super().__init__(path)
        if not self.runs:
            raise CacheError(f"{self.path} has no complete run; generate in capture(..., stream_to=) first")

    @cached_property
    def runs(self) -> list[StoredRun]:
        """Its complete runs, by seed and prompt, as they were when it was opened."""
        return [run for run in self.all_runs if run.is_complete]

    def check(self) -> None:
        """Read every shard and the latents once. CacheError for the first that is not what was written."""
        for run in self.runs:
            for path, sha256 in run.shards.items():
                load_activations(path, sha256)
            if "latents_sha256" in run.manifest:
                _ = run.latents

    def _run(self, run: Any) -> StoredRun:
        """Return a run by its index in runs, or itself. CacheError for others."""
        count = len(self.runs)
        if isinstance(run, StoredRun):
            return run
        if type(run) is not int or not -count <= run < count:
            raise CacheError(f"run {short_repr(run)} is not in 0..{count - 1}, and no run of runs")
        return self.runs[run]

    def tensor(self, site: str, layer: int | None, *, run: Any = 0, step: int | None = None) -> Tensor:
        """Return a site of a layer in one run (its index in runs, or itself), [blocks, steps, L, dim].

        The axis of steps goes where one is given; -1 is the last denoising step that was captured. layer is
        None for x_t, flow and x0. What reduce= made comes in its own shape, behind blocks and steps.
        """
        calls = self._calls(site, layer, [self._run(run)], as_numbers("step", step))
        table = Activations(
            site, tuple(c.place for c in calls), tuple(c.read() for c in calls), self.is_reduced
        )
        # One layer, one step where it is given, and one video: these axes say nothing.
        x, axes = table.stack(), table.axes
        alone = {"layer", "B"} | ({"step"} if step is not None else set())
        return x.squeeze([n for n, axis in enumerate(axes) if axis in alone])

    def batches(
        self,
        site: str,
        layer: int | None,
        *,
        size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        frames: Any = None,
        steps: Any = None,
        runs: Iterable[int | StoredRun] | None = None,
    ) -> "ActivationBatches":
        """Return batches [size, d] of the rows of a site and layer, every row once; the last may be smaller.

        A row is a token (of sites without tokens a frame) with all that it has there, heads one after
        another. shuffle draws rows from all runs, blocks and steps, without a table of them; equal seeds give
        equal batches, each time that it is iterated: take another seed for another epoch. frames are latent
        frames of the video; steps -1 is the last denoising step that was captured; runs are some of its runs,
        such as those to train on. For a DataLoader give batch_size=None: workers share the batches.
        """
        if self.is_reduced:
            if frames is not None:
                raise CacheError(f"{self.path}: what reduce= made has no frames to choose; leave frames out")
        elif SITES.get(site, "B L").split()[1] not in ROW_AXES:
            raise CacheError(
                f"{site} has no rows of one length ({SITES[site]}): read tensor(...) of each run"
            )
        some = self.runs if runs is None else [self._run(n) for n in runs]
        wanted = as_numbers("frames", frames)
        calls = self._calls(site, layer, some, as_numbers("steps", steps))
        parts = [self._parts(site, call, wanted) for call in calls]
        if not any(numbers for numbers, _ in parts):
            raise CacheError(f"{self.path}: frames {short_repr(wanted)} are in no call of {site}")
        return ActivationBatches(calls, parts, size, seed if shuffle else None, self.is_reduced)

    @property
    def is_reduced(self) -> bool:
        """True where a function (reduce=) made what was kept."""
        return self.shared["request"].get("reduce") is not None

    def _calls(
        self, site: str, layer: int | None, runs: Iterable[StoredRun], steps: list[int] | None
    ) -> list[StoredCall]:
        """Return the calls of a site, layer and steps, run after run. CacheError where there is none."""
        there = self.shared["request"]["sites"]
        require_known(site, there, f"no {{}} in {self.path}, but {', '.join(there)}", CacheError)
        # 1. Those of the layer; of all layers of many runs they would take more memory than a batch.
        of_layer = layer is not None or site not in OF_FORWARD
        found, layers = list[StoredCall](), set[int | None]()
        for run in runs:
            for path, sha256 in run.shards.items():
                for call in calls_of(path, sha256, site):
                    layers.add(call.place.layer)
                    if not of_layer or call.place.layer == layer:
                        found.append(call)
        if of_layer:
            require_held(f"{site} of layer", layer, sorted(n for n in layers if n is not None), self.path)
        if steps is None:
            return found
        # 2. Those of the steps; -1 is the last that denoises.
        last = max((call.place.step for call in found if not call.place.is_clean_pass), default=-1)
        wanted = {last if n == -1 else n for n in steps}
        for step in wanted:
            known = {call.place.step for call in found if call.place.step is not None}
            require_held(f"{site} of step", step, sorted(known), self.path)
        return [call for call in found if call.place.step in wanted]

    def _parts(self, site: str, call: StoredCall, frames: list[int] | None) -> "RowParts":
        """Return which rows of a call are taken: those of the chosen frames, where it has rows of frames."""
        axis = "" if self.is_reduced else SITES[site].split()[1]
        if self.is_reduced or frames is None:
            whole = call.shape[:-1] if self.is_reduced else call.shape[:2]
            return (0,), math.prod(whole)
        # A capture of some frames has kept these alone
        kept = self.shared["request"].get("frames")
        own = [n for n in call.place.frames if kept is None or n in kept]
        if axis == "L" or (axis == "F" and call.shape[1] == len(own)):
            return tuple(n for n, frame in enumerate(own) if frame in frames), call.shape[1] // len(own)
        return (0,) * (not {*frames}.isdisjoint(own)), call.shape[1]  # of all its frames


RowParts = tuple[tuple[int, ...], int]  # which parts of a call's rows are taken, and how long a part is


class ActivationBatches(IterableDataset[Tensor]):
    """Batches of rows, read from the shards as they are asked for: what ActivationStore.batches returns."""

    def __init__(
        self,
        calls: Sequence[StoredCall],
        parts: Sequence[RowParts],
        size: int,
        seed: int | None,
        is_reduced: bool,
    ):
        self.size, self.seed = size, seed
        kinds = {(math.prod(c.shape[-1:] if is_reduced else c.shape[2:]), c.dtype) for c in calls}
        if len(kinds) > 1:
            raise CacheError(f"rows of several lengths or types make no batch: {short_repr(kinds)}")
        [(self.width, self.dtype)] = kinds
        self.row_bytes = self.width * self.dtype.itemsize
        # Rows lie in pieces: the file of each, where it begins there, and its end in the store's order.
        self.paths = list(dict.fromkeys(call.path for call in calls))
        files, found = {path: n for n, path in enumerate(self.paths)}, list[tuple[int, int, int]]()
        for call, (numbers, length) in zip(calls, parts, strict=True):
            start, piece = call.start, length * self.row_bytes
            found += ((files[call.path], start + number * piece, length) for number in numbers)
        self.files, self.starts, self.lengths = np.array(found).T
        self.ends = self.lengths.cumsum()
        self.num_rows = int(self.ends[-1])

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self.num_rows // self.size)

    def __iter__(self) -> Iterator[Tensor]:
        # Workers of a DataLoader take every n-th batch, so that no row comes twice.
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, len(self), every):
            places = np.arange(number * self.size, min((number + 1) * self.size, self.num_rows))
            if self.seed is not None:
                places = permuted(places, self.num_rows, self.seed)
            yield self.read(places)

    def read(self, places: np.ndarray) -> Tensor:
        """Return the rows [n, d] at places 0 ... num_rows - 1 of the store's order."""
        # 1. Where each is, in the order of files; rows that follow each other are read at once.
        pieces = np.searchsorted(self.ends, places, side="right")
        rows = places - self.ends[pieces] + self.lengths[pieces]
        files, starts = self.files[pieces], self.starts[pieces] + rows * self.row_bytes
        order = np.lexsort((starts, files))
        files, starts = files[order], starts[order]
        follows = (np.diff(starts) == self.row_bytes) & (np.diff(files) == 0)
        bounds = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(places)]
        # 2. Read them, each file open as long as it takes.
        found = np.empty((len(places), self.row_bytes), np.uint8)
        for file, runs in groupby(pairwise(bounds), key=lambda run: files[run[0]]):
            with OpenShard(self.paths[file]) as shard:
                for first, last in runs:
                    shard.read_into(found[first:last].reshape(-1), int(starts[first]))
        # 3. Back to the order that was asked for.
        mixed = np.empty_like(found)
        mixed[order] = found
        return torch.from_numpy(mixed).view(self.dtype)


def permuted(places: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return where a random permutation of 0 ... count - 1 takes some places, without a table of all.

    A Feistel network over the next power of four, walked until it is within count (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains", https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf).
    """
    half = np.uint64(max(1, (int(count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.default_rng(seed).integers(0, 2**63, 6, dtype=np.uint64)

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64, wraps
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(27))) & mask)
        return (left << half) | right

    found = once(places.astype(np.uint64))
    while (outside := found >= count).any():
        found[outside] = once(found[outside])
    return found.astype(np.int64)
