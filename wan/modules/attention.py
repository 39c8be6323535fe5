"""The import path that Self-Forcing and its siblings use."""

from wan.attention import ATTENTION_WEIGHT_CAPTURE, attention

__all__ = ["ATTENTION_WEIGHT_CAPTURE", "attention"]
