"""Bad command lines of every script, by subject; {} is a folder that holds files of the wrong kind."""

from pathlib import Path

import torch

from experiments.caches import save_cache
from helpers import synthetic_caches

MINI = ["--config_path", "configs/wan_mini.yaml"]
NO_DISK = "/proc/no/such"  # nobody may write there, root neither


def write_wrong_files(folder: Path) -> None:
    """The files that the command lines name."""
    save_cache(folder / "layer.pt", synthetic_caches.layer())
    save_cache(folder / "atlas.pt", synthetic_caches.atlas())
    torch.save([1, 2], folder / "list.pt")
    (folder / "text.txt").write_text("not a cache, not a config: [")
    (folder / "bytes.bin").write_bytes(bytes(range(256)) * 4)
    (folder / "empty").write_bytes(b"")
    (folder / "folder").mkdir()
    (folder / "marked.md").write_text("<!-- table: text.txt -->\n<!-- end of table -->\n")
    (folder / "training").mkdir()
    (folder / "training/step_1.pt").write_bytes(b"")
