"""Every script with every kind of bad input: exit code 2 and one line; --help: 0. In forks of one warmed process."""

import os
from collections import Counter

import pytest
import synthetic_caches
import torch
from conftest import ROOT
from forked import exit_code, forked, tell

from experiments import (
    benchmark,
    benchmark_reading,
    build_published,
    cli,
    extract_attention_wan,
    layers_from_atlas,
    match_curve,
    readme_figures,
    run_extraction,
    run_extraction_all,
    run_extraction_each,
    run_extraction_figure4,
)
from experiments.caches import save_cache

MINI = ["--config_path", "configs/wan_mini.yaml"]
NO_DISK = "/proc/no/such"       # nobody may write there, root neither
ROLLOUTS = {script.__name__.split(".")[-1]: script
            for script in (run_extraction, run_extraction_all, run_extraction_each, run_extraction_figure4)}
OTHERS = {script.__name__.split(".")[-1]: script for script in (
    benchmark, benchmark_reading, build_published, extract_attention_wan, layers_from_atlas, match_curve, readme_figures)}


@pytest.fixture
def files(tmp_path):
    """Names in the matrix -> files of the wrong kind."""
    save_cache(tmp_path / "layer.pt", synthetic_caches.layer())
    save_cache(tmp_path / "atlas.pt", synthetic_caches.atlas())
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.txt").write_text("not a cache, not a config: [")
    (tmp_path / "bytes.bin").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    return tmp_path


def rollout_cases() -> list[list[str]]:
    """What every rollout script must refuse; {} is the folder of wrong files."""
    bad = [["--no_such_flag"], ["--config_path", "{}/none.yaml"], ["--checkpoint_path", "{}/none.pt"],
           ["--ckpt_dir", "{}/none"],
           *([flag, f"{{}}/{name}"] for flag in ("--config_path", "--checkpoint_path")
             for name in ("text.txt", "bytes.bin", "empty", "list.pt", "layer.pt", "folder")),
           *(["--ckpt_dir", f"{{}}/{name}"] for name in ("text.txt", "folder")),
           *([flag, "many"] for flag in ("--num_frames", "--seed", "--gpu_id", "--step")), ["--num_frames", "-3"],
           ["--num_frames", "0"], ["--num_frames", "1.5"], ["--step", "99"], ["--device", "abacus"], ["--seed"],
           ["--log_file", f"{NO_DISK}/log"], ["--save_video", f"{NO_DISK}/v.mp4"], ["--seed", str(2**70)]]
    return [(flags if flags[0] == "--config_path" else [*MINI, *flags]) for flags in bad]


CASES = {name: [*rollout_cases(), [*MINI, "--output_path", f"{NO_DISK}/out.pt"], [*MINI, "--output_path", "{}/folder"]]
         for name in ROLLOUTS}
CASES["run_extraction"] += [[*MINI, *f] for f in (["--blocks", "9"], ["--layer_indices", "x"], ["--steps", "7"],
                                                  ["--capture", "x"])]
CASES["run_extraction_all"] += [[*MINI, *f] for f in (["--prompts", "{}/bytes.bin", "--output_dir", "{}/o"], ["--seeds", "x"],
                                                      ["--seeds", "1", "--output_dir", NO_DISK],
                                                      ["--prompts", "{}/folder", "--output_dir", "{}/o"])]
CASES["run_extraction_each"] += [[*MINI, *f] for f in (["--layer_index", "8"], ["--output_dir", NO_DISK],
                                                       ["--granularity", "x"])]
CASES["run_extraction_figure4"] += [[*MINI, *f] for f in (["--layer_indices", "-1"], ["--granularity", "x"],
                                                          ["--capture", "x"])]
CASES |= {
    "benchmark": [["--no_such_flag"], [*MINI, "--repeats", "x"], [*MINI, "--repeats", "0"], ["--config_path", "{}/none.yaml"],
                  ["--config_path", "{}/text.txt"], [*MINI, "--output_path", f"{NO_DISK}/out.json"]],
    "benchmark_reading": [["--no_such_flag"], ["--tokens", "x"], ["--output_path", f"{NO_DISK}/out.json"], ["--repeats", "0"]],
    "build_published": [["--no_such_flag"], [], ["{}/none"], ["{}/text.txt"], ["{}/folder"]],
    "extract_attention_wan": [["--no_such_flag"], ["--ckpt_dir", "{}/none"], ["--ckpt_dir", "{}/folder"],
                              ["--num_frames", "20"],
                              ["--config_path", "{}/text.txt"], ["--config_path", "{}/none.yaml"],
                              *([*MINI, *f] for f in (["--step", "x"], ["--num_steps", "0"], ["--shift", "x"],
                                                      ["--layer_index", "9"], ["--output_dir", NO_DISK]))],
    "layers_from_atlas": [["--no_such_flag"], [], ["{}/none.pt"], ["{}/layer.pt"], ["{}/list.pt"], ["{}/text.txt"],
                          ["{}/folder"], ["{}/bytes.bin"], ["{}/atlas.pt", "--layers", "99"], ["{}/atlas.pt", "--layers", "x"],
                          ["{}/atlas.pt", "--step", "99"], ["{}/atlas.pt", "--output_dir", NO_DISK]],
    "match_curve": [["--no_such_flag"], ["--cache_path", "{}/none.pt"], ["--cache_path", "{}/text.txt"], ["--step", "x"],
                    *(["--cache_path", "{}/atlas.pt", "--curves", f"{{}}/{name}"] for name in
                      ("none.csv", "text.txt", "bytes.bin", "empty", "folder"))],
    "readme_figures": [["--no_such_flag"], ["--mini_cache", "{}/none.pt"], ["--mini_cache", "{}/layer.pt"],
                       ["--output_dir", NO_DISK]],
}
SCRIPTS = ROLLOUTS | OTHERS


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_input_is_one_line_and_exit_code_2(name, files, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    before, wrong, codes = sorted(files.iterdir()), [], Counter()
    for case in CASES[name]:
        argv = [part.format(files) for part in case]
        done = forked(exit_code(lambda argv=argv: cli.main(SCRIPTS[name].run, argv)), timeout=30)
        codes[done.value] += 1
        one_line = done.said.startswith("error: ") and done.said.count("\n") == 1 and done.said.endswith("\n")
        if (done.value, one_line) != (2, True):
            wrong.append((case, done.value, done.said[-300:]))
    assert not wrong, "\n".join(map(str, wrong))
    left = [path for path in sorted(files.iterdir()) if path not in before and (not path.is_dir() or os.listdir(path))]
    assert not left
    usage = forked(exit_code(lambda: cli.main(SCRIPTS[name].run, ["--help"])))
    assert usage.value == 0 and not usage.said
    tell(capfd, f"{name}: {codes.total()} bad command lines, exit code 2 and one line each; --help 0")
