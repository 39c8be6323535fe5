"""Long videos go on with what they were begun with, and with nothing else."""

from argparse import Namespace
from concurrent.futures import Future
from pathlib import Path

import torch

from experiments.running import long_job
from wan.config import load_config


def session_of(files: list) -> Namespace:
    """As much of a session as names a run."""
    hashed: Future = Future()
    hashed.set_result("of the weights")
    return Namespace(sha256=hashed, dtype="float32", device=torch.device("cpu"), common={"files": files})


def test_a_run_is_named_by_what_its_files_hold(tmp_path):
    folder = tmp_path / "model"
    (folder / "vae").mkdir(parents=True)
    (folder / "transformer").symlink_to(Path("checkpoints/wan-mini/transformer").resolve())
    (folder / "vae/config.json").write_text("{}")
    config = load_config("configs/wan_mini.yaml", {"ckpt_dir": str(folder)})
    vae, names = folder / "vae/diffusion_pytorch_model.safetensors", []
    for of_vae, of_text in ((b"1", 1), (b"2", 1), (b"1", 2)):
        vae.write_bytes(of_vae)
        names.append(long_job._made_of(config, session_of([of_text])))
    assert len(set(names)) == 3
