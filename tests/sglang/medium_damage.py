"""Damages pools behind the store's back."""

from __future__ import annotations

from pathlib import Path


def pool_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.tutti"))


def flip(path: Path, content: bytes) -> int:
    """Inverts the first byte of every occurrence of `content` in the file; how many."""
    data = path.read_bytes()
    found = 0
    with path.open("r+b") as file:
        at = data.find(content)
        while at >= 0:
            file.seek(at)
            file.write(bytes([data[at] ^ 0xFF]))
            found += 1
            at = data.find(content, at + len(content))
    return found


#: How blocks that are not objects begin (docs/format.md).
_METADATA = (b"TUTTISB1", b"TUTTISN1", b"TREC")


def flip_objects(path: Path, step: int = 4096) -> None:
    """Inverts bits in every block that holds KV; superblocks and records stay as they are."""
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), step):
        block = data[at : at + 64]
        if any(block) and not block.startswith(_METADATA):
            for offset in range(17, step, 64):
                data[at + offset] ^= 0x55
    with path.open("r+b") as file:
        file.write(data)
