"""A Ctrl-C in the middle of a run."""

import os
import signal
import time

from experiments.running.progress import Progress


def stopping_after(monkeypatch, block: int) -> None:
    """A Ctrl-C while a block is generated."""
    original = Progress.block

    def on_block(self, number, frames, num_blocks):
        original(self, number, frames, num_blocks)
        if number == block:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    monkeypatch.setattr(Progress, "block", on_block)
