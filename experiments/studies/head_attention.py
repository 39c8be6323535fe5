"""What heads attend to in a batch of unedited runs: s, masses, and the signs that kinds of heads go by."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from experiments.analysis.first_frame import context_cells, first_frame_effect
from experiments.analysis.measures import sign_rate
from experiments.studies.direct_effects import Runs
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.captured_call import CapturedCall

S, MASS_0, MASS_PAST, RATE = "s", "mass on frame 0", "mass on the past", "share of positive logits"


def measures_by_pass(runs: Runs, steps: Sequence[int]) -> dict[str, np.ndarray]:
    """By name [steps, R, layers, H] of R runs in these denoising steps; means over frames with a past."""
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", steps=steps) as calls:
        runs.inference()
    found: dict[str, list[np.ndarray]] = {S: [], MASS_0: [], MASS_PAST: [], RATE: []}
    sizes = runs.configs[0].block_sizes
    past = context_cells(sizes)  # [F, F]
    has_past = past.any(1)
    for step in steps:
        now = [call for call in calls if call.at is not None and call.at.step == step]
        logits, mass = (_matrices(now, name, len(past)) for name in ("frame_logits", "frame_mass"))
        found[S].append(first_frame_effect(logits, sizes).effect)
        found[RATE].append(sign_rate(logits[..., past]))
        of_past = np.where(past, mass, 0)[..., has_past, :]
        found[MASS_0].append(of_past[..., 0].mean(-1))
        found[MASS_PAST].append(of_past.sum(-1).mean(-1))
    return {name: np.stack(values) for name, values in found.items()}


def attention_measures(runs: Runs) -> dict[str, list[list[float]]]:
    """The same of the first pass, means over runs: [layers][H] each."""
    return {name: values[0].mean(0).tolist() for name, values in measures_by_pass(runs, [0]).items()}


def _matrices(calls: Sequence[CapturedCall], name: str, num_frames: int) -> np.ndarray:
    """A quantity of one pass as [R, layers, H, F, F]; NaN where nothing was attended."""
    layers = sorted({call.site.layer for call in calls})
    batch, heads = calls[0].values[name].shape[:2]
    matrix = torch.full((batch, len(layers), heads, num_frames, num_frames), torch.nan)
    for call in calls:
        values: Tensor = call.values[name]  # [R, H, Fq, Fk]
        assert call.at is not None and call.layout is not None
        rows, columns = torch.tensor(call.at.query_frames), torch.tensor(call.layout.frames)
        of_layer = matrix[:, layers.index(call.site.layer)]
        of_layer[:, :, rows[:, None], columns] = values.float()
    return matrix.double().numpy()
