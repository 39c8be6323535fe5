"""LoRAs of every program that trains them, against products in float64; what is wrong, in one line."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import golden_arrays
from helpers.checkpoints import GOLDEN_MODEL
from helpers.rollouts import drawn
from safetensors.torch import save_file

from wan import checkpoint
from wan.checkpoint import CheckpointError, LoRA, merge_lora, read_lora
from wan.config import LoRAFile, RunConfig
from wan.lora import LowRank
from wan.names import to_diffusers_names

State = dict[str, torch.Tensor]
LAYERS = ("blocks.0.self_attn.q", "blocks.0.ffn.0", "blocks.3.cross_attn.o", "blocks.4.ffn.2")
Q = LAYERS[0]
DIM, RANK = GOLDEN_MODEL.dim, 4


@pytest.fixture(scope="module")
def native() -> State:
    return dict(golden_arrays("weights"))


def pairs(native: State, seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Draw A [4, in] and B [out, 4] of some layers."""
    drawn_pairs = {}
    for number, layer in enumerate(LAYERS, 4 + 10 * seed):
        out, size = native[f"{layer}.weight"].shape
        drawn_pairs[layer] = (0.05 * drawn(number, size)[:RANK], 0.05 * drawn(out, number)[:, :RANK])
    return drawn_pairs


def named(native: State, name: str, halves: tuple[str, str] = ("lora_A.weight", "lora_B.weight")) -> State:
    """Name the halves of pairs(): {} of name is the layer."""
    state = {}
    for layer, pair in pairs(native).items():
        for half, tensor in zip(halves, pair, strict=True):
            state[f"{name.format(layer)}.{half}"] = tensor
    return state


def in_diffusers(layer: str) -> str:
    return next(iter(to_diffusers_names({f"{layer}.": 0}))).rstrip(".")


def renamed(state: State, rename: Callable[[str], str]) -> State:
    """Rename the layers of names such as blocks.0.ffn.0.lora_A.weight."""
    new_state = {}
    for name, tensor in state.items():
        layer = next(layer for layer in LAYERS if name.startswith(layer))
        new_state[rename(layer) + name.removeprefix(layer)] = tensor
    return new_state


def changed(native: State, lora: LoRA) -> State:
    """Merge, and return what each weight has gained, in float64; the rest must be the same tensors."""
    merged = merge_lora(native, lora, "base.pt")
    changes = {name for name in merged if merged[name] is not native[name]}
    assert all(merged[name].dtype == torch.float32 for name in changes)
    return {name: merged[name].double() - native[name].double() for name in changes}


def assert_merged(native: State, lora: LoRA, expected: State) -> None:
    gained = changed(native, lora)
    assert gained.keys() == expected.keys()
    for name, change in expected.items():
        assert change.dtype == torch.float64
        torch.testing.assert_close(gained[name], change.reshape(gained[name].shape), atol=2e-6, rtol=1e-5)


def products(native: State, scale: float = 1.0) -> State:
    """Return scale · B A of pairs(), in float64."""
    return {f"{layer}.weight": scale * (b.double() @ a.double()) for layer, (a, b) in pairs(native).items()}


DOWN_UP = ("lora_down.weight", "lora_up.weight")
ALPHA = torch.tensor(8.0)
NAMES = {  # who writes such a file -> its content, of alpha 8 or without one
    "longlive": lambda n: {"generator_lora": named(n, "base_model.model.{}"), "step": 7},
    "comfy": lambda n: named(n, "diffusion_model.{}", DOWN_UP),
    "fsdp": lambda n: named(n, "model.base_model.model._fsdp_wrapped_module.{}"),
    "named default": lambda n: named(
        n, "base_model.model.{}", ("lora_A.default.weight", "lora_B.default.weight")
    ),
    "named adapter": lambda n: named(n, "transformer.{}", ("lora_A.high.weight", "lora_B.high.weight")),
    "alphas without a prefix": lambda n: (
        named(n, "base_model.model.{}") | {f"{layer}.alpha": ALPHA for layer in LAYERS}
    ),
    "kohya": lambda n: renamed(named(n, "{}", DOWN_UP), lambda l: f"lora_unet_{l.replace('.', '_')}"),
    "kohya with dots": lambda n: renamed(named(n, "{}", DOWN_UP), lambda l: f"lora_unet_blocks_{l[7:]}"),
    "kohya of diffusers": lambda n: renamed(
        named(n, "{}", DOWN_UP), lambda l: f"lora_unet_{in_diffusers(l).replace('.', '_')}"
    ),
    "lycoris": lambda n: renamed(named(n, "{}", DOWN_UP), lambda l: f"lycoris_{l.replace('.', '_')}"),
    "diffusers": lambda n: renamed(named(n, "{}"), lambda l: f"transformer.{in_diffusers(l)}"),
    "old diffusers": lambda n: renamed(
        named(n, "{}", ("lora.down.weight", "lora.up.weight")), lambda l: f"transformer.{in_diffusers(l)}"
    ),
    "without weight": lambda n: named(n, "diffusion_model.{}", ("lora_A", "lora_B")),
    "1 x 1 convolutions": lambda n: {
        name: tensor[..., None, None] for name, tensor in named(n, "lycoris_{}", DOWN_UP).items()
    },
    "half precision": lambda n: {name: x.bfloat16() for name, x in named(n, "diffusion_model.{}").items()},
}


@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("alpha", [8, None])
def test_a_lora_of_each_program_is_merged(tmp_path, native, writer, alpha):
    """An alpha of the config, or none: the rank, which is said."""
    torch.save(NAMES[writer](native), tmp_path / "lora.pt")
    lora = read_lora(tmp_path / "lora.pt", RANK, alpha)
    own = writer.startswith("alphas")
    expected = products(native, 2.0 if alpha or own else 1.0)
    if writer == "half precision":
        expected = {
            f"{layer}.weight": (alpha or RANK) / RANK * b.bfloat16().double() @ a.bfloat16().double()
            for layer, (a, b) in pairs(native).items()
        }
    assert_merged(native, lora, expected)
    if alpha or own:
        assert str(lora) == "lora.pt merged into 4 layers (rank 4, alpha 8)"
    else:
        assert str(lora).endswith("(rank 4, alpha 4, the rank where none is given: 4 of 4)")


def test_a_lora_that_is_merged_already_is_refused(tmp_path, native):
    torch.save(named(native, "{}"), tmp_path / "lora.pt")
    lora = read_lora(tmp_path / "lora.pt", RANK, 8)
    merged = merge_lora(native, lora, "base.pt")
    with pytest.raises(CheckpointError, match=r"merged.pt holds lora.pt already"):
        merge_lora(merged, lora, "merged.pt")
    tiny = LoRA("lora.pt", [replace(pair, down=pair.down / 500, up=pair.up / 500) for pair in lora.terms])
    merge_lora(merge_lora(native, tiny, "base.pt"), tiny, "merged.pt")  # too small to be noticed


def test_several_loras_of_lightx2v_with_strengths(tmp_path, native):
    """Ranks that differ, an alpha each or none, and whole changes of weights, biases, modulations."""
    ffn = LAYERS[1]
    out, size = native[f"{ffn}.weight"].shape
    state = {
        f"{Q}.lora_down.weight": drawn(2, DIM)[:2],
        f"{Q}.lora_up.weight": drawn(DIM, 2)[:, :2],
        f"{Q}.alpha": torch.tensor(1.0),
        f"{ffn}.lora_down.weight": drawn(3, size)[:3],  # without alpha: that of its rank
        f"{ffn}.lora_up.weight": drawn(out, 3)[:, :3],
        f"{Q}.diff_b": drawn(DIM, 1)[:, 0],
        "blocks.0.norm3.diff": drawn(DIM, 1)[:, 0],
        "blocks.0.diff_m": drawn(6, DIM)[None],
        "head.diff_m": drawn(2, DIM)[None],
    }
    torch.save({f"diffusion_model.{name}": value for name, value in state.items()}, tmp_path / "a.pt")
    torch.save(
        {f"transformer.{name}": x for name, x in state.items() if "diff" not in name}, tmp_path / "b.pt"
    )
    files = [LoRAFile(f"{tmp_path}/a.pt", 0.8), LoRAFile(f"{tmp_path}/b.pt", -0.25)]
    torch.save(native, tmp_path / "base.pt")
    config = RunConfig(checkpoint_path=f"{tmp_path}/base.pt", lora=files)
    merged, report = checkpoint.read_weights(config, GOLDEN_MODEL)
    expected = {
        f"{Q}.weight": 0.55 * 0.5 * state[f"{Q}.lora_up.weight"] @ state[f"{Q}.lora_down.weight"],
        f"{ffn}.weight": 0.55 * state[f"{ffn}.lora_up.weight"] @ state[f"{ffn}.lora_down.weight"],
        f"{Q}.bias": 0.8 * state[f"{Q}.diff_b"],
        "blocks.0.norm3.weight": 0.8 * state["blocks.0.norm3.diff"],
        "blocks.0.modulation": 0.8 * state["blocks.0.diff_m"],
        "head.modulation": 0.8 * state["head.diff_m"],
    }
    for name, x in merged.items():
        torch.testing.assert_close(
            x - native[name], expected.get(name, torch.zeros_like(x)), atol=1e-5, rtol=1e-5
        )
    parts = "rank 2 to 3, alpha 1 to 3, the rank where none is given: 1 of 2, 4 whole changes, strength 0.8"
    assert f"a.pt merged into 2 layers ({parts})" in str(report)
    assert str(files[0]) == "a.pt:0.8" and report.merged.endswith("strength -0.25)")


# --- Several changes of one parameter are summed
def test_a_pair_a_whole_change_and_a_bias_of_one_layer(tmp_path, native):
    """PEFT's lora_bias is scaled as the product is; kohya's and LightX2V's diff_b is not."""
    (a, b), whole, bias = pairs(native)[Q], 0.05 * drawn(DIM, DIM), drawn(DIM, 1)[:, 0]
    state = named(native, "{}") | {f"{Q}.lora_B.bias": bias, f"{Q}.diff": whole, f"{Q}.diff_b": 3 * bias}
    torch.save(state, tmp_path / "lora.pt")
    expected = products(native, 0.5)
    expected[f"{Q}.weight"] = 0.5 * (b.double() @ a.double()) + whole.double()
    expected[f"{Q}.bias"] = 3.5 * bias.double()
    assert_merged(native, read_lora(tmp_path / "lora.pt", alpha=2), expected)


SUMS = {  # two pairs of each layer -> their names
    "two adapters": ("{}.lora_A.high.weight", "{}.lora_A.low.weight"),
    "two programs": ("diffusion_model.{}.lora_A.weight", "{}.lora_down.weight"),
    "two styles of one name": ("{}.lora_A.weight", "{}.lora_down.weight"),
    "native and diffusers": ("{}.lora_A.weight", "transformer.{diffusers}.lora_A.weight"),
}


@pytest.mark.parametrize("case", SUMS)
def test_two_names_of_a_layer_are_summed(tmp_path, native, case):
    state, expected = {}, {}
    for layer in LAYERS:
        for seed, name in enumerate(SUMS[case]):
            a, b = pairs(native, seed)[layer]
            full = name.format(layer, diffusers=in_diffusers(layer))
            state[full] = a
            state[full.replace("lora_A", "lora_B").replace("lora_down", "lora_up")] = b
            product = b.double() @ a.double()
            expected[f"{layer}.weight"] = expected.get(f"{layer}.weight", 0) + product
    torch.save(state, tmp_path / "lora.pt")
    lora = read_lora(tmp_path / "lora.pt")
    assert_merged(native, lora, expected)
    assert ("the sum of high and low" in str(lora)) == (case == "two adapters")


def test_a_convolution_is_merged(tmp_path, native):
    """Of [rank, in, 1, 2, 2] and [out, rank, 1, 1, 1]: a convolution after a convolution of one pixel."""
    weight = native["patch_embedding.weight"]
    down, up = drawn(3, *weight.shape[1:]), drawn(weight.shape[0], 3, 1, 1, 1)
    state = {
        "lora_unet_patch_embedding.lora_down.weight": down,
        "lora_unet_patch_embedding.lora_up.weight": up,
        "lora_unet_patch_embedding.alpha": torch.tensor(1.5),
    }
    torch.save(state, tmp_path / "lora.pt")
    product = torch.einsum("or,rcthw->octhw", up[:, :, 0, 0, 0].double(), down.double())
    expected = {"patch_embedding.weight": 0.5 * product}
    assert_merged(native, read_lora(tmp_path / "lora.pt"), expected)


# --- What PEFT says beside the weights
def adapter_config(**settings) -> dict:
    """Return what PEFT's LoraConfig writes, the settings apart that are as they always are."""
    usual = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "use_dora": False, "bias": "none"}
    usual |= {"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "init_lora_weights": True}
    return usual | {"target_modules": ["q", "k"], "peft_version": "0.18.0", "lora_bias": False} | settings


def write_peft(folder, native: State, settings: dict) -> None:
    folder.mkdir(exist_ok=True)
    save_file(named(native, "base_model.model.{}"), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "README.md").write_text("a model card")


SCALES = {  # settings of PEFT -> the scale of each layer of LAYERS
    "lora_alpha": ({"lora_alpha": 8}, [2, 2, 2, 2]),
    "use_rslora": ({"lora_alpha": 8, "use_rslora": True}, [4, 4, 4, 4]),
    "alpha_pattern": ({"alpha_pattern": {"self_attn.q": 2, "ffn.[02]": 6}}, [0.5, 1.5, 2, 1.5]),
    "rank_pattern": ({"r": 16, "rank_pattern": {"(q|0|o|2)": RANK}}, [2, 2, 2, 2]),
    "initialised": ({"init_lora_weights": "gaussian", "lora_alpha": 1}, [0.25] * 4),
}


@pytest.mark.parametrize("place", ["folder", "file", "header"])
@pytest.mark.parametrize("case", SCALES)
def test_settings_of_peft_are_read(tmp_path, native, place, case):
    """From adapter_config.json beside the weights, and from the header that diffusers writes."""
    settings, scales = SCALES[case]
    write_peft(tmp_path / "peft", native, adapter_config(**settings))
    path = tmp_path / "peft"
    if place == "file":
        path = path / "adapter_model.safetensors"
    if place == "header":
        path = tmp_path / "pytorch_lora_weights.safetensors"
        content = {f"transformer.{name}": value for name, value in adapter_config(**settings).items()}
        save_file(
            named(native, "transformer.{}"),
            path,
            {"lora_adapter_metadata": json.dumps(content), "format": "pt"},
        )
    plain = products(native)
    scale_of = dict(zip(LAYERS, scales, strict=True))
    expected = {f"{layer}.weight": scale * plain[f"{layer}.weight"] for layer, scale in scale_of.items()}
    assert_merged(native, read_lora(path, RANK), expected)


REFUSED_SETTINGS = {  # setting of PEFT -> what is said
    "use_dora": (True, "use_dora True"),
    "modules_to_save": (["head"], r"modules_to_save \['head'\]"),
    "target_parameters": (["blocks.0.modulation"], "target_parameters"),
    "fan_in_fan_out": (True, "fan_in_fan_out"),
    "bias": ("all", "bias 'all'"),
    "peft_type": ("LOHA", "peft_type 'LOHA'"),
    "init_lora_weights": ("pissa_niter_4", "init_lora_weights 'pissa_niter_4'"),
    "alpha_pattern": ({"(a+)+b": 2}, "alpha_pattern {"),
    "rank_pattern": (3, "rank_pattern 3 should be a valid dictionary"),
    "r": (8, "has rank 4 for blocks.0.ffn.0, and its settings say 8"),
    "lora_alpha": ("8", "lora_alpha '8' should be"),
    "use_rslora": ("yes", "use_rslora 'yes' should be"),
}


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_settings_that_are_not_merged_are_refused_by_name(tmp_path, native, name):
    value, problem = REFUSED_SETTINGS[name]
    write_peft(tmp_path / "peft", native, adapter_config(**{name: value}))
    with pytest.raises(CheckpointError, match=rf"\A.*peft.*{problem}.*\Z"):
        read_lora(tmp_path / "peft")


def test_an_alpha_that_contradicts_the_file_is_refused(tmp_path, native):
    """Of a header, of adapter_config.json and of the keys; the same one is none."""
    write_peft(tmp_path / "peft", native, adapter_config(lora_alpha=2))
    assert_merged(native, read_lora(tmp_path / "peft", alpha=2), products(native, 0.5))
    with pytest.raises(CheckpointError, match=r"alpha 2 and 4 for \S+; leave alpha out of the"):
        read_lora(tmp_path / "peft", alpha=4)
    torch.save(named(native, "{}") | {f"{Q}.alpha": ALPHA}, tmp_path / "lora.pt")
    with pytest.raises(CheckpointError, match="alpha 4 and 8"):
        read_lora(tmp_path / "lora.pt", alpha=4)
    two = {f"{Q}.alpha": ALPHA, f"model.{Q}.alpha": ALPHA / 2}
    torch.save(named(native, "{}") | two, tmp_path / "lora.pt")
    with pytest.raises(CheckpointError, match="alpha 4 and 8"):
        read_lora(tmp_path / "lora.pt")


# --- Files that are wrong
def wide(native: State) -> State:
    return {f"{Q}.lora_A.weight": torch.ones(4, DIM), f"{Q}.lora_B.weight": torch.ones(DIM, 8)}


FAULTS = {  # what is said -> the file's content
    "lora_rank is 8": lambda n: named(n, "{}"),
    "no whole LoRA: 4 layers with lora_A, 3": lambda n: {
        name: x for name, x in named(n, "{}").items() if "0.ffn.0.lora_B" not in name
    },
    "no whole LoRA: 0 layers with lora_A, 0": lambda n: {},
    "4 with lora_B, 1 with an alpha alone": lambda n: named(n, "{}") | {"blocks.1.ffn.0.alpha": ALPHA},
    "holds blocks.0.self_attn.q.lora_A.weight beside lora: which": lambda n: (
        named(n, "{}") | {"lora": named(n, "{}"), "step": torch.tensor(3)}
    ),
    "unet.w is no part of one": lambda n: {"unet.w": torch.ones(1)},
    r"A \[4, 192\] and B \[192, 8\] for blocks.0.self_attn.q, which are no pair of one rank": wide,
    r"A \[0, 192\] and B \[192, 0\] .* no pair of one rank above 0": lambda n: {
        f"{Q}.lora_A.weight": torch.ones(0, DIM),
        f"{Q}.lora_B.weight": torch.ones(DIM, 0),
    },
    "no number above 0 as .*q.alpha, but '8'": lambda n: named(n, "{}") | {f"{Q}.alpha": "8"},
    r"no number above 0 as .*q.alpha, but a tensor \[2\]": lambda n: (
        named(n, "{}") | {f"{Q}.alpha": torch.ones(2)}
    ),
    "no number above 0 as .*q.alpha, but a tensor .* of float32": lambda n: (
        named(n, "{}") | {f"{Q}.alpha": torch.tensor(float("nan"))}
    ),
    "no tensor of floating point as .*q.lora_A.weight, but 'a'": lambda n: (
        named(n, "{}") | {f"{Q}.lora_A.weight": "a"}
    ),
    r"no tensor of floating point as .*, but \[1.0, 2.0\]": lambda n: (
        named(n, "{}") | {f"{Q}.lora_B.weight": [1.0, 2.0]}
    ),
    "no tensor of floating point as .*q.diff, but a tensor .* of int64": lambda n: {
        f"{Q}.diff": torch.ones(DIM, DIM).long()
    },
    r"changes blocks.0.self_attn.q.weight by \[192, 1\] and by \[192, 192\]": lambda n: (
        named(n, "{}") | {f"{Q}.diff": torch.ones(DIM, 1)}
    ),
    "q_loras.down.weight is no part": lambda n: {f"{Q}_loras.down.weight": torch.ones(4, DIM)},
    "base_layer.weight is no part": lambda n: named(n, "{}") | {f"{Q}.base_layer.weight": torch.ones(2, 2)},
    r"holds a DoRA \(.*dora_scale\), not a LoRA; merge": lambda n: (
        named(n, "{}") | {f"{Q}.dora_scale": torch.ones(1)}
    ),
    "holds a DoRA .*lora_magnitude_vector": lambda n: (
        named(n, "{}") | {f"{Q}.lora_magnitude_vector.weight": torch.ones(1)}
    ),
    "holds a LoKr .*lokr_w1": lambda n: {f"lycoris_{Q}.lokr_w1": torch.ones(1)},
    "holds a LoHa .*hada_w1_a": lambda n: {f"lora_unet_{Q}.hada_w1_a": torch.ones(1)},
    "holds a OFT": lambda n: {f"{Q}.oft_blocks": torch.ones(1)},
    "holds a LoRA in Tucker form": lambda n: (
        named(n, "{}", DOWN_UP) | {f"{Q}.lora_mid.weight": torch.ones(4, 4)}
    ),
}


@pytest.mark.parametrize("problem", FAULTS)
def test_other_files_are_refused_in_one_line(tmp_path, native, problem):
    torch.save(FAULTS[problem](native), tmp_path / "w.pt")
    rank = 8 if problem == "lora_rank is 8" else None
    with pytest.raises(CheckpointError, match=rf"\A.*w\.pt.*{problem}.*\Z"):
        read_lora(tmp_path / "w.pt", rank)


@pytest.mark.parametrize(
    ("layer", "fill", "problem"),
    [
        ("blocks.7.self_attn.q", 1.0, "base.pt has nothing there"),
        ("blocks.0.ffn.0", 1.0, r"base.pt has \[\d+, \d+\] there; give a LoRA of this model"),
        (Q, float("nan"), "numbers that are not finite; get it again"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(native, layer, fill, problem):
    pair = LowRank(f"{layer}.weight", torch.full((2, DIM), fill), torch.ones(DIM, 2), alpha=2.0)
    with pytest.raises(CheckpointError, match=rf"lora.pt changes {layer} .*{problem}"):
        merge_lora(native, LoRA("lora.pt", [pair]), "base.pt")


def test_a_lora_that_changes_nothing_is_said(native):
    pair = LowRank(f"{Q}.weight", torch.ones(2, DIM), torch.zeros(DIM, 2), alpha=2.0)
    with pytest.warns(UserWarning, match="lora.pt changes nothing"):
        merge_lora(native, LoRA("lora.pt", [pair]), "base.pt")


def test_a_folder_without_one_lora_and_a_missing_file_are_refused(tmp_path, native):
    for name in ("a", "b"):
        save_file(named(native, "{}"), tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="holds 2 files of weights; give the file of a LoRA"):
        read_lora(tmp_path)
    with pytest.raises(CheckpointError, match=r"the LoRA .*c.safetensors not found; give the file of a LoRA"):
        read_lora(tmp_path / "c.safetensors")
