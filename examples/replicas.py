"""Two replicas, each a process, on one agent: one loads the pages that the other stored.

    python examples/replicas.py /tmp/folder

The agent is `tutti serve --folder ...`; see tutti.service and kubernetes.yaml for running it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

from tiny import LAYOUT, compute_page, keys_of, prompt

import tutti
from tutti.errors import AgentLost

PAGES = 8


def replica(socket: str, name: str) -> None:
    """Loads what is there of one prompt, computes and stores the rest."""
    keys = keys_of(prompt(1, PAGES))
    # A server would rather compute than wait; what this shows must not depend on a busy machine.
    with tutti.connect(socket, LAYOUT, capacity="64MiB", lookup_timeout_s=30.0) as store:
        memory = store.allocate_memory(PAGES)
        hits = store.match(keys, pin=True)
        if hits:
            store.load(keys[:hits], range(hits)).wait()
        right = sum(memory.read(page) == compute_page(keys[page]) for page in range(hits))
        for page in range(hits, PAGES):
            memory.write(page, compute_page(keys[page]))
        if hits < PAGES:
            parent = keys[hits - 1].tobytes() if hits else None
            store.put(keys[hits:], range(hits, PAGES), parent=parent, depth=hits).wait()
        print(f"{name}: {hits} pages loaded, {right} of them right", flush=True)


def wait_for_agent(socket: str) -> None:
    """Returns when the agent answers.  Raises AgentLost after 30 seconds."""
    for attempt in range(300):
        try:
            tutti.connect(socket, LAYOUT, capacity="64MiB").close()
            return
        except AgentLost:
            if attempt == 299:
                raise
            time.sleep(0.1)


def main(folder: str) -> None:
    """Starts the agent, then the replicas one after the other."""
    socket = str(Path(folder) / "tutti.sock")
    command = [sys.executable, "-m", "tutti.cli", "serve", "--folder", folder, "--socket", socket]
    agent = subprocess.Popen([*command, "--capacity", "256MiB"], stdout=subprocess.DEVNULL)
    try:
        wait_for_agent(socket)
        for name in ("replica 0", "replica 1"):
            process = get_context("spawn").Process(target=replica, args=(socket, name))
            process.start()
            process.join(300)
            if process.exitcode != 0:
                sys.exit(f"{name} ended with {process.exitcode}")
    finally:
        agent.terminate()
        agent.wait(60)


if __name__ == "__main__":
    main(sys.argv[1])
