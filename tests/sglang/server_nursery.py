"""Starts servers faster: imports SGLang once, then every server is a fork of this process.

What runs is `sglang.launch_server` as it is, but its processes are forked instead of spawned: each
of them would import for ten seconds otherwise. Requests and answers are lines of JSON.

    {"arguments": [...], "env": {...}, "log": "..."}  ->  {"pid": 123}
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any


def _import_everything() -> None:
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401
    from sglang.srt.mem_cache.utils import get_hash_str
    from sglang.srt.models.registry import ModelRegistry

    assert ModelRegistry.models
    # Its first call compiles for many seconds; a server whose cache is flushed meanwhile dies.
    get_hash_str([1, 2], None)
    # It decides on import whether it serves several processes; SGLang sets the variable later.
    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        del sys.modules[name]


def _serve(arguments: list[str], env: dict[str, str], log: Path) -> None:
    """The server, in this process."""
    os.setsid()
    die_with_parent()
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(log.parent)
    os.environ.update(env)
    for place in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(0, place)
    _fork_always()
    sys.argv = ["sglang.launch_server", *arguments]

    from sglang.launch_server import load_plugins, prepare_server_args, run_server
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if "nixl" in arguments:
        _transfer_host_memory()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _transfer_host_memory() -> None:
    """A CPU's pools lie in host memory, which SGLang's transfer by NIXL takes for a GPU's."""
    from sglang.srt.disaggregation.nixl import conn

    checked = conn._normalize_kv_mem_kinds
    conn._normalize_kv_mem_kinds = lambda _, n: checked(["DRAM"] * n, n)


def _fork_always() -> None:
    set_method = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> None:
        set_method("fork", force=True)

    multiprocessing.set_start_method = fork  # type: ignore[assignment]


def die_with_parent() -> None:
    """A test that is cut off takes its server along (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _main() -> None:
    die_with_parent()
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers that have ended leave no zombies
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _serve(request["arguments"], request["env"], Path(request["log"]))
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        print(json.dumps({"pid": pid}), file=answers, flush=True)


if __name__ == "__main__":
    _main()
