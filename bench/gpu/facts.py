"""Reads the facts of the measured GPU from nvidia-smi; changes no setting."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

#: Constant fields, then changing ones, of `nvidia-smi --help-query-gpu`.
_STATIC = (
    *("name", "driver_version", "memory.total", "vbios_version", "ecc.mode.current"),
    *("mig.mode.current", "compute_mode", "persistence_mode", "power.limit"),
    *("clocks.max.sm", "clocks.max.mem", "clocks.applications.graphics"),
    *("pcie.link.gen.max", "pcie.link.width.max"),
)
_MOVING = (
    *("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "pstate"),
    *("pcie.link.gen.current", "pcie.link.width.current", "clocks_event_reasons.active"),
)
_NODES = Path("/sys/devices/system/node")


def describe_gpu() -> dict[str, str]:
    """GPU, driver, limits and clocks; "not known" has the reason for missing ones."""
    return _query(_STATIC) | _query(_MOVING)


def clocks() -> dict[str, str]:
    """Current clocks, temperature, power, and reasons of throttling."""
    return _query(_MOVING)


def describe_host(gpu_node: int | None) -> dict[str, str]:
    """Properties of the host that affect pinned memory's speed.  gpu_node: the GPU's NUMA node."""
    nodes = len(list(_NODES.glob("node[0-9]*")))
    return {
        "numa_nodes": str(nodes or "unknown"),
        "gpu_numa_node": "unknown" if gpu_node is None else str(gpu_node),
        "processors": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default"),
    }


def _query(fields: tuple[str, ...]) -> dict[str, str]:
    """Values by field.  A driver refuses a query with an unknown field: then queries one by one."""
    try:
        return _ask(fields)
    except FileNotFoundError:
        return {"not known": "nvidia-smi is not installed"}
    except (OSError, subprocess.SubprocessError) as error:
        if len(fields) == 1 or isinstance(error, subprocess.TimeoutExpired):
            return {"not known": f"nvidia-smi: {type(error).__name__}"}
    found: dict[str, str] = {}
    for field in fields:
        found |= {k: v for k, v in _query((field,)).items() if k == field}
    return found or {"not known": "nvidia-smi answers nothing"}


def _ask(fields: tuple[str, ...]) -> dict[str, str]:
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    values = done.stdout.strip().splitlines()[0].split(", ")
    return dict(zip(fields, values, strict=True))
