"""A stand-in for hypothesis where it is absent: tests of properties are skipped, the others of a file run."""

from unittest.mock import MagicMock

import pytest

REASON = 'hypothesis is not installed: pip install -e ".[dev]"'
strategies = MagicMock()  # never drawn from
HealthCheck = MagicMock()


def given(*values, **named_values):
    """Mark a test as skipped in place of running it with drawn values."""
    return pytest.mark.skip(reason=REASON)


def settings(**options):
    """Leave a test as it is."""
    return lambda test: test
