"""Files that may be damaged or hostile: tensors."""

from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch

from wan.files import MAPPED_BYTES, UnreadableError, load_tensors


def test_a_compressed_file_is_read_as_any_other(tmp_path):
    """The published caches are deflated: as torch.save writes them they take four times the room."""
    content = {"values": torch.arange(6.0).reshape(2, 3), "name": "x"}
    stored, packed, large = (tmp_path / f"{name}.pt" for name in ("stored", "packed", "large"))
    torch.save(content, stored)
    with ZipFile(stored) as archive, ZipFile(packed, "w", ZIP_DEFLATED) as smaller:
        for record in archive.infolist():
            smaller.writestr(record.filename, archive.read(record))
    found = load_tensors(packed)
    assert torch.equal(found["values"], content["values"]) and found["name"] == "x"
    packed.write_bytes(packed.read_bytes()[:-40] + bytes(40))
    with pytest.raises(UnreadableError):
        load_tensors(packed)
    with ZipFile(large, "w", ZIP_DEFLATED) as bomb:
        bomb.writestr("large/data.pkl", bytes(MAPPED_BYTES + 1))
    with pytest.raises(UnreadableError, match="not as torch"):
        load_tensors(large)
