"""Byte sizes and durations, read and written for people."""

from __future__ import annotations

import re
from fractions import Fraction

from tutti.errors import ConfigError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_UNIT_NBYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
}
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*")


def parse_nbytes(size: str | int) -> int:
    """Bytes from "64GiB", "1.5 GB", "4096" or an int; a fraction of a byte is dropped.

    A bare "G" is refused, because tools disagree whether it means 10^9 or 2^30.
    Raises ConfigError.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"size {size} is negative; pass a number of bytes or e.g. '64GiB'")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = _UNIT_NBYTES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"cannot read the size {size!r}; write a number and one of"
            " B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
        )
    return int(Fraction(match[1]) * unit)


def format_nbytes(nbytes: int) -> str:
    """For people: "1.5 GiB", "64 KiB", "17 B"."""
    for name, unit in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(nbytes) >= unit:
            return f"{_three_digits(nbytes / unit)} {name}"
    return f"{nbytes} B"


def format_duration(duration_s: float) -> str:
    """For people: "1.5 ms", "320 us", "2 h 5 min"."""
    if duration_s < 0:
        return "-" + format_duration(-duration_s)
    if duration_s >= 3600:
        minutes = round(duration_s / 60)
        return f"{minutes // 60} h {minutes % 60} min"
    if duration_s >= 60:
        seconds = round(duration_s)
        return f"{seconds // 60} min {seconds % 60} s"
    for name, unit_s in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if duration_s >= unit_s:
            return f"{_three_digits(duration_s / unit_s)} {name}"
    return f"{duration_s * 1e9:.0f} ns"


def _three_digits(value: float) -> str:
    """At least three significant digits, at most two decimals, no trailing zeros."""
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
