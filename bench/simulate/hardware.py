"""Drives, GPUs and the model that `tutti bench slack` simulates, and profiles made of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tutti.errors import ConfigError

_FILE = Path(__file__).with_name("hardware.json")


@dataclass(frozen=True)
class SimulatedDrive:
    """A medium: bytes per second, and the factor on transfers during the other direction."""

    name: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_us: float
    interference: float
    source: str


@dataclass(frozen=True)
class SimulatedGpu:
    """Times of a model on a GPU: n new tokens after p take n * token_us + n * (p + n/2) * pair_ns.

    memory_bytes_per_s: memory bandwidth; transfers during a decode step use a part of it.
    """

    name: str
    token_us: float
    pair_ns: float
    decode_base_ms: float
    decode_token_ns: float
    memory_bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Model:
    """The KV of a model: bytes per token over all layers, and tokens per page."""

    layers: int
    token_nbytes: int
    page_tokens: int
    source: str

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page over all layers."""
        return self.page_tokens * self.token_nbytes


@dataclass(frozen=True)
class SimulatedMachine:
    """Everything that determines times.  Implements scheduler.request.Profile.

    compute, read, write: factors on the times; 1 is correct, others give a wrong profile.
    """

    drive: SimulatedDrive
    gpu: SimulatedGpu
    model: Model
    compute: float = 1.0
    read: float = 1.0
    write: float = 1.0

    @property
    def interference(self) -> float:
        return self.drive.interference

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        gpu, n = self.gpu, new_tokens
        whole_us = n * gpu.token_us + n * (prefix_tokens + n / 2) * gpu.pair_ns / 1e3
        return self.compute * whole_us / self.model.layers

    def decode_us(self, batch: int, context_tokens: int) -> float:
        gpu = self.gpu
        return self.compute * (
            gpu.decode_base_ms * 1e3 + gpu.decode_token_ns * context_tokens / 1e3
        )

    def read_us(self, nbytes: int) -> float:
        return self.read * (nbytes / self.drive.read_bytes_per_s * 1e6 + self.drive.latency_us)

    def write_us(self, nbytes: int) -> float:
        return self.write * (nbytes / self.drive.write_bytes_per_s * 1e6 + self.drive.latency_us)


@cache
def _values() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(_FILE.read_text())
    return values


def drive_names() -> list[str]:
    return list(_values()["drives"])


def gpu_names() -> list[str]:
    return list(_values()["gpus"])


def machine(drive: str, gpu: str) -> SimulatedMachine:
    """The true times of a drive and a GPU.  Raises ConfigError for an unknown name."""
    values = _values()
    for kind, name in (("drives", drive), ("gpus", gpu)):
        if name not in values[kind]:
            known = ", ".join(values[kind])
            raise ConfigError(f"the parameters of {name!r} are unknown; use one of {known}")
    return SimulatedMachine(
        SimulatedDrive(drive, **values["drives"][drive]),
        SimulatedGpu(gpu, **values["gpus"][gpu]),
        Model(**values["model"]),
    )


def copy_bytes_per_s() -> float:
    """Speed of copies from SGLang's memory to staging."""
    return float(_values()["copy_bytes_per_s"])
