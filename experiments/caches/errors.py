"""What can be wrong with files and runs, told in one line that says what to do."""

from wan.errors import OneLineError


class CacheError(OneLineError, ValueError):
    """What is wrong with a cache, in one line that says what to do."""


class RunError(OneLineError, RuntimeError):
    """A run that started but cannot give a result, such as NaN in the latents."""


class StoppedError(OneLineError):
    """A run that was asked to stop, and has saved what it could; the message says how to go on."""
