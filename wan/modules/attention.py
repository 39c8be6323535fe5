"""The import path that Self-Forcing and its siblings use."""

from wan.attention import attention
from wan.capture import ATTENTION_WEIGHT_CAPTURE

__all__ = ["ATTENTION_WEIGHT_CAPTURE", "attention"]
