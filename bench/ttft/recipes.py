"""`tutti bench serve`: starts one of the compared systems, with one command each.

Every recipe is SGLang's launch command with the same page size and the same DRAM capacity, so that
only the storage systems differ.  The server runs until Ctrl-C and describes itself in --info.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tutti.arguments import nbytes, port, positive
from tutti.base.terminal import ProgressFactory, facts
from tutti.base.units import format_nbytes
from tutti.bench.environment import command_line, describe
from tutti.bench.ttft.http import Endpoint, ServerError
from tutti.bench.ttft.server_control import Control
from tutti.bench.writable import check_writable, options
from tutti.errors import ConfigError, Unsupported
from tutti.integration.sglang.launch import server_arguments, server_environment
from tutti.integration.sglang.options import HICACHE, LINKER, named_options

_GB = 10**9  # SGLang's unit of host memory
_UP_S = 1800.0
_END_S = 60.0
_LMCACHE_PORT = 5556
_POLL_S = 0.5


@dataclass(frozen=True)
class RecipeOptions:
    """Inputs of a recipe.  dram_nbytes: host memory for KV.  storage: a folder on the SSD.
    more_storage: folders on further SSDs.  tutti: further options of Tutti, as NAME=VALUE.
    """

    model: str
    page_size: int
    dram_nbytes: int
    capacity_nbytes: int
    storage: Path
    more_storage: tuple[Path, ...] = ()
    tutti: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """Arguments and environment of SGLang for one system.

    daemon: Python arguments of a process that runs with it.  files: content of files that both
    read, by name.
    """

    arguments: list[str]
    env: dict[str, str] = field(default_factory=dict)
    daemon: tuple[str, ...] = ()
    files: dict[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A system to start.  needs: the module that it needs besides SGLang."""

    name: str
    summary: str
    make: Callable[[RecipeOptions], Launch]
    needs: str = ""
    uses_storage: bool = True


def _base(options: RecipeOptions) -> list[str]:
    sizes = ["--page-size", str(options.page_size)]
    return ["--model-path", options.model, *sizes, "--enable-metrics"]


def _hierarchical(options: RecipeOptions, *storage: str) -> list[str]:
    """SGLang's arguments for KV in host memory, whose size is in whole 10^9 bytes."""
    gigabytes = max(1, options.dram_nbytes // _GB)
    return [
        *_base(options),
        *("--enable-hierarchical-cache", "--hicache-size", str(gigabytes)),
        *("--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel"),
        *(("--hicache-storage-prefetch-policy", "timeout") if storage else ()),
        *storage,
    ]


def _dram(options: RecipeOptions) -> Launch:
    return Launch(_hierarchical(options))


def _file(options: RecipeOptions) -> Launch:
    env = {
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(options.storage),
        "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": str(options.capacity_nbytes),
    }
    return Launch(_hierarchical(options, "--hicache-storage-backend", "file"), env)


def _nixl(options: RecipeOptions) -> Launch:
    env = {
        "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(options.storage),
        "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN": "POSIX",
    }
    return Launch(_hierarchical(options, "--hicache-storage-backend", "nixl"), env)


def _tutti(mode: str, options: RecipeOptions) -> Launch:
    path = [str(folder) for folder in (options.storage, *options.more_storage)]
    sizes = {"path": path, "capacity": str(options.capacity_nbytes)}
    given = named_options(options.tutti, mode) | sizes
    arguments = server_arguments(mode, options.model, given, page_size=options.page_size)
    if mode == HICACHE:
        arguments += ["--hicache-size", str(max(1, options.dram_nbytes // _GB))]
    return Launch(arguments)


def _lmcache(options: RecipeOptions) -> Launch:
    """LMCache's own server with host memory and files, and SGLang as its client (LMCache's pages on
    its multiprocess mode; SGLang's mem_cache/storage/lmcache/README.md).

    Transfer mode auto: with GPUs LMCache copies, as by default; without them SGLang has to.
    """
    config = options.storage / "lmcache.yaml"
    adapter = {"type": "fs", "base_path": str(options.storage / "kv"), "use_odirect": True}
    daemon = ["-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    daemon += ["--port", str(_LMCACHE_PORT), "--supported-transfer-mode", "auto"]
    daemon += ["--l1-size-gb", str(max(1, options.dram_nbytes // _GB)), "--eviction-policy", "LRU"]
    return Launch(
        [*_base(options), "--enable-lmcache", "--lmcache-config-file", str(config)],
        daemon=(*daemon, "--l2-adapter", json.dumps(adapter)),
        files={config: f"mp_host: 127.0.0.1\nmp_port: {_LMCACHE_PORT}\n"},
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("hbm", "GPU memory alone", lambda o: Launch(_base(o)), uses_storage=False),
        Recipe("hicache-dram", "HiCache with host memory", _dram, uses_storage=False),
        Recipe("hicache-file", "HiCache with a file per page", _file),
        Recipe("hicache-nixl", "HiCache with NIXL's POSIX plugin", _nixl, needs="nixl"),
        Recipe("tutti-hicache", "HiCache with Tutti as its storage", partial(_tutti, HICACHE)),
        Recipe("tutti-linker", "Tutti without host memory", partial(_tutti, LINKER)),
        Recipe("lmcache", "LMCache with host memory and disk", _lmcache, needs="lmcache"),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    what = "; ".join(f"{recipe.name}: {recipe.summary}" for recipe in RECIPES.values())
    option("name", None, what, RECIPES, metavar="SYSTEM")
    option("--model", None, "folder or name of the model", required=True)
    what = "a new, empty folder on the SSD, for storage; Tutti takes one on each of several SSDs"
    option("--dir", [], what, Path, nargs="+")
    option("--capacity", "256GiB", "size of the storage", nbytes)
    option("--dram", "16GB", "host memory for KV", nbytes)
    option("--page-size", 64, "tokens per page", positive)
    option("--host", "127.0.0.1", "address to listen on")
    option("--port", 30000, "port to listen on", port)
    option("--info", None, "file for a description of the server", Path)
    option("--keep", False, "accept a --dir that is not empty")
    option("--print", False, "print the command only")
    option("--option NAME=VALUE", [], "one of Tutti's options; repeat for others", action="append")
    option("--more ='ARGUMENTS'", "", "SGLang's own arguments as one text, e.g. --more='--tp 2'")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Starts the server, waits until it answers, writes its facts, and returns when it has ended.

    Ctrl-C and SIGTERM end the server.  Raises Unsupported for a system that is not installed,
    ConfigError for a folder with other files, CapacityError for --info that cannot be written,
    ServerError when it ends before it answers.
    """
    recipe = RECIPES[args.name]
    launch = _launch(recipe, args)
    command = ["-m", "sglang.launch_server", *launch.arguments]
    daemon = list(launch.daemon)
    result: dict[str, Any] = {
        "benchmark": "serve",
        "system": recipe.name,
        "command": ["python", *command],
        "env": {**server_environment(HICACHE), **launch.env},  # host pools of all systems alike
        "daemon": ["python", *daemon] if daemon else [],
        "files": {str(path): content for path, content in launch.files.items()},
    }
    if args.print:
        return result
    _check_installed(recipe)
    if args.info is not None:
        check_writable(args.info)
    if recipe.uses_storage:
        for folder in args.dir:  # not before: a refusal leaves nothing
            folder.mkdir(parents=True, exist_ok=True)
    for path, content in launch.files.items():
        path.write_text(content)
    started: list[subprocess.Popen[bytes]] = []
    with _Interrupts() as interrupts:
        try:
            for words in filter(None, (daemon, command)):
                started.append(_start(words, result["env"]))
            result |= _facts(result, args, started, progress)
            while not (ended := _ended(started)):  # or until a signal
                time.sleep(_POLL_S)
            result["stopped"] = ended
        except KeyboardInterrupt:
            result["ended"] = "interrupted"
        finally:
            for each in reversed(started):
                _end(each, interrupts)
    if started:
        result["exit_code"] = started[-1].returncode
    return result


def report(result: dict[str, Any]) -> str:
    settings = [f"{name}={shlex.quote(value)}" for name, value in result["env"].items()]
    command = " ".join([*settings, shlex.join(result["command"])])
    if result["daemon"]:
        command = f"{shlex.join(result['daemon'])} &\n{command}"
    for path, content in result["files"].items():
        command = f"printf %s {shlex.quote(content)} > {shlex.quote(path)}\n{command}"
    if "exit_code" not in result:
        return command
    return facts([("command", command), ("server ended with", result["exit_code"])])


def _launch(recipe: Recipe, args: argparse.Namespace) -> Launch:
    folders = [folder.absolute() for folder in args.dir]
    is_tutti = recipe.name.startswith("tutti-")
    if recipe.uses_storage:
        if not folders:
            raise ConfigError(f"{recipe.name} needs --dir, a new folder on the SSD")
        if len(folders) > 1 and not is_tutti:
            raise ConfigError(f"{recipe.name} keeps all in one folder; name one with --dir")
        for folder in folders:
            if folder.exists() and any(folder.iterdir()) and not args.keep:
                raise ConfigError(
                    f"{folder.name} is not empty: what is stored there would be hits of this run; "
                    "name a new folder, or say --keep"
                )
    if args.option and not is_tutti:
        raise ConfigError(f"{recipe.name} does not take --option, which is for Tutti's systems")
    storage, *more_storage = folders or [Path()]
    options = RecipeOptions(
        *(args.model, args.page_size, args.dram, args.capacity, storage, tuple(more_storage)),
        tuple(args.option),
    )
    launch = recipe.make(options)
    more = ["--host", args.host, "--port", str(args.port)]
    if "--enable-cache-report" not in launch.arguments:  # else cached tokens are not reported
        more.append("--enable-cache-report")
    try:
        more += shlex.split(args.more)
    except ValueError as error:
        raise ConfigError(f"--more {args.more!r}: {error}; quote it as for a shell") from error
    return replace(launch, arguments=[*launch.arguments, *more])


def _check_installed(recipe: Recipe) -> None:
    for module in filter(None, ("sglang", recipe.needs)):
        if find_spec(module) is None:
            raise Unsupported(
                f"{module} is not installed in this environment; pip install {module}, or see the "
                "command with --print"
            )


def _facts(
    result: dict[str, Any],
    args: argparse.Namespace,
    started: list[subprocess.Popen[bytes]],
    progress: ProgressFactory,
) -> dict[str, Any]:
    """Waits for the server and writes --info."""
    host = "127.0.0.1" if args.host == "0.0.0.0" else args.host
    control = Control(Endpoint(host, args.port))
    deadline = time.monotonic() + _UP_S
    with progress(f"{args.name} starts", 0) as bar:
        while not control.is_up():
            if ended := _ended(started):
                raise ServerError(ended)
            if time.monotonic() > deadline:
                raise ServerError(f"SGLang does not answer after {_UP_S:g} s; see its log above")
            time.sleep(_POLL_S)
            bar.advance(1)
    found = {
        "dram": format_nbytes(args.dram),
        "capacity": format_nbytes(args.capacity),
        "launched": command_line(result["command"]),
        "server": control.facts(),
        "machine": describe(args.dir[0] if RECIPES[args.name].uses_storage else None),
    }
    if args.info is not None:
        args.info.write_text(json.dumps({"system": args.name, **found}, indent=1) + "\n")
    print(f"{args.name} answers on port {args.port}; Ctrl-C ends it", file=sys.stderr, flush=True)
    return found


def _start(words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts Python in its own process group: Ctrl-C reaches only this process, which ends it.

    All of its output goes to stderr: stdout is for the result.
    """
    command = [sys.executable, *words]
    return subprocess.Popen(command, stdout=2, env={**os.environ, **env}, start_new_session=True)


def _ended(started: list[subprocess.Popen[bytes]]) -> str:
    """Describes the process that ended, or "".  Without its daemon a server finds no KV."""
    for name, process in zip(("SGLang", "the process beside it"), reversed(started), strict=False):
        if process.poll() is not None:
            return f"{name} ended with {process.returncode}; see its log above"
    return ""


class _Interrupts:
    """SIGINT and SIGTERM while a server runs.

    The first raises KeyboardInterrupt.  Later ones set ``urgent`` and raise nothing.
    """

    def __init__(self) -> None:
        self._count = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def urgent(self) -> bool:
        return self._count > 1

    def _take(self, number: int, frame: object) -> None:
        self._count += 1
        if self._count == 1:
            raise KeyboardInterrupt


def _end(process: subprocess.Popen[bytes], interrupts: _Interrupts) -> None:
    """Sends SIGTERM, and SIGKILL to the group if it does not end or another signal arrived."""
    if process.poll() is None:
        process.terminate()
        deadline = time.monotonic() + _END_S
        while process.poll() is None and not interrupts.urgent and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)
