"""Caches of older scripts open as today's; what they leave open stays open."""

import zipfile

import numpy as np
import pytest
import torch
from helpers.older_caches import older_figure4, older_inference, older_layer, same
from omegaconf import OmegaConf

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError


@pytest.fixture
def read(tmp_path):
    """Write an older file and read it; what was read can be written, as of today."""

    def through(older, **how):
        torch.save(older, tmp_path / "old.pt", **how)
        cache = load_cache(tmp_path / "old.pt")
        save_cache(tmp_path / "new.pt", cache)
        assert same(load_cache(tmp_path / "new.pt"), cache)
        return cache

    return through


FIGURE4 = {"format": "figure4", "weights": "unknown", "step": 0, "timestep": 1000.0, "seed": None}
NINETEEN = {"num_frames": 19, "block_sizes": [1] + [3] * 6, "query_frames": [16, 17, 18]}
SAID = ["the file says 21 frames, its attention covers 19"]
WINDOW = ["a window of 6 frames without their numbers: taken as the newest"]


@pytest.mark.parametrize(
    ("older", "fields"),
    [
        (older_figure4(), FIGURE4 | {"query_frames": [18, 19, 20], "block_sizes": [3] * 7, "notes": []}),
        (older_figure4(F=19, claimed=21), FIGURE4 | NINETEEN | {"notes": SAID, "key_frames": [*range(19)]}),
        (older_figure4(is_logits=torch.tensor(True), num_frames=np.int64(21)), FIGURE4 | {"is_logits": True}),
        (older_layer(), {"format": "layer", "block_sizes": [3] * 3, "step": 0, "layer_index": 3}),
        (older_layer(block_sizes=[1, 4, 4]), {"block_sizes": [1, 4, 4], "query_frames": [*range(9)]}),
        (older_layer(orig_num_frames=33, block_sizes=[3, 3, 3]), {"block_sizes": [9], "timestep": None}),
        (older_inference([3, 3, 3], 2, window=6), {"format": "inference", "notes": WINDOW}),
        (older_inference([3, 3], 2), {"num_transformer_blocks": 8, "layer_indices": [2, 4], "num_heads": 3}),
    ],
)
def test_fields_of_older_files(read, older, fields):
    cache = read(older)
    assert {name: cache[name] for name in fields} == fields and cache["schema_version"] == 1


def test_tokens_of_an_older_figure4_are_kept(read):
    (entry,) = read(older_figure4())["attention_weights"]
    assert torch.equal(entry["attn_logits"], older_figure4()["attention_weights"][0]["attn_logits"])
    assert (entry["layer_idx"], entry["last_block_start_frame"], entry["num_key_frames"]) == (4, 18, 21)


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


def test_omegaconf_and_numpy_values(read):
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
    with pytest.raises(CacheError, match="looks like an older figure4 cache, but KeyError: 'frame_seq"):
        load_cache(tmp_path / "c.pt")
