"""Measures storing and loading in a pool: GB/s (10^9 bytes), latencies, CPU time, run lengths.

Phases: `store` puts new objects, evicting once the pool is full; `retrieve` looks up and loads
batches in random order; `layerwise` loads one long prefix and waits for layer after layer; `mixed`
stores and retrieves at once. Files are accessed by direct I/O if possible, so that the page cache
has no influence; the result notes where it is not. The last loads are compared byte by byte. The
pools are files, which are removed at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tutti.arguments import PAGE_SIZE, above_zero, natural, positive
from tutti.base.terminal import ProgressFactory
from tutti.base.units import GiB, parse_nbytes
from tutti.bench import pool_file
from tutti.bench.environment import describe
from tutti.bench.gpu.rig import facts_of
from tutti.bench.gpu_memory import ENGINES, DevicePool, open_gpu
from tutti.bench.pool_workload import Limit, PoolWorkload
from tutti.bench.shape import KvPageShape, parse_shape
from tutti.bench.writable import options
from tutti.errors import ConfigError
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.driver import Driver
from tutti.memory.device_memory import DeviceMemory
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

HEAD = ("object", "memory", "phase", "GB/s", "p50 ms", "p99 ms", "CPU-s/GB", "run", "note")
PHASES = ("store", "retrieve", "layerwise", "mixed")
SHAPES = ("32x256KiB", "64x128KiB", "8x32KiB", "1x256KiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pool_file.add_pool_arguments(parser)
    option = options(parser)
    option("--shapes LxSLICE", list(SHAPES), "shape of an object: layers x slice")
    what = "phases: puts, loads, one prefix layer by layer, puts with loads (default: all)"
    option("--phases", list(PHASES), what, PHASES)
    option("--capacity", "2GiB", "size of the pool")
    duration = parser.add_mutually_exclusive_group()
    duration.add_argument("--seconds", type=above_zero, default=2.0, help="length of a phase")
    duration.add_argument("--gib", type=above_zero, help="GiB to move per phase, instead of a time")
    option("--batch", "32MiB", "bytes per put or load")
    option("--inflight", 4, "puts or loads in flight", positive)
    what = "store and load one prompt at a time, of these lengths; replaces --batch and"
    what += f" --inflight; a page has {PAGE_SIZE} tokens"
    option("--contexts TOKENS", None, what, positive, nargs="+")
    what = "entries of a queue pair, a power of two (default: the engine's)"
    option("--depth", None, what, positive)
    what = "memory pointers of commands (default: what the drive supports)"
    option("--pointers", None, what, ("sgl", "prp"))
    what = "length of the prefix in the phase layerwise, in pages"
    option("--prefix-pages", 1024, what, positive)
    option("--memory", "512MiB", "limit of registered memory")
    what = "store from and load into memory of GPU 0 by this engine: host (the CPU submits, copy"
    what += " engines move), launch, resident or persistent (kernels submit)"
    option("--gpu ENGINE", None, what, ENGINES)
    option("--seed", 1, "seed of the order of loads", natural)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures every shape in a pool of its own, which is removed afterwards.

    The result's `rows` have one entry per shape and phase; `wrong` counts pages with wrong bytes.
    Raises ConfigError for sizes that do not fit together, and what the store raises.
    """
    shapes = [parse_shape(text) for text in args.shapes]
    paths = pool_file.pool_paths(args, "bandwidth")
    rows: list[dict[str, Any]] = []
    medium: dict[str, Any] = {}
    wrong = 0
    with ExitStack() as stack:
        gpu = stack.enter_context(open_gpu()) if args.gpu else None
        for shape in shapes:
            with _opened(paths, shape, args, progress, gpu) as (store, memory):
                medium = pool_file.medium_facts(store)
                for context in args.contexts or (None,):
                    workload = make_workload(store, shape, args, context, memory)
                    rows += _measure(workload, shape, args, progress)
                    wrong += workload.wrong
                    if memory is None:
                        store.unregister(workload.memory)
                    store.clear(deallocate=False)  # the next one has the same keys
        if gpu is not None:
            medium["gpu"] = {"engine": args.gpu, **facts_of(gpu[0])}
    return {
        "benchmark": "bandwidth",
        "rows": rows,
        "wrong": wrong,
        "verify": args.verify,
        "durability": args.durability,
        "depth": args.depth,
        "pointers": args.pointers,
        "capacity_nbytes": parse_nbytes(args.capacity),
        **medium,
        "machine": describe(pool_file.medium_of(args)),
    }


@contextmanager
def _opened(
    paths: list[str],
    shape: KvPageShape,
    args: argparse.Namespace,
    progress: ProgressFactory,
    gpu: tuple[Driver, Modules] | None,
) -> Iterator[tuple[ObjectStore, DeviceMemory | None]]:
    """A pool for objects of a shape; on a GPU, --memory for all its workloads."""
    with ExitStack() as stack:
        device = None
        if gpu is not None:
            pages = parse_nbytes(args.memory) // shape.object_nbytes
            device = DevicePool(*gpu, args.gpu, shape.layout(), _at_least_two(pages, shape))
            stack.callback(device.close)
        store = stack.enter_context(
            pool_file.temporary_pool(
                paths,
                shape.layout(),
                parse_nbytes(args.capacity),
                config=StoreConfig(verify=args.verify, durability=args.durability),
                prewrite=args.prewrite,
                force=args.force,
                progress=progress,
                engine=_engine_options(args),
            )
        )
        yield store, None if device is None else device.attach(store)


def _at_least_two(pages: int, shape: KvPageShape) -> int:
    if pages < 2:
        raise ConfigError(f"objects of {shape.object_nbytes} bytes need twice that as --memory")
    return pages


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"executor": args.executor}
    if args.depth is not None:
        if args.depth & (args.depth - 1) or args.depth < 2:
            raise ConfigError(f"--depth {args.depth} is not a power of two from 2 on")
        options["depth"] = args.depth
    if args.pointers is not None:
        options["use_sgl"] = args.pointers == "sgl"
    return options


def make_workload(
    store: ObjectStore,
    shape: KvPageShape,
    args: argparse.Namespace,
    context: int | None = None,
    memory: DeviceMemory | None = None,
) -> PoolWorkload:
    """A workload with at most --memory of memory, and batches of up to --batch.

    context: tokens per batch instead, one batch at a time.  memory: of a GPU.  Raises ConfigError
    if not even one object fits, or not a whole context.
    """
    if context is not None:
        pages = max(1, context // PAGE_SIZE)
        if 2 * pages > min(
            parse_nbytes(args.memory) // shape.object_nbytes, store.stats()["capacity_objects"]
        ):
            raise ConfigError(
                f"{context} tokens are {pages} pages of {shape.object_nbytes} bytes, and --memory"
                " and --capacity hold less than two such prompts; raise them"
            )
        return PoolWorkload(
            store,
            batch_pages=pages,
            inflight=1,
            load_pages=pages,
            hugepages=args.memory_pages == "huge",
            memory=memory,
            seed=args.seed,
        )
    memory_pages = _at_least_two(parse_nbytes(args.memory) // shape.object_nbytes, shape)
    inflight = min(args.inflight, memory_pages // 2)
    # A pool must be larger than the puts in flight, or every put would be dropped.
    share = min(memory_pages // 2, store.stats()["capacity_objects"] // 4) // inflight
    batch_pages = max(1, min(parse_nbytes(args.batch) // shape.object_nbytes, share))
    return PoolWorkload(
        store,
        batch_pages=batch_pages,
        inflight=inflight,
        load_pages=min(memory_pages - batch_pages * inflight, args.prefix_pages),
        hugepages=args.memory_pages == "huge",
        memory=memory,
        seed=args.seed,
    )


def rows_of(result: dict[str, Any]) -> list[list[Any]]:
    return [
        [
            row["shape"],
            row["backing"],
            row["phase"],
            round(row["gb_per_s"], 2),
            round(row["p50_ms"], 2),
            round(row["p99_ms"], 2),
            round(row["cpu_s_per_gb"], 3),
            round(row["mean_run_length"], 1) or "",
            _note(row),
        ]
        for row in result["rows"]
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    """Notes below the table: how the medium was accessed, and pages with wrong bytes."""
    direct = "direct I/O" if result.get("direct_io", True) else "BUFFERED: the page cache helps"
    notes = [
        f"{result['controller']} controller, {result.get('executor', 'no')} executor, {direct}; "
        f"verify {result['verify']}, durability {result['durability']}"
    ]
    return notes + ([f"WRONG BYTES in {result['wrong']} pages"] if result["wrong"] else [])


def _note(row: dict[str, Any]) -> str:
    if row["phase"] == "mixed":
        return f"{row['store_gb_per_s']:.2f} stored + {row['retrieve_gb_per_s']:.2f} retrieved"
    if row["phase"] == "layerwise":
        return f"{row['prefix_pages']} pages; ms to the first layer"
    if row["context_tokens"]:
        return f"{row['context_tokens']} tokens a prompt"
    return f"{row['batch_pages']} pages a batch"


def _measure(
    workload: PoolWorkload, shape: KvPageShape, args: argparse.Namespace, progress: ProgressFactory
) -> list[dict[str, Any]]:
    limit = Limit(args.seconds, None if args.gib is None else int(args.gib * GiB))
    rows, phases = [], workload.phases(limit, args.prefix_pages)
    with progress(f"objects of {shape}", len(args.phases)) as bar:
        if "store" not in args.phases:
            workload.fill_half()
        for phase in (p for p in PHASES if p in args.phases):
            facts = {
                "shape": str(shape),
                "object_nbytes": shape.object_nbytes,
                "backing": workload.backing,
                "batch_pages": workload.batch_pages,
                "context_tokens": workload.batch_pages * PAGE_SIZE if args.contexts else None,
                "inflight": workload.inflight,
            }
            rows.append({**facts, "phase": phase, **phases[phase]()})
            bar.advance(1)
    return rows
