"""A comparison of policies in which every answer is known."""

import numpy as np

from experiments.findings.long_rollouts.run import OF_SECONDS, OF_WHOLE

COST = {"seconds": 1.0, "last_block_seconds": 0.1, "batch": 2, "cache_bytes": 10**6}
KINDS = ["single", "crossing", "wall"] * 6


def comparison(gain: dict[str, float], prompts: int = 18, seconds: int = 59) -> dict:
    """A comparison in which the share of right seconds of each label is its gain over 0.4."""
    videos = []
    for label, more in gain.items():
        for prompt in range(prompts):
            for seed in range(3):
                rng = np.random.default_rng([prompt, seed])  # the same draws for every policy
                right = (rng.random(seconds) < 0.4 + more).astype(int).tolist()
                tracker = dict.fromkeys(("right", "color", "shape", "visible", "background"), right)
                each = {name: [0.1] * seconds for name in OF_SECONDS}
                whole = dict.fromkeys(OF_WHOLE, 0.5) | {"non_repetition": None}
                about = {"label": label, "prompt": f"p{prompt}", "seed": seed}
                videos.append(about | {"tracker": tracker, "seconds": each, "whole": whole})
    return {
        "prompts": [f"p{i}" for i in range(prompts)],
        "kinds": KINDS[:prompts],
        "unnamed": [i % 6 == 2 for i in range(prompts)],
        "model": "wan-mini",
        "num_frames": 240,
        "weights_sha256": "0",
        "costs": {label: COST for label in gain if label not in ("frozen", "vae")},
        "videos": videos,
    }
