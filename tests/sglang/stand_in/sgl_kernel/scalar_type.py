"""Names of quantised number types, for the tables that SGLang builds while it is imported."""

from __future__ import annotations

import re
from typing import NamedTuple


class ScalarType(NamedTuple):
    name: str
    size_bits: int

    @property
    def id(self) -> int:
        return sum(byte << 8 * i for i, byte in enumerate(self.name.encode()[:8]))


class _Types:
    def __getattr__(self, name: str) -> ScalarType:
        if name.startswith("__"):
            raise AttributeError(name)
        digits = re.search(r"\d+", name)
        return ScalarType(name, int(digits[0]) if digits else 0)


scalar_types = _Types()
