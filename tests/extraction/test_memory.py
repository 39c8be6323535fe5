"""The estimate of memory against what was measured, and what is refused with which hint before a run."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from helpers.forked import refused
from helpers.policies import POLICIES

from experiments import run_extraction_figure4
from experiments.extraction import cache_builders, memory
from experiments.extraction.memory import GB, Memory, check_memory
from wan.capture import CaptureRequest
from wan.checkpoint import VAE_FILE
from wan.config import MODELS, ModelConfig, RunConfig, load_config
from wan.errors import ConfigError
from wan.model import CausalWanModel

MEASURED = json.loads((ROOT / "docs/benchmarks/memory_h200.json").read_text())
MODELS_MEASURED = json.loads((ROOT / "docs/benchmarks/models_h200.json").read_text())["rows"]
GPU = torch.device("cuda")  # a name: nothing here touches one
FRAME = CaptureRequest(granularity="frame")
TOKENS = [CaptureRequest(layers=[1], blocks=[6], steps=[0], granularity="token", token_dtype=torch.float16)]


def on_gpu(tmp_path, requests=None, encodes=False, model="Wan2.1-T2V-1.3B", **settings) -> Memory:
    """A run of a real model from a native directory that has its config alone."""
    (tmp_path / "config.json").write_text(json.dumps(vars(MODELS[model])))
    config = RunConfig(model=model, ckpt_dir=str(tmp_path), **settings)
    requests = cache_builders.atlas_requests(config, True, False, False) if requests is None else requests
    return Memory(config, MODELS[model], requests, torch.bfloat16, GPU, encodes)


def parts(run: Memory, phase: str = "rolling out", where: str = "GPU") -> dict[str, int]:
    return next(need.parts for need in run.needs() if (need.phase, need.where) == (phase, where))


@pytest.mark.parametrize(
    ("model", "row", "settings"),
    [
        ("Wan2.1-T2V-1.3B", "resident", {}),
        ("Wan2.1-T2V-1.3B", "--offload", {"offload": True}),
        ("Wan2.1-T2V-1.3B", "72 frames", {"num_frames": 72}),
        ("Wan2.1-T2V-14B", "one block", {"num_frames": 3}),
        ("Wan2.1-T2V-14B", "one block, --offload", {"num_frames": 3, "offload": True}),
    ],
)
def test_predictions_are_within_10_percent_of_what_was_measured(tmp_path, model, row, settings):
    measured = MEASURED[model]["extract"][row]
    run = on_gpu(tmp_path, encodes=True, model=model, **settings)
    assert abs(sum(parts(run).values()) / measured["rollout"]["gpu_peak_bytes"] - 1) < 0.1
    if row == "resident":
        encoding = parts(run, "encoding the prompt")
        assert abs(sum(encoding.values()) / measured["prepare"]["gpu_peak_bytes"] - 1) < 0.1
        shared = replace(run, config=replace(run.config, gpus=2))
        assert parts(shared)["KV cache"] == parts(run)["KV cache"] // 2
        on_host = replace(run, config=replace(run.config, t5_cpu=True))
        assert parts(on_host, "encoding the prompt", "host") == encoding


@pytest.mark.parametrize("row", MODELS_MEASURED, ids=lambda row: row["name"])
def test_predictions_of_other_models_are_within_4_percent(row):
    """Their cache policies, blocks and samplers; of the window that a second prompt computes again, too."""
    config = load_config(f"configs/{row['name']}.yaml")
    run = Memory(config, MODELS[row["model"]], [FRAME], torch.bfloat16, GPU, encodes=False)
    assert abs(sum(parts(run).values()) / row["peak_bytes"] - 1) < 0.04


def test_decoding_is_predicted_too(tmp_path, monkeypatch):
    """8.5-9.2 GiB in float32 for 21 frames at 480 x 832; on a GPU its layers hold half of that."""
    with open(tmp_path / VAE_FILE, "wb") as file:
        file.truncate(507_609_880)
    run = replace(on_gpu(tmp_path), decodes=memory.SAVE_VIDEO)
    found = parts(run, "decoding the video")
    assert found.pop("weights") == parts(run)["weights"]
    in_float32 = memory.decoder(run.config, torch.float32)
    assert 8.5 < sum(in_float32.values()) / 2**30 < 9.2
    assert 2 * found["its layers"] == in_float32["its layers"]
    monkeypatch.setattr(Memory, "free", lambda self: {"GPU": 7 * GB, "host": 64 * GB})
    with pytest.raises(ConfigError, match=r"while decoding the video .*fits with no --save_video$"):
        check_memory(replace(run, config=replace(run.config, num_frames=3)), quiet=True)
    wide = replace(run, requests=[replace(FRAME, granularity="token")])  # a matrix of every call: 98 TB
    assert wide.fitting({"GPU": 11 * GB, "host": 64 * GB})[0][-1] == "--granularity frame"
    assert memory.decoder(load_config("configs/wan_mini.yaml"), torch.float32)["VAE"] < 1e7


def test_a_hint_names_what_makes_it_fit(tmp_path, monkeypatch):
    for gpu, host, encodes, requests, message in (
        (8, 64, False, None, "9.2 GB of GPU memory while .*8.0 GB are free; it fits with --offload$"),
        (10, 64, True, None, "while encoding the prompt .*it fits with --t5_cpu$"),
        (10, 8, True, None, "of GPU memory while encoding .*it fits with --prompt_embeds FILE$"),
        (5, 64, False, None, "it fits with --num_frames 6$"),
        (3.4, 64, False, None, "it fits with --offload --num_frames 9$"),
        (64, 2, False, TOKENS, "3.7 GB of host memory while rolling .*with --granularity frame$"),
        (1, 1, True, None, "no flag makes it fit: it needs a larger machine"),
    ):
        free = {"GPU": int(gpu * GB), "host": int(host * GB)}
        monkeypatch.setattr(Memory, "free", lambda self, free=free: free)
        with pytest.raises(ConfigError, match=message):
            check_memory(on_gpu(tmp_path, requests, encodes), quiet=True)


def test_a_script_stops_before_it_loads(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Memory, "free", lambda self: {"host": 10**6})
    for name in ("encode_prompts", "load_pipeline"):
        monkeypatch.setattr(f"experiments.session.{name}", lambda *args: pytest.fail("something was loaded"))
    flags = ["--config_path", "configs/wan_mini.yaml", "--output_path", tmp_path / "a.pt", "--device", "cpu"]
    refused(run_extraction_figure4, flags, capfd, "wan-mini needs .*MB of host memory while rolling out")
    assert not list(tmp_path.iterdir())


def test_a_control_group_limits_what_is_free(tmp_path):
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 300\ninactive_file 250\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    run = replace(on_gpu(tmp_path), device=torch.device("cpu"))
    assert run.free(tmp_path) == {"host": 550}
    (tmp_path / "memory.max").write_text("max\n")
    assert run.free(tmp_path)["host"] > 10**8 and run.free(tmp_path / "none")["host"] > 10**8


MODEL = ModelConfig(dim=24, ffn_dim=8, num_heads=2, num_layers=2, freq_dim=8, text_dim=8, text_len=3)


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda policy: policy["name"])
def test_the_estimate_holds_what_a_cache_holds_however_long_the_rollout(policy):
    found = []
    for num_frames in (30, 2400):
        size = {"num_frames": num_frames, "height": 4, "width": 8}
        config = RunConfig(**size, cache_policy=policy, layer_indices=[0])
        cache = CausalWanModel(**vars(MODEL)).new_kv_cache(1, num_frames, 4, 8, config.policy)
        found.append((cache.nbytes, memory.kv_cache(config, MODEL, torch.float32)))
    assert found[0] == found[1]
    held, said = found[0]
    assert held <= said <= 1.5 * held  # sums and averages of a policy count, too


@pytest.mark.parametrize(("name", "free"), [("cuda", 39), ("cuda:1", 19)])
def test_a_process_may_be_allowed_a_part_of_its_gpu(name, free, tmp_path, monkeypatch):
    """torch asks for a GPU's number where it tells that part, and takes no bare cuda."""
    for function, answer in {
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (80 * GB, 80 * GB),
        "memory_reserved": lambda device: GB,
        "get_per_process_memory_fraction": lambda index: [0.5, 0.25][int(index)],
    }.items():
        monkeypatch.setattr(torch.cuda, function, answer)
    assert replace(on_gpu(tmp_path), device=torch.device(name)).free()["GPU"] == free * GB
