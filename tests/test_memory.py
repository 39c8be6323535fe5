"""The estimate of memory against what was measured, and what is refused before a run."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from helpers.forked import refused
from helpers.policies import POLICIES

from experiments import memory, run_extraction_figure4
from experiments.extraction import cache_builders
from experiments.memory import GB, Need, free_memory, needs_of_run, require_memory
from wan.capture import CaptureRequest
from wan.checkpoint import VAE_FILE
from wan.config import MODELS, ModelConfig, RunConfig, load_config
from wan.errors import ConfigError
from wan.model import CausalWanModel
from wan.policies import policy_of

MEASURED = json.loads((ROOT / "docs/benchmarks/memory_h200.json").read_text())
MODELS_MEASURED = json.loads((ROOT / "docs/benchmarks/models_h200.json").read_text())["rows"]
GPU = torch.device("cuda")  # a name: nothing here touches one
FRAME = CaptureRequest(granularity="frame")
TOKENS = [CaptureRequest(layers=[1], blocks=[6], steps=[0], granularity="token", token_dtype=torch.float16)]


def real_config(folder, model="Wan2.1-T2V-1.3B", **settings) -> RunConfig:
    """Settings of a real model in a native directory that has its config alone."""
    (folder / "config.json").write_text(json.dumps(vars(MODELS[model])))
    return RunConfig(model=model, ckpt_dir=str(folder), **settings)


def needs_on_gpu(config, requests=None, encodes=False, **run) -> list[Need]:
    """Return what a run in bfloat16 on a GPU needs, of an atlas where no requests are given."""
    if requests is None:
        requests = cache_builders.atlas_requests(config, True, False, False)
    return needs_of_run(config, MODELS[config.model], requests, torch.bfloat16, GPU, encodes=encodes, **run)


def parts(needs, phase="rolling out", where="GPU") -> dict[str, int]:
    return next(need.parts for need in needs if (need.phase, need.where) == (phase, where))


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
    config = real_config(tmp_path, model, **settings)
    needs = needs_on_gpu(config, encodes=True)
    assert abs(sum(parts(needs).values()) / measured["rollout"]["gpu_peak_bytes"] - 1) < 0.1
    if row == "resident":
        encoding = parts(needs, "encoding the prompt")
        assert abs(sum(encoding.values()) / measured["prepare"]["gpu_peak_bytes"] - 1) < 0.1
        shared = needs_on_gpu(real_config(tmp_path, gpus=2))
        assert parts(shared)["KV cache"] == parts(needs)["KV cache"] // 2
        on_host = needs_on_gpu(real_config(tmp_path, t5_cpu=True), encodes=True)
        assert parts(on_host, "encoding the prompt", "host") == encoding


@pytest.mark.parametrize("row", MODELS_MEASURED, ids=lambda row: row["name"])
def test_predictions_of_other_models_are_within_4_percent(row):
    """Their cache policies, blocks and samplers; of the window that a second prompt computes again, too."""
    needs = needs_on_gpu(load_config(f"configs/{row['name']}.yaml"), [FRAME])
    assert abs(sum(parts(needs).values()) / row["peak_bytes"] - 1) < 0.04


@pytest.mark.parametrize("frames", ["24 frames", "120 frames"])
def test_predictions_of_longlive2_are_within_2_percent(frames):
    row = json.loads((ROOT / "docs/benchmarks/longlive2.json").read_text())[frames]["rows"]["logits"]
    config = load_config("configs/longlive2.yaml", {"num_frames": int(frames.split()[0])})
    needs = needs_on_gpu(config, [replace(FRAME, mass=False)])
    assert abs(sum(parts(needs).values()) / 2**20 / row["used_mib"] - 1) < 0.02


def test_decoding_is_predicted_too(tmp_path):
    """8.5-9.2 GiB in float32 for 21 frames at 480 x 832; on a GPU its layers hold half of that."""
    with open(tmp_path / VAE_FILE, "wb") as file:
        file.truncate(507_609_880)
    config = real_config(tmp_path)
    needs = needs_on_gpu(config, decodes=True)
    decoding = parts(needs, "decoding the video")
    assert decoding.pop("weights") == parts(needs)["weights"]
    in_float32 = memory.decoder(config, torch.float32)
    assert 8.5 < sum(in_float32.values()) / 2**30 < 9.2
    assert 2 * decoding["its layers"] == in_float32["its layers"]
    short = needs_on_gpu(real_config(tmp_path, num_frames=3), decodes=True)
    with pytest.raises(ConfigError, match="of GPU memory while decoding the video"):
        require_memory("1.3B", short, {"GPU": 7 * GB, "host": 64 * GB})
    assert memory.decoder(load_config("configs/wan_mini.yaml"), torch.float32)["VAE"] < 1e7


@pytest.mark.parametrize(
    ("gpu", "host", "encodes", "requests", "message"),
    [
        (
            8,
            64,
            False,
            None,
            r"1.3B needs 9.2 GB of GPU memory while rolling out \(.*8.0 GB are free",
        ),
        (10, 64, True, None, "of GPU memory while encoding the prompt"),
        (64, 2, False, TOKENS, "3.7 GB of host memory while rolling out"),
        (1, 1, True, None, "of GPU memory while encoding the prompt"),  # the scarcest of three
    ],
)
def test_what_does_not_fit_is_refused_with_what_takes_less(tmp_path, gpu, host, encodes, requests, message):
    needs = needs_on_gpu(real_config(tmp_path), requests, encodes)
    with pytest.raises(ConfigError, match=f"{message}.*--offload .*--layer_indices"):
        require_memory("1.3B", needs, {"GPU": gpu * GB, "host": host * GB})


def test_what_a_run_needs_is_printed(tmp_path, capsys):
    needs = needs_on_gpu(real_config(tmp_path))
    require_memory("1.3B", needs, {"GPU": 80 * GB, "host": 64 * GB}, quiet=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(needs) and lines[0].startswith("needs 9.2 GB of GPU memory while rolling out (")
    assert lines[0].endswith("; 80.0 GB are free")


def test_a_script_stops_before_it_loads(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("experiments.memory.free_memory", lambda device: {"host": 10**6})
    for name in ("session.encode_prompts", "session.load_pipeline"):
        monkeypatch.setattr(f"experiments.{name}", lambda *args: pytest.fail("something was loaded"))
    flags = ["--config_path", "configs/wan_mini.yaml", "--output_path", tmp_path / "a.pt", "--device", "cpu"]
    refused(run_extraction_figure4, flags, capfd, "wan-mini needs .*MB of host memory while rolling out")
    assert not list(tmp_path.iterdir())


def test_a_control_group_limits_what_is_free(tmp_path):
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 300\ninactive_file 250\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    cpu = torch.device("cpu")
    assert free_memory(cpu, tmp_path) == {"host": 550}
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(cpu, tmp_path)["host"] > 10**8 and free_memory(cpu, tmp_path / "none")["host"] > 10**8


MODEL = ModelConfig(dim=24, ffn_dim=8, num_heads=2, num_layers=2, freq_dim=8, text_dim=8, text_len=3)


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda policy: policy["name"])
def test_the_estimate_holds_what_a_cache_holds_however_long_the_rollout(policy):
    found = []
    for num_frames in (30, 2400):
        size = {"num_frames": num_frames, "height": 4, "width": 8}
        config = RunConfig(**size, cache_policy=policy, layer_indices=[0])
        cache = CausalWanModel(**vars(MODEL)).new_kv_cache(1, num_frames, 4, 8, policy_of(config))
        found.append((cache.nbytes, memory.kv_cache(config, MODEL, torch.float32)))
    assert found[0] == found[1]
    held, estimate = found[0]
    assert held <= estimate <= 1.5 * held  # sums and averages of a policy count, too


@pytest.mark.parametrize(("name", "free"), [("cuda", 39), ("cuda:1", 19)])
def test_a_process_may_be_allowed_a_part_of_its_gpu(name, free, monkeypatch):
    """torch asks for a GPU's number where it tells that part, and takes no bare cuda."""
    for function, answer in {
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (80 * GB, 80 * GB),
        "memory_reserved": lambda device: GB,
        "get_per_process_memory_fraction": lambda index: [0.5, 0.25][int(index)],
    }.items():
        monkeypatch.setattr(torch.cuda, function, answer)
    assert free_memory(torch.device(name))["GPU"] == free * GB
