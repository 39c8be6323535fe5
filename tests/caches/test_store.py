"""A store of activations: tensors of a run, and every row of all runs once, in an order that a seed gives."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from experiments import ActivationStore, capture, load
from experiments.caches.activations import permuted, write_json_file
from experiments.caches.files import CacheError
from wan.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Two runs of 6 frames and one of 3: two layers, both denoising steps and the clean pass."""
    path = tmp_path_factory.mktemp("store") / "acts"
    session = load(tiny.path, num_frames=6)
    with capture(session, "resid_post", "z", "pattern", "mod_shift", "x0", stream_to=path):
        session.generate(["a red circle", "a blue square"], seeds=[1, 2])
    shorter = load(tiny.path, num_frames=3)
    with capture(shorter, "resid_post", "z", "pattern", "mod_shift", "x0", stream_to=path):
        shorter.generate("a red circle", seed=3)
    return path


def rows_of(store, site="resid_post", layer=1, **chosen):
    """What batches must give, from whole tables: run after run, call after call."""
    found = []
    for run in store.runs:
        table = run.tables[site].at(layer=layer) if layer is not None else run.tables[site]
        for place, x in zip(table.places, table.values, strict=True):
            if place.step in chosen.get("steps", (0, 1, 2)):
                by_frame = x.flatten(0, 1).flatten(1).unflatten(0, (len(place.frames), -1))
                wanted = [n for n, f in enumerate(place.frames) if f in chosen.get("frames", range(99))]
                found.append(by_frame[wanted].flatten(0, 1))
    return torch.cat(found)


def in_order(rows):
    return rows[np.lexsort(rows.numpy().T)]


def test_tensors_of_a_run(folder):
    store = ActivationStore(folder)
    assert [run.manifest["seed"] for run in store.runs] == [1, 2, 3]  # whatever their fingerprints are
    run = store.runs[0]
    whole = run.tables["resid_post"].at(layer=1).stack()  # [layer, block, step, B, L, dim]
    assert torch.equal(store.tensor("resid_post", 1), whole[0, :, :, 0])
    assert torch.equal(store.tensor("resid_post", 1, run=run, step=-1), whole[0, :, 1, 0])
    assert store.tensor("z", 0, step=2).shape == (2, *whole.shape[4:5], 2, 16)
    assert store.tensor("x0", None, step=0).shape[2:] == (16, 8, 8)


@pytest.mark.parametrize("chosen", [{}, {"frames": [1, 4]}, {"steps": [0, 1], "frames": [2]}, {"site": "z"}])
def test_every_row_comes_once(folder, chosen):
    store, own = ActivationStore(folder), {"site": "resid_post", "layer": 1} | chosen
    wanted = rows_of(store, **own)
    plain = [*store.batches(**own, size=37, shuffle=False)]
    assert [len(x) for x in plain[:-1]] == [37] * (len(plain) - 1) and torch.equal(torch.cat(plain), wanted)
    mixed = torch.cat([*store.batches(**own, size=37)])
    maps = Path("/proc/self/maps")  # whose pages would count as this process's memory
    assert not maps.exists() or str(folder) not in maps.read_text()
    assert not torch.equal(mixed, wanted) and torch.equal(in_order(mixed), in_order(wanted))
    again, other = (torch.cat([*store.batches(**own, size=37, seed=seed)]) for seed in (0, 1))
    assert torch.equal(mixed, again) and not torch.equal(mixed, other)


def test_steps_and_runs_are_chosen(folder):
    store = ActivationStore(folder)
    last, first = (torch.cat([*store.batches("resid_post", 0, steps=n, shuffle=False)]) for n in (-1, 0))
    assert torch.equal(last, torch.cat([*store.batches("resid_post", 0, steps=[1], shuffle=False)]))
    assert not torch.equal(last, first)
    parts = [torch.cat([*store.batches("resid_post", 0, runs=[n], shuffle=False)]) for n in range(3)]
    assert torch.equal(torch.cat(parts), rows_of(store, layer=0))
    assert sum(map(len, store.batches("mod_shift", 0, frames=[0]))) > 0  # all frames have one row


def test_workers_share_the_batches(folder):
    batches = ActivationStore(folder).batches("resid_post", 1, size=50)
    together = [*DataLoader(batches, batch_size=None, num_workers=2)]
    assert len(together) == len(batches)
    assert torch.equal(in_order(torch.cat(together)), in_order(torch.cat([*batches])))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000, 4097])
def test_a_permutation_without_a_table(count):
    found = permuted(np.arange(count), count, seed=5)
    assert sorted(found.tolist()) == [*range(count)]
    parts = [permuted(np.arange(n, min(n + 10, count)), count, 5) for n in range(0, count, 10)]
    assert np.array_equal(np.concatenate(parts), found)
    if count > 64:  # neighbours are apart, as a shuffle's are: a third of count on average
        apart = np.abs(np.diff(found)).mean() / count
        assert 0.3 < apart < 0.37


@pytest.mark.parametrize(
    "asked, said",
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
        ({"size": 0}, "size 0 is not int in 1"),
        ({"size": True}, "size True is not int in 1"),
        ({"seed": -1}, "seed -1 is not int in 0"),
        ({"shuffle": "no"}, "shuffle 'no' is not bool"),
        ({"frames": True}, "frames must be a number or several"),
        ({"runs": [7]}, r"run 7 is not in 0\.\.2"),
        ({"runs": ["x"]}, r"run 'x' is not in 0\.\.2"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(folder, asked, said):
    with pytest.raises((CacheError, ConfigError), match=said) as error:
        ActivationStore(folder).batches(**({"site": "resid_post", "layer": 1} | asked))
    assert "\n" not in str(error.value)


def test_damaged_and_foreign_folders_are_refused(folder, tmp_path):
    for make in (lambda path: None, lambda path: path.mkdir(), lambda path: (path / "x").mkdir(parents=True)):
        make(path := tmp_path / "foreign")
        with pytest.raises(CacheError, match="give a folder that capture"):
            ActivationStore(path)
        shutil.rmtree(path, ignore_errors=True)
    own = shutil.copytree(folder, tmp_path / "acts")
    run = ActivationStore(own).runs[0]
    shard = next(iter(run.shards))
    whole = shard.read_bytes()
    other = next(iter(ActivationStore(own).runs[1].shards)).read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:100] + b"\0" * 100 + whole[200:], other):
        shard.write_bytes(damaged)
        with pytest.raises(CacheError, match=r"activations cannot be read.*capture that run again"):
            ActivationStore(own).batches("resid_post", 1)
    shard.write_bytes(whole)
    batches = ActivationStore(own).batches("resid_post", 1)
    shard.write_bytes(whole[: len(whole) // 2])  # while it is in use
    with pytest.raises(CacheError, match="shorter than its header says"):
        torch.cat([*batches])
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # headers say nothing of a flipped bit
    with pytest.raises(CacheError, match="activations cannot be read"):
        ActivationStore(own).check()
    shard.write_bytes(whole)
    ActivationStore(own).check()
    for one in ActivationStore(own).runs:
        write_json_file(one.manifest | {"is_complete": False}, one.path / "manifest.json")
    with pytest.raises(CacheError, match="has no complete run"):
        ActivationStore(own)
