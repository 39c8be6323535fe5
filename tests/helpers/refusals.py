"""What a script says where it refuses."""

import re

import pytest

from experiments.running import cli


def refused(script, flags, capfd, message: str, code: int = 2) -> None:
    """Run a script that ends with this exit code; its one line on stderr must match the message."""
    with pytest.raises(SystemExit) as ended:
        cli.main(script.run, [*map(str, flags)])
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("block ")]
    assert ended.value.code == code and len(said) == 1 and re.search(f"^error: .*{message}", said[0]), said
