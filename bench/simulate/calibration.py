"""Parameters of `tutti simulate`: read from a file, checked, and made into times.

Compute comes from the scheduler's roofline or from a profile, drives from the list that
`tutti bench slack` uses; this file adds servers, systems and capacities.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tutti.base.checks import open_regular
from tutti.bench.simulate.hardware import SimulatedDrive, machine
from tutti.errors import ConfigError
from tutti.scheduler.loads_and_writes import Profile
from tutti.scheduler.profile import TableProfile
from tutti.scheduler.roofline import DENSE_MODELS, GPUS, GpuRoofline, ModelShape, Roofline

FILE = Path(__file__).with_name("calibration.json")
TIERS = ("none", "dram", "ssd")
POLICIES = ("immediate", "slack")
_WAYS = {"whole": False, "layers": True}
_NBYTES_MAX = 1 << 20
_VALUE_MAX = 1e18
_POSITIVE = ("gpu_scale", "chunk_tokens", "io_nbytes", "requests", "token_scale")

_Record = TypeVar("_Record", bound="ServerParameters | StorageSystem | Sent")
_Known = TypeVar("_Known")


@dataclass(frozen=True)
class ServerParameters:
    """An inference server.  gpu_scale: factor on the roofline's compute.  chunk_tokens: per step.

    base_share: share of a step in which the GPU waits even if everything is in its memory.
    mixed: running requests decode within prefill steps, which take mixed_ms longer; else they wait.
    """

    gpu_scale: float
    base_share: float
    chunk_tokens: int
    mixed: bool
    mixed_ms: float
    fitted: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class StorageSystem:
    """A store below the server's own cache.

    layerwise: a layer computes once it has arrived; else all layers must have.  read_ahead_nbytes:
    limit of loads whose step has not begun; 0 for none.  submit_*_us: per I/O of io_nbytes, by one
    thread.  fixed_us: per load.
    """

    tier: str
    layerwise: bool
    policy: str
    read_ahead_nbytes: int
    io_nbytes: int
    submit_read_us: float
    submit_write_us: float
    fixed_us: float
    fitted: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Sent:
    """Assumptions on how the paper's clients sent a data set.

    tasks: empty for all.  token_scale: factor on the tokens in the data set's table.
    """

    order: str
    requests: int
    tasks: tuple[str, ...]
    token_scale: float
    fitted: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Calibration:
    """All parameters that determine times; capacities are per server."""

    model: ModelShape
    page_tokens: int
    link_bytes_per_s: float
    hbm_tokens: int
    dram_nbytes: float
    ssd_nbytes: float
    servers: dict[str, ServerParameters]
    systems: dict[str, StorageSystem]
    workloads: dict[str, Sent]

    @property
    def page_nbytes(self) -> int:
        """A page over all layers."""
        return self.page_tokens * self.model.kv_nbytes_per_token

    def with_value(self, kind: str, name: str, value: str, number: float) -> Calibration:
        """A copy with one value changed.  kind: servers, systems or workloads."""
        records = dict(getattr(self, kind))
        records[name] = replace(records[name], **{value: number})
        changed: dict[str, Any] = {kind: records}
        return replace(self, **changed)

    def server(self, name: str) -> ServerParameters:
        """Raises ConfigError for a name that is not known."""
        return _named(self.servers, name, "server")

    def system(self, name: str) -> StorageSystem:
        """A system by its name; the suffix -whole or -layers changes what it waits for.

        Raises ConfigError for an unknown name, or a system that loads nothing.
        """
        first, _, way = name.rpartition("-")
        if name in self.systems or way not in _WAYS:
            return _named(self.systems, name, "system")
        found = _named(self.systems, first, "system")
        if found.tier == "none":
            raise ConfigError(f"{first} loads nothing, so {name!r} does not exist; use {first}")
        return replace(found, layerwise=_WAYS[way])


def load_calibration(path: Path = FILE) -> Calibration:
    """Reads a calibration.  Raises ConfigError for any invalid file."""
    try:
        with open_regular(path) as file:
            content = file.read(_NBYTES_MAX + 1)
        values = json.loads(content[:_NBYTES_MAX])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read the calibration {path.name}: {error}; copy the one that is installed"
        ) from error
    try:
        return _calibration(values)
    except KeyError as error:
        raise ConfigError(f"the calibration {path.name} lacks {error}; add it") from error
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"the calibration {path.name} has another form ({error}); copy the installed one"
        ) from error


def drive_of(name: str) -> SimulatedDrive:
    """A drive of the list.  Raises ConfigError for a name that is not known."""
    return machine(name, "H100").drive


def gpu_of(name: str) -> GpuRoofline:
    """Raises ConfigError for a name that is not known."""
    return _named(GPUS, name, "GPU")


class ServerTimes:
    """Times of one idle server, as a `Profile` for the scheduler.

    profile: measured compute and drive, which replace the roofline and the listed drive.
    """

    def __init__(
        self,
        calibration: Calibration,
        server: ServerParameters,
        system: StorageSystem,
        *,
        gpu: GpuRoofline,
        drive: SimulatedDrive,
        profile: TableProfile | None = None,
    ) -> None:
        self.calibration, self.server, self.system = calibration, server, system
        self.drive = _measured_drive(profile) if profile else drive
        self._roofline = Roofline(gpu, calibration.model)
        self._gpu_scale = server.gpu_scale / (1 - server.base_share)
        self._compute: Profile | None = profile
        self._link = calibration.link_bytes_per_s
        on_ssd = system.tier == "ssd"
        self._read = min(self._link, self.drive.read_bytes_per_s) if on_ssd else self._link
        self._write = min(self._link, self.drive.write_bytes_per_s) if on_ssd else self._link
        self._latency_us = self.drive.latency_us if on_ssd else 0.0

    @property
    def interference(self) -> float:
        """See Profile; links are full duplex."""
        return self.drive.interference if self.system.tier == "ssd" else 1.0

    @property
    def latency_us(self) -> float:
        """Latency of every transfer, in microseconds."""
        return self._latency_us

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        if self._compute is not None:
            return self._compute.layer_us(new_tokens, prefix_tokens)
        return self._gpu_scale * self._roofline.layer_us(new_tokens, prefix_tokens)

    def decode_us(self, batch: int, context_tokens: int) -> float:
        """See Profile.  Decode is not scaled, because no factor is published."""
        if self._compute is not None:
            return self._compute.decode_us(batch, context_tokens)
        return self._roofline.decode_us(context_tokens)

    def submit_us(self, nbytes: int, *, write: bool) -> float:
        """Time of the submitting thread for a transfer, in microseconds."""
        system = self.system
        one_us = system.submit_write_us if write else system.submit_read_us
        return -(-nbytes // system.io_nbytes) * one_us

    def read_us(self, nbytes: int) -> float:
        """See Profile: the slowest of thread, link and medium."""
        moved_us = max(self.submit_us(nbytes, write=False), nbytes / self._read * 1e6)
        return self._latency_us + moved_us

    def write_us(self, nbytes: int) -> float:
        moved_us = max(self.submit_us(nbytes, write=True), nbytes / self._write * 1e6)
        return self._latency_us + moved_us


def _measured_drive(profile: TableProfile) -> SimulatedDrive:
    largest = 1 << 30
    write = largest / profile.write_us(largest) * 1e6
    return SimulatedDrive(
        name="profile",
        read_bytes_per_s=profile.read_gb_per_s * 1e9,
        write_bytes_per_s=write,
        latency_us=profile.read_us(1),
        interference=profile.interference,
        source="a profile of this project",
    )


def _named(known: Mapping[str, _Known], name: str, what: str) -> _Known:
    if name not in known:
        raise ConfigError(f"the {what} {name!r} does not exist; use one of {', '.join(known)}")
    return known[name]


def _calibration(values: dict[str, Any]) -> Calibration:
    capacity = values["capacity"]
    model = _named(DENSE_MODELS, values["model"], "model")
    for owner in (values["link"], capacity):
        _check_source(owner)
    found = Calibration(
        model=model,
        page_tokens=int(_number("page_tokens", values["page_tokens"], above=0)),
        link_bytes_per_s=_number("link", values["link"]["bytes_per_s"], above=0),
        hbm_tokens=int(_number("hbm_tokens", capacity["hbm_tokens"], above=0)),
        dram_nbytes=_number("dram_nbytes", capacity["dram_nbytes"], above=0),
        ssd_nbytes=_number("ssd_nbytes", capacity["ssd_nbytes"], above=0),
        servers={name: _record(ServerParameters, name, v) for name, v in values["servers"].items()},
        systems={name: _record(StorageSystem, name, v) for name, v in values["systems"].items()},
        workloads={name: _record(Sent, name, v) for name, v in values["workloads"].items()},
    )
    for name, server in found.servers.items():
        if server.base_share >= 1:
            raise ConfigError(f"{name}: base_share is a share of a step, below 1")
    for name, system in found.systems.items():
        if system.tier not in TIERS or system.policy not in POLICIES:
            raise ConfigError(
                f"{name}: the tier is one of {', '.join(TIERS)}, the policy of "
                f"{', '.join(POLICIES)}"
            )
    return found


def _record(kind: type[_Record], name: str, values: dict[str, Any]) -> _Record:
    _check_source(values)
    found: dict[str, Any] = {}
    for one in fields(kind):
        value = values[one.name]
        if one.name in ("fitted", "tasks"):
            value = tuple(value)
        elif one.type in ("int", "float"):
            above = 0 if one.name in _POSITIVE else -1
            value = _number(f"{name}.{one.name}", value, above=above)
            value = int(value) if one.type == "int" else max(0.0, value)
        found[one.name] = value
    return kind(**found)


def _number(name: str, value: object, *, above: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r} in the calibration; give a number")
    if not (value >= 0 and value > above and value < _VALUE_MAX):
        raise ConfigError(f"{name} is {value} in the calibration; give a positive number")
    return float(value)


def _check_source(values: dict[str, Any]) -> None:
    if not values.get("source"):
        raise ConfigError("a part of the calibration has no source; say where its numbers are from")
