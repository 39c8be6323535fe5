"""Every stage of training by its name: the miniature's own, and low-rank changes to it."""

from collections.abc import Callable

from experiments.miniature import stages
from experiments.miniature.few_step import train_few_step
from experiments.miniature.lora_training import CHANGES, train_change
from experiments.miniature.recipe import StageRun

STAGES: dict[str, Callable[[StageRun], dict]] = (
    stages.STAGES | {"few_step": train_few_step} | dict.fromkeys(CHANGES, train_change)
)
