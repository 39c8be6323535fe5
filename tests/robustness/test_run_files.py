"""No run writes a file that it reads, or one file twice:
derived from the flags of every script, by device and inode.
"""

import contextlib
import io
import os
import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import synthetic_caches
from helpers.flags import arguments, scripts

from experiments import (
    compare_policies,
    contact_sheet,
    extract_attention_wan,
    layer_page,
    layers_from_atlas,
    measure_checkpoints,
    run_causal_atlas,
    run_extraction,
    run_extraction_all,
    run_extraction_each,
    run_extraction_figure4,
    run_intervention,
    run_rollout,
)
from experiments.caches import load_cache, save_cache
from experiments.extraction import causal
from experiments.running import cli

SHORT = ["--num_frames", "3", "--quiet"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    for module, name in ((causal, "load_pipeline"), (causal, "encode_prompts")):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("it began"))


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    """A file for every flag that names one."""
    shutil.copy("configs/wan_mini.yaml", tmp_path / "config.yaml")
    shutil.copy("checkpoints/wan-mini/self_forcing_mini.pt", tmp_path / "checkpoint.pt")
    (tmp_path / "prompts.txt").write_text("a red circle\n", encoding="utf-8")
    save_cache(tmp_path / "states.pt", synthetic_caches.layer())
    names = ("config.yaml", "checkpoint.pt", "prompts.txt", "states.pt")
    flags = ("--config_path", "--checkpoint_path", "--prompts", "--prompt_embeds")
    return dict(zip(flags, (tmp_path / name for name in names), strict=True))


def refused(script, argv) -> str:
    said = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(said):
        cli.main(script.run, [str(word) for word in argv])
    line = said.getvalue()
    assert ended.value.code == 2 and line.count("\n") == 1 and "is the same file as" in line, (argv, line)
    return line


def test_no_output_is_an_input_by_any_name(inputs, tmp_path):
    """Every file that is read, under its own name, a symbolic and a hard link,
    as every file that is written.
    """
    tried = 0
    for script in (run_extraction, run_extraction_all, run_extraction_each, run_extraction_figure4):
        for flag, path in inputs.items():
            if flag == "--prompts" and script is not run_extraction_all:
                continue
            (tmp_path / "soft").unlink(missing_ok=True)
            (tmp_path / "hard").unlink(missing_ok=True)
            (tmp_path / "soft").symlink_to(path)
            os.link(path, tmp_path / "hard")
            before = path.read_bytes()
            for name in (path, tmp_path / "soft", tmp_path / "hard", tmp_path / "x" / ".." / path.name):
                for output in ("--output_path", "--log_file"):
                    config = [] if flag == "--config_path" else ["--config_path", "configs/wan_mini.yaml"]
                    refused(script, [*config, *SHORT, flag, path, output, name])
                    tried += 1
            assert path.read_bytes() == before
    assert tried == 104


def test_no_output_is_a_file_of_the_model(tmp_path):
    files = [path for path in Path("checkpoints/wan-mini").rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files[:6]:
        refused(run_extraction, ["--config_path", "configs/wan_mini.yaml", *SHORT, "--output_path", path])


def test_what_a_config_names_is_read_by_every_script(inputs, tmp_path):
    """The LoRA, the classes of heads, what edits take from: no output, of no script."""
    named = [tmp_path / name for name in ("lora.pt", "heads.csv", "means.pt", "checkpoint.pt")]
    shutil.copy("checkpoints/wan-mini/lora_window.pt", named[0])
    named[1].write_text("\n".join([",".join(["a"] * 12)] * 8), encoding="utf-8")
    named[2].write_bytes(b"means")
    policy = f"{{name: per_head, file: {named[1]}, policies: {{a: {{name: full}}}}}}"
    text = inputs["--config_path"].read_text().replace("checkpoints/wan-mini/self_forcing", "NONE")
    text += f"lora_path: {named[0]}\nlora_rank: 16\nlora_alpha: 16\ncache_policy: {policy}\n"
    inputs["--config_path"].write_text(text, encoding="utf-8")
    (tmp_path / "policy.yaml").write_text(policy, encoding="utf-8")
    edit = f"- {{edit: ablate, how: mean, source: {named[2]}, passes: denoise}}\n"
    (tmp_path / "edit.yaml").write_text(edit, encoding="utf-8")
    before = [path.read_bytes() for path in named]
    base = ["--config_path", inputs["--config_path"], "--checkpoint_path", named[3], *SHORT]
    edited = ["--interventions", tmp_path / "edit.yaml"]
    for path in named:
        for script in (run_extraction_all, run_intervention):
            refused(script, [*base, *edited, "--output_path", path])
        edits = ["--edit", tmp_path / "edit.yaml", "--output_dir", tmp_path / "o"]
        refused(run_rollout, [*base, *edited, "--output_path", tmp_path / "o.mp4", "--log_file", hard(path)])
        refused(run_causal_atlas, [*base, *edits, "--log_file", hard(path)])
        if path != named[2]:  # policies are compared without edits
            policies = ["--policies", tmp_path / "policy.yaml", "--output_dir", tmp_path / "o"]
            refused(compare_policies, [*base, *policies, "--videos", "0", "--log_file", hard(path)])
    vae = next(Path("checkpoints/wan-mini/vae").glob("*.json"))
    refused(run_rollout, ["--config_path", "configs/wan_mini.yaml", *SHORT, "--log_file", vae])
    assert [path.read_bytes() for path in named] == before and not (tmp_path / "o.mp4").exists()


def hard(path: Path) -> Path:
    """A name that a log may have; the file is the same."""
    link = path.with_name(f"{path.name}.log")
    if not link.exists():
        os.link(path, link)
    return link


def test_the_atlas_of_a_checkpoint_is_not_the_checkpoint(tmp_path):
    weights = tmp_path / "step_00500.pt"
    shutil.copy("checkpoints/wan-mini/self_forcing_mini.pt", weights)
    before = weights.read_bytes()
    flags = [tmp_path, "--steps", "500", "--device", "cpu", "--output_path", tmp_path / "report.json"]
    refused(measure_checkpoints, flags)
    assert weights.read_bytes() == before and os.listdir(tmp_path) == [weights.name]


def test_effects_and_their_video_are_two_files(tmp_path, capfd):
    edit = tmp_path / "edits.txt"
    edit.write_text("- {edit: ablate, how: zero, passes: denoise}\n", encoding="utf-8")
    flags = ["--config_path", "configs/wan_mini.yaml", *SHORT, "--interventions", edit]
    refused(run_intervention, [*flags, "--output_path", tmp_path / "eff.mp4"])
    with pytest.raises(SystemExit) as ended:
        cli.main(run_intervention.run, [str(word) for word in [*flags, "--save_video", tmp_path / "o.txt"]])
    assert ended.value.code == 2 and "does not end in .mp4" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["edits.txt"]


def test_no_file_is_written_twice(tmp_path):
    out, mini = tmp_path / "o.mp4", ["--config_path", "configs/wan_mini.yaml", *SHORT]
    for script in (run_extraction, run_extraction_all, run_extraction_each, run_extraction_figure4):
        refused(script, [*mini, "--output_path", out, "--save_video"])
        refused(script, [*mini, "--output_path", out, "--save_video", out])
        refused(script, [*mini, "--output_path", out, "--log_file", out])
    sweeping = [*mini, "--seeds", "1", "--output_dir", tmp_path / "s"]
    refused(run_extraction_all, [*sweeping, "--log_file", tmp_path / "s/manifest.json"])
    slug = "a-red-circle-moving-right-over-a-dark-blue-background_s1"
    refused(run_extraction_all, [*sweeping, "--log_file", tmp_path / f"s/{slug}.pt"])
    mini = ["--ckpt_dir", "checkpoints/wan-mini", "--num_frames", "5", "--quiet", "--output_dir", tmp_path]
    refused(
        extract_attention_wan, [*mini, "--save_video", tmp_path / "v.mp4", "--log_file", tmp_path / "v.mp4"]
    )
    assert not os.listdir(tmp_path)


def test_what_is_converted_is_kept(tmp_path):
    save_cache(tmp_path / "layer1.pt", synthetic_caches.atlas())
    (tmp_path / "a.svg").write_text("<svg/>", encoding="utf-8")
    before = (tmp_path / "layer1.pt").read_bytes()
    refused(layer_page, [tmp_path / "layer1.pt", "--output_path", tmp_path / "layer1.pt"])
    refused(layer_page, [tmp_path, "--output_path", tmp_path / "layer1.pt"])
    refused(layers_from_atlas, [tmp_path / "layer1.pt", "--output_dir", tmp_path])
    refused(contact_sheet, [tmp_path / "a.svg", f"A={tmp_path / 'a.svg'}"])
    assert (tmp_path / "layer1.pt").read_bytes() == before and load_cache(tmp_path / "layer1.pt")
    assert sorted(os.listdir(tmp_path)) == ["a.svg", "layer1.pt"]


WRITES = {"output", "save", "log", "sheet", "figure"}  # words of the names of what is written


def test_every_flag_that_writes_is_known():
    """The next flag that names an output is in the list, or this fails; what is in the list is a flag."""
    found: dict[str, list[str]] = {}
    for script in scripts():
        assert arguments(script), script
        for action in arguments(script):
            if WRITES & set(action.dest.split("_")):
                found.setdefault(action.dest, []).append(script)
    assert found.keys() - {"output_dir"} == set(cli.OUTPUT_FLAGS), found
    assert len(found["output_path"]) > 10 and "train_mini" in found["log"]


def test_filelock_neither_follows_nor_truncates_a_link(tmp_path):
    """What our own check looks for first must hold in the library too: a link can be made in between."""
    from filelock import FileLock

    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="Too many levels"):
        FileLock(tmp_path / "lock", timeout=0).acquire()
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "mine"
