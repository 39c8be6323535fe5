"""long_rollouts.ipynb from top to bottom, on findings whose answers are known; and what RoPE alone says."""

import base64
import io
import json

import numpy as np
import pytest
from helpers import executed, long_findings
from PIL import Image

from experiments.analysis import long_rollouts
from experiments.analysis.long_rollouts import LongRollouts
from experiments.benchmarks.reproduce.long_rollouts import about_videos
from experiments.caches.files import CacheError
from experiments.studies import policy_comparison as policy_grid
from experiments.studies import policy_findings


@pytest.fixture(scope="module")
def findings():
    gains = dict.fromkeys(("full", *policy_grid.FAMILY, "frozen", "vae"), 0.1)
    gains |= {"window,window=9,sink=3": 0.4, "deep_sink,window=9,sink=3": 0.2}
    made = {"device": "a GPU", "torch": "2", "date": "today", "git": "0" * 40, "command": "python x.py"}
    return policy_findings.findings(long_findings.comparison(gains) | {"made": made})


def files(folder, findings):
    (folder / "findings.json").write_text(json.dumps(findings))
    content = io.BytesIO()
    Image.fromarray(np.zeros((8, 16, 3), np.uint8)).save(content, "PNG")
    rows = dict.fromkeys(("full", "deep sink"), base64.b64encode(content.getvalue()).decode())
    comparison = {"prompts": ["a red circle", "a"], "weights_sha256": "fedcba987654"}
    comparison["videos"] = [{"prompt": "a red circle", "seed": 3}, {"prompt": "a red circle", "seed": 4}]
    about = about_videos(comparison)
    (folder / "strips.json").write_text(json.dumps(about | {"seconds": [0, 5], "rows": rows}))
    row = {"policy": "full", "effect": [0.6, 0.5, 0.7], "largest_placebo": 0.2}
    rows = [row | {"num_frames": length} for length in (21, 240)]
    (folder / "effects.json").write_text(
        json.dumps({"prompts": 4, "weights_sha256": "0123456789ab", "rows": rows})
    )
    names = {"FINDINGS": "findings", "STRIPS": "strips", "EFFECTS": "effects"}
    return {name: str(folder / f"{file}.json") for name, file in names.items()}


def test_the_notebook_runs(tmp_path, findings):
    printed = executed.run("long_rollouts.ipynb", tmp_path, **files(tmp_path, findings))
    assert "240 latent frames, 18 held-out prompts x 3 seeds" in printed
    assert (
        "window 9/3: right 0.8" in printed
        and "a sink of one block against none, window 9: right 0.3" in printed
    )
    names = ["strips", "right", "over_time", "motion", "sink_maps", "cost", "effect_by_length", "rope"]
    drawn = executed.figures(tmp_path)
    assert set(drawn) == {f"{name}.svg" for name in names}
    assert "deep_sink 21/10" in executed.words(drawn["right.svg"])
    by_length = executed.words(drawn["effect_by_length.svg"])
    assert "weights 012345678, 4 prompts" in by_length and "a 95 % interval needs 16" in by_length
    strips = executed.words(drawn["strips.svg"])
    assert "latent 20" in strips and "“a red circle”" in strips and "weights fedcba987, seed 3" in strips
    assert "201" in executed.words(drawn["rope.svg"])


def test_coherence_has_the_maxima_that_are_known():
    distances = np.arange(0, 260)
    values = long_rollouts.rope_coherence(distances)
    assert values[0] == 1 and len(values) == 260
    found = long_rollouts.maxima(distances, values, beyond=100, count=2)
    assert [(place, round(value, 3)) for place, value in found] == [(201, 0.544), (132, 0.541)]
    assert round(values[69], 3) == 0.565 and round(values[88], 3) == 0.548


def test_the_map_is_empty_where_no_policy_is(findings):
    windows, sinks, values = LongRollouts(findings).sink_map("window")
    assert windows == [9, 12] and sinks == [0, 3]
    assert np.isnan(values[1, 0]) and values[0, 1] > values[0, 0]


@pytest.mark.parametrize(
    "content", [None, "[", "{}", "[]", '{"rows": {"a": "b"}, "seconds": [1]}', '{"rows": 3}']
)
def test_other_files_are_refused_with_the_remedy(content, tmp_path):
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    for read in (LongRollouts.open, long_rollouts.read_strips, long_rollouts.read_effects):
        with pytest.raises(CacheError, match="run: python experiments/benchmarks"):
            read(tmp_path / "x.json")
