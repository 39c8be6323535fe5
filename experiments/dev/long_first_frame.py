"""The first-frame effect of rollouts by their length: is frame 0 still preferred at 240 frames?

    python experiments/dev/long_first_frame.py --output_path docs/benchmarks/long_first_frame.json

Mean logits of pass 0 (t = 1000) of every layer and head of the miniature, for the config's reference prompts,
each with a seed of its own.
A length's effect is fitted to the cells of its first frames; placebos are the same fit for frames 1 to 14.
They count by their size.
"""

from typing import Any

from experiments.running.cli import Parser, count, main

LENGTHS = (21, 45, 93, 141, 240)
POLICIES = ("full", "window,window=9,sink=3", "deep_sink,window=21,sink=10")
PLACEBOS = range(1, 15)


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml", help="the model and its reference prompts")
    flag("--lengths", type=count, nargs="+", default=list(LENGTHS), help="latent frames")
    flag("--prompts", type=count, default=4, help="reference prompts that are rolled out, together")
    flag("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    flag("--output_path", help="where the report goes")
    args = parser.parse_args(argv)

    from dataclasses import replace

    from experiments.caches.files import require_writable
    from experiments.dev.tables import save_report
    from experiments.extraction import causal
    from experiments.extraction.provenance import environment
    from experiments.studies.policy_comparison import read_policies, short_label
    from wan.config import load_config

    config = load_config(args.config_path, {"device": args.device, "num_frames": max(args.lengths)})
    prompts = config.reference_prompts[: args.prompts]
    if args.output_path:
        require_writable(args.output_path)
    session, rows = causal.prepare(config, [], prompts), []
    for label, settings in read_policies(POLICIES).items():
        matrix = frame_logits(session, replace(config, cache_policy=settings), prompts)
        for length in sorted(args.lengths):
            rows.append({"policy": short_label(label), "num_frames": length} | effects(matrix, length))
            print(rows[-1])
    report = {
        "prompts": len(prompts),
        "weights_sha256": session.sha256.result(),
        "environment": environment(session.device),
        "rows": rows,
    }
    save_report(report, args.output_path)


def frame_logits(session: Any, config: Any, prompts: list[str]) -> Any:
    """Mean logits of pass 0 of one rollout a prompt, NaN where nothing was seen: [B, layers · H, F, F]."""
    from dataclasses import replace

    import numpy as np
    import torch

    from experiments.extraction.causal import pipeline_of, seeded_noise
    from experiments.extraction.devices import threads_for
    from wan.attention import ATTENTION_WEIGHT_CAPTURE

    configs = [replace(config, seed=config.seed + number) for number in range(len(prompts))]
    noise = seeded_noise(configs, session.model_config, session.dtype, session.device)
    text = torch.cat([session.texts[prompt][0] for prompt in prompts])
    heads, F = session.model_config.num_layers * session.model_config.num_heads, config.num_frames
    matrix = np.full((len(prompts), heads, F, F), np.nan, np.float32)
    request = {"steps": [0], "granularity": "frame", "mass": False}
    with (
        threads_for(torch.empty(1, *noise.shape[1:]), session.model_config),
        ATTENTION_WEIGHT_CAPTURE.capture(**request) as calls,
    ):
        for frames, _ in pipeline_of(session.pipeline.model, config).blocks(noise, text):
            logits = torch.cat([call.values["frame_logits"] for call in calls], 1).float().cpu().numpy()
            layout = calls[0].layout
            assert layout is not None  # of self-attention
            matrix[:, :, frames.start : frames.stop, list(layout.frames)] = logits
            calls.clear()
    return matrix


def effects(matrix: Any, length: int) -> dict[str, Any]:
    """Mean over heads with its interval over prompts, the size of the largest mean placebo, and the share of
    heads whose effect exceeds the size of every placebo."""
    import numpy as np

    from experiments.analysis.effects import bootstrap
    from experiments.analysis.first_frame import first_frame_effect, placebo_effects

    cut, sizes = matrix[:, :, :length, :length], [3] * (length // 3)
    effect = first_frame_effect(cut, sizes).effect  # [B, heads]
    placebos = placebo_effects(cut, sizes, PLACEBOS)  # [B, heads, placebos]
    known = ~np.isnan(placebos).any((0, 1))
    found: dict[str, Any] = {
        "effect": [round(float(x), 4) for x in bootstrap(effect.mean(1))],
        "largest_placebo": None,
        "heads_above_placebos": None,
    }
    if known.any():
        exceeds = (effect[..., None] > np.abs(placebos[..., known])).all(-1)
        found["largest_placebo"] = round(float(np.abs(placebos[..., known].mean((0, 1))).max()), 4)
        found["heads_above_placebos"] = round(float(exceeds.mean()), 3)
    return found


if __name__ == "__main__":
    main(run)
