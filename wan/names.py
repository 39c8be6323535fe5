"""Names of weights: those of https://github.com/Wan-Video/Wan2.1, of diffusers, and of transformers."""

import re
from collections.abc import Mapping
from typing import TypeVar

from wan.errors import CheckpointError

Value = TypeVar("Value")

# Files of the original release. Scripts name them with this module, which imports no torch.
VAE_FILE, UMT5_FILE = "Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"
WIDE_VAE_FILE = "Wan2.2_VAE.pth"  # of a model of 48 channels

# native prefix -> diffusers prefix
TOP_NAMES = {
    "patch_embedding.": "patch_embedding.",
    "text_embedding.0.": "condition_embedder.text_embedder.linear_1.",
    "text_embedding.2.": "condition_embedder.text_embedder.linear_2.",
    "time_embedding.0.": "condition_embedder.time_embedder.linear_1.",
    "time_embedding.2.": "condition_embedder.time_embedder.linear_2.",
    "time_projection.1.": "condition_embedder.time_proj.",
    "head.modulation": "scale_shift_table",
    "head.head.": "proj_out.",
}
PROJECTIONS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
BLOCK_NAMES = {
    "modulation": "scale_shift_table",
    "norm3.": "norm2.",
    "ffn.0.": "ffn.net.0.proj.",
    "ffn.2.": "ffn.net.2.",
    **{f"self_attn.{native}.": f"attn1.{diffusers}." for native, diffusers in PROJECTIONS.items()},
    **{f"cross_attn.{native}.": f"attn2.{diffusers}." for native, diffusers in PROJECTIONS.items()},
}
NATIVE_TO_DIFFUSERS = TOP_NAMES | {f"blocks.N.{a}": f"blocks.N.{b}" for a, b in BLOCK_NAMES.items()}
DIFFUSERS_TO_NATIVE = {diffusers: native for native, diffusers in NATIVE_TO_DIFFUSERS.items()}
UMT5_TO_TRANSFORMERS = {
    "token_embedding.": "shared.",
    "norm.": "encoder.final_layer_norm.",
    "blocks.N.norm1.": "encoder.block.N.layer.0.layer_norm.",
    "blocks.N.norm2.": "encoder.block.N.layer.1.layer_norm.",
    **{f"blocks.N.attn.{n}.": f"encoder.block.N.layer.0.SelfAttention.{n}." for n in "qkvo"},
    "blocks.N.pos_embedding.embedding.": "encoder.block.N.layer.0.SelfAttention.relative_attention_bias.",
    "blocks.N.ffn.gate.0.": "encoder.block.N.layer.1.DenseReluDense.wi_0.",
    "blocks.N.ffn.fc1.": "encoder.block.N.layer.1.DenseReluDense.wi_1.",
    "blocks.N.ffn.fc2.": "encoder.block.N.layer.1.DenseReluDense.wo.",
}
# What training wrappers put before or into the names of weights
WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")  # anywhere


def renamed_one(name: str, table: Mapping[str, str]) -> str:
    """Replace the prefix of a name by a table, in which N stands for a block's number; keep other names."""
    general, number = name, "N"
    in_block = re.match(r"((?:encoder\.)?blocks?)\.(\d+)\.", name)
    if in_block:
        general, number = f"{in_block[1]}.N.{name[in_block.end() :]}", in_block[2]
    for old, new in table.items():
        if general.startswith(old):
            return (new + general[len(old) :]).replace(".N.", f".{number}.")
    return name


def renamed(state: Mapping[str, Value], table: Mapping[str, str]) -> dict[str, Value]:
    """Rename the keys of a state dict by renamed_one(). Raise CheckpointError where two become one."""
    new_state: dict[str, Value] = {}
    for name, tensor in state.items():
        new_name = renamed_one(name, table)
        if new_name in new_state:
            raise CheckpointError(f"two keys for {new_name}, such as {name}")
        new_state[new_name] = tensor
    return new_state


def to_diffusers_names(state: Mapping[str, Value]) -> dict[str, Value]:
    """Rename a native state dict to the names of diffusers' WanTransformer3DModel."""
    return renamed(state, NATIVE_TO_DIFFUSERS)


def to_native_names(state: Mapping[str, Value]) -> dict[str, Value]:
    """Rename a state dict of diffusers' WanTransformer3DModel to native names."""
    return renamed(state, DIFFUSERS_TO_NATIVE)


def native_layer(name: str) -> str:
    """Return the native name of a layer, or of a block, that may have diffusers'."""
    return renamed_one(f"{name}.", DIFFUSERS_TO_NATIVE).removesuffix(".")


# Parts of names of Wan2.2's VAE (https://github.com/Wan-Video/Wan2.2 wan/modules/vae2_2.py) -> diffusers'
WIDE_VAE_NAMES = {
    r"^conv1\.": "quant_conv.",
    r"^conv2\.": "post_quant_conv.",
    r"^(encoder|decoder)\.conv1\.": r"\1.conv_in.",
    r"\.head\.0\.": ".norm_out.",
    r"\.head\.2\.": ".conv_out.",
    r"\.middle\.0\.": ".mid_block.resnets.0.",
    r"\.middle\.1\.": ".mid_block.attentions.0.",
    r"\.middle\.2\.": ".mid_block.resnets.1.",
    r"\.downsamples\.(\d+)\.downsamples\.\d+\.(resample|time_conv)\.": r".down_blocks.\1.downsampler.\2.",
    r"\.downsamples\.(\d+)\.downsamples\.": r".down_blocks.\1.resnets.",
    r"\.upsamples\.(\d+)\.upsamples\.\d+\.(resample|time_conv)\.": r".up_blocks.\1.upsampler.\2.",
    r"\.upsamples\.(\d+)\.upsamples\.": r".up_blocks.\1.resnets.",
    r"\.residual\.0\.": ".norm1.",
    r"\.residual\.2\.": ".conv1.",
    r"\.residual\.3\.": ".norm2.",
    r"\.residual\.6\.": ".conv2.",
    r"\.shortcut\.": ".conv_shortcut.",
}


def wide_vae_names(state: Mapping[str, Value]) -> dict[str, Value]:
    """Rename a state dict of Wan2.2's VAE to the names of diffusers' AutoencoderKLWan; keep those."""
    new_state: dict[str, Value] = {}
    for name, tensor in state.items():
        for pattern, replacement in WIDE_VAE_NAMES.items():
            name = re.sub(pattern, replacement, name)
        new_state[name] = tensor
    return new_state
