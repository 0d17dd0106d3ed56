"""SGLang's KV pools in CPU memory as Tutti sees them: numbered pages of one layout.

What is not supported is refused at start, by a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti.errors import Unsupported
from tutti.host_pool import HostPool
from tutti.integration.sglang import linker_adapter as adapter
from tutti.integration.sglang.identity import Shape
from tutti.layout import KVLayout

Pages = npt.NDArray[np.int64]
Views = list[list[npt.NDArray[np.uint8]]]

_HICACHE = "serve this model in Tutti's HiCache mode instead"


class EnginePool:
    """The KV pool of one rank.

    tensors: one contiguous tensor (tokens, ...) per layer and segment, pages one after another.
    views: the same memory, uint8 (pages, segment_nbytes), as ``views[layer][segment]``.
    """

    def __init__(
        self,
        kind: str,
        tensors: Sequence[Sequence[torch.Tensor]],
        page_size: int,
        *,
        dtype: str,
        first_layer: int = 0,
        dims: Sequence[int] = (),
    ) -> None:
        self.tensors = tensors
        self.page_size = page_size
        self.pages = tensors[0][0].shape[0] // page_size
        self.views: Views = [[_as_pages(tensor, page_size) for tensor in row] for row in tensors]
        self.shape = Shape(
            pool="kv",
            kind=kind,
            layers=len(tensors),
            model_layers=len(tensors),
            first_layer=first_layer,
            segments=tuple(view.shape[1] for view in self.views[0]),
            page_size=page_size,
            dtype=dtype,
            order="layer_first",
            dims=tuple(dims),
        )

    @property
    def replicated(self) -> bool:
        """Whether all TP ranks hold the same KV."""
        return self.shape.kind == "mla"

    def host_pool(self, layout: KVLayout) -> HostPool:
        """The same memory for ObjectStore.register."""
        return HostPool.from_layers(layout, self.tensors, self.pages)

    def page_numbers(self, indices: torch.Tensor | None, pages: int) -> Pages | None:
        """Page numbers of the token slots of ``pages`` whole pages; None for anything else."""
        if indices is None or indices.numel() != pages * self.page_size:
            return None
        slots = indices.detach().to("cpu", torch.int64).numpy().reshape(pages, self.page_size)
        first = slots[:, 0]
        if (first % self.page_size).any() or (first < 0).any():
            return None
        if (slots != first[:, None] + np.arange(self.page_size)).any():
            return None
        numbers: Pages = first // self.page_size
        return numbers if not pages or numbers.max() < self.pages else None


def engine_pool(params: Any, components: Collection[Any]) -> EnginePool:
    """The pool behind CacheInitParams.  Raises Unsupported with the reason."""
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    _check_cache(params, components)
    _check_pool(kvcache, params.page_size)
    if type(kvcache) is adapter.MLATokenToKVPool:
        return EnginePool(
            "mla",
            [[buffer] for buffer in kvcache.kv_buffer],
            params.page_size,
            dtype=_dtype_name(kvcache.dtype),
            first_layer=kvcache.start_layer,
            dims=(kvcache.kv_lora_rank, kvcache.qk_rope_head_dim),
        )
    return EnginePool(
        "mha",
        list(zip(kvcache.k_buffer, kvcache.v_buffer, strict=True)),
        params.page_size,
        dtype=_dtype_name(kvcache.dtype),
        first_layer=kvcache.start_layer,
        dims=(kvcache.head_num, kvcache.head_dim, kvcache.v_head_dim),
    )


def _check_cache(params: Any, components: Collection[Any]) -> None:
    others = sorted(c.name for c in components if c != adapter.ComponentType.FULL)
    if others:
        raise Unsupported(
            f"the model keeps {', '.join(others)} state beside its full attention, which this "
            f"version's linker does not store; {_HICACHE}"
        )
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise Unsupported(
            "a speculative draft model keeps KV of its own, which this version's linker does not "
            "store; start SGLang without speculative decoding"
        )


def _check_pool(kvcache: Any, page_size: int) -> None:
    name = type(kvcache).__name__
    if type(kvcache) not in (adapter.MHATokenToKVPool, adapter.MLATokenToKVPool):
        raise Unsupported(
            f"the KV pool is a {name}; this version's linker knows the plain MHA/GQA and MLA pools "
            f"only; {_HICACHE}"
        )
    if kvcache.page_size != page_size:
        raise Unsupported(
            f"the KV pool has pages of {kvcache.page_size} tokens, the tree of {page_size}; "
            "give SGLang one --page-size"
        )
    if getattr(kvcache, "use_dsa", False) or kvcache.layer_shard_enabled:
        raise Unsupported(f"sparse or sharded latents are not supported; {_HICACHE}")
    scales = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")
    if any(getattr(kvcache, scale, None) is not None for scale in scales):
        raise Unsupported(
            "the KV cache is quantised with scales that lie beside it, which this version's linker "
            "does not store; choose a --kv-cache-dtype without scales"
        )
    layout = getattr(kvcache, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise Unsupported(f"the KV pool has the memory layout {layout!r}; only 'nhd' is supported")
    device = torch.device(kvcache.device)
    if device.type != "cpu":
        raise Unsupported(
            f"the KV pool is in {device.type} memory; this version's linker moves KV of pools in "
            f"CPU memory only; {_HICACHE}"
        )


def _as_pages(tensor: torch.Tensor, page_size: int) -> npt.NDArray[np.uint8]:
    """uint8 (pages, nbytes) over the whole pages of a contiguous tensor (tokens, ...)."""
    pages = tensor.shape[0] // page_size
    view: npt.NDArray[np.uint8] = tensor[: pages * page_size].view(torch.uint8).numpy()
    return view.reshape(pages, -1)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
