"""What can be wrong with files and runs, told in one line that says what to do."""


class CacheError(ValueError):
    """What is wrong with a cache, in one line that says what to do."""

    def _render_traceback_(self) -> list[str]:  # the hook by which IPython shows the line alone in a notebook
        return [f"{type(self).__name__}: {self}"]


class RunError(RuntimeError):
    """A run that started but cannot give a result, such as NaN in the latents."""


class StoppedError(Exception):
    """A run that was asked to stop, and has saved what it could; the message says how to go on."""
