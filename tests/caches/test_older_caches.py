"""Caches of older scripts open as today's; what they leave open stays open."""

import zipfile

import numpy as np
import pytest
import torch
from helpers.older_caches import older_figure4, older_inference, older_layer, same
from omegaconf import OmegaConf

from experiments.caches import load_cache, save_cache


def test_older_figure4(tmp_path):
    torch.save(older_figure4(), tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt", expect=("figure4",))
    assert (cache["format"], cache["weights"], cache["timestep"]) == ("figure4", "unknown", 1000.0)
    assert cache["query_frames"] == [18, 19, 20]
    assert cache["block_sizes"] == [3] * 7
    assert torch.equal(
        cache["attention_weights"][0]["attn_logits"], older_figure4()["attention_weights"][0]["attn_logits"]
    )
    save_cache(tmp_path / "new.pt", cache)  # what was read can be written, as of today
    assert same(load_cache(tmp_path / "new.pt"), cache)


def test_nineteen_frames_called_21(tmp_path):
    torch.save(older_figure4(F=19, claimed=21), tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt")
    assert (cache["num_frames"], cache["block_sizes"]) == (19, [1] + [3] * 6)
    assert cache["query_frames"] == [16, 17, 18]
    assert cache["notes"] == ["the file says 21 frames, its attention covers 19"]


@pytest.mark.parametrize("block_sizes", [[3, 3, 3], None])
def test_older_zeros_are_absent_by_block(tmp_path, block_sizes):
    older = older_layer(block_sizes=block_sizes)
    if block_sizes is None:
        del older["block_sizes"]
    torch.save(older, tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt")
    matrix = cache["full_frame_attention"]
    assert matrix.dtype == torch.float16
    for query in range(9):
        for key in range(9):
            assert matrix[:, query, key].isnan().all().item() == (key // 3 > query // 3)
    assert (matrix[:, 4, 2] == 0).all()
    assert (older["full_frame_attention"][:, 0, 8] == 0).all()  # the input is left alone


def test_older_bidirectional_layer(tmp_path):
    older = older_layer(orig_num_frames=33, vae_stride_t=4)
    del older["block_sizes"]
    torch.save(older, tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt")
    assert cache["block_sizes"] == [9]
    assert cache["timestep"] is None
    assert not cache["full_frame_attention"].isnan().any()


def test_older_inference(tmp_path):
    torch.save(older_inference([1, 3, 3], passes=5), tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt", expect=("inference",))
    assert not cache["is_logits"]
    assert cache["config"] == {"denoising_step_list": [1000, 750, 500, 250]}
    tags = [(c["block"], c["step"], c["layer_idx"]) for c in cache["attention_weights"]]
    assert tags == [(b, p, layer) for b in range(3) for p in range(5) for layer in (2, 4)]
    assert [c["is_clean_pass"] for c in cache["attention_weights"][:10:2]] == [False] * 4 + [True]
    assert cache["attention_weights"][-1]["query_frames"] == [4, 5, 6]
    assert cache["attention_weights"][-1]["q_shape"] == [1, 15, 3, 4]


def test_older_inference_window_and_single_call(tmp_path):
    torch.save(older_inference([3, 3, 3], passes=2, window=6), tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt")
    assert cache["attention_weights"][-1]["key_frames"] == [3, 4, 5, 6, 7, 8]
    assert cache["notes"] == ["a window of 6 frames without their numbers: taken as the newest"]
    one = older_inference([3, 3, 3], passes=5, layers=(2,))
    one["attention_weights"] = one["attention_weights"][-1:]
    torch.save(one, tmp_path / "c.pt")
    (call,) = load_cache(tmp_path / "c.pt")["attention_weights"]
    assert (call["block"], call["step"], call["timestep"]) == (
        2,
        None,
        None,
    )  # which pass it was, nobody knows


def test_older_inference_of_one_pass(tmp_path):
    """Its calls lie in their blocks; which pass it was, the file does not say."""
    torch.save(older_inference([3, 3, 3], passes=1), tmp_path / "c.pt")
    calls = load_cache(tmp_path / "c.pt")["attention_weights"]
    assert [(c["block"], c["step"]) for c in calls] == [(b, None) for b in range(3) for _ in (2, 4)]
    assert [c["query_frames"][0] for c in calls] == [0, 0, 3, 3, 6, 6]


def test_omegaconf_and_numpy_values(tmp_path):
    config = OmegaConf.create({"layers": [4], "nested": {"a": 1.5, "home": "${oc.env:HOME}"}, "none": None})
    older = older_figure4(
        layer_indices=config.layers,
        config=config,
        num_frames=np.int64(21),
        prompt=np.str_("x"),
        key_frames=np.arange(21),
        frame_seq_length=np.int32(5),
        is_logits=np.bool_(True),
    )
    older["attention_weights"][0] |= {"num_heads": np.int64(3), "scale": np.float64(0.5)}
    torch.save(older, tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt")
    assert cache["config"] == {"layers": [4], "nested": {"a": 1.5, "home": "${oc.env:HOME}"}, "none": None}
    assert type(cache["prompt"]) is str
    assert cache["attention_weights"][0]["scale"] == 0.5
    older = older_layer(more=np.zeros((2, 3)), words=np.array(["a", "b"]))
    older["full_frame_attention"] = older["full_frame_attention"].numpy()
    torch.save(older, tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt")
    assert cache["full_frame_attention"].isnan().any()
    assert cache["full_frame_attention"].dtype == torch.float16
    assert cache["words"] == ["a", "b"] and cache["more"].shape == (2, 3)


def test_numpy_1_names(tmp_path):
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


def test_before_zip_files(tmp_path):
    torch.save(older_layer(), tmp_path / "c.pt", _use_new_zipfile_serialization=False)
    assert load_cache(tmp_path / "c.pt")["format"] == "layer"
