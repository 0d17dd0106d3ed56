"""A profile: how long compute, reads and writes take on one machine, for one model and medium.

`tutti profile` measures it; docs/profile.md describes the JSON.  What could not be measured is
estimated (`roofline.py`) and marked as such.  `tutti.profiles` finds the profile of a pool.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tutti.base.checks import open_regular
from tutti.base.units import KiB, MiB
from tutti.errors import ProfileError
from tutti.scheduler.profile_curves import Family, check_rows
from tutti.scheduler.roofline import (
    LINK_GB_PER_S,
    PAPER_DRIVE,
    AssumedDrive,
    GpuRoofline,
    ModelShape,
    Roofline,
    mover_gb_per_s,
)

KIND = "tutti profile"
SCHEMA = 1
HALVES = ("compute", "io", "movers")
#: Facts that must be equal for a profile to be valid; the version of the kernel need not be.
MACHINE_KEYS = ("cpu", "cores", "memory", "filesystem", "disk")

_FILE_NBYTES_MAX = 16 * MiB
#: Faster than any medium or memory: a typing error or a clock that jumped.
_GB_PER_S_MAX = 1000.0
_SMS_MAX = 4096
#: Tokens of a page in an estimate, from which its slices follow.
_PAGE_TOKENS = 64


class TableProfile:
    """A profile by tables; implements the scheduler's `Profile`.  Immutable.

    document: the JSON it was made of.  warnings: why it replaces the profile that was asked for.
    """

    def __init__(self, document: Mapping[str, Any], warnings: tuple[str, ...] = ()) -> None:
        """Raises ProfileError for a document that is not a whole, sensible profile."""
        self.document = document
        self.warnings = warnings
        if document.get("kind") != KIND:
            raise ProfileError("this is not a profile; make one with `tutti profile`")
        if document.get("schema") != SCHEMA:
            raise ProfileError(
                f"the profile has schema {document.get('schema')!r}, this version reads {SCHEMA};"
                " run `tutti profile` again"
            )
        compute, io = _half(document, "compute"), _half(document, "io")
        self._prefill = Family.from_rows("prefill", compute.get("prefill"), rising=True)
        self._decode = Family.from_rows("decode", compute.get("decode"), rising=True)
        self._read = Family.from_rows("read", io.get("read"), rising=False)
        self._write = Family.from_rows("write", io.get("write"), rising=False)
        _check_bandwidth("read", io["read"])
        _check_bandwidth("write", io["write"])
        self.slice_nbytes = _positive(document, "slice_nbytes")
        self._machine, self._model = _half(document, "machine"), _half(document, "model")
        self.mover_points = _mover_points(_half(document, "movers"))
        self._engines = _engine_times(document.get("engines", {}))
        self.interference = self._find_interference(io.get("both"))
        self.estimated = tuple(half for half in HALVES if document[half].get("estimated"))

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        """One layer of a prefill of so many new tokens behind so many that are there already."""
        return self._prefill.at(new_tokens, prefix_tokens)

    def decode_us(self, batch: int, context_tokens: int) -> float:
        """One whole decode step; ``context_tokens`` is the sum over the batch."""
        return self._decode.at(batch, context_tokens)

    def read_us(self, nbytes: int) -> float:
        """A read from the medium, alone on it, in slices of the profile's model."""
        return self._read.at(nbytes, self.slice_nbytes)

    def write_us(self, nbytes: int) -> float:
        """A write to the medium, alone on it."""
        return self._write.at(nbytes, self.slice_nbytes)

    def engine_us(self, tier: str) -> Mapping[str, float]:
        """Time of the same load by each GPU engine on a tier; empty where it was not measured."""
        return self._engines.get(tier, {})

    @property
    def read_gb_per_s(self) -> float:
        """10^9 bytes a second of the longest read that was measured."""
        nbytes = int(self._read.curves[0].amounts[-1])
        return nbytes / self.read_us(nbytes) / 1e3

    def _find_interference(self, rows: object) -> float:
        """How many times as long a transfer takes with the other direction busy: the median."""
        slower = []
        for nbytes, slice_nbytes, read_us, write_us in check_rows("both", rows, 3):
            slower.append(read_us / self._read.at(nbytes, slice_nbytes))
            slower.append(write_us / self._write.at(nbytes, slice_nbytes))
        return max(1.0, median(slower))

    def mismatches(self, machine: Mapping[str, Any], model: ModelShape) -> list[str]:
        """Why this profile is not one of that machine and model; empty when it is."""
        found = []
        for name in MACHINE_KEYS:
            mine, other = self._machine.get(name), machine.get(name)
            if other is not None and mine != other:
                found.append(f"{name} was {mine!r} and is {other!r}")
        if self._model != model.to_dict():
            title = self._model.get("name")
            found.append(f"it is of the model {title!r}, not of {model.name!r} with this shape")
        return found


def load_profile(path: str | os.PathLike[str]) -> TableProfile:
    """Reads a profile.  Raises ProfileError, whatever the file holds or lacks."""
    try:
        with open_regular(path) as file:
            content = file.read(_FILE_NBYTES_MAX + 1)
        if len(content) > _FILE_NBYTES_MAX:
            raise ProfileError(f"{Path(path).name} is too long for a profile; choose another file")
        document = json.loads(content)
    except OSError as error:
        raise ProfileError(
            f"cannot read {Path(path).name}: {error.strerror}; make it with `tutti profile`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{Path(path).name} is not JSON: {error}; make it again") from error
    if not isinstance(document, dict):
        raise ProfileError(f"{Path(path).name} has no JSON object; run `tutti profile` again")
    return TableProfile(document)


def estimated_document(
    model: ModelShape, gpu: GpuRoofline, *, machine: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A profile of which nothing was measured; the drive is the paper's."""
    slice_nbytes = model.slice_nbytes_per_token * _PAGE_TOKENS
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "machine": dict(machine or {}),
        "model": model.to_dict(),
        "gpu": gpu.name,
        "medium": PAPER_DRIVE.name,
        "slice_nbytes": slice_nbytes,
        "compute": estimated_compute(model, gpu),
        "io": _estimated_io(PAPER_DRIVE, slice_nbytes),
        "movers": estimated_movers(gpu),
    }


def estimated_compute(model: ModelShape, gpu: GpuRoofline) -> dict[str, Any]:
    """The compute half by the roofline.

    Times are linear in the prefix and in the context, so two points each are exact; in the new
    tokens they are quadratic, where steps of a fourth of an octave are at most 1 % too high.
    """
    roofline = Roofline(gpu, model)
    new = sorted({round(2 ** (i / 4)) for i in range(4 * 17 + 1)})
    prefixes, contexts = (0, 1 << 20), (0, 1 << 22)
    return {
        "estimated": True,
        "prefill": [[n, p, roofline.layer_us(n, p)] for p in prefixes for n in new],
        "decode": [[b, c, roofline.decode_us(c)] for c in contexts for b in (1, 1024)],
    }


def estimated_movers(gpu: GpuRoofline) -> dict[str, Any]:
    """Speed of SM movers and the copy engine, limited by round trips and the link."""
    return {
        "estimated": True,
        "copy_engine_gb_per_s": LINK_GB_PER_S,
        "points": [[sms, mover_gb_per_s(sms)] for sms in range(1, gpu.sms + 1)],
    }


def _estimated_io(drive: AssumedDrive, slice_nbytes: int) -> dict[str, Any]:
    sizes = [(64 * KiB) << i for i in range(13)]

    def times(gb_per_s: float, slower: float) -> list[float]:
        return [slower * (drive.fixed_us + n / gb_per_s / 1e3) for n in sizes]

    read, write = times(drive.read_gb_per_s, 1.0), times(drive.write_gb_per_s, 1.0)
    both = zip(
        sizes,
        times(drive.read_gb_per_s, drive.interference),
        times(drive.write_gb_per_s, drive.interference),
        strict=True,
    )
    return {
        "estimated": True,
        "read": [[n, slice_nbytes, us] for n, us in zip(sizes, read, strict=True)],
        "write": [[n, slice_nbytes, us] for n, us in zip(sizes, write, strict=True)],
        "both": [[n, slice_nbytes, r, w] for n, r, w in both],
    }


def _half(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    half = document.get(name)
    if not isinstance(half, dict):
        raise ProfileError(f"the profile has no {name}; run `tutti profile` again to complete it")
    return half


def _positive(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ProfileError(f"{name} is {value!r} in the profile; it must be an integer above 0")
    return value


def _check_bandwidth(name: str, rows: list[list[float]]) -> None:
    for nbytes, slice_nbytes, time_us, *_ in rows:
        if nbytes / time_us / 1e3 > _GB_PER_S_MAX:
            raise ProfileError(
                f"{name} of {nbytes} bytes in slices of {slice_nbytes} takes {time_us} us in the"
                f" profile, which is faster than {_GB_PER_S_MAX:g} GB/s; measure it again"
            )


def _engine_times(engines: object) -> dict[str, dict[str, float]]:
    """Times by tier and engine; a profile of a machine without a GPU has none."""
    tiers: dict[str, Any] = engines if isinstance(engines, dict) else {"engines": engines}
    for tier, times in tiers.items():
        rows: list[Any] = list(times.values()) if isinstance(times, dict) else [-1]
        if not all(type(us) in (int, float) and 0 < us < math.inf for us in rows):
            raise ProfileError(f"engines has {times!r} for {tier}; times must be above 0 us")
    return tiers


def _mover_points(movers: dict[str, Any]) -> list[tuple[int, float]]:
    rows = movers.get("points")
    if not isinstance(rows, list) or not rows:
        raise ProfileError("the profile has no points of the mover; run `tutti profile` again")
    points = []
    for row in rows:
        is_pair = isinstance(row, list) and [type(v) in (int, float) for v in row] == [True] * 2
        if not is_pair or not 1 <= row[0] <= _SMS_MAX or not 0 < row[1] <= _GB_PER_S_MAX:
            raise ProfileError(f"the mover has the point {row!r}; SMs and GB/s must be above 0")
        points.append((int(row[0]), float(row[1])))
    return points
