"""The scripts: what they write, that it is right, and what they say of bad input."""

import json
from types import SimpleNamespace

import imageio.v3 as iio
import pytest
import torch
from conftest import ROOT
from helpers.forked import refused
from helpers.synthetic_caches import token_matrix_to_frames

from experiments import (
    check_model,
    configs,
    extract_attention_wan,
    run_extraction,
    run_extraction_all,
    run_extraction_each,
    run_extraction_figure4,
)
from experiments import session as sessions
from experiments.caches import load_cache
from experiments.caches.files import RunError
from experiments.caches.view import open_call, open_profiles
from experiments.session import PROMPTS_AT_ONCE
from experiments.studies import model_check
from wan import checkpoint
from wan.capture import CapturedCall, Pass, Site
from wan.config import MODELS, WAN_NEGATIVE_PROMPT, ModelConfig, load_config
from wan.errors import CheckpointError, ConfigError
from wan.keys import later_block

BASE = extract_attention_wan, ["--ckpt_dir", "checkpoints/wan-mini"], "--output_dir"


def short(tiny, num_frames=6) -> list[str]:
    """Flags of a rollout of two blocks."""
    return ["--config_path", tiny.path, "--num_frames", str(num_frames)]


def extract(script, path, *flags) -> dict:
    script.run([*flags, "--quiet", "--output_path", str(path)])
    return load_cache(path, mmap=False)


@pytest.fixture(scope="module")
def caches(tiny, tmp_path_factory) -> dict[str, dict]:
    """One rollout of two blocks per script."""
    folder, both = tmp_path_factory.mktemp("caches"), ["--layer_indices", "0", "1"]
    return {
        name: extract(script, folder / f"{name}.pt", *short(tiny), *flags)
        for name, script, flags in (
            ("token", run_extraction_figure4, both),
            ("probabilities", run_extraction_figure4, [*both, "--capture", "probabilities"]),
            ("key", run_extraction_figure4, [*both, "--granularity", "key"]),
            ("frame", run_extraction_figure4, [*both, "--granularity", "frame"]),
            ("atlas", run_extraction_all, ["--key_curve", "--cross"]),
            ("inference", run_extraction, both),
        )
    }


def test_every_script_and_granularity_gives_the_same_numbers(caches, tiny, tmp_path):
    S, atlas = caches["token"]["frame_seq_length"], caches["atlas"]
    for layer in (0, 1):
        names = ("token", "key", "frame", "probabilities", "inference")
        token, key, frame, prob, call = (caches[name]["attention_weights"][layer] for name in names)
        scale, logits = frame["frame_logits"].abs().max(), token["attn_logits"][0]
        from_tokens = token_matrix_to_frames(logits, S)
        torch.testing.assert_close(from_tokens, frame["frame_logits"], atol=2**-10 * scale, rtol=0)
        torch.testing.assert_close(key["key_curve"], logits.float().mean(1), atol=2**-9 * scale, rtol=0)
        mass = S * token_matrix_to_frames(prob["attn_weights"][0], S)
        torch.testing.assert_close(mass, frame["frame_mass"], atol=1e-6, rtol=0)
        assert torch.equal(call["attn_weights"], prob["attn_weights"])
        assert (call["layer_idx"], call["block"], call["step"]) == (layer, 1, 0)
        assert torch.equal(atlas["frame_logits"][layer, 0, :, 3:], frame["frame_logits"])
        assert torch.equal(atlas["frame_mass"][layer, 0, :, 3:], frame["frame_mass"])
        assert torch.equal(atlas["key_curve"][layer, 0], key["key_curve"].half())
    run_extraction_each.run([*short(tiny), "--output_dir", str(tmp_path / "layers")])
    assert {path.name for path in (tmp_path / "layers").iterdir()} == {"layer0.pt", "layer1.pt"}
    layer = extract(run_extraction_each, tmp_path / "alone.pt", *short(tiny), "--layer_index", "1")
    assert (tmp_path / "alone.pt").read_bytes() == (tmp_path / "layers/layer1.pt").read_bytes()
    matrix = layer["full_frame_attention"]
    torch.testing.assert_close(matrix, atlas["frame_logits"][1, 0], equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(layer["last_block_frame_attention"], matrix[:, 3:].mean(1))

    assert atlas["pass_timesteps"] == pytest.approx([1000, 833.3333, 0]) and atlas["layers"] == [0, 1]
    absent = later_block(atlas["block_sizes"]).expand(2, 3, 2, 6, 6)
    for name in ("frame_logits", "frame_mass"):
        assert torch.equal(atlas[name].isnan(), absent)  # NaN exactly where never attended
    assert (atlas["frame_mass"].nansum(-1) - 1).abs().max() < 1e-5
    words = len(atlas["cross_tokens"])
    assert atlas["cross_mass"].shape == (2, 3, 2, 6, words) and "circle" in "".join(atlas["cross_tokens"])
    assert (atlas["cross_mass"].sum(-1) <= 1 + 1e-5).all()


def test_chosen_layers_blocks_and_passes_as_logits(tiny, tmp_path):
    chosen = ["--layer_indices", "1", "0", "--blocks", "0", "-1", "--steps", "2", "0", "--capture", "logits"]
    cache = extract(run_extraction, tmp_path / "c.pt", *short(tiny), *chosen)
    tags = [(call["block"], call["step"], call["layer_idx"]) for call in cache["attention_weights"]]
    assert tags == [(b, s, layer) for b in (0, 1) for s in (0, 2) for layer in (1, 0)]  # as they were named
    assert cache["is_logits"] and cache["layer_indices"] == [1, 0]
    last, first = open_call(cache, 7, "mass"), open_call(cache, 0)
    assert (last.layers, last.pass_label, last.matrix_rows) == ((0,), "clean pass (t = 0)", (3, 4, 5))
    assert abs(last.frame_matrix(0).sum(-1) - 1).max() < 1e-5
    assert (first.query_frames, first.own_block, first.context_frames) == ((0, 1, 2), (0, 1, 2), ())


@pytest.mark.slow
def test_a_first_frame_alone_a_long_prompt_and_the_video(tiny, tmp_path):
    flags = [*short(tiny, 9), "--independent_first_frame"]
    with pytest.warns(UserWarning, match="with an independent first frame 9 frames become 7"):
        cache = extract(run_extraction_each, tmp_path / "i.pt", *flags)
    assert cache["block_sizes"] == [1, 3, 3] and cache["num_frames"] == 7
    prompt = " ".join(["a red circle moving right"] * 20) + " zebra"
    with pytest.warns(UserWarning, match=r"the model reads 64; cut: .*zebra"):
        extract(run_extraction_each, tmp_path / "l.pt", *short(tiny), "--prompt", prompt, "--save_video")
    video = iio.imread(tmp_path / "l.mp4")
    assert video.shape == (21, 256, 256, 3) and video.std() > 5  # something is to be seen


FIGURE4, EACH, ALL, CALLS = (
    (script, ["--config_path", "configs/wan_mini.yaml"], "--output_path")
    for script in (run_extraction_figure4, run_extraction_each, run_extraction_all, run_extraction)
)
OTHER_MODEL = "checkpoints/wan-mini is not Wan2.1-T2V-1.3B: num_layers 8 instead of 30"


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (FIGURE4, ["--checkpoint_path", "no.pt"], "no.pt not found; run: bash experiments/download_weights"),
        (FIGURE4, ["--layer_indices", "1", "8"], r"layer 8 is not in 0\.\.7"),
        (FIGURE4, ["--capture", "probabilities", "--granularity", "frame"], "needs --granularity token"),
        (EACH, ["--layer_index", "-1"], r"layer_index.*-1|layer -1 is not in 0\.\."),
        ((run_extraction_all, [], "--output_path"), ["--ckpt_dir", "checkpoints/wan-mini"], OTHER_MODEL),
        (ALL, ["--step", "5"], r"step 5 is not in 0\.\.4; 4 is the clean pass"),
        (EACH, ["--num_frames", "20"], "20 frames do not fit blocks of 3; try 18 or 21"),
        (EACH, ["--output_dir", "somewhere"], "--output_path: not allowed with .*--output_dir"),
        (CALLS, ["--blocks", "-8"], r"block -8 is not in 0\.\.6"),
        (CALLS, ["--step", "1", "--steps", "2"], "argument --steps: not allowed with argument --step"),
        (BASE, ["--num_frames", "20"], r"20 video frames are not 4n \+ 1; try 17 or 21"),
        (BASE, ["--layer_index", "8"], r"layer 8 is not in 0\.\.7"),
        (BASE, ["--step", "50"], r"step '50' is not first, last, all or in 0\.\.49"),
        (BASE, ["--step", "first", "last"], "a layer cache holds one step, not 2"),
        (BASE, ["--all_layers", "--layer_index", "1"], "--layer_index: not allowed with .*--all_layers"),
        (BASE, ["--ckpt_dir", "nowhere"], "model directory nowhere not found; run: bash experiments/"),
        (BASE, ["--config_path", "configs/wan_mini_lora.yaml"], "names a LoRA, .*, and runs of"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(script, flags, message, tmp_path, capfd):
    script, mini, output = script
    refused(script, [*mini, *flags, output, tmp_path / "out.pt"], capfd, message)
    assert not list(tmp_path.rglob("*.pt"))


FIELDS = {"format": "layer", "layer_index": 7, "weights": "base", "model": "wan-mini", "vae_stride_t": 4}
FIELDS |= {"num_frames": 3, "orig_num_frames": 9, "block_sizes": [3], "last_block_query_frames": [0, 1, 2]}
FIELDS |= {"step": 0, "timestep": 999.0, "is_clean_pass": False, "num_steps": 4, "guidance_scale": 1.5}
FIELDS |= {"timestep_shift": 5.0, "config": {"height": 8, "width": 8}}
FIELDS |= {"weights_file": "diffusion_pytorch_model.safetensors"}


@pytest.mark.slow
def test_a_layer_cache_and_the_atlases_of_both_branches(tmp_path, capsys):
    short = [*BASE[1], "--num_frames", "9", "--num_steps", "4", "--output_dir", str(tmp_path)]
    extract_attention_wan.run(short)
    assert (
        "next: mkdir -p outputs && papermill --cwd notebooks notebooks/extract_all_attention.ipynb"
        in capsys.readouterr().out.splitlines()[-1]
    )
    extract_attention_wan.run([*short, "--all_layers", "--step", "first", "last"])
    cache = load_cache(tmp_path / "layer7.pt")
    assert {name: cache[name] for name in FIELDS} == FIELDS
    names = {file["name"] for file in cache["files"]}
    assert {"diffusion_pytorch_model.safetensors", "tokenizer.json"} <= names
    full, uncond = cache["full_frame_attention"], cache["full_frame_attention_uncond"]
    assert full.shape == (12, 3, 3) and full.isfinite().all() and not torch.equal(full, uncond)
    torch.testing.assert_close(cache["last_block_frame_attention"], full.mean(1))
    view = open_profiles(cache)
    assert view.query_frames == view.own_block == view.noise_frames == (0, 1, 2)
    assert view.context_frames == () and view.pass_label == "pass 0 (t = 999)"
    for branch, name, of_layer in (("cond", "", full), ("uncond", "_uncond", uncond)):
        atlas = load_cache(tmp_path / f"atlas_base{name}.pt")
        assert atlas["branch"] == branch and atlas["layers"] == [*range(8)] and atlas["pass_steps"] == [0, 3]
        assert atlas["pass_timesteps"][0] == 999 and (atlas["frame_mass"].sum(-1) - 1).abs().max() < 1e-5
        assert torch.equal(of_layer, atlas["frame_logits"][7, 0])
        assert not torch.equal(atlas["frame_logits"][:, 0], atlas["frame_logits"][:, 1])


def test_a_directory_chooses_its_settings(monkeypatch):
    sizes, mini = dict(MODELS), checkpoint.read_model_config
    monkeypatch.setattr(checkpoint, "read_model_config", lambda path: sizes.get(str(path)) or mini(path))
    for name, shift, guidance in (("Wan2.1-T2V-1.3B", 8, 6), ("Wan2.1-T2V-14B", 5, 5)):
        config = load_config(configs.config_for(name))
        assert (config.model, config.base.shift, config.base.guidance_scale) == (name, shift, guidance)
        assert config.base.negative_prompt == WAN_NEGATIVE_PROMPT and config.base.num_steps == 50
    sizes["strange"] = ModelConfig(dim=96, ffn_dim=128, num_heads=6, num_layers=3)
    with pytest.raises(ConfigError, match=r"3 layers, 6 heads and dim 96 .* with --config_path"):
        configs.config_for("strange")


ON_CPU = ["--config_path", "configs/wan_mini.yaml", "--device", "cpu", "--quiet"]


@pytest.mark.slow
def test_the_miniature_agrees_with_itself_and_its_base_weights_do_not(tmp_path, capsys):
    atlas, figure = tmp_path / "atlas.pt", tmp_path / "check.svg"
    short = [*ON_CPU, "--num_frames", "12", "--no-mass", "--noise", "L40"]  # an atlas says whose noise it has
    run_extraction_all.run([*short, "--output_path", str(atlas)])
    flags = [*ON_CPU, "--reference", str(atlas), "--output_path", str(figure)]
    check_model.run(flags)
    said = capsys.readouterr().out
    assert "wan-mini attends alike: its heads attend as in atlas. In tests on the miniature 3 of 4" in said
    assert "published" not in said
    assert len(said.split("atlas\n")[-1].splitlines()) >= 10
    assert "All heads, ordered" in figure.read_text()
    with pytest.raises(RunError, match="wan-mini is wrong"):
        check_model.run([*flags, "--no_checkpoint"])
    with pytest.raises(ConfigError, match=r"make an atlas of it, python .*, and give --reference cache"):
        check_model.run(ON_CPU)


def test_a_check_without_weights_names_no_other_model():
    """The miniature has no published heads, so that its config would end in another error."""
    with pytest.raises(CheckpointError, match=r"rehearse without it, python experiments/(\w+).py$") as caught:
        check_model.run(["--ckpt_dir", "nowhere"])
    assert "get it, bash experiments/download_weights.sh;" in str(caught.value)
    assert (ROOT / "experiments/rehearse_release.py").is_file()


def test_the_borders_of_a_models_check_separate_what_was_measured():
    report = json.loads((ROOT / "docs/check_model.json").read_text())
    borders = model_check.ALIKE, model_check.OTHER_R, model_check.OTHER_OWN
    assert tuple(report["borders"].values()) == borders
    wrong = (
        "heads",
        "layers shifted",
        "base",
        "random",
        "no ",
        "RoPE off",
        "RoPE of base 1,000,000",
        "blocks of 1",
    )
    said = {wrong: "wrong", "another prompt": "differs like another prompt"}
    assert {*report["wan-mini"]["the same in bfloat16"]["verdicts"]} == {"attends alike"}
    for name, row in (report["published"] | report["wan-mini"]).items():
        for begins, verdict in said.items():
            assert not name.startswith(begins) or {*row["verdicts"]} == {verdict}, name
    # How many of the first row of faults in docs/real_model.md are wrong, of all that it names
    row = ("heads", "layers shifted", "base", "random", "no ", "RoPE off", "RoPE of base 1,000,000")
    both = [*report["published"].items(), *report["wan-mini"].items()]
    videos = sum(entry["videos"] for name, entry in both if name.startswith(row))
    assert f"{videos} of {videos} wrong" in (ROOT / "docs/real_model.md").read_text()
    # How many pass that should not, as the verdict says
    passes = {name: row["verdicts"].get("attends alike", 0) for name, row in report["wan-mini"].items()}
    faults = {*passes} - {"another prompt", "another seed", "the same in bfloat16"}
    videos = sum(report["wan-mini"][name]["videos"] for name in faults)
    faulty = f"{sum(passes[name] for name in faults)} of {videos} videos of faulty models"
    assert f"{passes['another seed']} of 4 videos of another seed and {faulty}" == model_check.FALSE_PASSES


# --- Numbers that cannot be right stop a run, and the message says where
@pytest.mark.slow
def test_latents_that_are_not_finite_stop_the_run(tiny, tmp_path, monkeypatch, capfd):
    original = sessions.load_pipeline

    def broken(*args):
        pipeline = original(*args)
        pipeline.model.blocks[1].self_attn.q.bias.fill_(float("nan"))
        return pipeline

    monkeypatch.setattr(sessions, "load_pipeline", broken)
    flags = ["--config_path", tiny.path, "--output_path", tmp_path / "out.pt"]
    said = "block 0: the latents are not finite, nor is the weight .*"
    said += "blocks.1.self_attn.q.bias: get the file of the weights again$"
    refused(run_extraction_figure4, flags, capfd, said, code=1)
    assert not list(tmp_path.iterdir())


def call_of(**values) -> CapturedCall:
    at = Pass(query_frames=(3, 4, 5), block=1, step=2, timestep=500.0)
    shape = (1, 15, 3, 8)
    return CapturedCall(site=Site(7, "self"), at=at, values=values, q_shape=shape, k_shape=shape, layout=None)


ROWS = torch.full((1, 3, 2, 4), 0.25)
NAN = float("nan")
HEADS = ROWS.clone()
HEADS[:, 1, :, 0] = NAN  # a head that does not see a frame


def test_captured_numbers_that_cannot_be_right_and_those_that_can():
    for values, message in (
        ({"frame_logits": ROWS / 0}, "layer 7, block 1, step 2: frame_logits is not finite; try --device"),
        ({"frame_logits": ROWS.masked_fill(torch.eye(2, 4).bool(), NAN)}, "frame_logits is not finite"),
        ({"frame_logits": ROWS * NAN}, "frame_logits is not finite"),
        ({"token_logits": ROWS.half() / 0}, "token_logits is not finite in float16; --capture probabilities"),
        ({"frame_mass": ROWS * 1.01}, r"rows of frame_mass sum to 1 ± 0\.01, not to 1"),
        ({"cross_mass": ROWS[..., 1:]}, "rows of cross_mass sum to 1 ± 0.25"),
        ({"token_probabilities": ROWS * 0.99}, "rows of token_probabilities sum to 1 ± 0.01"),
        ({"slot_mass": ROWS * 1.01, "frame_mass": ROWS}, "rows of slot_mass"),
        ({"frame_logits": -ROWS / 0, "attended": ROWS > 0}, "frame_logits is not finite"),
    ):
        with pytest.raises(RunError, match=message):
            sessions.check_numbers(None, ROWS, "", [call_of(frame_logits=ROWS), call_of(**values)])
    for values in (
        {"frame_logits": HEADS, "frame_mass": HEADS},  # heads with keys of their own
        {"frame_logits": ROWS * NAN, "attended": ROWS > 0},  # left out by an intervention
        {"frame_mass": ROWS / 2, "slot_mass": ROWS},  # averages, which are no frames, have the rest
        {"frame_mass": ROWS * 1.0009, "key_curve": ROWS, "map_queries": ROWS / 0},
    ):
        sessions.check_numbers(None, ROWS, "", [call_of(**values)])


def test_weights_leave_the_device_for_the_encoder(monkeypatch):
    config, done = load_config("configs/wan_mini.yaml", {"num_frames": 6, "device": "cpu"}), []

    class Model(torch.nn.Module):
        def to(self, device):
            done.append(str(device))

    pipeline = SimpleNamespace(model=Model(), weights="", quantised="")

    def encode(config, prompts, *given):
        done.append(f"encoded {len(prompts)}")
        return dict.fromkeys(prompts)

    monkeypatch.setattr(sessions, "choose_device", lambda *given: torch.device("meta"))
    monkeypatch.setattr(sessions, "load_pipeline", lambda *given: pipeline)
    monkeypatch.setattr("experiments.session.encode_prompts", encode)
    prompts = [str(i) for i in range(PROMPTS_AT_ONCE + 1)]
    loaded = sessions.load(config).prepare((), prompts)
    loaded.texts[prompts[-1]]
    assert done == [f"encoded {PROMPTS_AT_ONCE}", "cpu", "encoded 1", "meta"]
