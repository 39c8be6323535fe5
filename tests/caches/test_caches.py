"""Caches: what is written comes back, the same bytes each time; what is wrong is said."""

import os
import pickle
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import synthetic_caches
from helpers.older_caches import MAKERS, same

from experiments.caches import formats as schema
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.store import select_passes
from experiments.caches.view import open_profiles


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("mmap", [True, False])
def test_round_trip(tmp_path, maker, mmap):
    cache = maker()
    save_cache(tmp_path / "c.pt", cache)
    assert same(load_cache(tmp_path / "c.pt", mmap=mmap), cache)
    assert os.listdir(tmp_path) == ["c.pt"]
    with torch.serialization.safe_globals([]):
        torch.load(tmp_path / "c.pt", weights_only=True)  # needs no allow-list


def test_bytes_depend_on_the_content_alone(tmp_path):
    cache = synthetic_caches.figure4(S=5, H=3)
    cache["notes"] = [cache["prompt"], cache["prompt"]]  # one object three times
    save_cache(tmp_path / "a.pt", cache)
    twin = synthetic_caches.figure4(S=5, H=3)
    twin["notes"] = ["".join(list(twin["prompt"])) for _ in range(2)]  # equal texts, three objects
    twin["query_frames"] = tuple(twin["query_frames"])
    tokens = twin["attention_weights"][0]
    padded = torch.cat(
        [tokens["attn_logits"], torch.zeros_like(tokens["attn_logits"])]
    )  # a view of a larger storage
    tokens["attn_logits"] = padded[:1]
    os.makedirs(tmp_path / "other")
    save_cache(tmp_path / "other" / "a much longer name.pt", twin)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "other" / "a much longer name.pt").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "42"}, "seed is '42', not int | none"),
        ({"prompt": None}, "prompt is None, not str"),
        ({"num_heads": np.int64(3)}, r"cache\['num_heads'\] is a numpy.int64"),
        ({"seed": True}, "seed is True"),
        ({"weights": "other"}, "weights is 'other', not one of base, checkpoint, published"),
        ({"block_sizes": [3, 3]}, r"block_sizes \[3, 3\] do not add up to num_frames 9"),
        (
            {"last_block_query_frames": [6, 7, 9]},
            r"last_block_query_frames \[6, 7, 9\] are not increasing frames of 0..8",
        ),
        (
            {"full_frame_attention": torch.zeros(3, 9, 8)},
            r"float32 \[3, 9, 8\], not f16/f32 \[H, F, F\] \(F 9, H 3\)",
        ),
        (
            {"full_frame_attention": torch.zeros(3, 9, 9)},
            "values where the key's block comes after the query's",
        ),
        ({"last_block_frame_attention": torch.zeros(3, 9).double()}, r"float64 \[3, 9\]"),
        ({"format": "lyer"}, "format is 'lyer', not one of"),
        ({"schema_version": 99}, "schema_version 99 is newer"),
    ],
)
def test_wrong_fields_are_not_written(tmp_path, change, message):
    with pytest.raises(CacheError, match=message):
        save_cache(tmp_path / "c.pt", synthetic_caches.layer() | change)
    assert os.listdir(tmp_path) == []


def test_every_required_field_is_required(tmp_path):
    for maker in MAKERS.values():
        cache = maker()
        for name in cache.keys() - {"key_curve", "pass_steps", "frame_mass", "frame_logits"}:
            with pytest.raises(CacheError, match=f"{name}|format is None"):
                save_cache(tmp_path / "c.pt", {k: v for k, v in cache.items() if k != name})


def test_wrong_entries(tmp_path):
    cache = synthetic_caches.figure4(S=5, H=3)
    cache["attention_weights"][1]["attn_logits"] = torch.zeros(1, 3, 15, 100).half()
    with pytest.raises(
        CacheError,
        match=r"attention_weights\[1\].attn_logits is float16 .*, not of 21 key frames of 5 tokens",
    ):
        save_cache(tmp_path / "c.pt", cache)
    del cache["attention_weights"][1]["attn_logits"]
    with pytest.raises(CacheError, match=r"attention_weights\[1\].none of attn_logits, .* is there"):
        save_cache(tmp_path / "c.pt", cache)
    with pytest.raises(
        CacheError, match=r"layer_indices \[1\] are not the layers of attention_weights, \[1, 5\]"
    ):
        save_cache(tmp_path / "c.pt", synthetic_caches.figure4(S=5, H=3) | {"layer_indices": [1]})
    with pytest.raises(CacheError, match="not a list of dicts"):
        save_cache(tmp_path / "c.pt", synthetic_caches.figure4(S=5, H=3) | {"attention_weights": 3})


def test_logits_of_figure4_have_both_names_and_one_storage(tmp_path):
    """Older notebooks read attn_logits, or attn_weights: a default cache opens in both, not a byte larger."""
    entry = synthetic_caches.figure4(S=5, H=3)["attention_weights"][0]
    entry["attn_weights"] = entry["attn_logits"]
    one = synthetic_caches.figure4(layers=(1,), S=5, H=3)
    save_cache(tmp_path / "one.pt", one)
    save_cache(tmp_path / "both.pt", one | {"attention_weights": [entry]})
    sizes = [(tmp_path / name).stat().st_size for name in ("one.pt", "both.pt")]
    assert 0 <= sizes[1] - sizes[0] < 1000 < entry["attn_logits"].numel() * 2
    for mmap in (True, False):
        (read,) = load_cache(tmp_path / "both.pt", mmap=mmap)["attention_weights"]
        assert read["attn_weights"].data_ptr() == read["attn_logits"].data_ptr()
        assert torch.equal(read["attn_weights"], entry["attn_logits"])
    assert (
        load_cache(tmp_path / "one.pt")["attention_weights"][0].keys() == one["attention_weights"][0].keys()
    )
    with pytest.raises(CacheError, match=r"attention_weights\[0\].attn_weights is another tensor"):
        other = entry | {"attn_weights": entry["attn_logits"] + 1}
        save_cache(tmp_path / "c.pt", one | {"attention_weights": [other]})


def test_unwritable_paths_leave_nothing(tmp_path):
    cache = synthetic_caches.layer()
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "c.pt", tmp_path / "folder", "/proc/c.pt"):
        with pytest.raises(CacheError, match="cannot be written: "):
            save_cache(path, cache)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path, monkeypatch):
    save_cache(tmp_path / "c.pt", synthetic_caches.layer())
    before = (tmp_path / "c.pt").read_bytes()

    def disk_full(cache, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(CacheError, match="No space left"):
        save_cache(tmp_path / "c.pt", synthetic_caches.layer(N=4))
    assert (tmp_path / "c.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["c.pt"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(CacheError, match=r"No space left on device; it needs \d{3,} bytes, 1 are free"):
        save_cache(tmp_path / "c.pt", synthetic_caches.layer(N=4))


def test_what_cannot_be_read(tmp_path):
    for name, command in {
        "attention_cache_figure4.pt": "run_extraction_figure4.py (",
        "layer7.pt": "run_extraction_each.py --layer_index 7 "
        "(without a model: python experiments/layers_from_atlas.py cache/",
        "mine.pt": "run_extraction_each.py --output_path cache/mine.pt (",
        "atlas.pt": "run_extraction_all.py (",
        "attention_cache.pt": "run_extraction.py (",
    }.items():
        with pytest.raises(CacheError) as error:
            load_cache(tmp_path / name, expect=("layer",) if name == "mine.pt" else ())
        assert f"{name} not found; run: python experiments/{command}" in str(error.value)
        assert "\n" not in str(error.value)
    for name in ("layer10.pt", "layer3.pt"):
        save_cache(tmp_path / name, synthetic_caches.layer())
    with pytest.raises(
        CacheError, match=r"layer7.pt not found; there is layer3.pt, layer10.pt; run: python experiments/run_"
    ):
        load_cache(tmp_path / "layer7.pt")
    save_cache(tmp_path / "whole.pt", synthetic_caches.layer())
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-700])
    (tmp_path / "text.pt").write_text("not a cache")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"state_dict": {}}, tmp_path / "weights.pt")
    for name, why in {
        "cut.pt": "cannot be read", "text.pt": "cannot be read", "empty.pt": "cannot be read",
        "list.pt": "holds a list", "weights.pt": "not an attention cache, its keys are state_dict",
    }.items():  # fmt: skip
        with pytest.raises(
            CacheError, match=f"{name}.*{why}.*; make it again: python experiments/run_"
        ) as error:
            load_cache(tmp_path / name)
        assert "\n" not in str(error.value)


def test_the_wrong_kind_is_named(tmp_path):
    save_cache(tmp_path / "c.pt", synthetic_caches.layer())
    with pytest.raises(
        CacheError,
        match=r"is a cache of format layer: open it with notebooks/extract_all_attention\.ipynb.*"
        r"figure4 or atlas, made by: python experiments/run_extraction_figure4\.py",
    ):
        load_cache(tmp_path / "c.pt", expect=("figure4", "atlas"))
    assert load_cache(tmp_path / "c.pt", expect=("layer",))["format"] == "layer"


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "value", [Harmful(), np.array([Harmful()], dtype=object), pickle.Unpickler, torch.nn.Linear(1, 1)]
)
def test_nothing_else_is_unpickled(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    torch.save(synthetic_caches.layer() | {"more": value}, "c.pt")
    with pytest.raises(CacheError, match="cannot be read"):
        load_cache("c.pt")
    assert os.listdir(tmp_path) == ["c.pt"]


def test_passes_are_taken_out_of_an_atlas():
    atlas = synthetic_caches.atlas()
    first, *_, last = atlas.get("pass_steps") or range(len(atlas["pass_timesteps"]))
    ends = select_passes(atlas, [last, first])
    schema.check(ends)
    assert ends["pass_steps"] == [last, first]
    for step in (last, first):
        ours, theirs = open_profiles(ends, step), open_profiles(atlas, step)
        assert (ours.timestep, ours.is_clean_pass) == (theirs.timestep, theirs.is_clean_pass)
        np.testing.assert_array_equal(ours.profiles(), theirs.profiles())
    with pytest.raises(CacheError, match="pass 77 is not in this cache"):
        select_passes(atlas, [77])
