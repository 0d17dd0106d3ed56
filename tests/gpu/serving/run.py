"""SGLang's real server on a GPU: Tutti's two modes, SGLang's files, and no storage at all.

    tests/gpu/serving/start.sh --dir FOLDER_ON_THE_DRIVE --out DIR

All servers run at once on one device, with the sizes of a model of 8 billion parameters and random
weights, about 30 GB of GPU memory each.  DIR/result.json is written after every step.  A server
that does not come up is named there with the end of its log, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu.serving import correctness, prefix, rates
from gpu.serving.server import Fleet, GpuServer
from gpu.shards import write

from tutti.arguments import nbytes
from tutti.bench.environment import describe
from tutti.bench.ttft.recipes import RecipeOptions

HERE = Path(__file__).resolve().parent
SYSTEMS = ["hbm", "tutti-linker", "tutti-hicache", "hicache-file"]
PACKAGES = {"sglang", "sglang-kernel", "torch", "triton", "transformers", "numpy"}
#: In this order, each with its deadline; that of the whole holds, too.
PHASES = {"correctness": (correctness, 120), "prefix": (prefix, 400), "rates": (rates, 900)}
EVERYWHERE = "--load-format dummy --skip-tokenizer-init --dtype bfloat16 --random-seed 7 "
EVERYWHERE += "--max-running-requests 32 --skip-server-warmup --host 127.0.0.1 "
ON_GPU = "--attention-backend triton --sampling-backend pytorch --disable-cuda-graph "
ON_GPU += "--context-length 131072 --max-total-tokens 104000 --chunked-prefill-size 8192 "
ON_GPU += "--mem-fraction-static 0.97"
ON_CPU = "--device cpu --attention-backend torch_native --mem-fraction-static 0.3 "
ON_CPU += "--context-length 8192 --max-total-tokens 8192 --chunked-prefill-size 1024"
#: A rehearsal: a tiny model, on which no time means anything.
SMALL: dict[str, Any] = {"dram": 10**9, "capacity": 64 << 20, "prompts": [300, 700]}
SMALL |= {"lengths": [512, 2048], "tail_tokens": 128, "repeats": 2}


class Trial:
    """Servers, and the result that grows with every step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.fleet = args, Fleet([])
        self._began_s = time.monotonic()
        self._end_s = self._began_s + 60 * args.minutes
        self._pools: list[Path] = [folder / "tutti-gpu-serving" for folder in args.dir]
        self._remove_pools()
        for folder in (args.out, *self._pools):
            folder.mkdir(parents=True)
        installed = {found.name: found.version for found in metadata.distributions()}
        self.result: dict[str, Any] = {
            "benchmark": "sglang-gpu",
            "note": args.note,
            "machine": describe(args.dir[0]) | ({"commit": args.commit} if args.commit else {}),
            "gpu": gpu_facts(),
            "versions": {name: installed[name] for name in sorted(PACKAGES & installed.keys())},
            "page_cache": "kept" if args.keep_page_cache else "dropped before each request",
            "phases_s": {},
            "errors": self.fleet.errors,
        }

    def run(self) -> None:
        # What waits for a server ends with it.
        stop = threading.Timer(60 * self.args.minutes, self.fleet.kill)
        stop.daemon = True
        stop.start()
        try:
            self._start()
            for name in self.args.phases:
                phase, limit_s = PHASES[name]
                began_s = self._begin(name, limit_s)
                for row in phase.run(self.fleet, self.args):
                    self.result.setdefault(name, []).append(row)
                    self._save(began_s)
                self._save(began_s)
        finally:
            self.fleet.kill()
            self._remove_pools()

    def _remove_pools(self) -> None:
        for folder in self._pools:
            shutil.rmtree(folder, ignore_errors=True)

    def _begin(self, name: str, limit_s: float) -> float:
        now_s = time.monotonic()
        print(f"{name} begins after {now_s - self._began_s:.0f} s", flush=True)
        self.fleet.phase = name
        self.fleet.until(min(self._end_s, now_s + limit_s))
        return now_s

    def _save(self, began_s: float) -> None:
        """Writes the result, with what Tutti's stores have counted: the proof of the path."""
        self.result["phases_s"][self.fleet.phase] = time.monotonic() - began_s
        counts = {server.system: server.counts() for server in self.fleet.servers}
        self.result["counts"] = {name: found for name, found in counts.items() if found}
        write(self.args.out / "result.json", self.result)

    def _start(self) -> None:
        """Starts all servers, and warms each as soon as it answers.

        The first that needs a kernel has it compiled for all, while others still load.
        """
        args = self.args
        model = made_model(args)
        config = json.loads((model / "config.json").read_text())
        args.vocabulary = min(32_000, config["vocab_size"])
        words = [*(EVERYWHERE + (ON_CPU if args.cpu else ON_GPU)).split(), *shlex.split(args.more)]
        sizes = (GpuServer.page_tokens, args.dram, args.capacity)
        for system in args.systems:
            folder, *more = [pools / system for pools in self._pools]
            if not system.startswith("tutti-"):
                more.clear()
            tutti = tuple(args.option)
            options = RecipeOptions(str(model), *sizes, folder, tuple(more), tutti)
            self.fleet.servers.append(GpuServer(system, options, words, args.out))
        servers = {server.system: server.facts for server in self.fleet.servers}
        self.result["servers"] = servers
        began_s = self._begin("start", 60 * args.minutes)
        long = correctness.random_prompt(1, args.prompts[-1], args.vocabulary)

        def ready(server: GpuServer) -> dict[str, Any]:
            server.wait_ready(min(self._end_s, began_s + args.start_s))
            up_s = time.monotonic() - began_s
            prompts = [long[:10], long, [*long, *long[:70]]]
            warm_s = [correctness.ask(server, prompt)["elapsed_s"] for prompt in prompts]
            # SGLang ends when it is flushed while it compiles the hashes that it stores pages by.
            server.wait_stored(0, len(long) // server.page_tokens)
            server.flush()
            return {"up_s": up_s, "warm_up_s": warm_s}

        found = self.fleet.each(ready)
        for server in list(self.fleet.servers):
            servers[server.system] |= found.get(server.system, {})
            if server.system not in found:
                server.kill()
                self.fleet.servers.remove(server)
        self._save(began_s)


def made_model(args: argparse.Namespace) -> Path:
    """The folder of a model's configuration: weights are random in any case."""
    if not args.cpu:
        return HERE / "model"
    script, folder = HERE.parents[1] / "sglang/tiny_model.py", args.out / "model"
    subprocess.run([sys.executable, str(script), str(folder), "0", "mha"], timeout=120, check=True)
    return Path(folder)


def gpu_facts() -> dict[str, str]:
    """What the driver says; empty without one."""
    names = ("name", "driver_version", "memory.total")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(names, done.stdout.splitlines()[0].split(", "), strict=True))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = parser.add_argument
    option("--out", type=Path, default=Path("build/gpu-serving"), help="a new folder")
    places = "folders on the drives, for pools; only Tutti takes more than the first"
    option("--dir", type=Path, nargs="+", default=[Path("build")], help=places)
    option("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    option("--phases", nargs="+", default=list(PHASES), choices=list(PHASES))
    option("--minutes", type=float, default=15.0, help="deadline of the whole")
    option("--start-s", type=float, default=240.0, help="for the servers to answer")
    option("--cpu", action="store_true", help="a rehearsal with a tiny model, without a GPU")
    option("--prompts", type=int, nargs="+", default=[1000, 4000, 9000], help="for correctness")
    option("--lengths", type=int, nargs="+", default=[8192, 32768, 65536, 98304], help="prefixes")
    option("--tail-tokens", type=int, default=512, help="behind each prefix")
    option("--repeats", type=int, default=3)
    option("--keep-page-cache", action="store_true", help="dropping it needs root")
    option("--trace", type=Path, help="in Mooncake's format; without one no rates are measured")
    option("--rates", type=float, nargs="+", default=[1.0, 2.0], help="requests/s")
    option("--requests", type=int, default=24, help="of the trace")
    option("--dram", type=nbytes, default="20GB", help="host memory of each HiCache")
    option("--capacity", type=nbytes, default="19GiB", help="of each storage")
    option("--option", action="append", default=[], help="of Tutti's, NAME=VALUE; repeat it")
    option(
        "--more", default="", help="SGLang's own arguments, e.g. --more='--max-total-tokens 99968'"
    )
    option("--commit", default="", help="commit of the code, where git is missing")
    option("--note", default="", help="kept with the result")
    parser.set_defaults(**(SMALL if "--cpu" in arguments else {}))
    args = parser.parse_args(arguments)
    if args.out.exists():
        parser.error(f"{args.out} is there already: name a new folder with --out")
    return args


def main(arguments: list[str]) -> int:
    """0 when every system passed, and nothing failed."""
    trial = Trial(parsed(arguments))

    def end(*_: object) -> None:
        trial.fleet.kill()  # or the phase would wait for its requests
        sys.exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    trial.run()
    passed = [row["verdict"]["passed"] for row in trial.result.get("correctness", [])]
    return 0 if all(passed) and not trial.fleet.errors else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
