"""From flags to a causal atlas: pieces are made until asked to stop, the cache when all are there."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.caches import save_cache
from experiments.caches.atomic_files import require_writable
from experiments.caches.errors import StoppedError
from experiments.extraction import causal
from experiments.extraction.edit_files import read_edits, record_of
from experiments.extraction.provenance import files_of
from experiments.running.jobs import deterministic, name_inputs
from experiments.running.progress import Progress, memory, stopping_when_asked
from experiments.running.ranks import Rank
from experiments.studies import causal_atlas
from wan import checkpoint
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.modules.interventions import Ablate, Edit

ATLAS = "causal_atlas.pt"


def the_edit(path: str | None) -> Edit:
    """The one edit of a file; the default is mean ablation."""
    if path is None:
        return Ablate("mean", passes="denoise")
    edits = read_edits(path)
    if len(edits) != 1:
        raise ConfigError(f"{path} holds {len(edits)} interventions; a causal atlas is of one")
    return edits[0]


def make_atlas(args: argparse.Namespace, configs: Sequence[RunConfig], rank: Rank) -> None:
    """Make what is not done yet of an atlas, and the atlas when all is. Raises StoppedError after Ctrl-C.

    Several ranks make different pieces, and the first of them the atlas; without a launcher each writes it,
    whole and with the same bytes.
    """
    edit, folder = the_edit(args.edit), Path(args.output_dir)
    with_edit = replace(configs[0], interventions=[edit.to_dict()])
    name_inputs(args, with_edit)
    args.files.writes("the atlas", folder / ATLAS)
    args.files.writes("the index", folder / "index.json")
    with (
        Progress(args.quiet, args.log_file) as watch,
        stopping_when_asked(watch, "layer"),
        deterministic(args.deterministic),
    ):
        require_writable(folder / ATLAS)
        files = files_of(with_edit, checkpoint.weights_file(with_edit.ckpt_dir, with_edit.checkpoint_path))
        prompts = list(dict.fromkeys(config.prompt for config in configs))
        session = causal.prepare(configs[0], [], prompts, watch)
        study = causal_atlas.Study(
            folder,
            edit,
            args.each,
            configs,
            session.model_config.num_layers,
            session.model_config.num_heads,
            session.sha256.result(),
            str(session.dtype),
            files,
        )
        start = time.monotonic()
        watch.log("rollout", items=sum(1 for _ in study.items()))  # from here on Ctrl-C ends a layer first
        done = causal_atlas.run(study, session, args.batch, watch.print, lambda: watch.stopping, rank, watch)
        if not done:
            raise StoppedError("stopped; what is done will not be made again: run the same command to go on")
        if not rank.is_first:
            return
        save_cache(folder / ATLAS, atlas_cache(study, session))
        watch.print(
            f"{folder / ATLAS}: {edit}, each {args.each}: {time.monotonic() - start:.1f} s, {memory()}"
        )


def atlas_cache(study: causal_atlas.Study, session: causal.Session) -> dict:
    """The cache of a finished study."""
    first = study.configs[0]
    return {
        **session.common,
        "format": "causal_atlas",
        "prompt": first.prompt,
        "seed": None,
        "weights_sha256": study.weights_sha256,
        "is_logits": False,
        "interventions": record_of([study.edit]),
        "prompts": [config.prompt for config in study.configs],
        "seeds": [config.seed for config in study.configs],
        "each": study.each,
        "layers": [layer or 0 for layer in study.layers],
        "units": causal_atlas.units(study),
        **causal_atlas.merged(study),
    }
