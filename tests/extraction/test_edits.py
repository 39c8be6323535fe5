"""Interventions in YAML and CSV, friendly and hostile; flags that name them."""

import json

import pytest

from experiments.running.cli import config_from, run_parser
from wan.errors import ConfigError
from wan.interventions import Ablate, Bias, Knockout, Patch, Source, read_ablated_heads, read_edits, record_of

EDITS = [
    Knockout(frames="first", layers=[5], heads=[10], passes="denoise"),
    Bias(-0.5, tokens=[1, 3], passes="all"),
    Patch("kv", Source("雪の朝", 3), frames=[0, "sink"], passes="clean"),
]


def written(tmp_path, text, name="edits.yaml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_yaml_and_back(tmp_path):
    said = record_of(EDITS)
    assert read_edits(written(tmp_path, json.dumps(said["edits"]))) == EDITS  # JSON is YAML
    assert len(said["hash"]) == 16 and said["words"].startswith("Knockout(layers=5")
    bare = "- {edit: ablate, how: zero, layers: 3, heads: [0, 2], passes: denoise}"
    assert read_edits(written(tmp_path, bare)) == [Ablate("zero", layers=[3], heads=[0, 2], passes="denoise")]


HOSTILE = {
    "interventions are a list": "interventions: knockout\n",
    "intervention 2: edit 'cut' is not one": "- {edit: bias, b: 1, frames: 0, passes: all}\n- {edit: cut}\n",
    "passes 'no' is not one of|passes False is not": "- {edit: knockout, frames: 0, passes: no}\n",
    "not a YAML file of interventions": "- {edit: [",
    "not a YAML file of interventions: could not determine": "- !!python/object/apply:os.system [echo]\n",
    "not text in UTF-8": b"\xff\xfe\x00\x01",
    "duplicate key layers in line 1": "- {edit: ablate, how: zero, layers: 5, layers: 3}\n",
    "holds no intervention": "[]\n",
    "is larger than 1048576 bytes": "#" * (2 << 20),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_a_hostile_yaml_is_one_line(tmp_path, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_edits(written(tmp_path, HOSTILE[message]))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_csv_of_heads_to_drop(tmp_path):
    path = written(tmp_path, "0,1,0\n0,0,0\n1, 1,0\n", "heads.csv")
    assert read_ablated_heads(path, 3, 3, "denoise") == [
        Ablate("zero", layers=[0], heads=[1], passes="denoise"),
        Ablate("zero", layers=[2], heads=[0, 1], passes="denoise"),
    ]
    for message, text in {
        r"is \(3, 3\) .* takes 4 layers x 3 heads": "0,1,0\n0,0,0\n1,1,0\n",
        r"of \[0, 1, 2\]; .* 1 drops a head": "0,1,0\n0,0,2\n1,1,0\n0,0,0\n",
        r"of \[0\]; .* 1 drops a head": "0,0,0\n" * 4,
        "is not a CSV of layers x heads: ": "0,1\n0,0,0\n1,1,0\n0,0,0\n",
        "x heads: could not convert": "no,0,0\n",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read_ablated_heads(written(tmp_path, text, "heads.csv"), 4, 3, "all")


@pytest.mark.parametrize("read", [read_edits, lambda path: read_ablated_heads(path, 3, 3, "all")])
def test_an_endless_file_is_refused(read):
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it is no plain file"):
        read("/dev/zero")


def test_flags_name_edits_and_replace_those_of_the_config(tmp_path):
    def edits_by(*flags):
        words = ["--config_path", "configs/wan_mini.yaml", *flags]
        return config_from(run_parser("a script", "cache/x.pt").parse_args(words)).interventions

    edits = [edit.to_dict() for edit in EDITS]
    assert edits_by("--interventions", str(written(tmp_path, json.dumps(edits)))) == edits
    heads = str(written(tmp_path, "0,0,0,0,0,0,0,0,0,0,0,0\n" * 7 + "1,0,0,0,0,0,0,0,0,0,0,0", "heads.csv"))
    both = ["--ablate_heads", heads, "--ablate_passes", "clean"]
    assert edits_by(*both) == [Ablate("zero", layers=7, heads=0, passes="clean").to_dict()]
    for wrong in (both[:2], both[2:]):
        with pytest.raises(ConfigError, match="go together"):
            edits_by(*wrong)
    assert edits_by() == []
