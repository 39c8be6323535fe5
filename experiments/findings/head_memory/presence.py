"""Do some heads bring a hidden object back, and others know what it was? (presence_and_identity.md)

    python experiments/findings/head_memory/presence.py --device cuda --ckpt_dir checkpoints/wan-mini mini1

Makes the trials of each training, FOLDER/NAME.jsonl, one command a training or one for all; the same command
goes on where it stopped.
"""

from pathlib import Path
from typing import Any

import torch

from experiments.extraction.provenance import environment
from experiments.findings.head_memory.captions import Design
from experiments.findings.head_memory.presence_trials import PresenceTrials
from experiments.findings.report import finding_parser, miniature_config
from experiments.running.cli import count, main
from experiments.session import load


def run(argv=None):
    parser = finding_parser(__doc__, "head_memory")
    flag = parser.add_argument
    flag("--ckpt_dir", nargs="+", default=["checkpoints/wan-mini"], help="directories of miniatures")
    flag("--captions", type=count, default=Design.captions, help="on which heads are judged")
    flag("--selection", type=count, default=Design.selection, help="captions on which heads are chosen")
    flag("--seeds", type=int, choices=range(1, 10), default=3, help="of each caption")
    flag("--folder", type=Path, default=Path("cache/presence"), help="where trials are kept")
    measure(parser.parse_args(argv))


def measure(args: Any) -> None:
    """Make the trials that are missing of each miniature."""
    design = Design(args.captions, args.selection, args.seeds)
    for ckpt_dir in args.ckpt_dir:
        config = miniature_config(args, ckpt_dir)
        session = load(config).prepare((), PresenceTrials.texts())
        torch.backends.cudnn.benchmark = session.device.type == "cuda"  # a decoder of one size
        trials = PresenceTrials(config, session, args.folder / f"{Path(ckpt_dir).name}.jsonl", design)
        if "training" not in trials.done:
            about = {"weights_sha256": session.identity(config)["weights_sha256"], "seeds": args.seeds}
            trials.write("training", about | {"environment": environment(session.device)})
        trials.run()
        print(trials.file)


if __name__ == "__main__":
    main(run)
