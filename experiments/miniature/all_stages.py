"""Every stage of training by its name: the miniature's own, and low-rank changes to it."""

from collections.abc import Callable

from experiments.miniature import stages
from experiments.miniature.lora_training import CHANGES, train_change
from experiments.miniature.recipe import StageRun

STAGES: dict[str, Callable[[StageRun], dict]] = stages.STAGES | dict.fromkeys(CHANGES, train_change)
