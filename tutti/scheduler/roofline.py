"""Estimates of what cannot be measured here: compute by a roofline, drives by published figures.

Everything in this file is an estimate, and profiles that use it are marked so.  The times of
prefill and decode are a fit to the kernel tables of AIConfigurator 0.12 for Llama-3.1-8B in BF16
(at most 4.3 % off for full prefills of 4K to 128K tokens, 7.7 % for 512 new tokens):

    prefill(n new, p cached) = n a + n (p + n / 2) b        decode = c + d (sum of contexts)

a grows with the parameters, b with layers times attention width, c with the weights to read and d
with the KV bytes of a token; that scaling to other models is arithmetic, not a fit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tutti.errors import ConfigError
from tutti.medium.layout import MODELS


@dataclass(frozen=True)
class ModelShape:
    """What the time of a model depends on.

    attention_width: query heads times head size.  kv_nbytes_per_token: of all layers.
    weight_nbytes: read in every decode step.
    """

    name: str
    layers: int
    parameters: float
    attention_width: int
    kv_nbytes_per_token: int
    weight_nbytes: float

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that no model has."""
        numbers = asdict(self)
        for name, value in numbers.items():
            if name != "name" and not 0 < value < 1e15:
                raise ConfigError(f"a model with {name}={value}; pass a positive number")

    @property
    def slice_nbytes_per_token(self) -> int:
        """KV bytes of a token in one layer."""
        return max(1, self.kv_nbytes_per_token // self.layers)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _dense(name: str, parameters: float, attention_width: int, weight_nbytes: float) -> ModelShape:
    token = MODELS[name](1, "bfloat16")
    return ModelShape(
        name, token.layers, parameters, attention_width, token.object_nbytes, weight_nbytes
    )


#: Models whose times the fit can estimate, by their published configurations.
DENSE_MODELS = {
    model.name: model
    for model in (
        _dense("llama-3.1-8b", 8.03e9, 4096, 16.06e9),
        _dense("llama-3.1-70b", 70.6e9, 8192, 141.2e9),
        _dense("qwen3-32b", 32.8e9, 8192, 65.5e9),
    )
}
_FITTED = DENSE_MODELS["llama-3.1-8b"]


@dataclass(frozen=True)
class GpuRoofline:
    """One GPU and the fitted model.

    token_us, pair_ns: a and b above.  hbm_gb_per_s, sms: the vendor's data sheet.
    """

    name: str
    token_us: float
    pair_ns: float
    hbm_gb_per_s: float
    sms: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuRoofline("H100", 21.2, 0.862, 3350.0, 132),
        GpuRoofline("H200", 21.1, 0.899, 4800.0, 132),
        GpuRoofline("A100", 61.6, 2.59, 2039.0, 108),
    )
}
#: c and d, fitted on the H100; decode is bound by HBM, so other GPUs are scaled by its bandwidth.
_DECODE_US, _DECODE_CONTEXT_US, _DECODE_FITTED = 6500.0, 0.0425, GPUS["H100"]

#: An SM keeps at most 2048 threads with 16 bytes each in flight, and a read over PCIe takes about
#: a microsecond and a half: bytes in flight over round trip (Little's law).
_SM_INFLIGHT_NBYTES = 2048 * 16
_PCIE_ROUND_TRIP_US = 1.5
#: Host to device, PCIe 5 x16: 50 GB/s in the testbed of the Tutti paper (arXiv 2605.03375).
LINK_GB_PER_S = 50.0


class Roofline:
    """Times of a model on a GPU, in microseconds."""

    def __init__(self, gpu: GpuRoofline, model: ModelShape) -> None:
        widths = model.layers * model.attention_width / (_FITTED.layers * _FITTED.attention_width)
        self._token_us = gpu.token_us * model.parameters / _FITTED.parameters / model.layers
        self._pair_us = gpu.pair_ns * 1e-3 * widths / model.layers
        slower = _DECODE_FITTED.hbm_gb_per_s / gpu.hbm_gb_per_s
        self._step_us = slower * _DECODE_US * model.weight_nbytes / _FITTED.weight_nbytes
        kv_nbytes = model.kv_nbytes_per_token / _FITTED.kv_nbytes_per_token
        self._context_us = slower * _DECODE_CONTEXT_US * kv_nbytes

    def layer_us(self, new_tokens: float, prefix_tokens: float) -> float:
        """One layer of a prefill."""
        pairs = new_tokens * (prefix_tokens + new_tokens / 2)
        return new_tokens * self._token_us + pairs * self._pair_us

    def decode_us(self, context_tokens: float) -> float:
        """One decode step of all layers; contexts summed over the batch."""
        return self._step_us + self._context_us * context_tokens


def mover_gb_per_s(sms: int) -> float:
    """Speed of a copy kernel on so many SMs from host memory, at most the link's."""
    return min(LINK_GB_PER_S, sms * _SM_INFLIGHT_NBYTES / _PCIE_ROUND_TRIP_US / 1e3)


@dataclass(frozen=True)
class AssumedDrive:
    """A medium that was not measured.  fixed_us: of one command.

    interference: how many times as long a transfer takes while the other direction is busy.
    """

    name: str
    read_gb_per_s: float
    write_gb_per_s: float
    fixed_us: float
    interference: float


#: Half of the two drives of the Tutti paper: 29 GB/s read, 12 GB/s written, and 60 % of the
#: bandwidth lost with both at once.  The fixed time is a device's latency of a 128 KiB read.
PAPER_DRIVE = AssumedDrive("one drive of the Tutti paper", 14.5, 6.0, 100.0, 2.5)
