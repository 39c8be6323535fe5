"""Every other file that a run reads, damaged and hostile."""

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
    as_json,
    changed,
    lying_archive,
    respelled,
    spoil_safetensors,
    spoilt_json,
)

from experiments.analysis.published import FIGURE4_CSV, FOLDER, read_curves
from experiments.extraction.memory import Memory
from experiments.extraction.prompt_embeds import read_states
from experiments.running.cli import read_prompts, slugs_of
from wan import checkpoint
from wan.config import load_config
from wan.text_encoder import TextEncoder, encoder_config
from wan.vae import VAE

MINI = ROOT / "checkpoints/wan-mini"
TRIES = 150 if FULL else 8


def bytewise(content, dice) -> bytes:
    return dice.choice(BYTEWISE)(content, dice)


@cache
def sizes():
    return checkpoint.read_model_config(MINI)


def encode(folder):
    encoder = TextEncoder.from_pretrained(folder, sizes().text_len, torch.float32)
    return encoder(["a red circle moving right"]).shape, encoder.words("a red circle")


def estimate(folder):
    """What is computed from configs before anything is loaded."""
    config = replace(load_config(ROOT / "configs/wan_mini.yaml"), ckpt_dir=str(folder))
    found = checkpoint.read_model_config(folder)
    encoder_config(folder)
    needs = Memory(config, found, [], torch.float32, torch.device("cpu"), True).needs()
    return [need.total for need in needs]


def vae(folder):
    return VAE.from_pretrained(folder).latents_mean.shape


FILES = {  # a file of the model's directory, and who reads it
    "tokenizer/tokenizer.json": encode,
    "tokenizer/tokenizer_config.json": encode,
    "text_encoder/config.json": encode,
    "transformer/config.json": estimate,
    "vae/config.json": vae,
    "text_encoder/model.safetensors": encode,
    "vae/diffusion_pytorch_model.safetensors": vae,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_model(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / f"model{number}" for number in range(AT_ONCE)]
    for folder in folders:  # of links
        shutil.copytree(MINI, folder, copy_function=os.symlink)
    seed = list(FILES).index(name) + 10
    dice, judge, content = random.Random(seed), Judge(name, seed), (MINI / name).read_bytes()
    assert FILES[name](folders[0])  # whole, it is read
    for start in range(0, TRIES, AT_ONCE):
        mutants = []
        for number, folder in enumerate(folders, start):
            inside = dice.random() < 0.7
            if not inside:
                spoilt, how = bytewise(content, dice), "bytes"
            elif name.endswith(".json"):
                spoilt, how = spoilt_json(content, dice)
            else:
                spoilt, how = spoil_safetensors(content, dice), "header"
            (folder / name).unlink()
            (folder / name).write_bytes(spoilt)
            mutants.append((folder, f"{number}: {name} {how}", inside))
        judge.read_all(FILES[name], mutants)
    tell(capfd, judge.close())


YAML = [
    b"a: &a [x]\nprompt: *a\n",
    b"prompt: !!python/object/apply:os.system ['touch ran-code']\n",
    b"height: 8\nheight: 9\n",
    b"prompt: ${oc.env:HOME}\n",
    b"height: 0x_\n",
    b"? {a: b}\n: c\n",
    b"prompt: 2020-02-30\n",
    b'prompt: "\\ud800"\n',
    b"---\na: 1\n---\nb: 2\n",
]
POLICIES = [{}, {"cache_policy": {"name": "window", "window": 9, "sink": 3}}]
LINES = [
    "a red circle",
    "一只猫",
    "# a comment",
    "x" * 5000,
    "a\0b",
    "../../etc/passwd",
    "a\x1b[31m",
    "",
    ".",
]
CELLS = [b"nan", b"inf", b"1e999", b"x", b"", b"-1", b"9" * 5000, b'"', b"\xff", b"0.5,0.5"]


def a_config(whole, dice, folder):
    if dice.random() < 0.2:
        return dice.choice(YAML), "YAML"
    tree, how = changed(yaml.safe_load(whole) | dice.choice(POLICIES), dice)
    return as_json(tree), how


def some_prompts(whole, dice, folder):
    return "\n".join(dice.choices(LINES, k=dice.randrange(1, 30))).encode(), "lines"


def a_curve(whole, dice, folder):
    rows = [line.split(b",") for line in whole.splitlines()]
    row = dice.choice(rows)
    row[dice.randrange(len(row))] = dice.choice(CELLS)
    return b"\n".join(b",".join(row) for row in rows), "cell"


def some_states(whole, dice, folder):
    path, made = folder / "a.pt", folder / "made.pt"
    path.write_bytes(whole)
    if dice.random() < 0.3:
        lying_archive(path, made, dice)
        return made.read_bytes(), "archive"
    values = torch.load(path, weights_only=True)
    how = respelled(values, dice)
    torch.save(values, made)
    return made.read_bytes(), how


def names_of(path: Path):
    names = list(slugs_of(read_prompts(path)).values())
    assert all("/" not in name and not name.startswith(".") and len(name) < 100 for name in names)
    return names


def states(folder) -> bytes:
    values = {"prompt": "a", "tokens": ["a"], "prompt_embeds": torch.randn(1, 4, sizes().text_dim)}
    torch.save(values, folder / "states.pt")
    return (folder / "states.pt").read_bytes()


@pytest.mark.parametrize(
    ("suffix", "read", "whole", "spoil"),
    [
        (".yaml", load_config, lambda _: (ROOT / "configs/wan_mini.yaml").read_bytes(), a_config),
        (".yml", load_config, lambda _: (ROOT / "configs/self_forcing_dmd.yaml").read_bytes(), a_config),
        (".txt", names_of, lambda _: "\n".join(LINES).encode(), some_prompts),
        (".csv", read_curves, lambda _: (ROOT / FOLDER / FIGURE4_CSV).read_bytes(), a_curve),
        (".pt", lambda path: read_states(path, sizes()), states, some_states),
    ],
    ids=["config", "released config", "prompts", "curves", "states"],
)
def test_a_file_of_a_user(suffix, read, whole, spoil, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    dice, judge, content = random.Random(30), Judge(suffix, 30), whole(tmp_path)
    (tmp_path / f"whole{suffix}").write_bytes(content)
    assert read(tmp_path / f"whole{suffix}")
    for start in range(0, 2 * TRIES, AT_ONCE):
        mutants = []
        for number in range(AT_ONCE):
            path = tmp_path / f"mutant{number}{suffix}"
            inside = dice.random() < 0.7
            made = (
                spoil(content, dice, tmp_path) if inside else (dice.choice(BYTEWISE)(content, dice), "bytes")
            )
            path.write_bytes(made[0])
            mutants.append((path, f"{start + number}: {made[1]} {made[0][:60]!r}", inside))
        judge.read_all(read, mutants)
    tell(capfd, judge.close())
