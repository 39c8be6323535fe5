"""Rollouts under a cache policy, from a config: their atlas or their latents, in memory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.extraction.cache_builders import atlas_cache, atlas_requests
from experiments.extraction.causal import extract
from experiments.extraction.result import Extraction
from wan.config import RunConfig, load_config


def policy_atlas(config_path: str | Path, settings: Mapping[str, Any], num_frames: int) -> dict[str, Any]:
    """Mean logits and mass of every call of num_frames frames under the policy of settings."""
    config = _config(config_path, settings, num_frames)
    requests = atlas_requests(config, mass=True, key_curve=False, cross=False)
    return atlas_cache(extract(config, requests))


def policy_run(config_path: str | Path, settings: Mapping[str, Any], num_frames: int) -> Extraction:
    """Latents of num_frames frames under the policy of settings, and what they depend on."""
    return extract(_config(config_path, settings, num_frames), [])


def _config(config_path: str | Path, settings: Mapping[str, Any], num_frames: int) -> RunConfig:
    config = load_config(config_path, {"cache_policy": dict(settings)})
    return replace(config, num_frames=num_frames)
