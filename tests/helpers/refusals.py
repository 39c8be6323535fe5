"""Refusals: what cannot be asked for ends in one line."""

from contextlib import contextmanager

import pytest

from wan.errors import ConfigError


@contextmanager
def refused(message: str, error: type[Exception] = ConfigError):
    """Expect an error of one line that matches message (a regular expression)."""
    with pytest.raises(error, match=message) as caught:
        yield caught
    assert "\n" not in str(caught.value)
