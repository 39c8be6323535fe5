"""What a run is said to need: against what was measured,
and that it stops with the right advice before anything is loaded.
"""

import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from experiments import run_extraction_figure4
from experiments.extraction import cache_builders, causal, devices
from experiments.extraction import memory as memory_estimate
from experiments.extraction.memory import GB, Memory, check_memory
from experiments.running import cli
from wan.capture import CaptureRequest
from wan.config import MODELS, RunConfig, load_config
from wan.errors import ConfigError

MEASURED = json.loads((ROOT / "docs/benchmarks/memory_h200.json").read_text())
MODELS_MEASURED = json.loads((ROOT / "docs/benchmarks/models_h200.json").read_text())["rows"]
PARALLEL = json.loads((ROOT / "docs/benchmarks/parallel_2xh200.json").read_text())
GPU = torch.device("cuda")  # a name: nothing here touches one


def on_gpu(tmp_path, requests=None, encodes=False, model="Wan2.1-T2V-1.3B", **settings) -> Memory:
    """A run of a real model from a native directory that has its config alone."""
    (tmp_path / "config.json").write_text(json.dumps(vars(MODELS[model])))
    config = RunConfig(model=model, ckpt_dir=str(tmp_path), **settings)
    requests = cache_builders.atlas_requests(config, True, False, False) if requests is None else requests
    return Memory(config, MODELS[model], requests, torch.bfloat16, GPU, encodes)


def total(run: Memory, phase: str, where: str) -> int:
    (need,) = [need for need in run.needs() if (need.phase, need.where) == (phase, where)]
    return need.total


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
    measured = MEASURED[model]["extract"][row]["rollout"]["gpu_peak_bytes"]
    assert abs(total(on_gpu(tmp_path, model=model, **settings), "rolling out", "GPU") / measured - 1) < 0.1


@pytest.mark.parametrize("row", MODELS_MEASURED, ids=lambda row: row["name"])
def test_predictions_of_other_models_are_within_4_percent(row):
    """Their cache policies, blocks and samplers; of the window that a second prompt computes again, too."""
    config = load_config(ROOT / f"configs/{row['name']}.yaml")
    request = CaptureRequest(granularity="frame")
    run = Memory(config, MODELS[row["model"]], [request], torch.bfloat16, GPU, encodes=False)
    assert abs(total(run, "rolling out", "GPU") / row["peak_bytes"] - 1) < 0.04


def test_encoding_is_predicted_too(tmp_path):
    measured = MEASURED["Wan2.1-T2V-1.3B"]["extract"]["resident"]
    assert measured["encoded_on"] == "cuda"
    run = on_gpu(tmp_path, encodes=True)
    assert abs(total(run, "encoding the prompt", "GPU") / measured["prepare"]["gpu_peak_bytes"] - 1) < 0.1
    on_host = replace(run, config=replace(run.config, t5_cpu=True))
    assert total(on_host, "encoding the prompt", "host") == total(run, "encoding the prompt", "GPU")


def test_the_parts_follow_from_the_sizes(tmp_path):
    def parts(**settings):
        return next(need.parts for need in on_gpu(tmp_path, **settings).needs() if need.where == "GPU")

    plain, long = parts(), parts(num_frames=42)
    assert plain["weights"] == MEASURED["Wan2.1-T2V-1.3B"]["load"]["shards"]["parameter_bytes"]
    assert plain["KV cache"] == 2 * 30 * 21 * 1560 * 1536 * 2 and long["KV cache"] == 2 * plain["KV cache"]
    assert parts(local_attn_size=9)["KV cache"] * 21 == plain["KV cache"] * 9
    assert parts(offload=True)["weights"] < plain["weights"] / 8
    in_float32 = replace(on_gpu(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert total(in_float32, "rolling out", "host") > 2 * plain["weights"] + 2 * plain["KV cache"]


TOKENS = [CaptureRequest(layers=[1], blocks=[6], steps=[0], granularity="token", token_dtype=torch.float16)]


@pytest.mark.parametrize(
    ("gpu", "host", "encodes", "requests", "message"),
    [
        (
            8,
            64,
            False,
            None,
            "9.2 GB of GPU memory while rolling.*8.0 GB are free; it fits with --offload or --num_frames 15",
        ),
        (
            10,
            64,
            True,
            None,
            "while encoding the prompt .*it fits with --t5_cpu or --offload or --prompt_embeds FILE$",
        ),
        (
            10,
            8,
            True,
            None,
            "of GPU memory while encoding the prompt .*it fits with --prompt_embeds FILE$",
        ),
        (5, 64, False, None, "it fits with --num_frames 6$"),
        (3.4, 64, False, None, "it fits with --offload --num_frames 9$"),
        (
            64,
            2,
            False,
            TOKENS,
            "3.7 GB of host memory while rolling out .*it fits with --granularity frame or --num_frames 9",
        ),
        (1, 1, True, None, "no flag makes it fit: it needs a larger machine"),
    ],
)
def test_advice_names_what_makes_it_fit(tmp_path, monkeypatch, gpu, host, encodes, requests, message):
    monkeypatch.setattr(Memory, "free", lambda self: {"GPU": int(gpu * GB), "host": int(host * GB)})
    monkeypatch.setattr(memory_estimate, "_files", lambda run: iter(()))
    with pytest.raises(ConfigError, match=message):
        check_memory(on_gpu(tmp_path, requests, encodes), quiet=True)


def test_what_fits_is_printed_and_not_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Memory, "free", lambda self: {"GPU": 10 * GB, "host": 10 * GB})
    monkeypatch.setattr(
        memory_estimate, "_files", lambda run: iter([ROOT / "checkpoints/wan-mini/self_forcing_mini.pt"])
    )
    check_memory(on_gpu(tmp_path))
    said = capsys.readouterr().out
    assert said.startswith(
        "reads 9 MB of files\nneeds 9.2 GB of GPU memory while rolling out (weights 2.8 GB, KV cache 6.0 GB"
    )
    assert "; 10.0 GB are free\n" in said
    check_memory(on_gpu(tmp_path), quiet=True)
    assert not capsys.readouterr().out


def test_a_script_stops_before_it_loads(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(memory_estimate, "free_host_bytes", lambda: 10**6)
    for name in ("encode_prompts", "load_pipeline"):
        monkeypatch.setattr(causal, name, lambda *args: pytest.fail("something was loaded"))
    with pytest.raises(SystemExit) as ended:
        cli.main(
            run_extraction_figure4.run,
            ["--config_path", "configs/wan_mini.yaml", "--output_path", f"{tmp_path}/a.pt"],
        )
    said = capfd.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and not list(tmp_path.iterdir())
    assert said.startswith("error: wan-mini needs ") and "MB of host memory while rolling out" in said


def test_offload_needs_a_gpu(monkeypatch):
    with pytest.raises(
        ConfigError,
        match="--offload keeps weights on the host for a GPU, and the device is cpu; leave it out",
    ):
        devices.choose_device("cpu", offload=True)
    config = load_config(ROOT / "configs/self_forcing_dmd.yaml")
    assert devices.choose_dtype(config.dtype, GPU) == torch.bfloat16
    assert devices.choose_dtype(config.dtype, torch.device("cpu")) == torch.float32
    with pytest.raises(ConfigError, match="dtype 'int8' is not one of auto, bfloat16, float16, float32"):
        devices.choose_dtype("int8", GPU)


def test_a_control_group_limits_what_is_free(tmp_path):
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 300\ninactive_file 250\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory_estimate._group_free(tmp_path) == 550
    (tmp_path / "memory.max").write_text("max\n")
    assert (
        memory_estimate._group_free(tmp_path)
        == memory_estimate._group_free(tmp_path / "none")
        == float("inf")
    )
    assert 0 < memory_estimate.free_host_bytes() < 10**15


def test_a_lora_and_a_rolling_window_are_planned(tmp_path):
    dim, ffn, layers = 1536, 8960, 30
    lora = on_gpu(tmp_path, lora_path="lora.pt", lora_alpha=1.0)
    assert total(lora, "merging the LoRA", "host") == 4 * layers * (8 * dim**2 + 2 * dim * ffn)
    plain = on_gpu(tmp_path)
    rolling = on_gpu(tmp_path, sampler="rolling_forcing", denoising_step_list=[1000, 800, 600, 400, 200])
    parts = [
        next(n.parts for n in run.needs() if (n.phase, n.where) == ("rolling out", "GPU"))
        for run in (plain, rolling)
    ]
    assert parts[1]["KV cache"] == parts[0]["KV cache"] // 21 * 24  # the anchor beside 21 frames
    assert parts[1]["activations"] == 5 * parts[0]["activations"]


@pytest.mark.parametrize(("way", "gpus"), [("alone", 1), ("graphs", PARALLEL["gpus"])])
def test_predictions_of_a_rollout_over_gpus_are_within_2_percent(tmp_path, way, gpus):
    rows = PARALLEL["rollouts"]["Wan2.1-T2V-1.3B"]["rows"]
    for row, requests in (("nothing", []), ("mean logits + mass", [CaptureRequest(granularity="frame")])):
        run = on_gpu(tmp_path, requests, gpus=gpus)
        assert abs(total(run, "rolling out", "GPU") / (1e9 * rows[row][way]["peak_gb"]) - 1) < 0.02


def test_places_of_an_exchange_are_planned(tmp_path):
    cross = CaptureRequest(granularity="frame", kinds=("self", "cross"))
    moving = {"cache_policy": {"name": "relative", "window": 9, "sink": 3}}
    found = [
        next(n.parts["exchange"] for n in run.needs() if (n.phase, n.where) == ("rolling out", "GPU"))
        for run in (
            on_gpu(tmp_path),
            on_gpu(tmp_path, gpus=2),
            on_gpu(tmp_path, gpus=3, **moving),
            on_gpu(tmp_path, [cross], gpus=2),
        )
    ]
    each = 3 * 1560 * 1536 * 2  # a block of 3 frames, in bfloat16
    assert found == [0, 4 * each // 2, 8 * each // 3, 5 * each // 2]
