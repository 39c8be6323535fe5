"""A model of two layers of two heads, with a narrow VAE and the miniature's text encoder."""

import os
from types import SimpleNamespace

import pytest
import torch
import yaml

SIZES = {"num_layers": 2, "num_heads": 2, "dim": 32, "ffn_dim": 64, "freq_dim": 64}
SIZES |= {"text_dim": 64, "text_len": 64, "in_dim": 16, "out_dim": 16}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, request) -> SimpleNamespace:
    """Its path, config (three blocks, two steps and the clean pass) and session."""
    from diffusers import AutoencoderKLWan

    from experiments.session import load
    from helpers.checkpoints import write_transformer
    from wan.config import ModelConfig, load_config
    from wan.model import CausalWanModel

    folder, mini = tmp_path_factory.mktemp("tiny"), request.config.rootpath
    for part in ("text_encoder", "tokenizer"):
        os.symlink(mini / "checkpoints/wan-mini" / part, folder / part)
    torch.manual_seed(0)
    vae = AutoencoderKLWan.load_config(mini / "checkpoints/wan-mini/vae")
    AutoencoderKLWan.from_config(vae, base_dim=4, decoder_base_dim=4).save_pretrained(folder / "vae")
    write_transformer(folder, CausalWanModel(**SIZES).state_dict(), sizes=ModelConfig(**SIZES))
    settings = yaml.safe_load((mini / "configs/wan_mini.yaml").read_text())
    settings |= {"model": "tiny", "ckpt_dir": str(folder), "checkpoint_path": None, "num_frames": 9}
    settings |= {"denoising_step_list": [1000, 500], "layer_indices": [1], "layer_index": 1, "device": "cpu"}
    settings |= {"embeds_dir": None}  # nothing that another test can find
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    config = load_config(str(folder / "tiny.yaml"))
    return SimpleNamespace(path=f"{folder}/tiny.yaml", config=config, session=load(config).prepare())
