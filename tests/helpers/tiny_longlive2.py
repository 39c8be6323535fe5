"""A tiny LongLive 2.0: its configuration, names and keys, small random weights, Wan2.2's VAE in small."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

SIZES = {"num_layers": 2, "num_heads": 2, "dim": 32, "ffn_dim": 64, "freq_dim": 64}
SIZES |= {"text_dim": 64, "text_len": 64, "in_dim": 48, "out_dim": 48}
SMALL_VAE = {"base_dim": 4, "decoder_base_dim": 4, "num_res_blocks": 1}
SHORT = {"num_frames": 40, "height": 4, "width": 6, "layer_indices": [1], "layer_index": 1}


@pytest.fixture(scope="session")
def tiny_longlive2(tmp_path_factory, request) -> SimpleNamespace:
    """Its path, config (five blocks of 8 frames of 6 tokens) and session; beyond the window of 32 frames."""
    from diffusers import AutoencoderKLWan

    from experiments.session import load
    from helpers.checkpoints import write_transformer
    from wan.config import ModelConfig, load_config
    from wan.model import CausalWanModel
    from wan.vae import WIDE_SIZES

    folder, root = tmp_path_factory.mktemp("longlive2"), Path(request.config.rootpath)
    for part in ("text_encoder", "tokenizer"):
        os.symlink(root / "checkpoints/wan-mini" / part, folder / part)
    torch.manual_seed(0)
    AutoencoderKLWan(**WIDE_SIZES | SMALL_VAE).save_pretrained(folder / "vae")
    model = CausalWanModel(**SIZES)
    write_transformer(folder, model.state_dict(), sizes=ModelConfig(**SIZES))
    state = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    torch.save({"generator": state}, folder / "model_bf16.pt")
    settings = yaml.safe_load((root / "configs/longlive2.yaml").read_text()) | SHORT
    settings |= {"model": "tiny-longlive2", "ckpt_dir": str(folder), "device": "cpu", "embeds_dir": None}
    settings |= {"checkpoint_path": str(folder / "model_bf16.pt"), "lora_rank": None, "lora_alpha": None}
    (folder / "longlive2.yaml").write_text(yaml.safe_dump(settings))
    config = load_config(str(folder / "longlive2.yaml"))
    return SimpleNamespace(
        path=f"{folder}/longlive2.yaml", config=config, folder=folder, session=load(config).prepare()
    )
