"""Arrays -> SVG, PDF, HTML: every drawing function by one name, such as `figures.head_curves(...)`."""

# ruff: noqa: F403
from experiments.figures.atlas import *
from experiments.figures.folder import FigureFolder as FigureFolder
from experiments.figures.folder import about as about
from experiments.figures.heads import *
from experiments.figures.long_rollouts import *
from experiments.figures.style import LABELS as LABELS
from experiments.figures.style import NAMES as NAMES
from experiments.figures.style import save_figure as save_figure
from experiments.figures.style import save_svg as save_svg
from experiments.figures.style import use_size as use_size
from experiments.figures.video_maps import *
