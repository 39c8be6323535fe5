"""Errors that a caller can mend: each message is one line with the remedy."""


class ConfigError(ValueError):
    """What a user asked for cannot be run; the message is one line with the remedy."""
