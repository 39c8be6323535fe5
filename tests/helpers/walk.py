"""Which of our own functions a call enters: a measure of what a reader has to get through."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
OWN = tuple(f"{ROOT / name}/" for name in ("wan", "experiments"))


def walk(call: Callable[[], Any]) -> set[tuple[str, str]]:
    """Call it, and return the (file, function) pairs of wan/ and experiments/ that any thread entered.

    Bodies of classes count, as importing runs them, so call it in a fresh process. Comprehensions, lambdas
    and bodies of modules do not.

    >>> walk(lambda: main(["--config_path", "configs/wan_mini.yaml"]))
    {("wan/model.py", "CausalWanModel.forward"), ...}
    """
    entered: set[Any] = set()  # code objects; they are named at the end, as this slows every call down

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            entered.add(frame.f_code)

    threading.setprofile(note)  # of threads that start from now on
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    named = [code for code in entered if not code.co_name.startswith("<")]
    return {(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname) for code in named}
