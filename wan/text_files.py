"""Text, JSON and YAML of bounded size, UTF-8 by name whatever the locale; any other file is refused in one
line.
"""

import json
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any

from wan.errors import ConfigError, OneLineError, quoted, reason_of
from wan.limits import CONFIG_BYTES, JSON_BYTES, TEXT_BYTES


def read_text(path: str | Path, limit: int = TEXT_BYTES, error: type[OneLineError] = ConfigError) -> str:
    """A file of UTF-8, with or without its mark, of at most limit bytes. Raises error for any other file."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            kind = os.fstat(file.fileno()).st_mode
            content = b"" if stat.S_ISFIFO(kind) else file.read(limit + 1)
    except (OSError, ValueError) as problem:
        raise error(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}") from problem
    if stat.S_ISFIFO(kind):
        raise error(f"{path} cannot be read: it is a pipe; write its content to a file")
    if len(content) > limit:
        raise error(f"{path} is larger than {limit} bytes, as no such file is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not text in UTF-8: {problem.reason} at byte {problem.start}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Open a pipe as if somebody wrote to it: a name must not make a run wait for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))


def read_json(path: str | Path, error: type[OneLineError] = ConfigError) -> dict[str, Any]:
    """A JSON file that holds a table of settings. Raises error for any other."""
    text = read_text(path, JSON_BYTES, error)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:  # ValueError: also numbers of 5000 digits
        raise error(f"{path} is not JSON: {reason_of(problem)}") from problem
    if not isinstance(content, dict):
        raise error(f"{path} holds a {type(content).__name__}, not a table of settings")
    return content


@cache
def _yaml_loader() -> type:
    """PyYAML's safe loader without aliases, which can unfold without end, and without keys given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(
                    problem="an alias (*name), which settings do not need; write its value out",
                    problem_mark=self.peek_event().start_mark,
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [name for name in names if names.count(name) > 1]:
                problem = f"the key {quoted(twice[0])} twice; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            return super().construct_mapping(node, deep)

    return Loader


def read_yaml(path: str | Path) -> dict[Any, Any]:
    """A YAML file that holds a mapping of settings; texts stay as they are written, with nothing filled in.

    Raises ConfigError for any other.
    """
    content = load_yaml(path, "settings", CONFIG_BYTES)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a mapping of settings")
    return content


def load_yaml(path: str | Path, what: str, limit: int) -> Any:
    """What a YAML file of at most limit bytes holds; what says what it is of. ConfigError for any other."""
    import yaml

    text = read_text(path, limit)
    try:
        return yaml.load(text, Loader=_yaml_loader())
    except Exception as error:  # PyYAML's own error classes, and those of the values that it builds
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}: not a YAML file of {what}: {problem or reason_of(error)}{place}"
        ) from error
