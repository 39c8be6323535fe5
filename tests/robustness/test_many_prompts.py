"""Ten thousand prompts start as one does; a checkout that nobody may write to is read all the same."""

import os

import pytest
import torch
from conftest import ROOT
from helpers.forked import FULL, exit_code, forked

from experiments import run_extraction_all, run_extraction_each
from experiments.caches import load_cache
from experiments.extraction import causal
from experiments.extraction.prompt_embeds import PROMPTS_AT_ONCE, PromptTexts
from experiments.running import cli
from experiments.running.sweep import slugs_of

MINI = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "3", "--quiet"]
SECONDS = 10.0  # of CPU until the first of many prompts is rolled out


class BeganError(Exception):
    """The first rollout would begin here."""


def begins(*args):
    raise BeganError


def test_ten_thousand_prompts_start_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    count = 10_000 if FULL else 2_000
    (tmp_path / "prompts.txt").write_text(
        "\n".join(f"a red circle {i}" for i in range(count)), encoding="utf-8"
    )
    monkeypatch.setattr(causal, "extract_next", begins)
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--output_dir", str(tmp_path / "out")]

    def start():
        with pytest.raises(BeganError):
            run_extraction_all.run([*MINI, *flags])

    done = forked(start, timeout=60)
    assert done.code == 0 and done.cpu_seconds < SECONDS, done
    assert sorted(os.listdir(tmp_path / "out")) == ["items", "manifest.json"]


def test_prompts_are_encoded_as_they_are_asked_for():
    asked = []

    def encode(prompts):
        asked.append(list(prompts))
        return {prompt: (torch.zeros(1), [prompt]) for prompt in prompts}

    prompts = [str(i) for i in range(PROMPTS_AT_ONCE + 3)]
    texts = PromptTexts(prompts, encode)
    assert not asked
    assert [texts[prompt][1] for prompt in prompts] == [[prompt] for prompt in prompts]
    assert asked == [prompts[:PROMPTS_AT_ONCE], prompts[PROMPTS_AT_ONCE:]]
    assert texts["another"][1] == ["another"]


def test_names_of_many_prompts_are_made_at_once():
    done = forked(lambda: len(set(slugs_of([f"{'x' * 80} {i}" for i in range(10_000)]).values())))
    assert done.value == 10_000 and done.cpu_seconds < 5


def test_a_checkout_of_somebody_else(tmp_path):
    """As another user, who may write nothing but the folder of the output."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    out = tmp_path / "out"
    out.mkdir()
    for folder in [folder for folder in (out, *out.parents) if len(folder.parts) > 2]:
        os.chmod(folder, 0o777)

    def as_nobody(flags):
        os.chdir(ROOT)
        run_extraction_each.run([*MINI, "--output_path", str(out / "warm.pt")])  # all that is imported late
        os.unlink(out / "warm.pt")
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(PermissionError):
            open(ROOT / "new", "w", encoding="utf-8").close()
        cli.main(run_extraction_each.run, [*MINI, *flags])

    done = forked(exit_code(lambda: as_nobody(["--output_path", str(out / "a.pt")])))
    assert done.value == 0 and load_cache(out / "a.pt")["format"] == "layer", done
    assert os.listdir(out) == ["a.pt"]
    blocked = forked(exit_code(lambda: as_nobody([])))
    assert blocked.value == 2 and blocked.said.count("\n") == 1 and "cannot be" in blocked.said, blocked
