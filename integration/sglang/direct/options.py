"""The linker's own options; those of both modes are in options.py."""

from __future__ import annotations

from tutti.integration.sglang.options import LINKER, Option
from tutti.units import MiB

_PLAIN = tuple(
    Option(name, kind, default, meaning, modes=(LINKER,), minimum=minimum)
    for name, kind, default, meaning, minimum in (
        ("min_tokens", "int", 0, "hits shorter than this are computed instead", 0),
        (
            "recompute_us_per_token",
            "float",
            0.0,
            "time to compute one token's KV; hits that take longer to load are computed instead "
            "(0: every hit is loaded)",
            0,
        ),
        (
            "max_load_tokens",
            "int",
            0,
            "at most so many tokens are loaded for one batch, the rest is computed (0: no limit)",
            0,
        ),
        (
            "max_load_ms",
            "float",
            0.0,
            "a look-up answers no more than the SSD brings in this time, by past loads, and what "
            "was read ahead (0: no limit)",
            0,
        ),
        (
            "read_ahead_share",
            "float",
            0.5,
            "share of load_staging that may be filled for requests that still wait (0: none)",
            0,
        ),
        (
            "sidecar_capacity",
            "size",
            None,
            "size of each pool of states beside the KV (sliding windows, Mamba), over all ranks; "
            "default: an eighth of capacity",
            None,
        ),
        ("pin_lookups", "int", 256, "for how many later look-ups a found page is kept", 1),
        ("pin_share", "float", 0.5, "share of the pool that found pages may keep", 0),
        (
            "backlog_share",
            "float",
            0.25,
            "share of each pool's pages that may wait for the SSD before they are copied out",
            0,
        ),
        (
            "load_staging",
            "size",
            256 * MiB,
            "memory that loads go through; larger ones bypass it",
            None,
        ),
        ("store_staging", "size", 256 * MiB, "memory for pages copied out of SGLang's pool", None),
        (
            "profile",
            "str",
            None,
            "file that `tutti profile` wrote: writes then yield to reads as it says; default: both "
            "go at once",
            None,
        ),
        ("load_timeout_s", "float", 60.0, "after how long a batch's load has failed", 0.001),
        ("breaker_failures", "int", 3, "failures in a row after which the SSD is not asked", 1),
        ("breaker_pause_s", "float", 5.0, "time between probes of an SSD that failed", 0.001),
        ("crawl_mbs", "float", 20.0, "a load slower than this (MB/s) counts as a failure", 0),
    )
)

LINKER_OPTIONS: tuple[Option, ...] = (
    *_PLAIN,
    Option(
        "page_cache_share",
        "float",
        0.0,
        "share of the memory free at the start that the page cache may use for each pool of each "
        "rank (0: direct I/O only)",
        modes=(LINKER,),
        minimum=0,
    ),
    Option(
        "gpu_mover",
        "str",
        "auto",
        "how pages in GPU memory are copied: copy-batch is one cuMemcpyBatchAsync for a layer, "
        "copy one call for each piece, kernel a kernel on as many multiprocessors as profile says; "
        "auto: the better of the first two that the driver has",
        modes=(LINKER,),
        choices=("auto", "copy-batch", "copy", "kernel"),
    ),
)
