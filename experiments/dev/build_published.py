"""Make cache/published/ from published data: atlases of the real model, a digitised figure, head labels.

    python experiments/dev/build_published.py FOLDER

FOLDER holds self_forcing_dmd_last_block_logits.npz, self_forcing_dmd_frame_matrix_quantised.npz and the three
CSV files that experiments/analysis/published.py names; cache/published/README.md says what they are and where
they come from.
"""

from pathlib import Path

from experiments.running.cli import Parser, main

FOLDER = Path("cache/published")  # experiments.analysis.published.FOLDER, which imports torch


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the published files are")
    parser.add_argument("--output_dir", type=Path, default=FOLDER)
    args = parser.parse_args(argv)

    from experiments.dev.published_atlases import build  # after the flags: it needs torch

    build(args.folder, args.output_dir)


if __name__ == "__main__":
    main(run)
