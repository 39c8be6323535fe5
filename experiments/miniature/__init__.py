"""A small Wan that is trained on moving shapes: its scenes, tracker, evaluation and training."""

from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "checkpoints/wan-mini"
