"""The decoding benchmark: every way decodes the same number of frames, ratios are against the earlier VAE."""

import json

import torch

from experiments.dev import benchmark_decoding


def test_every_way_has_its_row(tmp_path):
    path = tmp_path / "decoding_mini.json"
    benchmark_decoding.run(["--frames", "2", "--repeats", "2", "--output_path", str(path)])
    report = json.loads(path.read_text())
    rows = {(row["vae"], row["way"]): row for row in report["rows"]}
    assert list(rows) == [(vae, way) for vae in benchmark_decoding.SIZES for way in benchmark_decoding.WAYS]
    assert rows[benchmark_decoding.AGAINST]["times_cheaper"] == [1, 1, 1]
    for row in rows.values():
        median, low, high = row["times_cheaper"]
        assert 0 < low <= median <= high and row["seconds"] > 0
    assert benchmark_decoding.table(report).count("\n| ") == 4


def test_both_ways_give_whole_videos():
    latents = torch.randn(1, 3, 16, 2, 2)
    calls = benchmark_decoding.ways(latents)
    with torch.inference_mode():
        for vae in benchmark_decoding.SIZES:
            assert calls[vae, "diffusers"]().sample.shape == (1, 3, 9, 16, 16)
            assert calls[vae, "streamed"]().shape == (1, 9, 3, 16, 16)
