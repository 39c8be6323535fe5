"""Every other kind of file that a run reads, damaged and hostile: configs, tokenizers, encoders, prompts,
states, curves.
"""

import json
import os
import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT
from helpers.forked import FULL, tell
from helpers.judged import AT_ONCE, Judge
from helpers.mutations import (
    BYTEWISE,
    as_yaml,
    changed,
    lying_archive,
    respelled,
    spoil_safetensors,
    spoilt_json,
)

from experiments.analysis.published import FIGURE4_CSV, FOLDER, read_curves
from experiments.extraction.memory import Memory
from experiments.extraction.prompt_embeds import read_states
from experiments.running.sweep import read_prompts, slugs_of
from wan import checkpoint
from wan.config import load_config
from wan.text_encoder import TextEncoder, encoder_config
from wan.vae import VAE

MINI = ROOT / "checkpoints/wan-mini"
TRIES = 150 if FULL else 8


@cache
def sizes():
    return checkpoint.read_model_config(MINI)


def encode(folder):
    """What a run does with a tokenizer and a text encoder."""
    encoder = TextEncoder.from_pretrained(folder, sizes().text_len, torch.float32)
    states = encoder(["a red circle moving right"])
    return states.shape, encoder.words("a red circle")


def estimate(folder):
    """What is computed from configs before anything is loaded."""
    config = replace(load_config(ROOT / "configs/wan_mini.yaml"), ckpt_dir=str(folder))
    found = checkpoint.read_model_config(folder)
    encoder_config(folder)
    return [
        need.total for need in Memory(config, found, [], torch.float32, torch.device("cpu"), True).needs()
    ]


def vae(folder):
    return VAE.from_pretrained(folder).latents_mean.shape


FILES = {  # a file of the model's directory: who reads it, and with what
    "tokenizer/tokenizer.json": encode,
    "tokenizer/tokenizer_config.json": encode,
    "text_encoder/config.json": encode,
    "transformer/config.json": estimate,
    "vae/config.json": vae,
    "text_encoder/model.safetensors": encode,
    "vae/diffusion_pytorch_model.safetensors": vae,
}


@pytest.fixture
def folders(tmp_path, monkeypatch) -> list[Path]:
    """Directories of the miniature, made of links, one for each mutant of a fork."""
    monkeypatch.chdir(tmp_path)
    made = []
    for number in range(AT_ONCE):
        folder = tmp_path / f"model{number}"
        for file in MINI.rglob("*"):
            if file.is_file():
                (folder / file.relative_to(MINI)).parent.mkdir(parents=True, exist_ok=True)
                (folder / file.relative_to(MINI)).symlink_to(file)
        made.append(folder)
    return made


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_model(name, folders, capfd):
    seed = list(FILES).index(name) + 10
    dice, judge, content = random.Random(seed), Judge(name, seed), (MINI / name).read_bytes()
    assert FILES[name](folders[0])  # whole, it is read
    for start in range(0, TRIES, AT_ONCE):
        mutants = []
        for number, folder in enumerate(folders, start):
            inside = dice.random() < 0.7
            if not inside:
                spoilt, how = dice.choice(BYTEWISE)(content, dice), "bytes"
            elif name.endswith(".json"):
                spoilt, how = spoilt_json(content, dice)
            else:
                spoilt, how = spoil_safetensors(content, dice), "header"
            (folder / name).unlink()
            (folder / name).write_bytes(spoilt)
            mutants.append((folder, f"{number}: {name} {how}", inside))
        judge.read_all(FILES[name], mutants)
    tell(capfd, judge.close())


def each_mutant(what, seed, read, whole, spoil, tmp_path, suffix, tries=TRIES):
    """Read mutants of one text file; spoil gives bytes, how they were made, and whether inside valid
    structure.
    """
    dice, judge = random.Random(seed), Judge(what, seed)
    (tmp_path / f"whole{suffix}").write_bytes(whole)
    assert read(tmp_path / f"whole{suffix}")
    for start in range(0, tries, AT_ONCE):
        mutants = []
        for number in range(AT_ONCE):
            path = tmp_path / f"mutant{number}{suffix}"
            content, how, inside = spoil(dice)
            path.write_bytes(content)
            mutants.append((path, f"{start + number}: {how} {content[:60]!r}", inside))
        judge.read_all(read, mutants)
    return judge.close()


YAML = [
    b"a: &a [x]\nprompt: *a\n",
    b"prompt: !!python/object/apply:os.system ['touch ran-code']\n",
    b"height: 8\nheight: 9\n",
    b"- 1\n",
    b"prompt: ${oc.env:HOME}\n",
    b"height: 0x_\n",
    b"? {a: b}\n: c\n",
    b"%YAML 9\n---\n",
    b"prompt: 2020-02-30\n",
    b"seed: 0o7_7__\n",
    b'prompt: "\\ud800"\n',
    b"\xff\xfe",
    b"!!binary '%'",
    b"prompt: !!set {a}\n",
    b"---\na: 1\n---\nb: 2\n",
]


POLICIES = [
    {},
    {"cache_policy": {"name": "window", "window": 9, "sink": 3}},
    {"cache_policy": {"name": "deep_sink"}},
    {"prompt_schedule": [{"frame": 9, "prompt": "a blue square"}]},
]


@pytest.mark.parametrize("name", ["wan_mini.yaml", "self_forcing_dmd.yaml"])
def test_configs(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    whole = (ROOT / "configs" / name).read_bytes()

    def spoil(dice):
        which = dice.random()
        if which < 0.25:
            return dice.choice(BYTEWISE)(whole, dice), "bytes", False
        if which < 0.4:
            return dice.choice(YAML), "YAML", True
        tree, how = changed(yaml.safe_load(whole) | dice.choice(POLICIES), dice)
        return as_yaml(tree), how, True

    seed = 30 + len(name)
    tell(capfd, each_mutant(f"config {name}", seed, load_config, whole, spoil, tmp_path, ".yaml", 2 * TRIES))


def test_prompts(tmp_path, monkeypatch, capfd):
    """A file of any lines: prompts, each with a name that a file can have."""
    monkeypatch.chdir(tmp_path)
    lines = [
        "a red circle",
        "一只猫",
        "# a comment",
        "x" * 5000,
        "a\0b",
        "../../etc/passwd",
        "CON",
        "a\x1b[31m",
        "",
        "\u2028",
        ".",
    ]

    def read(path):
        names = slugs_of(read_prompts(path))
        assert all(
            "/" not in name and not name.startswith(".") and len(name) < 100 for name in names.values()
        )
        return names

    def spoil(dice):
        chosen = "\n".join(dice.choices(lines, k=dice.randrange(1, 30))).encode()
        if dice.random() < 0.5:
            return chosen, "lines", True
        return dice.choice(BYTEWISE)(chosen, dice) if chosen else b"\xff", "bytes", False

    tell(capfd, each_mutant("prompts", 40, read, "\n".join(lines).encode(), spoil, tmp_path, ".txt"))


def test_curves(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    whole = (ROOT / FOLDER / FIGURE4_CSV).read_bytes()
    cells = [b"nan", b"inf", b"1e999", b"x", b"", b"-1", b"9" * 5000, b'"', b"\xff", b"0.5,0.5"]

    def spoil(dice):
        if dice.random() < 0.4:
            return dice.choice(BYTEWISE)(whole, dice), "bytes", False
        rows = [line.split(b",") for line in whole.splitlines()]
        row = dice.choice(rows)
        row[dice.randrange(len(row))] = dice.choice(cells)
        return b"\n".join(b",".join(row) for row in rows), "cell", True

    tell(capfd, each_mutant("curves", 41, read_curves, whole, spoil, tmp_path, ".csv"))


def test_states_of_a_prompt(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    states = {"prompt": "a", "tokens": ["a"], "prompt_embeds": torch.randn(1, 4, sizes().text_dim)}
    torch.save(states, tmp_path / "whole.pt")
    whole, path = (tmp_path / "whole.pt").read_bytes(), tmp_path / "made.pt"

    def spoil(dice):
        which = dice.random()
        if which < 0.3:
            return dice.choice(BYTEWISE)(whole, dice), "bytes", False
        if which < 0.5:
            lying_archive(tmp_path / "whole.pt", path, dice)
            return path.read_bytes(), "archive", True
        values = dict(states)
        how = respelled(values, dice)
        torch.save(values, path)
        return path.read_bytes(), how, True

    tell(capfd, each_mutant("states", 42, lambda p: read_states(p, sizes()), whole, spoil, tmp_path, ".pt"))


def test_counts_are_limited_before_anything_is_made(folders):
    """A billion layers, blocks or words are refused at once."""
    judge = Judge("numbers of configs", 0)
    for name in ("text_encoder/config.json", "vae/config.json", "transformer/config.json"):
        config = json.loads((MINI / name).read_text(encoding="utf-8"))
        keys = [key for key, value in config.items() if type(value) is int]
        tried = [(key, number) for key in keys for number in ((10**6, 10**9, -1, 0) if FULL else (10**9, 0))]
        for start in range(0, len(tried), AT_ONCE):
            mutants = []
            for folder, (key, number) in zip(folders, tried[start : start + AT_ONCE], strict=False):
                (folder / name).unlink()
                (folder / name).write_text(json.dumps(config | {key: number}), encoding="utf-8")
                mutants.append((folder, f"{name} {key} {number}", True))
            judge.read_all(FILES[name], mutants)
        for folder in folders:
            (folder / name).unlink()
            shutil.copy(MINI / name, folder / name)
    judge.close()
    assert not os.path.exists("ran-code")
