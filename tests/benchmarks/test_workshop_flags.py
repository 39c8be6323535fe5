"""Bad input of the workshop's scripts is one line and exit code 2, and leaves nothing behind."""

from importlib import import_module

import pytest
from conftest import ROOT

from experiments.running import cli

MINI = ["--config_path", "configs/wan_mini.yaml"]
CASES: dict[str, list[list[str]]] = {
    "rollout": [
        [*MINI, "--repeats", "0"],
        [*MINI, "--graphs", "--device", "cpu"],
        [*MINI, "--random_weights"],
        [*MINI, "--other", "{}"],
        ["--what", "models", "--models", "wan_mini", "--device", "cpu"],
        ["--config_path", "{}/none.yaml"],
    ],
    "cards": [["--cards", "8 GB"]],
    "decode": [[*MINI, "--repeats", "0"], [*MINI, "--what", "sound"]],
    "engine": [["--items", "0"]],
    "kernels": [["--frames", "0"]],
    "public": [[*MINI], ["{}/none", *MINI]],
    "random_weights": [["{}/out", "--model", "Wan3"]],
    "reproduce.band_edits": [["--captions", "0"], ["--config_path", "{}/none.yaml"]],
    "reproduce.base_and_causal": [["{}/none.pt", "{}/none.pt", "{}/sheet.svg"]],
    "reproduce.check_model": [["--config_path", "{}/none.yaml"]],
    "reproduce.color_probe": [["--config_path", "{}/none.yaml"]],
    "reproduce.first_frame": [["--training", "{}"], ["--training", "--output_path", "{}/text.json"]],
    "reproduce.head_memory": [["--config_path", "{}/none.yaml"]],
    "reproduce.hidden_shapes": [
        ["--seeds", "10"],
        ["--config_path", "configs/wan_14b.yaml"],
        ["--draw", "--output_path", "{}/none.json"],
        ["--draw", "--output_path", "{}/text.json"],
    ],
    "reproduce.long_rollouts": [[], ["{}/none.json"], ["{}/text.json"], ["--first_frame", "--lengths", "22"]],
    "reproduce.policies": [["--config_path", "{}/none.yaml"]],
    "reproduce.published": [["{}"]],
    "reproduce.readme_figures": [["--mini_cache", "{}/none.pt"]],
    "reproduce.released_noise": [["--card", "abacus"]],
    "reproduce.rope_waves": [["x"]],
    "reproduce.shape_attention": [["--captions", "0"], ["--draw", "--output_path", "{}/text.json"]],
}


def test_every_script_is_here():
    folder = ROOT / "experiments/benchmarks"
    starts = [path for path in folder.rglob("*.py") if "main(run)" in path.read_text()]
    assert {".".join(path.relative_to(folder).with_suffix("").parts) for path in starts} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_exit_code_2(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    (tmp_path / "text.json").write_text("not JSON")
    run = import_module(f"experiments.benchmarks.{name}").run
    for case in [["--no_such_flag"], *CASES[name]]:
        with pytest.raises(SystemExit) as ended:
            cli.main(run, [word.format(tmp_path) for word in case])
        said = capfd.readouterr().err
        assert ended.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, (case, said)
    assert [path.name for path in tmp_path.iterdir()] == ["text.json"]
