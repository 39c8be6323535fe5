"""What is kept of a call may need numbers from the GPU first: it is launched when they have come."""

from collections import deque
from collections.abc import Callable

from wan.modules.key_layout import KeyLayout

BEHIND = 3  # calls of attention: the GPU is busy with them while the host makes out what to launch

Work = Callable[[], None]


class LateWork:
    """Functions that wait for their turn, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()

    def is_for(self, layout: KeyLayout | None) -> bool:
        """Whether work on a call with this layout has to wait: for its chosen tokens, or behind others."""
        chosen = None if layout is None else layout.chosen
        return (chosen is not None and chosen.fetch()) or bool(self._waiting)

    def add(self, work: Work) -> None:
        """Call it BEHIND others later, or in finish()."""
        self._waiting.append(work)
        if len(self._waiting) > BEHIND:
            self._waiting.popleft()()

    def finish(self) -> None:
        """Call all that wait."""
        while self._waiting:
            self._waiting.popleft()()

    def forget(self) -> None:
        """Call none of them."""
        self._waiting.clear()
