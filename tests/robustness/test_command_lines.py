"""Every script with every kind of bad input: exit code 2 and one line; --help: 0. In forks of one process."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches
from helpers.forked import forked, one_after_another, tell

from experiments import (
    compare_policies,
    contact_sheet,
    evaluate_mini,
    extract_attention_wan,
    layer_page,
    layers_from_atlas,
    match_curve,
    measure_checkpoints,
    measure_moments,
    run_causal_atlas,
    run_extraction,
    run_extraction_all,
    run_extraction_each,
    run_extraction_figure4,
    run_extraction_maps,
    run_intervention,
    run_notebooks,
    run_rollout,
    train_mini,
)
from experiments.caches import save_cache
from experiments.dev import (
    benchmark_capture,
    benchmark_first_contact,
    benchmark_interventions,
    benchmark_long_rollouts,
    benchmark_maps,
    benchmark_memory,
    benchmark_models,
    benchmark_page,
    benchmark_parallel,
    benchmark_policies,
    benchmark_reading,
    build_published,
    compare_base_and_causal,
    first_frame_numbers,
    first_frame_training,
    hidden_shapes,
    long_first_frame,
    long_rollout_findings,
    long_rollout_strips,
    notebook_outputs,
    on_the_video_figure,
    policy_figures,
    readme_figures,
    readme_tables,
    shape_attention,
)
from experiments.running import cli

MINI = ["--config_path", "configs/wan_mini.yaml"]
NO_DISK = "/proc/no/such"  # nobody may write there, root neither
ROLLOUTS = {
    script.__name__.split(".")[-1]: script
    for script in (
        run_extraction,
        run_extraction_all,
        run_extraction_each,
        run_extraction_figure4,
        run_extraction_maps,
    )
}
OTHERS = {
    script.__name__.split(".")[-1]: script
    for script in (
        benchmark_first_contact,
        benchmark_interventions,
        benchmark_long_rollouts,
        benchmark_maps,
        benchmark_page,
        hidden_shapes,
        first_frame_numbers,
        compare_base_and_causal,
        compare_policies,
        long_first_frame,
        long_rollout_findings,
        long_rollout_strips,
        notebook_outputs,
        first_frame_training,
        run_causal_atlas,
        benchmark_capture,
        benchmark_reading,
        benchmark_memory,
        benchmark_models,
        benchmark_parallel,
        benchmark_policies,
        build_published,
        contact_sheet,
        evaluate_mini,
        extract_attention_wan,
        layer_page,
        layers_from_atlas,
        match_curve,
        measure_checkpoints,
        measure_moments,
        policy_figures,
        readme_figures,
        on_the_video_figure,
        readme_tables,
        shape_attention,
        run_causal_atlas,
        run_intervention,
        run_notebooks,
        run_rollout,
        train_mini,
    )
}


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
    (tmp_path / "marked.md").write_text("<!-- table: text.txt -->\n<!-- end of table -->\n")
    (tmp_path / "training").mkdir()
    (tmp_path / "training/step_1.pt").write_bytes(b"")
    return tmp_path


def rollout_cases() -> list[list[str]]:
    """What every rollout script must refuse; {} is the folder of wrong files."""
    bad = [
        ["--no_such_flag"],
        ["--config_path", "{}/none.yaml"],
        ["--checkpoint_path", "{}/none.pt"],
        ["--ckpt_dir", "{}/none"],
        *(
            [flag, f"{{}}/{name}"]
            for flag in ("--config_path", "--checkpoint_path")
            for name in ("text.txt", "bytes.bin", "empty", "list.pt", "layer.pt", "folder")
        ),
        *(["--ckpt_dir", f"{{}}/{name}"] for name in ("text.txt", "folder")),
        *([flag, "many"] for flag in ("--num_frames", "--seed", "--gpu_id", "--step")),
        ["--num_frames", "-3"],
        ["--num_frames", "0"],
        ["--num_frames", "1.5"],
        ["--step", "99"],
        ["--device", "abacus"],
        ["--seed"],
        ["--log_file", f"{NO_DISK}/log"],
        ["--save_video", f"{NO_DISK}/v.mp4"],
        ["--seed", str(2**70)],
    ]
    return [(flags if flags[0] == "--config_path" else [*MINI, *flags]) for flags in bad]


CASES = {
    name: [
        *rollout_cases(),
        [*MINI, "--output_path", f"{NO_DISK}/out.pt"],
        [*MINI, "--output_path", "{}/folder"],
    ]
    for name in ROLLOUTS
}
CASES["run_extraction"] += [
    [*MINI, *f] for f in (["--blocks", "9"], ["--layer_indices", "x"], ["--steps", "7"], ["--capture", "x"])
]
CASES["run_extraction_all"] += [
    [*MINI, *f]
    for f in (
        ["--prompts", "{}/bytes.bin", "--output_dir", "{}/o"],
        ["--seeds", "x"],
        ["--seeds", "1", "--output_dir", NO_DISK],
        ["--prompts", "{}/folder", "--output_dir", "{}/o"],
    )
]
CASES["run_extraction_all"] += [
    [*MINI, *f]
    for f in (
        ["--cache_policy", "no_such_policy"],
        ["--cache_policy", "{}/none.yaml"],
        ["--cache_policy", "{}/text.txt"],
        ["--prompt_schedule", "{}/none.yaml"],
        ["--gpus", "0"],
        ["--gpus", "x"],
        ["--gpus", "5", "--device", "cpu"],
        ["--gpus", "2", "--seeds", "1", "--output_dir", "{}/o"],
        ["--checkpoints", "{}/none.pt", "--output_dir", "{}/o"],
        ["--checkpoints", "base"],
    )
]
CASES["run_extraction_each"] += [
    [*MINI, *f] for f in (["--layer_index", "8"], ["--output_dir", NO_DISK], ["--granularity", "x"])
]
CASES["run_extraction_figure4"] += [
    [*MINI, *f] for f in (["--layer_indices", "-1"], ["--granularity", "x"], ["--capture", "x"])
]
CASES["run_extraction_maps"] += [
    [*MINI, *f]
    for f in (
        *(
            ["--query_patch", word]
            for word in ("99,0,0", "a,b", "1,-1,0", "-1,0,0", "18,4,0", "18,0,4", "", "1,2")
        ),
        ["--query_patch", "18,1,1", "18,1,1"],
        ["--query_patch", "9" * 30 + ",0,0"],
        *(["--query_frame", word] for word in ("21", "-1", "x")),
        ["--query_frame", "3", "3"],
        *(["--query_grid", word] for word in ("18,0,4", "18,5,4", "21,2,2", "x")),
        ["--heads", "12"],
        ["--heads", "-1"],
        ["--layer_indices", "9"],
        ["--blocks", "9"],
        ["--blocks", "0", "--query_patch", "18,0,0"],
        ["--steps", "7"],
        ["--cache_policy", "forcing_kv_heads"],
    )
]
CASES |= {
    name: [
        *rollout_cases(),
        [*MINI, "--interventions", "{}/none.yaml"],
        *(
            [*MINI, "--interventions", f"{{}}/{file}"]
            for file in ("text.txt", "bytes.bin", "empty", "folder")
        ),
        [*MINI, "--ablate_heads", "{}/empty", "--ablate_passes", "all"],
        [*MINI, "--ablate_heads", "{}/none.csv", "--ablate_passes", "all"],
        [*MINI, "--ablate_heads", "{}/empty"],
        [*MINI, "--ablate_passes", "some"],
        *more,
    ]
    for name, more in {
        "run_intervention": [[*MINI], [*MINI, "--output_path", f"{NO_DISK}/out.pt"]],
        "run_causal_atlas": [
            [*MINI, "--each", "token"],
            [*MINI, "--edit", "{}/text.txt"],
            [*MINI, "--batch", "0"],
            [*MINI, "--output_dir", NO_DISK],
        ],
    }.items()
}
CASES |= {
    "benchmark_capture": [
        ["--no_such_flag"],
        [*MINI, "--repeats", "x"],
        [*MINI, "--repeats", "0"],
        ["--config_path", "{}/none.yaml"],
        ["--config_path", "{}/text.txt"],
        [*MINI, "--output_path", f"{NO_DISK}/out.json"],
    ],
    "compare_base_and_causal": [["--no_such_flag"], ["{}/none.pt", "{}/none.pt", "{}/sheet.svg"]],
    "policy_figures": [["--no_such_flag"], ["--config_path", "{}/none.yaml", "--output_dir", "{}/out"]],
    "benchmark_interventions": [
        ["--no_such_flag"],
        [*MINI, "--repeats", "0"],
        [*MINI, "--sweep_seconds", "0"],
        [*MINI, "--sweep_prompts", "99"],
        ["--config_path", "{}/none.yaml"],
        [*MINI, "--output_path", f"{NO_DISK}/out.json"],
    ],
    "hidden_shapes": [
        ["--no_such_flag"],
        ["--captions", "0"],
        ["--seeds", "x"],
        ["--config_path", "{}/none.yaml"],
        ["--config_path", "configs/wan_14b.yaml"],
        ["--ckpt_dir", "{}/folder"],
        ["--captions", "1", "--selection", "1", "--first_frame_captions", "1", "--layers", "8"],
        ["--captions", "1", "--selection", "1", "--first_frame_captions", "1", "--counts", "96"],
        ["--draw", "--output_path", "{}/none.json"],
        ["--draw", "--output_path", "{}/text.txt"],
        ["--output_path", f"{NO_DISK}/out.json"],
    ],
    "benchmark_parallel": [
        ["--no_such_flag"],
        [],  # one process alone
        ["--models", "Wan3"],
        ["--repeats", "0"],
        ["--device", "abacus"],
    ],
    "benchmark_models": [
        ["--no_such_flag"],
        ["--models", "no_such_model"],
        ["--models", "wan_mini"],
        ["--models", "self_forcing_dmd", "--num_frames", "4"],
        ["--device", "abacus"],
        ["--output_path", f"{NO_DISK}/out.json"],
    ],
    "benchmark_policies": [
        ["--no_such_flag"],
        [*MINI, "--repeats", "0"],
        [*MINI, "--blocks", "0"],
        [*MINI, "--output_path", f"{NO_DISK}/out.json"],
    ],
    "on_the_video_figure": [
        ["--no_such_flag"],
        ["--seed", "x"],
        *(["--heads", f"{{}}/{name}"] for name in ("none.json", "text.txt", "folder", "bytes.bin")),
        ["--config_path", "{}/none.yaml"],
        ["--output_path", f"{NO_DISK}/out.svg"],
    ],
    "shape_attention": [
        ["--no_such_flag"],
        ["--captions", "0"],
        ["--config_path", "{}/none.yaml"],
        ["--device", "abacus"],
        ["--output_path", f"{NO_DISK}/out.json"],
        ["--figure", f"{NO_DISK}/out.svg"],
    ],
    "benchmark_maps": [
        ["--no_such_flag"],
        [*MINI, "--repeats", "0"],
        ["--config_path", "{}/none.yaml"],
        [*MINI, "--output_path", f"{NO_DISK}/out.json"],
    ],
    "benchmark_reading": [
        ["--no_such_flag"],
        ["--tokens", "x"],
        ["--output_path", f"{NO_DISK}/out.json"],
        ["--repeats", "0"],
    ],
    "build_published": [["--no_such_flag"], [], ["{}/none"], ["{}/text.txt"], ["{}/folder"]],
    "extract_attention_wan": [
        ["--no_such_flag"],
        ["--ckpt_dir", "{}/none"],
        ["--ckpt_dir", "{}/folder"],
        ["--num_frames", "20"],
        ["--config_path", "{}/text.txt"],
        ["--config_path", "{}/none.yaml"],
        *(
            [*MINI, *f]
            for f in (
                ["--step", "x"],
                ["--num_steps", "0"],
                ["--shift", "x"],
                ["--layer_index", "9"],
                ["--output_dir", NO_DISK],
            )
        ),
    ],
    "layers_from_atlas": [
        ["--no_such_flag"],
        [],
        ["{}/none.pt"],
        ["{}/layer.pt"],
        ["{}/list.pt"],
        ["{}/text.txt"],
        ["{}/folder"],
        ["{}/bytes.bin"],
        ["{}/atlas.pt", "--layers", "99"],
        ["{}/atlas.pt", "--layers", "x"],
        ["{}/atlas.pt", "--step", "99"],
        ["{}/atlas.pt", "--output_dir", NO_DISK],
    ],
    "match_curve": [
        ["--no_such_flag"],
        ["--cache_path", "{}/none.pt"],
        ["--cache_path", "{}/text.txt"],
        ["--step", "x"],
        *(
            ["--cache_path", "{}/atlas.pt", "--curves", f"{{}}/{name}"]
            for name in ("none.csv", "text.txt", "bytes.bin", "empty", "folder")
        ),
    ],
    "readme_figures": [
        ["--no_such_flag"],
        ["--mini_cache", "{}/none.pt"],
        ["--mini_cache", "{}/layer.pt"],
        ["--output_dir", NO_DISK],
    ],
}
EAGLE = "cache/published/self_forcing_dmd_eagle_21f.pt"
CASES |= {
    "benchmark_memory": [
        ["--no_such_flag"],
        ["--device", "abacus"],
        ["--device"],
        ["--device", "cpu", "--output_path", f"{NO_DISK}/out.json"],
    ],
    "compare_policies": [
        ["--no_such_flag"],
        ["--policies", "no_such_policy"],
        ["--policies", "window,window"],
        ["--policies", "window,window=x"],
        ["--policies", "window,window=3,sink=3"],
        ["--policies", "{}/text.txt"],
        ["--policies", "full", "--cache_policy", "full"],
        ["--num_frames", "4"],
        ["--prompts", "{}/empty"],
        ["--prompts", "{}/text.txt", "--held_out", "3"],
        ["--held_out", "0"],
        ["--batch", "0"],
        ["--workers", "-1"],
        ["--videos", "x"],
        ["--output_dir", NO_DISK],
        ["--output_dir", "{}/text.txt"],
        ["--vbench_dir", NO_DISK, "--output_dir", "{}/o"],
        ["--capture", "last:x"],
        ["--vae_dtype", "int8"],
        ["--controls", "thawed"],
        ["--config_path", "{}/none.yaml"],
        ["--device", "abacus"],
    ],
    "benchmark_long_rollouts": [
        ["--no_such_flag"],
        ["--num_frames", "0"],
        ["--cache_policy", "no_such_policy"],
        ["--config_path", "{}/none.yaml"],
        ["--device", "abacus"],
        ["--output_path", f"{NO_DISK}/out.json"],
    ],
    "long_first_frame": [
        ["--no_such_flag"],
        ["--lengths", "0"],
        ["--lengths", "22"],
        ["--prompts", "x"],
        ["--config_path", "{}/none.yaml"],
        ["--output_path", f"{NO_DISK}/out.json"],
    ],
    "long_rollout_strips": [
        ["--no_such_flag"],
        [],
        ["{}/none"],
        ["{}/folder"],
        ["{}/text.txt"],
        ["{}/folder", "--output_path", f"{NO_DISK}/out.json"],
    ],
    "run_rollout": [
        *rollout_cases(),
        *(
            [*MINI, *f]
            for f in (
                ["--capture", "some"],
                ["--capture", "last:0"],
                ["--capture", "band"],
                ["--num_frames", "4"],
                ["--output_path", "{}/o.avi"],
                ["--output_path", "{}/folder"],
                ["--output_path", f"{NO_DISK}/o.mp4"],
                ["--save_video"],
                ["--cache_policy", "no_such_policy"],
            )
        ),
    ],
    "long_rollout_findings": [
        ["--no_such_flag"],
        [],
        *([f"{{}}/{name}"] for name in ("none.json", "text.txt", "bytes.bin", "folder", "empty")),
    ],
    "contact_sheet": [
        ["--no_such_flag"],
        [],
        ["{}/sheet.svg"],
        ["{}/sheet.svg", "A={}/none.svg"],
        ["{}/sheet.svg", "A"],
        *(["{}/sheet.svg", f"A={{}}/{name}"] for name in ("text.txt", "bytes.bin", "empty", "folder")),
    ],
    "evaluate_mini": [
        ["--no_such_flag"],
        ["--captions", "x"],
        ["--captions", "-1"],
        ["--pasts", "0"],
        ["--clips", "0"],
        ["--long_videos", "99999999999999999999"],
        ["--config_path", "{}/none.yaml"],
        ["--config_path", "{}/text.txt"],
        ["--ckpt_dir", "{}/none"],
        ["--device", "abacus"],
        ["--output_path", f"{NO_DISK}/out.json"],
        ["--output_path", "{}/folder"],
    ],
    "layer_page": [
        ["--no_such_flag"],
        [],
        *([f"{{}}/{name}"] for name in ("none.pt", "text.txt", "bytes.bin", "list.pt", "folder", "empty")),
        ["{}/atlas.pt", "--output_path", f"{NO_DISK}/page.html"],
        *(
            ["{}/atlas.pt", "--maps", f"{{}}/{name}"]
            for name in ("none.pt", "atlas.pt", "text.txt", "folder")
        ),
        ["{}/atlas.pt", "--output_path", "{}/folder"],
    ],
    "measure_moments": [["--no_such_flag"], [], ["{}/none"]],
    "measure_checkpoints": [
        ["--no_such_flag"],
        [],
        ["{}/none"],
        ["{}/folder"],
        ["{}/text.txt"],
        ["{}/folder", "--steps", "x"],
        ["{}/folder", "--captions", "x"],
        ["{}/training", "--config_path", "{}/none.yaml"],
        ["{}/training", "--output_path", f"{NO_DISK}/out.json"],
        ["{}/training", "--steps", "9"],
        ["{}/training", "--captions", "0"],
    ],
    "benchmark_first_contact": [["--no_such_flag"], ["x"], ["--output_path", f"{NO_DISK}/out.json"]],
    "benchmark_page": [["--no_such_flag"], ["--frames", "4"], ["--frames", "x"], ["--repeats", "x"]],
    "first_frame_training": [["--no_such_flag"], ["x"], ["--output_path", f"{NO_DISK}/out.json"]],
    "first_frame_numbers": [["--no_such_flag"], ["x"], ["--output_path", f"{NO_DISK}/out.json"]],
    "run_causal_atlas": [
        ["--no_such_flag"],
        ["--each", "token"],
        ["--batch", "0"],
        ["--edit", "{}/none.yaml", *MINI],
        ["--edit", "{}/text.txt", *MINI],
        ["--config_path", "{}/none.yaml"],
    ],
    "readme_tables": [
        ["--no_such_flag"],
        ["{}/none.md"],
        ["{}/folder"],
        ["{}/bytes.bin"],
        ["{}/marked.md"],
        ["a", "b"],
    ],
    "run_notebooks": [
        ["--no_such_flag"],
        [],
        ["none.ipynb", EAGLE, "1"],
        ["extract_all_attention.ipynb", "{}/none.pt", "1"],
        *(["extract_all_attention.ipynb", f"{{}}/{name}", "1"] for name in ("text.txt", "list.pt", "folder")),
        *(
            ["extract_all_attention.ipynb", EAGLE, *more]
            for more in (
                ["99"],
                ["x"],
                ["3-1"],
                ["1", "--jobs", "0"],
                ["1", "--jobs", "x"],
                ["1", "--output_dir", NO_DISK],
                ["1", "--output_dir", "{}/text.txt"],
            )
        ),
    ],
    "notebook_outputs": [["--no_such_flag"], ["--check", "no_such_notebook"], ["../plt_fig4"]],
    "train_mini": [
        ["--no_such_flag"],
        [],
        ["--stage", "none"],
        ["--stage", "base", "--output_dir", "{}/folder"],
        ["--stage", "vae", "--minutes", "x"],
        ["--stage", "vae", "--device", "abacus"],
        ["--stage", "vae", "--batch", "x"],
        ["--stage", "vae", "--output_dir", NO_DISK],
        ["--stage", "vae", "--output_dir", "{}/text.txt"],
        ["--stage", "vae", "--batch", "0"],
        ["--stage", "vae", "--steps", "0"],
        ["--stage", "vae", "--steps", "99999999999999999999"],
        ["--stage", "vae", "--minutes", "nan"],
        ["--stage", "vae", "--seed", str(2**70)],
        ["--stage", "vae", "--kinds", "x"],
        ["--stage", "vae", "--clips", "1", "--steps", "1", "--output_dir", "{}/folder", "--resume"],
        ["--stage", "vae", "--training_checkpoints", NO_DISK],
        ["--stage", "vae", "--log", f"{NO_DISK}/log.json"],
    ],
}
SCRIPTS = ROLLOUTS | OTHERS


def test_every_script_is_here():
    starts = {
        path.stem
        for path in [*(ROOT / "experiments").glob("*.py"), *(ROOT / "experiments/dev").glob("*.py")]
        if '__name__ == "__main__"' in path.read_text()
    }
    assert starts == SCRIPTS.keys() == CASES.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_input_is_one_line_and_exit_code_2(name, files, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    before, wrong, cases = sorted(files.iterdir()), [], [*CASES[name], ["--help"]]
    runs = [partial(cli.main, SCRIPTS[name].run, [part.format(files) for part in case]) for case in cases]
    done = forked(lambda: one_after_another(runs), timeout=60)
    assert done.code == 0, done
    *refused, usage = done.value
    for case, (code, said) in zip(cases, refused, strict=False):
        one_line = said.startswith("error: ") and said.count("\n") == 1 and said.endswith("\n")
        if (code, one_line) != (2, True):
            wrong.append((case, code, said[-300:]))
    assert len(refused) == len(CASES[name]) and not wrong, "\n".join(map(str, wrong))
    left = [
        path
        for path in sorted(files.iterdir())
        if path not in before and (not path.is_dir() or os.listdir(path))
    ]
    assert not left
    assert usage == (0, "")
    tell(capfd, f"{name}: {len(refused)} bad command lines, exit code 2 and one line each; --help 0")


HELPS = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
    assert "torch" not in sys.modules, path
"""


def test_no_help_of_the_workshop_imports_torch():
    """Those of users: tests/robustness/test_streams.py."""
    paths = [str(path) for path in (ROOT / "experiments/dev").glob("*.py") if path.stem in SCRIPTS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", HELPS, *paths], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and len(paths) > 15, done.stderr


SHELL = {  # too few or too many words
    "base_and_causal": [["1", "2", "3"], ["x"]],
    "download_weights": [["a", "b"]],
    "extract_all_layers": [[], ["configs/wan_mini.yaml"]],
    "extract_attention": [[]],
    "published_figure": [["1"]],
    "quickstart": [["1"]],
    "run_notebooks": [[], ["a", "b"]],
}
BEHIND = {  # what the script behind it refuses
    "extract_all_layers": [["{}/none.yaml", "{}/o"]],
    "extract_attention": [["checkpoints/wan-mini", "1", NO_DISK]],
    "run_notebooks": [["extract_all_attention.ipynb", "{}/text.txt", "all"]],
}


def bad_lines(cases, files):
    """How many lines were tried, and those that did not end with code 2 and one line."""
    wrong, tried = [], 0
    for name, lines in cases.items():
        for case in lines:
            argv = ["bash", f"experiments/{name}.sh", *(part.format(files) for part in case)]
            done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
            tried += 1
            if done.returncode != 2 or not done.stderr.startswith("error: ") or done.stderr.count("\n") != 1:
                wrong.append((name, case, done.returncode, done.stderr[-300:]))
    return tried, wrong


def test_every_shell_script(files, capfd):
    paths = (ROOT / "experiments").glob("*.sh")
    assert {path.stem for path in paths} - {"env", "usage"} == SHELL.keys()  # these two are sourced
    for name in SHELL:
        script = ["bash", f"experiments/{name}.sh", "--help"]
        usage = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
        assert usage.returncode == 0 and " ".join(script[:2]) in usage.stdout and not usage.stderr, usage
    tried, wrong = bad_lines({name: [["--no_such_flag"], *cases] for name, cases in SHELL.items()}, files)
    assert not wrong, "\n".join(map(str, wrong))
    tell(
        capfd,
        f"{len(SHELL)} shell scripts: {tried} bad command lines, exit code 2 and one line each; --help 0",
    )


@pytest.mark.beside
def test_a_shell_script_passes_on_what_the_script_behind_it_refuses(files):
    assert bad_lines(BEHIND, files) == (len(BEHIND), [])
