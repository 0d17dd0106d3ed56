"""The KV of one page: its layers, its segments, and the fingerprint that identifies all of it.

A layout's numbers become addresses in tutti/medium/geometry.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from typing import TypedDict, Unpack

import xxhash

from tutti.errors import ConfigError, LayoutError
from tutti.medium.geometry import (
    FORMAT_VERSION,
    LAYERS_MAX,
    LAYOUT_JSON_NBYTES_MAX,
    SEGMENT_NBYTES_MAX,
    SEGMENTS_MAX,
)

NUMBER_MAX = 2**53  # beyond it, readers of JSON in other languages round

ITEMSIZE_NBYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}


class LayoutIdentity(TypedDict, total=False):
    """Identity of the KV; see the attributes of `KVLayout`."""

    model: str | None
    weights: str
    rank: int
    world: int


@dataclass(frozen=True)
class KVLayout:
    """The geometry and identity of one page's KV.

    Two layouts are interchangeable exactly when all fields are equal; `fingerprint` is the digest
    of them. Build one with `mha`, `gqa`, `mla`, or directly for other shapes. All of these raise
    LayoutError or ConfigError for values that are not supported.

    Attributes:
        layers: layers that are moved one by one; 1 for token-major memory.
        segments: bytes of each contiguous fragment of one page in one layer (at most 4).
        page_size: tokens in a page.
        dtype: element type, a key of ITEMSIZE_NBYTES.
        kind: "mha", "mla", or a name of your own for other shapes.
        model_layers: layers of the model, whatever `layers` is.
        dims: the model's dimensions from which `segments` follow; used for the fingerprint only.
        order: order of the bytes inside a segment; used for the fingerprint only.
        model, weights: name of the model, version of its weights.  A new pool needs a model, since
            pages of another model with the same shape would match; None allows that.
        rank, world: number of this rank and of all ranks, over all kinds of parallelism.
    """

    layers: int
    segments: tuple[int, ...]
    page_size: int
    dtype: str
    kind: str
    model_layers: int
    dims: tuple[int, ...] = ()
    order: str = "layer_first"
    model: str | None = ""
    weights: str = ""
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "model_layers", "page_size", "world"):
            _require_positive(name, getattr(self, name))
        for name in ("dtype", "kind", "order", "model", "weights"):
            if name == "model" and self.model is None:
                continue
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a string")
        _check_numbers(self)
        itemsize_nbytes(self.dtype)
        if len(self.to_json()) > LAYOUT_JSON_NBYTES_MAX:
            raise ConfigError(
                f"the layout's JSON has {len(self.to_json())} bytes, {LAYOUT_JSON_NBYTES_MAX} fit"
                " into a superblock; shorten the names of model and weights (a digest will do)"
            )

    @classmethod
    def mha(
        cls,
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: str,
        *,
        v_head_dim: int | None = None,
        **identity: Unpack[LayoutIdentity],
    ) -> KVLayout:
        """K and V: two segments of page_size * kv_heads * head_dim elements.

        `kv_heads` counts the KV heads of this rank. V may have another head size.  identity: model,
        weights, rank and world.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        _require_positives(kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
        _require_positive("page_size", page_size)
        head_nbytes = page_size * kv_heads * itemsize_nbytes(dtype)
        return cls(
            layers=layers,
            segments=(head_nbytes * head_dim, head_nbytes * v_head_dim),
            page_size=page_size,
            dtype=dtype,
            kind="mha",
            model_layers=layers,
            dims=(kv_heads, head_dim, v_head_dim),
            **identity,
        )

    @classmethod
    def gqa(
        cls,
        layers: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: str,
        **identity: Unpack[LayoutIdentity],
    ) -> KVLayout:
        """As `mha` with the number of KV heads; `q_heads` must be a multiple of it.

        The KV does not depend on the query heads, so both constructors give equal layouts.
        """
        _require_positives(q_heads=q_heads, kv_heads=kv_heads)
        if q_heads % kv_heads:
            raise LayoutError(
                f"{q_heads} query heads cannot share {kv_heads} KV heads evenly;"
                " check the model's config"
            )
        return cls.mha(layers, kv_heads, head_dim, page_size, dtype, **identity)

    @classmethod
    def mla(
        cls,
        layers: int,
        kv_lora_rank: int,
        rope_dim: int,
        page_size: int,
        dtype: str,
        **identity: Unpack[LayoutIdentity],
    ) -> KVLayout:
        """The latent: one segment of page_size * (kv_lora_rank + rope_dim) elements."""
        _require_positives(kv_lora_rank=kv_lora_rank, rope_dim=rope_dim, page_size=page_size)
        return cls(
            layers=layers,
            segments=(page_size * (kv_lora_rank + rope_dim) * itemsize_nbytes(dtype),),
            page_size=page_size,
            dtype=dtype,
            kind="mla",
            model_layers=layers,
            dims=(kv_lora_rank, rope_dim),
            **identity,
        )

    def token_major(self, order: str = "page_first") -> KVLayout:
        """The same KV with all layers of a page in one blob per segment, so that `layers` is 1.

        `order` names the order of the bytes inside a blob. Pools of different orders never match.
        Raises LayoutError for a layout that is not by layers.
        """
        if self.layers != self.model_layers:
            raise LayoutError(
                f"token_major() needs a layout by layers, this one has {self.layers} of"
                f" {self.model_layers}; call it on the result of mha, gqa or mla"
            )
        blobs = tuple(nbytes * self.layers for nbytes in self.segments)
        return replace(self, layers=1, segments=blobs, order=order)

    def check_model(self) -> None:
        """Raises ConfigError if `model` is empty: neither a name nor None was given."""
        if self.model == "":
            raise ConfigError(
                "the layout names no model, so pages of another model with this shape would match;"
                " pass model= and weights= to KVLayout, or model=None to accept that"
            )

    @property
    def slice_nbytes(self) -> int:
        """Payload of one page in one layer."""
        return sum(self.segments)

    @property
    def object_nbytes(self) -> int:
        """Payload of one page over all layers."""
        return self.layers * self.slice_nbytes

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes: XXH3-128 of `to_json()`, canonical byte order."""
        return xxhash.xxh3_128_digest(self.to_json().encode("ascii"))

    def to_json(self) -> str:
        """Canonical JSON: ASCII, sorted keys, no spaces; stored in the superblock."""
        content = {"format": FORMAT_VERSION, **asdict(self)}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> KVLayout:
        """The layout that `to_json` wrote. Raises ConfigError for anything else."""
        try:
            content = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the layout is not JSON ({error}); the superblock or file that held it is damaged"
            ) from error
        names = {"format", *(field.name for field in fields(cls))}
        if not isinstance(content, dict) or set(content) != names:
            raise ConfigError(f"the layout's JSON must be an object with exactly {sorted(names)}")
        version = content.pop("format")
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"layout format {version!r}, this version reads {FORMAT_VERSION}; format a new pool"
            )
        for name in ("segments", "dims"):
            if not isinstance(content[name], list):
                raise ConfigError(f"{name} in the layout's JSON must be a list of integers")
            content[name] = tuple(content[name])
        return cls(**content)


#: Shapes by name, as functions of (page_size, dtype). From the config.json of the models' cards on
#: huggingface.co: num_hidden_layers, num_key_value_heads and head_dim (hidden_size over
#: num_attention_heads where it is not given); for MLA kv_lora_rank and qk_rope_head_dim.
MODELS: dict[str, Callable[[int, str], KVLayout]] = {
    "llama-3.1-8b": partial(KVLayout.mha, 32, 8, 128),  # meta-llama/Llama-3.1-8B
    "llama-3.1-70b": partial(KVLayout.mha, 80, 8, 128),  # meta-llama/Llama-3.1-70B
    "qwen3-32b": partial(KVLayout.mha, 64, 8, 128),  # Qwen/Qwen3-32B
    "deepseek-v3": partial(KVLayout.mla, 61, 512, 64),  # deepseek-ai/DeepSeek-V3
    "tiny": partial(KVLayout.mha, 4, 2, 64),  # no model: for tries and tests
}


def differences(pool: KVLayout, asked: KVLayout) -> str:
    """The fields in which two layouts differ: "dtype is 'float16', not 'bfloat16'"."""
    found = [
        f"{field.name} is {getattr(pool, field.name)!r}, not {getattr(asked, field.name)!r}"
        for field in fields(pool)
        if getattr(pool, field.name) != getattr(asked, field.name)
    ]
    return "; ".join(found)


def itemsize_nbytes(dtype: str) -> int:
    """Bytes of one element; raises LayoutError for a type that is not in ITEMSIZE_NBYTES."""
    try:
        return ITEMSIZE_NBYTES[dtype]
    except (KeyError, TypeError):
        raise LayoutError(
            f"dtype {dtype!r} is not supported; use one of {', '.join(ITEMSIZE_NBYTES)}"
        ) from None


def _check_numbers(layout: KVLayout) -> None:
    if layout.layers > LAYERS_MAX:
        raise LayoutError(
            f"{layout.layers} layers, a slot record holds {LAYERS_MAX};"
            " use token_major() or split the model"
        )
    if not isinstance(layout.segments, tuple) or not 1 <= len(layout.segments) <= SEGMENTS_MAX:
        raise LayoutError(
            f"segments is {layout.segments!r}; pass a tuple of 1 to {SEGMENTS_MAX} byte sizes"
        )
    for i, nbytes in enumerate(layout.segments):
        _require_positive(f"segments[{i}]", nbytes)
        if nbytes > SEGMENT_NBYTES_MAX:
            raise LayoutError(
                f"segments[{i}] has {nbytes} bytes, at most {SEGMENT_NBYTES_MAX};"
                " choose smaller pages"
            )
    if not isinstance(layout.dims, tuple):
        raise LayoutError(f"dims is {layout.dims!r}; pass a tuple of integers")
    for i, dim in enumerate(layout.dims):
        _require_positive(f"dims[{i}]", dim)
    if type(layout.rank) is not int or not 0 <= layout.rank < layout.world:
        raise ConfigError(
            f"rank {layout.rank!r} is not between 0 and world - 1 = {layout.world - 1}"
        )


def _require_positive(name: str, value: object) -> None:
    if type(value) is not int or not 0 < value <= NUMBER_MAX:
        raise LayoutError(f"{name} is {value!r}; it must be a positive integer, at most 2^53")


def _require_positives(**values: object) -> None:
    for name, value in values.items():
        _require_positive(name, value)
