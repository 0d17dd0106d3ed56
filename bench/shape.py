"""Shapes of objects for benchmarks: layers times slice, as in "32x256KiB"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti.base.units import format_nbytes, parse_nbytes
from tutti.errors import ConfigError
from tutti.medium.layout import KVLayout


@dataclass(frozen=True)
class KvPageShape:
    """`layers` slices of `slice_nbytes`, half of each K and half V."""

    layers: int
    slice_nbytes: int

    @property
    def object_nbytes(self) -> int:
        """Payload of one object."""
        return self.layers * self.slice_nbytes

    def layout(self, page_size: int = 64) -> KVLayout:
        """A layout of this shape; `page_size` is in tokens, and only part of the identity."""
        half = self.slice_nbytes // 2
        return KVLayout(
            layers=self.layers,
            segments=(half, half),
            page_size=page_size,
            dtype="bfloat16",
            kind="bench",
            model="bench",
            model_layers=self.layers,
        )

    def __str__(self) -> str:
        return f"{self.layers}x{format_nbytes(self.slice_nbytes).replace(' ', '')}"


def parse_shape(text: str) -> KvPageShape:
    """Reads "32x256KiB".  Raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9]{1,4})\s*x\s*(.+)", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"cannot read the shape {text!r}; write layers x slice, as in 32x256KiB")
    slice_nbytes = parse_nbytes(match[2])
    if slice_nbytes == 0 or slice_nbytes % 16:
        raise ConfigError(
            f"a slice of {slice_nbytes} bytes is not a multiple of 16; choose another"
        )
    return KvPageShape(int(match[1]), slice_nbytes)
