"""Names of the transformer's weights: native (https://github.com/Wan-Video/Wan2.1) and diffusers'."""

import re

from torch import Tensor

StateDict = dict[str, Tensor]

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
BLOCK_NAMES = {
    "modulation": "scale_shift_table",
    "norm3.": "norm2.",
    "ffn.0.": "ffn.net.0.proj.",
    "ffn.2.": "ffn.net.2.",
} | {
    f"{ours}.{part}.": f"{theirs}.{name}."
    for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
    for part, name in (
        ("q", "to_q"),
        ("k", "to_k"),
        ("v", "to_v"),
        ("o", "to_out.0"),
        ("norm_q", "norm_q"),
        ("norm_k", "norm_k"),
    )
}


NATIVE_ROOTS = {"blocks", *(name.partition(".")[0] for name in TOP_NAMES)}  # of native names
DIFFUSERS_ROOTS = ("condition_embedder.", "proj_out.")  # that native names do not have


def is_diffusers(state: StateDict) -> bool:
    """Whether a state dict has the names of diffusers' WanTransformer3DModel."""
    return any(name.startswith(DIFFUSERS_ROOTS) for name in state)


def to_diffusers_names(state: StateDict) -> StateDict:
    """Native state dict -> the names of diffusers' WanTransformer3DModel."""
    return {_rename(name, TOP_NAMES, BLOCK_NAMES): tensor for name, tensor in state.items()}


def to_native_names(state: StateDict) -> StateDict:
    """State dict of diffusers' WanTransformer3DModel -> native names. Unknown names stay as they are."""
    top, block = ({theirs: ours for ours, theirs in table.items()} for table in (TOP_NAMES, BLOCK_NAMES))
    return {_rename(name, top, block): tensor for name, tensor in state.items()}


def _rename(name: str, top: dict[str, str], block: dict[str, str]) -> str:
    in_block = re.match(r"blocks\.\d+\.", name)
    start, table = (in_block[0], block) if in_block else ("", top)
    rest = name[len(start) :]
    for old, new in table.items():
        if rest.startswith(old):
            return start + new + rest[len(old) :]
    return name
