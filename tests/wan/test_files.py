"""Files that are not what their names say: each loader names what a file is, and what to take."""

import gzip
import io
import json
import runpy
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

from experiments.extraction.video import read_latents
from experiments.prompts import read_states
from wan.checkpoint import CheckpointError, read_checkpoint
from wan.config import MODELS
from wan.files import OtherKindError, read_tensors, read_weights_file
from wan.lora import read_lora
from wan.vae import Preview


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model.safetensors", "x")
    return file.getvalue()


KINDS = {  # what is said -> the file's bytes
    "is a GGUF; take the model's .safetensors": b"GGUF" + bytes(60),
    "is a web page; .* download": b"\n<!DOCTYPE html><html>401 Unauthorized</html>",
    "is a git-lfs pointer .* git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n",
    "is text, which begins 'Entry not found'": b"Entry not found",
    "is empty": b"",
    "is a file of zeros, whose download has not ended": bytes(4096),
    "is packed by gzip; unpack it": gzip.compress(b"weights"),
    "is no archive of torch.save; unpack it": zipped(),
    "is an array of numpy": b"\x93NUMPY\x01\x00v\x00{'descr'",
}


def read_preview(path):
    return Preview.from_file(path, torch.float32, torch.device("cpu"))


def read_first_frames(path):
    return read_latents(path, str(path), remedy="give latents")


def read_states_of_a_prompt(path):
    return read_states(path, MODELS["Wan2.1-T2V-1.3B"])


@pytest.mark.parametrize(
    "read", [read_checkpoint, read_lora, read_preview, read_first_frames, read_states_of_a_prompt]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_loader_tells_a_file_by_its_first_bytes(tmp_path, kind, read):
    for name in ("w.safetensors", "w.pt"):
        (tmp_path / name).write_bytes(KINDS[kind])
        with pytest.raises(OtherKindError, match=rf"\A.*{name} {kind}.*\Z"):
            read(tmp_path / name)


def test_a_name_does_not_decide_how_a_file_is_read(tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3)}
    save_file(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.safetensors")
    torch.save(state, tmp_path / "c.safetensors", _use_new_zipfile_serialization=False)
    for path in sorted(tmp_path.iterdir()):
        assert torch.equal(read_weights_file(path)["w"], state["w"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_torch_distributed_is_named_and_its_command_makes_a_file(tmp_path, monkeypatch):
    state = {"generator": {"w": torch.ones(2, 3)}}
    torch.distributed.checkpoint.save(state, checkpoint_id=str(tmp_path / "outer/dcp"), no_dist=True)
    for given in ("outer", "outer/dcp", "outer/dcp/__0_0.distcp", "outer/dcp/.metadata"):
        with pytest.raises(CheckpointError, match=r"is a torch.distributed .* make one") as caught:
            read_checkpoint(tmp_path / given)
    command = str(caught.value).partition("of it: ")[2].replace("FILE.pt", str(tmp_path / "one.pt"))
    program, flag, module, *arguments = command.split()
    assert (program, flag) == ("python", "-m")
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    runpy.run_module(module, run_name="__main__")  # in this process, which has torch
    assert torch.equal(read_checkpoint(tmp_path / "one.pt", use_ema=False)[0]["w"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["adapter_config.json"], "the folder of a LoRA of PEFT; give it as lora_path"),
        (
            ["a.safetensors", "a.safetensors.index.json"],
            "a folder; give a file in it: a.safetensors.index.json",
        ),
        (["README.md"], "a folder without weights"),
    ],
)
def test_a_folder_in_place_of_a_file(tmp_path, names, kind):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{tmp_path.name} is {kind}"):
        read_checkpoint(tmp_path)


# --- Quantised weights
W = "blocks.0.ffn.0.weight"
QUANTISED = {  # what is named -> what is beside or in place of a weight
    "torch.int8: blocks.0.ffn.0.weight": {
        W: torch.ones(4, 4).to(torch.int8),
        "x.weight_scale": torch.ones(4),
    },
    "torch.uint8": {W: torch.ones(4, 4).to(torch.uint8)},
    "torch.float8_e8m0fnu": {W: torch.ones(4, 4).to(torch.float8_e8m0fnu)},
    "NVFP4": {W: torch.ones(4, 4).to(torch.uint8), "blocks.0.ffn.0.weight_scale_2": torch.ones(())},
    "bitsandbytes": {W: torch.ones(4, 4).to(torch.uint8), f"{W}.absmax": torch.ones(4)},
    "bitsandbytes: ": {"blocks.0.ffn.0.SCB": torch.ones(4)},
    "blocks of FP8": {
        W: torch.ones(4, 4).to(torch.float8_e4m3fn),
        "blocks.0.ffn.0.weight_scale_inv": torch.ones(1, 1),
    },
    "GPTQ": {"blocks.0.ffn.0.qweight": torch.ones(4, 4).int()},
    "quanto": {f"{W}._data": torch.ones(4, 4).to(torch.int8)},
    "torchao": {"blocks.0.ffn.0._weight_qdata": torch.ones(4, 4).to(torch.int8)},
}


@pytest.mark.parametrize("writer", QUANTISED)
def test_quantised_weights_are_named_with_what_to_take(tmp_path, writer):
    rest = {"head.head.bias": torch.ones(2)}
    save_file(rest | QUANTISED[writer], tmp_path / "w.safetensors")
    torch.save({"generator": rest | QUANTISED[writer]}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        with pytest.raises(
            OtherKindError, match=rf"{name} is quantised \({writer}.*\); take the weights in bf"
        ):
            read_checkpoint(tmp_path / name, use_ema=False)


class Int8Tensor(torch.Tensor):
    """Stands for a tensor of torchao, which its import lets a file name."""


@pytest.mark.filterwarnings("ignore:.*quantized tensor")
def test_a_tensor_of_another_library_is_refused(tmp_path):
    """One of a class that is known, one of a class that is not imported, and one of torch."""
    state = {W: torch.ones(4, 4).as_subclass(Int8Tensor)}
    torch.save(state, tmp_path / "w.pt")
    with (
        torch.serialization.safe_globals([Int8Tensor]),
        pytest.raises(OtherKindError, match=r"is quantised \(.*Int8Tensor of torch.float32\); take"),
    ):
        read_tensors(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"holds a .*Int8Tensor, which is neither"):
        read_weights_file(tmp_path / "w.pt")
    torch.save({W: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}, tmp_path / "q.pt")
    with pytest.raises(OtherKindError, match=r"is quantised \(.*qint8\)"):
        read_tensors(tmp_path / "q.pt")


# --- Shards
def write_shards(folder: Path, *shards: dict[str, torch.Tensor]) -> Path:
    names = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"{number}.safetensors")
        names |= dict.fromkeys(shard, f"{number}.safetensors")
    path = folder / "w.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": names}))
    return path


def test_a_weight_in_two_shards_is_refused(tmp_path):
    first, second = {"a": torch.ones(2), "b": torch.ones(2)}, {"b": torch.zeros(2), "c": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"1.safetensors cannot be read: another shard holds b, too"):
        read_weights_file(write_shards(tmp_path, first, second))
    (tmp_path / "1.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"1.safetensors is a git-lfs pointer"):
        read_weights_file(tmp_path / "w.safetensors.index.json")
