"""A store of activations: a folder a run, a file a block, whole or interrupted; rows of all as a Dataset."""

import random
import shutil
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from experiments import ActivationStore, at, capture, intervene, load, named
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.progress import Progress
from wan.errors import ConfigError

PROMPTS = ["a red circle", "a blue square"]
ASKED = {"layers": [0, 1], "steps": [0]}
SITES = ("resid_post", "z", "pattern", "mod_shift", "x0")


@pytest.fixture(scope="module")
def pipe(tiny):
    return load(tiny.path, num_frames=6)


def stored(folder) -> dict:
    """Every complete run's values by prompt, seed and number of frames."""
    values = {}
    for run in ActivationStore(folder).runs:
        name = run.about["prompt"], run.about["seed"], run.about["num_frames"]
        values[name] = run.tables["z"].stack()
    return values


def alone(pipe, prompt, seed, **settings):
    with capture(pipe, "z", **ASKED, **settings) as seen:
        pipe.generate(prompt, seed=seed)
    return seen["z"].stack()


# --- Runs
def test_each_run_of_any_capture_has_a_folder_of_its_own(pipe, tiny, tmp_path):
    with capture(pipe, "z", **ASKED, stream_to=tmp_path) as seen:
        first = pipe.generate("a red circle", seed=1)
        pipe.generate("a red circle", seed=2)
        assert seen["z"].values[0].shape[0] == 1
        of_last = seen["z"].stack()
    with capture(pipe, "z", **ASKED, stream_to=tmp_path) as seen:
        pipe.generate(PROMPTS, seeds=[3, 4])
    shorter = load(tiny.path, num_frames=3)
    with capture(shorter, "z", **ASKED, stream_to=tmp_path):
        shorter.generate("a red circle", seed=1)
    values = stored(tmp_path)
    assert {*values} == {
        *[("a red circle", seed, 6) for seed in (1, 2, 3)],
        ("a blue square", 4, 6),
        ("a red circle", 1, 3),
    }
    assert torch.equal(of_last, values["a red circle", 2, 6])
    assert torch.equal(values["a red circle", 1, 6], alone(pipe, "a red circle", 1))
    assert torch.equal(values["a red circle", 1, 3], alone(shorter, "a red circle", 1))
    of_batch = alone(pipe, "a blue square", 4)
    torch.testing.assert_close(values["a blue square", 4, 6], of_batch, atol=1e-5, rtol=0)
    run = next(run for run in ActivationStore(tmp_path).runs if run.path.name.endswith("_seed1"))
    assert {"fingerprint", "policy", "edits", "model"} <= run.about.keys()
    assert any(
        torch.equal(run.latents, first.latents)
        for run in ActivationStore(tmp_path).runs
        if run.about["num_frames"] == 6
    )


class Stopped(Progress):
    def advance(self, unit, index, *rest):
        if index == 1:
            raise KeyboardInterrupt


def test_what_is_whole_stays_and_is_not_made_again(pipe, tmp_path, monkeypatch):
    def call(observer=None):
        with capture(pipe, "z", **ASKED, stream_to=tmp_path) as seen:
            return [pipe.generate("a red circle", seed=seed, observer=observer) for seed in (1, 2)], seen

    with capture(pipe, "z", **ASKED, stream_to=tmp_path):
        whole = pipe.generate("a red circle", seed=1)
    with capture(pipe, "z", **ASKED, stream_to=tmp_path), suppress(KeyboardInterrupt):
        pipe.generate("a red circle", seed=2, observer=Stopped(quiet=True))
    (part,) = [run for run in ActivationStore(tmp_path).all_runs if not run.is_complete]
    assert [path.name for path in part.blocks] == ["block_00000.safetensors"]
    assert {place.block for place in part.tables["z"].places} == {0}
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*_seed1/*")}
    rolled, original = [], type(pipe)._roll_out
    monkeypatch.setattr(type(pipe), "_roll_out", lambda *args: rolled.append(args[1]) or original(*args))
    runs, seen = call()
    assert [len(configs) for configs in rolled] == [1]  # of seed 2 alone
    assert torch.equal(runs[0].latents, whole.latents) and runs[0].common == whole.common
    assert files == {path: path.stat().st_mtime_ns for path in files}
    assert torch.equal(seen["z"].stack(), alone(pipe, "a red circle", 2))
    rolled.clear()
    with intervene(at("z"), lambda z, where: z):
        call()
    assert len(rolled) == 2  # somebody else looks, and an edit is another run
    hook = pipe.model.blocks[0].register_forward_hook(lambda block, inputs, x: 2 * x)
    refused = pytest.raises(CacheError, match=r"weights is '[a-z]*', not 'changed'; choose another")
    with hook, refused:
        call()


@pytest.mark.parametrize("other", ["sites", "layers", "reduce", "model"])
def test_a_folder_of_another_model_or_request_is_refused(pipe, tiny, tmp_path, other):
    with capture(pipe, "z", **ASKED, stream_to=tmp_path):
        pipe.generate("a red circle", seed=1)
    changed = {"layers": {"layers": [0]}, "reduce": {"reduce": lambda x, where: x.mean()}}.get(other, {})
    site, session = "v" if other == "sites" else "z", pipe
    if other == "model":
        session = load("wan_mini", num_frames=6)
    refused = pytest.raises(
        CacheError, match=r"holds another (model|request)'s activations: .*another folder"
    )
    with refused, capture(session, site, **(ASKED | changed), stream_to=tmp_path):
        session.generate("a red circle", seed=1)
    with pytest.raises(ConfigError, match="name a site"), capture(pipe, stream_to=tmp_path):
        pass


FUNCTION = "def keep(x, where):\n    return {} * x\n"


def function_of(text: str, tmp_path):
    """Return a function whose source Python finds."""
    path = tmp_path / f"module_{len([*tmp_path.iterdir()])}.py"
    path.write_text(FUNCTION.format(text))
    names: dict = {}
    exec(compile(path.read_text(), path, "exec"), names)
    return names["keep"]


@pytest.mark.parametrize("is_reduce", [False, True], ids=["edit", "reduce"])
def test_a_function_without_a_name_replaces_a_run_of_the_same_text(pipe, tmp_path, is_reduce):
    folder, scripts = tmp_path / "acts", tmp_path / "scripts"
    scripts.mkdir()

    def generate(function, observer=None):
        edit = nullcontext() if is_reduce else intervene(at("v"), function)
        chosen = ASKED | ({"reduce": function} if is_reduce else {})
        with edit, capture(pipe, "z", **chosen, stream_to=folder) as seen:
            pipe.generate("a red circle", seed=1, observer=observer)
        return seen["z"].stack()

    def complete() -> list:
        return [run for run in ActivationStore(folder).all_runs if run.is_complete]

    with warnings.catch_warnings(action="error"):
        first = generate(function_of("2", scripts))
    with suppress(KeyboardInterrupt):
        generate(function_of("2", scripts), Stopped(quiet=True))
    (run,) = complete()  # the earlier run stays until the new one is complete
    assert torch.equal(run.tables["z"].stack(), first)
    with pytest.warns(UserWarning, match=r"replaces the earlier run.*named\("):
        generate(function_of("2", scripts))
    (run,) = complete()
    assert torch.equal(run.tables["z"].stack(), first) and len([*folder.iterdir()]) == 1
    with pytest.raises(CacheError, match=r"named\("):  # another text
        generate(function_of("3", scripts))
    shutil.rmtree(folder)
    generate(eval("lambda x, where: x"))  # no text
    with pytest.raises(CacheError, match=r"another text, or none: .*named\("):
        generate(eval("lambda x, where: x"))
    # Equal runs of a batch are one
    shutil.rmtree(folder)
    chosen = ASKED | ({"reduce": function_of("2", scripts)} if is_reduce else {})
    for _ in range(2):
        edit = nullcontext() if is_reduce else intervene(at("v"), function_of("2", scripts))
        quiet = warnings.catch_warnings(action="ignore")  # the second replaces the first
        with quiet, edit, capture(pipe, "z", **chosen, stream_to=folder):
            pipe.generate(["a red circle"] * 2, seeds=[1, 1])
        assert len(complete()) == len([*folder.iterdir()]) == 1
    # With a name the run is kept, and its name stands for one text
    shutil.rmtree(folder)
    for _ in range(2):
        generate(named("twice", function_of("2", scripts)))
        (run,) = complete()
        times = {path: path.stat().st_mtime_ns for path in run.path.iterdir()}
    generate(named("twice", function_of("2", scripts)))
    assert times == {path: path.stat().st_mtime_ns for path in run.path.iterdir()}
    with pytest.raises(CacheError, match=r"named\("):
        generate(named("twice", function_of("3", scripts)))


def test_every_changed_byte_is_refused(pipe, tmp_path):
    with capture(pipe, "z", **ASKED, stream_to=tmp_path / "runs") as seen:
        pipe.generate("a red circle", seed=1)
    path = seen.save(tmp_path / "all.safetensors")
    (run,) = ActivationStore(tmp_path / "runs").runs
    draw = random.Random(0)
    for file, read in (
        (path, load_cache),
        (run.blocks[0], lambda _: run.tables),
        (run.path / "latents.safetensors", lambda _: run.latents),
    ):
        whole = file.read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            unread = "activations cannot be read.*capture that run again"
            unknown = "holds no activations of this program"  # the name of the format was hit
            with pytest.raises(CacheError, match=f"{unread}|{unknown}"):
                read(file)
        file.write_bytes(whole)


def test_a_removed_block_is_made_again(pipe, tmp_path):
    def call() -> torch.Tensor:
        with capture(pipe, "z", **ASKED, stream_to=tmp_path) as seen:
            pipe.generate("a red circle", seed=1)
        return seen["z"].stack()

    whole = call()
    (run,) = ActivationStore(tmp_path).runs
    run.blocks[0].unlink()
    with pytest.raises(CacheError, match="has no complete run"):
        _ = ActivationStore(tmp_path).runs
    assert torch.equal(call(), whole) and len(ActivationStore(tmp_path).runs) == 1


def test_stores_of_older_versions_are_refused(pipe, tmp_path):
    for name in ("activations.json", "block_00000.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).touch()
        refused = pytest.raises(CacheError, match="version 1 or older; capture them again in another folder")
        with refused:
            _ = ActivationStore(folder).runs
        with refused, capture(pipe, "z", stream_to=folder):
            pass


# --- Rows of all runs
@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Two runs of 6 frames and one of 3: two layers, both denoising steps and the clean pass."""
    path = tmp_path_factory.mktemp("store") / "acts"
    session = load(tiny.path, num_frames=6)
    with capture(session, *SITES, stream_to=path):
        session.generate(["a red circle", "a blue square"], seeds=[1, 2])
    shorter = load(tiny.path, num_frames=3)
    with capture(shorter, *SITES, stream_to=path):
        shorter.generate("a red circle", seed=3)
    return path


def rows_of(store, site="resid_post", layer=1, steps=(0, 1, 2), frames=range(99)):
    """Rows as a Dataset must give them, from whole tables: run after run, call after call."""
    rows = []
    for run in store.runs:
        table = run.tables[site].at(layer=layer)
        for place, x in zip(table.places, table.values, strict=True):
            if place.step in steps:
                by_frame = x.flatten(0, 1).flatten(1).unflatten(0, (len(place.frames), -1))
                wanted = [n for n, frame in enumerate(place.frames) if frame in frames]
                rows.append(by_frame[wanted].flatten(0, 1))
    return torch.cat(rows)


def in_order(rows):
    return rows[np.lexsort(rows.numpy().T)]


def batches(rows, **options) -> list[torch.Tensor]:
    return [*DataLoader(rows, batch_size=37, **options)]


def test_one_layer_of_a_run(folder):
    store = ActivationStore(folder)
    assert [run.about["seed"] for run in store.runs] == [1, 2, 3]  # whatever their fingerprints are
    run = store.runs[0]
    for where in ({"layer": 1}, {"layer": 0, "step": 2}, {"is_clean_pass": True, "block": 1}):
        part, whole = run.read("resid_post", **where), run.tables["resid_post"].at(**where)
        assert part.places == whole.places and part.axes == whole.axes
        assert torch.equal(part.stack(), whole.stack())
    assert run.read("x0", step=0).stack().shape[3:] == (3, 16, 8, 8)
    for where, message in (({"layer": 7}, "no call of {'layer': 7}"), ({"head": 1}, "have no 'head'")):
        with pytest.raises(CacheError, match=message):
            run.read("resid_post", **where)


@pytest.mark.parametrize("chosen", [{}, {"frames": [1, 4]}, {"steps": [0, 1], "frames": [2]}, {"site": "z"}])
def test_every_row_comes_once(folder, chosen):
    store, where = ActivationStore(folder), {"site": "resid_post", "layer": 1} | chosen
    wanted, rows = rows_of(store, **where), store.rows(**where)
    assert len(rows) == len(wanted) and torch.equal(rows[5], wanted[5]) and torch.equal(rows[-1], wanted[-1])
    plain = batches(rows)
    assert [len(x) for x in plain[:-1]] == [37] * (len(plain) - 1) and torch.equal(torch.cat(plain), wanted)
    mixed = torch.cat(batches(rows, shuffle=True))
    maps = Path("/proc/self/maps")  # whose pages would count as this process's memory
    assert not maps.exists() or str(folder) not in maps.read_text()
    assert not torch.equal(mixed, wanted) and torch.equal(in_order(mixed), in_order(wanted))
    shared = batches(rows, shuffle=True, num_workers=2)  # of two processes
    assert len(shared) == len(plain) and torch.equal(in_order(torch.cat(shared)), in_order(wanted))


def test_steps_and_runs_are_chosen(folder):
    store = ActivationStore(folder)
    last, first, named = (torch.cat(batches(store.rows("resid_post", 0, steps=n))) for n in (-1, 0, [1]))
    assert torch.equal(last, named) and not torch.equal(last, first)
    parts = [torch.cat(batches(store.rows("resid_post", 0, runs=[n]))) for n in range(3)]
    assert torch.equal(torch.cat(parts), rows_of(store, layer=0))
    assert len(store.rows("mod_shift", 0, frames=[0])) > 0  # all frames have one row
    assert store.rows("x0", None, frames=[5], steps=0)[0].shape == (16 * 8 * 8,)


@pytest.mark.parametrize(
    "asked, message",
    [
        (
            {"site": "resid_pots"},
            "no 'resid_pots' in .*, but resid_post, z, pattern, mod_shift, x0; did you mean resid_post",
        ),
        ({"layer": 7}, "resid_post of layer 7 is not in .*; it has 0, 1"),
        ({"layer": None}, "resid_post of layer None is not in"),
        ({"steps": [9]}, r"step 9 is not in .*; it has 0\.\.2"),
        ({"frames": [99]}, r"frames \[99\] are in no call"),
        ({"site": "pattern"}, "pattern has no rows of one length"),
        ({"frames": True}, "frames must be a number or several"),
        ({"runs": [7]}, r"run 7 is not in .*; it has 0\.\.2"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(folder, asked, message):
    with pytest.raises((CacheError, ConfigError), match=message) as error:
        ActivationStore(folder).rows(**({"site": "resid_post", "layer": 1} | asked))
    assert "\n" not in str(error.value)


def test_damaged_and_foreign_folders_are_refused(folder, tmp_path):
    for make in (lambda path: None, lambda path: path.mkdir(), lambda path: (path / "x").mkdir(parents=True)):
        make(path := tmp_path / "foreign")
        with pytest.raises(CacheError, match="give a folder in which capture"):
            ActivationStore(path).rows("z", 0)
        shutil.rmtree(path, ignore_errors=True)
    own = shutil.copytree(folder, tmp_path / "acts")
    block = ActivationStore(own).runs[0].blocks[0]
    whole = block.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:100] + b"\0" * 100 + whole[200:]):
        block.write_bytes(damaged)
        with pytest.raises(CacheError, match=r"activations cannot be read.*capture that run again"):
            ActivationStore(own).rows("resid_post", 1)
    block.write_bytes(whole)
    rows = ActivationStore(own).rows("resid_post", 1)
    block.write_bytes(whole[: len(whole) // 2])  # while it is in use
    with pytest.raises(CacheError, match="shorter than its header says"):
        batches(rows)
    block.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # headers say nothing of a flipped bit
    with pytest.raises(CacheError, match="activations cannot be read"):
        ActivationStore(own).check()
    block.write_bytes(whole)
    ActivationStore(own).check()
