"""Check numbers before they are kept: finite once a block, masses that sum to 1, the model that is named."""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.caches.files import RunError
from experiments.caches.formats import MASS_TOLERANCE
from wan.capture import CapturedCall
from wan.config import MODELS, ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.model import WanModel

REMEDY = "try --device cpu or another dtype in the config"


def check_latents(model: WanModel, latents: Tensor, where: str) -> None:
    """Raise RunError for latents that are not finite, naming the weights that are to blame."""
    if latents.isfinite().all():
        return
    spoilt = next((name for name, x in model.named_parameters() if not x.isfinite().all()), None)
    remedy = f"nor is the weight {spoilt}: get the file of the weights again" if spoilt else REMEDY
    raise RunError(f"{where}: the latents are not finite, {remedy}")


def check_values(calls: Sequence[CapturedCall]) -> None:
    """Raise RunError for captured numbers that cannot be right, naming layer, block and pass."""
    for call in calls:
        for name, values in call.values.items():
            if name in ("attended", "map_queries"):
                continue
            where = f"layer {call.site.layer}, block {call['block']}, step {call['step']}: "
            heads_differ = name.startswith("frame_") and _heads_differ(values)
            left_out = "attended" in call.values and not name.endswith("_mass")  # by an intervention: NaN
            wrong = values.isinf().any() if left_out else not all(x.isfinite() for x in values.aminmax())
            if wrong and not heads_differ:
                half = values.dtype == torch.float16
                remedy = " in float16; --capture probabilities keeps float32" if half else f"; {REMEDY}"
                raise RunError(f"{where}{name} is not finite{remedy}")
            if name == "frame_mass" and ("slot_mass" in call.values or heads_differ):
                continue  # averages of frames are of no frame
            if name.endswith("_mass") or name == "token_probabilities":
                # maps keep mass times the tokens of a frame
                unit = call.layout.tokens_per_slot if name == "map_mass" and call.layout else 1
                off = (values.sum(-1, dtype=torch.float32) / unit - 1).abs().max().item()
                if off > MASS_TOLERANCE:
                    raise RunError(f"{where}rows of {name} sum to 1 ± {off:.2g}, not to 1")


def _heads_differ(values: Tensor) -> bool:
    """Return True where heads see different frames: values [B, H, Fq, Fk] are NaN for whole columns."""
    missing = values.isnan()
    if values.ndim != 4 or not missing.any() or missing.all():
        return False
    return torch.equal(missing.any(2), missing.all(2))


def check_model(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError where a directory holds another model than the config, and so the cache, names."""
    named = MODELS.get(config.model)
    different = [
        f"{name} {getattr(model_config, name)} instead of {getattr(named, name)}"
        for name in ("num_layers", "num_heads", "dim", "ffn_dim")
        if named and getattr(model_config, name) != getattr(named, name)
    ]
    if different:
        raise ConfigError(
            f"{config.ckpt_dir} is not {config.model}: {', '.join(different)}; "
            "name a config with its settings by --config_path"
        )
