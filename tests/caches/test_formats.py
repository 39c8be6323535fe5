"""Caches: what is written comes back, older files too; what is wrong is said in one line."""

import os
import pickle
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches
from helpers.refusals import refused
from helpers.synthetic_caches import MAKERS, older_figure4, older_inference, older_layer, same
from omegaconf import OmegaConf

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, part_of, peek
from experiments.caches.formats import FORMATS, Fields, check, declared_fields
from experiments.caches.legacy import to_attention_weights
from experiments.caches.store import open_layers
from experiments.caches.view import open_profiles
from wan import files

INF = float("inf")


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_round_trip(tmp_path, maker):
    """With the same bytes, also of what no format knows."""
    plain = {"": [None, True, -(2**62), 2**62, 1e-300, "一\n\x7f𝄞"], "a": {"b": [[], {"c": {}}]}}
    for number, cache in enumerate((maker(), maker() | {"more": plain, "seed": 2**62, "prompt": "\t“”"})):
        a, b = tmp_path / f"{number}.pt", tmp_path / f"another{number}.pt"
        save_cache(a, cache)
        assert same(load_cache(a, mmap=True), cache)
        save_cache(b, load_cache(a, mmap=False))
        assert same(load_cache(b, mmap=False), cache) and a.read_bytes() == b.read_bytes()
        with torch.serialization.safe_globals([]):
            torch.load(a, weights_only=True)  # needs no allow-list
    assert len(os.listdir(tmp_path)) == 4


# --- What is wrong
def changed(values, **changes):
    """The values with some replaced, or, given a function, changed."""
    new = {name: value(values[name]) if callable(value) else value for name, value in changes.items()}
    return values | new


def with_fields(kind, granularity=None, **changes):
    """A cache of a format, with some of its fields changed."""
    settings = {"granularity": granularity} if granularity else {}
    return changed(getattr(synthetic_caches, kind)(**settings), **changes)


def with_entries(kind, granularity=None, **changes):
    """A cache of a format, with fields of its entries changed."""
    cache = with_fields(kind, granularity)
    entries = [changed(call, **changes) for call in cache["attention_weights"]]
    return cache | {"attention_weights": entries}


def with_block(cache_changes=(), **changes):
    """A cache of maps, with fields of its block changed."""
    cache = synthetic_caches.maps() | dict(cache_changes)
    return cache | {"blocks": [changed(cache["blocks"][0], **changes)]}


def refused_when_opened(cache, message, folder):
    torch.save(cache, folder / "c.pt")
    with refused(message, CacheError):
        view = open_profiles(load_cache(folder / "c.pt"))
        view.frame_profile(view.layers[0])


def infinite(x):
    return x * INF


def nan(x):
    return x * float("nan")


def zero(x):
    return x * 0


def negative(x):
    return -x


def times(factor):
    return lambda x: x * factor


def plus(number):
    return lambda x: x + number


def without_last_key(x):
    return x[..., :-1]


def with_one_nan(x):
    return x.clone().index_put_(tuple(torch.zeros(x.ndim, 1, dtype=torch.long)), x.new_tensor(torch.nan))


def with_site_twice(sites):
    return sites[:1] * 2


def with_unknown_site(sites):
    return [sites[0] | {"site": "zzz"}]


def named(value):
    """Name a case by its message."""
    return value[:40] if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "42"}, "seed is '42'; it should be a valid integer"),
        ({"seed": 2**70}, "seed is .*; it should be less than 9223372036854775808"),
        ({"prompt": 3}, "prompt is 3; it should be a valid string"),
        ({"prompt": "a" * 100_001}, "has 100001 characters"),
        ({"num_heads": 0}, "num_heads is 0; it should be greater than or equal to 1"),
        ({"head_dim": 0}, "head_dim is 0; it should be greater than or equal to 1"),
        ({"layer_index": -3}, "layer_index is -3; it should be greater"),
        ({"files": [1]}, r"files\[0\] is 1; it should be a dictionary"),
        ({"files": [{"name": "a"}]}, r"files\[0\].size is missing"),
        ({"format": "lyer"}, "format is 'lyer'; did you mean layer"),
        ({"schema_version": 7, "read_by": "3.1"}, "7 is not one of 1..2.*version 3.1 of this"),
        ({"quantity": "probs"}, "quantity is 'probs'; it should be 'mean_logit', 'mass'"),
    ],
    ids=named,
)
def test_a_field_has_its_type_and_range(changes, message, tmp_path):
    refused_when_opened(with_fields("layer", **changes), message, tmp_path)


OF_TWO_BLOCKS = {"partial": True, "blocks_done": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_sizes": [3, 3]}, r"block_sizes \[3, 3\] do not add up to num_frames 9"),
        ({"partial": True, "blocks_done": 4}, "or blocks_done 4 is not in 1..3"),
        (OF_TWO_BLOCKS, r"the last block is \[3, 4, 5\]"),
        (
            OF_TWO_BLOCKS | {"last_block_query_frames": [3, 4, 5]},
            "full_frame_attention .*must be NaN in later blocks",
        ),
        (
            {"last_block_query_frames": [6, 7, 9]},
            r"\[6, 7, 9\]; must be increasing frames of 0 to 8",
        ),
        ({"last_block_query_frames": [0, 1, 2]}, "last_block_query_frames .*the last block is"),
        ({"full_frame_attention": torch.zeros(3, 3, 8)}, r"float32 \[3, 3, 8\], not f16/f32 \[H, F, F\]"),
        ({"full_frame_attention": torch.zeros(3, 9, 9)}, "must be NaN in later blocks"),
    ],
    ids=named,
)
def test_frames_of_a_layer_cache_are_those_of_its_blocks(changes, message, tmp_path):
    refused_when_opened(with_fields("layer", **changes), message, tmp_path)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            with_fields("figure4", query_frames=[3, 4, 5]),
            "must not come after the queries' block",
        ),
        (
            with_entries("inference", block=0, query_frames=[0, 1, 2]),
            "must not come after the queries' block",
        ),
        (
            with_fields("atlas", key_curve=without_last_key),
            "key_curve is .*be of 9 key frames of 5 tokens",
        ),
        (with_entries("figure4", attn_logits=without_last_key), "must be of 21 key frames of 16 tokens"),
        (with_block(key_frame=plus(50)), "key_frame is .*must be below 3"),
        (with_block(key_token=plus(50)), "key_token is .*must be below 4"),
        (with_block(queries=plus(4)), "queries is .*must be frame, row and column"),
        (with_block(block=7), "block is 7; its queries are"),
        (with_block({"rows": 3}), "rows is 3; must make 4 tokens of a frame with 2 columns"),
        (with_block({"heads": [1, 9]}), "heads is .*must be of 3"),
        (with_block(map_mass=None), r"blocks\[0\].none of map_mass, word_map is there"),
    ],
    ids=named,
)
def test_queries_and_keys_are_tokens_of_the_video(cache, message, tmp_path):
    refused_when_opened(cache, message, tmp_path)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (with_fields("layer", last_block_frame_attention=infinite), "must be finite"),
        (with_fields("atlas", frame_logits=infinite), "frame_logits .*must be finite"),
        (with_fields("atlas", key_curve=infinite), "key_curve is .*must be finite"),
        (with_fields("causal_atlas", effects=infinite), "effects .*must be finite"),
        (with_fields("effects", latents_base=nan), "latents_base is .*must be finite"),
        (with_fields("effects", total=negative), "total is .*must not be negative"),
        (with_entries("figure4", attn_logits=infinite), "attn_logits is .*must be finite"),
        (with_entries("figure4", attn_logits=with_one_nan), "attn_logits is .*whole keys may be absent"),
    ],
    ids=named,
)
def test_numbers_are_finite(cache, message, tmp_path):
    refused_when_opened(cache, message, tmp_path)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (with_fields("atlas", frame_mass=times(1.002)), "frame_mass .*must have rows that sum to 1"),
        (
            with_fields("atlas", slot_mass=torch.ones(3, 2, 3, 9, 2)),
            "slot_mass .*rows that sum to 1",
        ),
        (
            with_fields("atlas", cross_mass=torch.full((3, 2, 3, 9, 4), 0.9)),
            "cross_mass is .*rows of at most 1",
        ),
        (with_entries("figure4", "frame", frame_mass=times(3)), r"\[0\].frame_mass .*rows that sum to 1"),
        (with_entries("inference", attn_weights=times(0.5)), "attn_weights is .*rows that sum to 1"),
        (with_block(map_mass=zero), "map_mass .*must have rows that sum to 4"),
    ],
    ids=named,
)
def test_shares_of_attention_sum_to_one(cache, message, tmp_path):
    refused_when_opened(cache, message, tmp_path)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (with_fields("atlas", layers=[0, 1, 1]), "layers is .*must have each once"),
        (
            with_fields("atlas", layers=[-1, 0, 1]),
            r"layers\[0\] is -1; it should be greater than or equal",
        ),
        (with_fields("atlas", pass_steps=[0, 0]), "pass_steps is .*must have each once"),
        (
            with_fields("atlas", pass_timesteps=[float("nan"), 0.0]),
            r"pass_timesteps.* is nan; it should be a finite",
        ),
        (with_fields("atlas", sink_slots=[1]), r"sink_slots is \[1\], not \[done\]"),
        (with_fields("causal_atlas", units=[0, 1, 1]), "units is .*must have each once"),
        (with_fields("causal_atlas", each="heads"), "each is 'heads'; it should be 'head', 'layer'"),
        (with_fields("attribution", sites=with_site_twice), "sites has site .*twice"),
        (with_fields("attribution", sites=with_unknown_site), "site is 'zzz'; is no site"),
        (with_entries("inference", layer_idx=1), "attention_weights has layer_idx, block, step .*twice"),
    ],
    ids=named,
)
def test_everything_has_one_name_and_counts_from_0(cache, message, tmp_path):
    refused_when_opened(cache, message, tmp_path)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (with_fields("figure4", layer_indices=[2, 7]), r"layer_indices is .*entries are of \[1, 5\]"),
        (with_fields("inference", num_transformer_blocks=2), "num_transformer_blocks is 2; it has layers"),
        (with_entries("figure4", num_heads=3), r"attention_weights\[0\]"),
        (with_entries("figure4", num_frames=20), r"attention_weights\[0\]"),
        (with_entries("figure4", is_logits=False), "is_logits is False; the cache has True"),
    ],
    ids=named,
)
def test_entries_repeat_what_the_cache_says(cache, message, tmp_path):
    refused_when_opened(cache, message, tmp_path)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_every_field_is_required_or_optional_as_declared(maker):
    cache = maker()
    check(cache)
    kind = FORMATS[cache["format"]]
    optional = {name for name in declared_fields(kind) if hasattr(kind, name)}
    for name in cache.keys() - optional:
        with pytest.raises(CacheError, match=f"{name}|format is None"):
            check({k: v for k, v in cache.items() if k != name})
    for name in cache.keys() & optional - {"frame_logits", "frame_mass"}:
        check({k: v for k, v in cache.items() if k != name})


def names_of_fields(hint):
    """Yield the names of a format's fields, and of those of the dicts in its lists."""
    if isinstance(hint, type) and issubclass(hint, Fields):
        hints = get_type_hints(hint)
        for name in declared_fields(hint):
            yield name
            yield from names_of_fields(hints[name])
    for part in get_args(hint):  # of a list of dicts
        yield from names_of_fields(part)


def test_the_page_of_fields_names_what_is_declared():
    page, notebooks = ((ROOT / n).read_text() for n in ("docs/cache_schema.md", "notebooks/README.md"))
    declared = {name for kind in FORMATS.values() for name in names_of_fields(kind)}
    columns = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    named = {name for column in columns for name in re.findall(r"`(\w+)`", column)}
    assert len(named) > 60 and named <= declared
    for kind, cache in FORMATS.items():
        assert kind in page and f"`{cache.script}`" in page and f"`{cache.notebook}`" in notebooks


# --- Files
def test_unwritable_paths_leave_nothing_and_a_failed_write_keeps_what_was_there(tmp_path, monkeypatch):
    cache = synthetic_caches.layer()
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(CacheError, match=r"c.png does not end in .pt, which is written there"):
        save_cache(tmp_path / "c.png", cache)
    for path in (tmp_path / "file" / "c.pt", tmp_path / "folder.pt", "/proc/c.pt"):
        with pytest.raises(CacheError, match="cannot be written: "):
            save_cache(path, cache)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder.pt"]
    path = tmp_path / "folder.pt" / "c.pt"
    save_cache(path, cache)
    before = path.read_bytes()

    def disk_full(cache, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(CacheError, match=r"No space left on device"):
        save_cache(path, synthetic_caches.layer(N=4), overwrite=True)
    assert path.read_bytes() == before and os.listdir(path.parent) == ["c.pt"]


def test_what_cannot_be_read(tmp_path):
    for name in ("layer10.pt", "layer3.pt", "whole.pt"):
        save_cache(tmp_path / name, synthetic_caches.layer())
    with pytest.raises(CacheError, match=r"layer7.pt not found; there is layer3.pt, layer10.pt; run: "):
        load_cache(tmp_path / "layer7.pt")
    with pytest.raises(CacheError, match=r"whol.pt not found; did you mean whole.pt\?$"):
        load_cache(tmp_path / "whol.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-700])
    (tmp_path / "text.pt").write_text("not a cache")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"state_dict": {}}, tmp_path / "weights.pt")
    said = dict.fromkeys(("cut", "text", "empty"), "cannot be read") | {
        "list": "cannot be read as a cache: .*list"
    }
    for name, why in (said | {"weights": "not an attention cache, its keys are state_dict"}).items():
        with pytest.raises(CacheError, match=f"{name}.*{why}.*; run: python ") as error:
            load_cache(tmp_path / f"{name}.pt")
        assert "\n" not in str(error.value)
        # A command names only what is nobody's, or a cache's
        assert (f"{name}.pt" in str(error.value).partition("; run: ")[2]) == (name in ("cut", "empty"))
    with pytest.raises(CacheError, match=r"is a cache of format layer: open it with notebooks/extract_all_"):
        load_cache(tmp_path / "whole.pt", expect=("figure4", "atlas"))
    assert load_cache(tmp_path / "whole.pt", expect=("atlas", "layer"))["format"] == "layer"


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


# --- Caches made of others
def test_a_look_at_a_file_never_fails(tmp_path):
    path = tmp_path / "a.pt"
    os.mkfifo(tmp_path / "pipe.pt")
    assert peek(path) == {} == peek(tmp_path / "pipe.pt")
    torch.save([1], path)
    assert peek(path) == {}
    save_cache(path, synthetic_caches.atlas() | {"fingerprint": "run"}, overwrite=True)
    assert peek(path)["fingerprint"] == "run"


def test_a_file_that_is_replaced_while_it_is_read_is_whole(tmp_path, monkeypatch):
    """A notebook may open a cache while its run writes the next one."""
    path, caches = tmp_path / "a.pt", [synthetic_caches.atlas(), synthetic_caches.layer()]
    save_cache(path, caches[0])
    original = files.is_archive

    def replaced_after(path):
        found = original(path)
        if caches:
            save_cache(path, caches.pop(), overwrite=True)
        return found

    monkeypatch.setattr(files, "is_archive", replaced_after)
    assert same(load_cache(path), synthetic_caches.atlas())  # the last that was written


def test_an_archive_behind_another_is_no_cache(tmp_path):
    for name in ("layer", "atlas"):
        save_cache(tmp_path / f"{name}.pt", getattr(synthetic_caches, name)())
    both = [(tmp_path / name).read_bytes() for name in ("layer.pt", "atlas.pt")]
    (tmp_path / "two.pt").write_bytes(both[0] + both[1])
    with pytest.raises(CacheError, match="its records are not as"):
        load_cache(tmp_path / "two.pt")


def test_threads_write_one_path_and_a_killed_process_of_ones_number_blocks_nobody(tmp_path):
    path = tmp_path / "a.pt"
    part_of(path).write_bytes(b"of a killed process")
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: save_cache(path, synthetic_caches.layer()), range(20)))
    save_cache(path, synthetic_caches.layer())
    assert os.listdir(tmp_path) == ["a.pt"]
    itself: dict = {}
    itself["x"] = itself
    with pytest.raises(CacheError, match="it holds itself"):
        save_cache(path, synthetic_caches.layer() | itself)
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    with pytest.raises(CacheError, match=r"loop\.pt not found; run: "):
        load_cache(tmp_path / "loop.pt")


def test_a_folder_of_layers_is_of_one_rollout(tmp_path):
    for name, layer in (("layer10.pt", 10), ("layer9.pt", 9)):
        save_cache(tmp_path / name, synthetic_caches.layer(N=layer))
    assert [path.name for path in open_layers(tmp_path)] == ["layer9.pt", "layer10.pt"]
    for wrong, message in (
        (synthetic_caches.layer(N=9), r"each layer once, and holds a layer twice: \[9, 10, 9\]"),
        (synthetic_caches.layer(N=3) | {"seed": 7}, "by their source: layer9.pt .*layer11.pt has .*seed 7"),
        (synthetic_caches.layer(N=3) | {"fingerprint": "b"}, "by their fingerprint: .*layer11.pt has 'b'"),
        (synthetic_caches.layer(N=3) | {"config": {"timestep_shift": 4.0}}, "by their settings"),
        (synthetic_caches.layer(N=3) | {"dtype": "bfloat16"}, "by their model"),
        (synthetic_caches.layer(N=3) | {"first_frames": "3 a"}, "by their given frames"),
    ):
        save_cache(tmp_path / "layer11.pt", wrong, overwrite=True)
        with pytest.raises(CacheError, match=message):
            open_layers(tmp_path)
    with pytest.raises(CacheError, match="holds no layerN"):
        open_layers(tmp_path / "none")


@pytest.fixture
def read(tmp_path):
    """Write an older file and read it; what was read can be written, as of today."""

    def through(older, **how):
        torch.save(older, tmp_path / "old.pt", **how)
        cache = load_cache(tmp_path / "old.pt")
        save_cache(tmp_path / "new.pt", cache, overwrite=True)
        assert same(load_cache(tmp_path / "new.pt"), cache)
        return cache

    return through


FIGURE4 = {"format": "figure4", "weights": "unknown", "step": 0, "timestep": 1000.0, "seed": None}
NINETEEN = {"num_frames": 19, "block_sizes": [1] + [3] * 6, "query_frames": [16, 17, 18]}
SAID = ["the file says 21 frames, its attention covers 19"]
WINDOW = ["a window of 6 frames without their numbers: taken as the newest"]


def test_fields_of_older_files(read):
    for older, fields in (
        (older_figure4(), FIGURE4 | {"query_frames": [18, 19, 20], "block_sizes": [3] * 7, "notes": []}),
        (older_figure4(F=19, claimed=21), FIGURE4 | NINETEEN | {"notes": SAID, "key_frames": [*range(19)]}),
        (older_figure4(is_logits=torch.tensor(True), num_frames=np.int64(21)), FIGURE4 | {"is_logits": True}),
        (older_layer(), {"format": "layer", "block_sizes": [3] * 3, "step": 0, "layer_index": 3}),
        (older_layer(block_sizes=[1, 4, 4]), {"block_sizes": [1, 4, 4], "query_frames": [*range(9)]}),
        (older_layer(orig_num_frames=33, block_sizes=[3, 3, 3]), {"block_sizes": [9], "timestep": None}),
        (older_inference([3, 3, 3], 2, window=6), {"format": "inference", "notes": WINDOW}),
        (older_inference([3, 3], 2), {"num_transformer_blocks": 8, "layer_indices": [2, 4], "num_heads": 3}),
    ):
        cache = read(older)
        assert {name: cache[name] for name in fields} == fields and cache["schema_version"] == 1


@pytest.mark.parametrize("known", [True, False])
def test_older_zeros_are_absent_by_block(read, known):
    older = older_layer()
    if not known:
        del older["block_sizes"], older["last_block_frame_attention"], older["last_block_query_frames"]
    cache = read(older)
    matrix = cache["full_frame_attention"]
    block = torch.arange(9) // 3
    assert torch.equal(matrix.isnan(), (block > block[:, None]).expand(3, 9, 9))
    assert matrix.dtype == torch.float16 and (matrix[:, 4, 2] == 0).all()
    assert (older["full_frame_attention"][:, 0, 8] == 0).all()  # the input is left alone
    assert cache["last_block_query_frames"] == [6, 7, 8]
    profile = cache["last_block_frame_attention"].float()
    torch.testing.assert_close(profile, matrix[:, 6:].float().mean(1), atol=2e-3, rtol=0)
    whole = read(older_layer(orig_num_frames=33))
    assert not whole["full_frame_attention"].isnan().any() and whole["is_clean_pass"] is None


def test_calls_of_an_older_inference_cache_get_their_tags(read):
    cache = read(older_inference([1, 3, 3], passes=5))
    assert not cache["is_logits"] and cache["config"] == {"denoising_step_list": [1000, 750, 500, 250]}
    calls = cache["attention_weights"]
    tags = [(c["block"], c["step"], c["layer_idx"]) for c in calls]
    assert tags == [(b, p, layer) for b in range(3) for p in range(5) for layer in (2, 4)]
    assert [c["is_clean_pass"] for c in calls[:10:2]] == [False] * 4 + [True]
    assert [c["timestep"] for c in calls[:10:2]] == [1000.0, None, None, None, 0.0]
    assert (calls[-1]["query_frames"], calls[-1]["q_shape"]) == ([4, 5, 6], [1, 15, 3, 4])
    windowed = read(older_inference([3, 3, 3], passes=2, window=6))["attention_weights"]
    assert windowed[-1]["key_frames"] == [3, 4, 5, 6, 7, 8]
    once = read(older_inference([3, 3, 3], passes=1))["attention_weights"]  # of which pass?
    assert [(c["block"], c["step"]) for c in once] == [(b, None) for b in range(3) for _ in (2, 4)]
    alone = older_inference([3, 3, 3], passes=5, layers=(2,))
    alone["attention_weights"] = alone["attention_weights"][-1:]
    (call,) = read(alone)["attention_weights"]
    assert (call["block"], call["step"], call["timestep"]) == (2, None, None)


def test_an_atlas_is_written_for_the_notebooks_of_the_forks(read):
    now = synthetic_caches.atlas(layers=(1, 5), F=9, H=3, S=5)
    older = to_attention_weights(now, at=1)
    for place, entry in enumerate(older["attention_weights"]):  # as they compute it
        attn, length = entry["attn_logits"][0].float().numpy(), entry["frame_seq_length"]
        means = [
            attn.mean(1)[:, k * length : (k + 1) * length].mean(1) for k in range(attn.shape[2] // length)
        ]
        expected = now["frame_logits"][place, 1][:, 6:].mean(1)
        torch.testing.assert_close(torch.from_numpy(np.stack(means, 1)), expected)
    again = open_profiles(read(older))
    assert again.layers == (1, 5) and np.allclose(again.frame_profile(5), expected)


def test_omegaconf_and_numpy_values_and_tokens(read):
    (entry,) = read(older_figure4())["attention_weights"]
    assert torch.equal(entry["attn_logits"], older_figure4()["attention_weights"][0]["attn_logits"])
    assert (entry["layer_idx"], entry["last_block_start_frame"], entry["num_key_frames"]) == (4, 18, 21)
    config = OmegaConf.create({"layers": [4], "nested": {"a": 1.5, "home": "${oc.env:HOME}"}, "none": None})
    numbers = {"key_frames": np.arange(21), "frame_seq_length": np.int32(5)}
    older = older_figure4(layer_indices=config.layers, config=config, prompt=np.str_("x"), **numbers)
    older["attention_weights"][0] |= {"num_heads": np.int64(3), "scale": np.float64(0.5)}
    cache = read(older)
    assert cache["config"] == {"layers": [4], "nested": {"a": 1.5, "home": "${oc.env:HOME}"}, "none": None}
    assert type(cache["prompt"]) is str and cache["attention_weights"][0]["scale"] == 0.5
    older = older_layer(more=np.zeros((2, 3)), words=np.array(["a", "b"]))
    older["full_frame_attention"] = older["full_frame_attention"].numpy()
    cache = read(older)
    assert cache["full_frame_attention"].dtype == torch.float16
    assert cache["words"] == ["a", "b"] and cache["more"].shape == (2, 3)


def test_numpy_1_names_and_files_before_zip(tmp_path, read):
    """Files pickled under numpy 1 say numpy.core where numpy 2 says numpy._core."""
    torch.save(older_figure4(num_frames=np.int64(21), key_frames=np.arange(21)), tmp_path / "2.pt")
    with zipfile.ZipFile(tmp_path / "2.pt") as two, zipfile.ZipFile(tmp_path / "1.pt", "w") as one:
        for name in two.namelist():
            data = two.read(name)
            if name.endswith("data.pkl"):
                assert data.count(b"cnumpy._core.multiarray\n") == 2
                data = data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
            one.writestr(name, data)
    assert same(load_cache(tmp_path / "1.pt"), load_cache(tmp_path / "2.pt"))
    assert read(older_layer(), _use_new_zipfile_serialization=False)["format"] == "layer"


def test_what_looks_older_and_is_not(tmp_path):
    older = older_figure4()
    del older["frame_seq_length"]
    torch.save(older, tmp_path / "c.pt")
    with pytest.raises(CacheError, match="KeyError in its fields: 'frame_seq"):
        load_cache(tmp_path / "c.pt")
