"""The scripts, for real, on the miniature:
what they write, that it is right, and what they say of bad input.
"""

import re
import subprocess
import sys

import imageio.v3 as iio
import pytest
import torch
from conftest import ROOT

from experiments import run_extraction_all, run_extraction_each, run_extraction_figure4
from experiments.benchmarks import rollout
from experiments.caches import frames, load_cache
from experiments.extraction import causal
from experiments.running import cli
from wan.blocks import later_block

MINI = ["--config_path", "configs/wan_mini.yaml"]
SHORT = [*MINI, "--num_frames", "6"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def extract(script, path, *flags) -> dict:
    script.run([*flags, "--output_path", str(path)])
    return load_cache(path, mmap=False)


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> dict[str, dict]:
    """One rollout of four blocks of the miniature per script."""
    folder = tmp_path_factory.mktemp("caches")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, script, flags in (
            ("token", run_extraction_figure4, []),
            ("probabilities", run_extraction_figure4, ["--capture", "probabilities"]),
            ("key", run_extraction_figure4, ["--granularity", "key"]),
            ("frame", run_extraction_figure4, ["--granularity", "frame"]),
            ("layer", run_extraction_each, ["--layer_index", "5"]),
            ("atlas", run_extraction_all, ["--key_curve", "--cross"]),
        ):
            made[name] = extract(script, folder / f"{name}.pt", *MINI, "--num_frames", "12", *flags)
    return made


def test_the_figure4_cache(caches):
    cache = caches["token"]
    assert cache["format"] == "figure4" and cache["layer_indices"] == [1, 5] and cache["is_logits"]
    assert (cache["num_frames"], cache["block_sizes"], cache["frame_seq_length"]) == (12, [3] * 4, 16)
    assert (cache["query_frames"], cache["key_frames"]) == ([9, 10, 11], list(range(12)))
    assert (cache["step"], cache["timestep"], cache["is_clean_pass"]) == (0, 1000.0, False)
    assert (cache["model"], cache["weights"], cache["weights_file"]) == (
        "wan-mini",
        "checkpoint",
        "self_forcing_mini.pt",
    )
    assert len(cache["weights_sha256"]) == 64 and cache["seed"] == 42 and "circle" in cache["prompt"]
    for entry, layer in zip(cache["attention_weights"], (1, 5), strict=True):
        assert entry["layer_idx"] == layer and entry["last_block_start_frame"] == 9
        assert entry["attn_logits"].shape == (1, 12, 48, 192) and entry["attn_logits"].dtype == torch.float16


def test_granularities_agree(caches):
    """Frames from half-precision tokens, from exact means, from the key curve,
    and from the atlas are the same numbers.
    """
    S, atlas = caches["token"]["frame_seq_length"], caches["atlas"]
    for i, layer in enumerate((1, 5)):
        names = ("token", "key", "frame", "probabilities")
        token, key, frame, prob = (caches[name]["attention_weights"][i] for name in names)
        from_tokens = frames.token_matrix_to_frames(token["attn_logits"][0], S)
        scale = frame["frame_logits"].abs().max()
        torch.testing.assert_close(from_tokens, frame["frame_logits"], atol=2**-10 * scale, rtol=0)
        torch.testing.assert_close(
            key["key_curve"], token["attn_logits"][0].float().mean(1), atol=2**-9 * scale, rtol=0
        )
        torch.testing.assert_close(
            S * frames.token_matrix_to_frames(prob["attn_weights"][0], S),
            frame["frame_mass"],
            atol=1e-6,
            rtol=0,
        )
        assert torch.equal(atlas["frame_logits"][layer, 0, :, 9:], frame["frame_logits"])
        assert torch.equal(atlas["frame_mass"][layer, 0, :, 9:], frame["frame_mass"])
        assert torch.equal(atlas["key_curve"][layer, 0], key["key_curve"].half())


def test_the_layer_cache_is_a_slice_of_the_atlas(caches):
    layer, atlas = caches["layer"], caches["atlas"]
    assert layer["layer_index"] == 5 and layer["last_block_query_frames"] == [9, 10, 11]
    torch.testing.assert_close(
        layer["full_frame_attention"], atlas["frame_logits"][5, 0], equal_nan=True, atol=0, rtol=0
    )
    torch.testing.assert_close(
        layer["last_block_frame_attention"], layer["full_frame_attention"][:, 9:].mean(1)
    )


def test_the_long_way_through_tokens_gives_the_same_layer(tmp_path):
    short, long = (
        extract(run_extraction_each, tmp_path / f"{name}.pt", *SHORT, "--granularity", name)
        for name in ("frame", "token")
    )
    torch.testing.assert_close(
        short["full_frame_attention"], long["full_frame_attention"], atol=1e-5, rtol=0, equal_nan=True
    )


def test_the_atlas(caches):
    atlas = caches["atlas"]
    assert atlas["pass_timesteps"] == pytest.approx([1000, 937.5, 833.3333, 625, 0]) and atlas[
        "layers"
    ] == list(range(8))
    assert atlas["frame_logits"].shape == atlas["frame_mass"].shape == (8, 5, 12, 12, 12)
    absent = later_block(atlas["block_sizes"])
    for name in ("frame_logits", "frame_mass"):
        assert torch.equal(
            atlas[name].isnan(), absent.expand_as(atlas[name])
        )  # NaN exactly where never attended
    assert (atlas["frame_mass"].nansum(-1) - 1).abs().max() < 1e-5
    words = len(atlas["cross_tokens"])
    assert atlas["cross_mass"].shape == (8, 5, 12, 12, words) and "circle" in "".join(atlas["cross_tokens"])
    assert (atlas["cross_mass"].sum(-1) <= 1 + 1e-5).all()


def test_a_window_keeps_global_frames(tmp_path):
    config = tmp_path / "window.yaml"
    config.write_text((ROOT / "configs/wan_mini.yaml").read_text() + "local_attn_size: 6\nsink_size: 1\n")
    flags = ["--config_path", str(config), "--num_frames", "12"]
    cache = extract(run_extraction_figure4, tmp_path / "w.pt", *flags, "--granularity", "frame")
    assert cache["key_frames"] == [0, 7, 8, 9, 10, 11] and cache["query_frames"] == [9, 10, 11]
    present = ~cache["attention_weights"][0]["frame_logits"][0, 0].isnan()
    assert present.nonzero().flatten().tolist() == [0, 7, 8, 9, 10, 11]
    atlas = extract(run_extraction_all, tmp_path / "a.pt", *flags, "--key_curve")
    frames_with_keys = (~atlas["key_curve"][3, 2, 5].isnan()).unflatten(-1, (-1, 16)).all(-1)
    assert frames_with_keys.nonzero().flatten().tolist() == [0, *range(7, 12)]


@pytest.mark.parametrize("script", [run_extraction_figure4, run_extraction_each, run_extraction_all])
def test_the_same_seed_gives_the_same_bytes(script, tmp_path):
    a, b, other = (tmp_path / name for name in ("a.pt", "another-name.pt", "c.pt"))
    for path, seed in ((a, "1"), (b, "1"), (other, "2")):
        extract(script, path, *SHORT, "--seed", seed)
    assert a.read_bytes() == b.read_bytes() != other.read_bytes()


def test_which_pass(tmp_path):
    cache = extract(run_extraction_each, tmp_path / "clean.pt", *SHORT, "--step", "4")
    assert (cache["step"], cache["timestep"], cache["is_clean_pass"], cache["layer_index"]) == (
        4,
        0.0,
        True,
        3,
    )


def test_base_weights_are_said_to_be_base(tmp_path):
    cache = extract(run_extraction_each, tmp_path / "base.pt", *SHORT, "--no_checkpoint")
    assert (cache["weights"], cache["weights_file"]) == ("base", "diffusion_pytorch_model.safetensors")
    tuned = extract(run_extraction_each, tmp_path / "tuned.pt", *SHORT)
    assert not torch.equal(cache["full_frame_attention"][:, :3, :3], tuned["full_frame_attention"][:, :3, :3])


def test_an_independent_first_frame_is_rounded_with_a_notice(tmp_path):
    with pytest.warns(UserWarning, match="with an independent first frame 21 frames become 19"):
        cache = extract(run_extraction_each, tmp_path / "i.pt", *MINI, "--independent_first_frame")
    assert cache["block_sizes"] == [1] + [3] * 6 and cache["num_frames"] == 19


def test_the_video(tmp_path):
    run_extraction_each.run([*SHORT, "--output_path", str(tmp_path / "l.pt"), "--save_video"])
    video = iio.imread(tmp_path / "l.mp4")
    assert video.shape == (21, 256, 256, 3)
    assert video.std() > 5  # something is to be seen


@pytest.mark.beside
def test_a_script_runs_without_pythonpath(tmp_path):
    command = [
        sys.executable,
        "experiments/run_extraction_each.py",
        *SHORT,
        "--output_path",
        str(tmp_path / "l.pt"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "l.pt").is_file() and "layer cache of wan-mini (checkpoint weights)" in done.stdout


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (
            run_extraction_figure4,
            ["--checkpoint_path", "no.pt"],
            "no.pt not found; run: bash experiments/download_weights.sh.* with --no_checkpoint",
        ),
        (
            run_extraction_figure4,
            ["--ckpt_dir", "nowhere"],
            "model directory nowhere not found; run: bash experiments/download_weights.sh",
        ),
        (run_extraction_figure4, ["--config_path", "no.yaml"], "config no.yaml not found; configs/ holds"),
        (run_extraction_figure4, ["--layer_indices", "1", "8"], "layer 8 is not in 0..7"),
        (run_extraction_each, ["--layer_index", "-1"], "layer -1 is not in 0..255; layers count from 0"),
        (run_extraction_all, ["--step", "5"], "step 5 is not in 0..4; 4 is the clean pass"),
        (run_extraction_each, ["--num_frames", "20"], "20 frames do not fit blocks of 3; try 18 or 21"),
        (
            run_extraction_each,
            ["--device", "cuda"],
            "device cuda was asked for, but 0 CUDA devices are there",
        ),
        (run_extraction_each, ["--device", "quantum"], "device 'quantum' is not one of auto, cpu"),
        (run_extraction_each, ["--no_checkpoint", "--checkpoint_path", "a.pt"], "exclude each other"),
        (run_extraction_each, ["--seed", "many"], "argument --seed: 'many' is not a whole number of 64 bits"),
        (run_extraction_each, ["--frames", "21"], "unrecognized arguments: --frames 21"),
        (
            run_extraction_figure4,
            ["--capture", "probabilities", "--granularity", "frame"],
            "needs --granularity token",
        ),
        (rollout, ["--random_weights"], "--random_weights knows the sizes of Wan2.1-T2V-1.3B"),
        (rollout, ["--repeats", "0"], "argument --repeats: 0 is not in 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(script, flags, message, tmp_path, capfd):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("CUDA is there")
    output = tmp_path / "out.pt"
    flags = flags if "--config_path" in flags else [*MINI, *flags]
    with pytest.raises(SystemExit) as ended:
        cli.main(script.run, [*flags, "--output_path", str(output)])
    said = capfd.readouterr().err.strip()
    assert ended.value.code == 2 and "\n" not in said
    assert said.startswith("error: ") and re.search(message, said), said
    assert not list(tmp_path.iterdir())


def test_a_window_too_small(tmp_path, capfd):
    config = tmp_path / "window.yaml"
    config.write_text((ROOT / "configs/wan_mini.yaml").read_text() + "local_attn_size: 3\nsink_size: 1\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(
            run_extraction_each.run, ["--config_path", str(config), "--output_path", str(tmp_path / "out.pt")]
        )
    assert ended.value.code == 2 and "must be at least 4" in capfd.readouterr().err


@pytest.mark.parametrize("path", ["/proc/cannot/out.pt", "/sys/out.pt", "configs"])
def test_an_output_path_that_cannot_be_written(path, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_figure4.run, [*SHORT, "--output_path", path])
    assert ended.value.code == 2 and f"{path} cannot be written" in capfd.readouterr().err


def test_a_prompt_that_is_too_long_is_cut_with_a_warning(tmp_path):
    prompt = " ".join(["a red circle moving right"] * 20) + " zebra"
    with pytest.warns(UserWarning, match="the model reads 64; cut: .*zebra"):
        extract(run_extraction_each, tmp_path / "long.pt", *SHORT, "--prompt", prompt)


def test_nan_stops_the_run(tmp_path, monkeypatch, capfd):
    original = causal.load_pipeline

    def broken(*args):
        pipeline = original(*args)
        pipeline.model.head.head.bias.fill_(float("nan"))
        return pipeline

    monkeypatch.setattr(causal, "load_pipeline", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_each.run, [*SHORT, "--output_path", str(tmp_path / "out.pt")])
    assert ended.value.code == 1 and "not finite" in capfd.readouterr().err and not list(tmp_path.iterdir())
