"""The older name of measure_checkpoints.py.

python experiments/measure_moments.py outputs/training --steps 0 500 9000
"""

from experiments.measure_checkpoints import run
from experiments.running.cli import main

if __name__ == "__main__":
    main(run)
