"""`make try-sglang`: SGLang's real server on this machine's CPU, with Tutti as its storage.

The model is tiny and its weights are random.  A server computes a prompt, its caches are flushed,
and it loads the prompt's KV from the pool; a second server then does the same.  Exit 1 when a
server computes the prompt again, or answers something else.  The argument is hicache or linker.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from server_modes import Mode, prompts
from sglang_server import Reply, Server, make_model


def ask(server: Server, mode: Mode, prompt: list[int], when: str) -> tuple[Reply, int]:
    """The answer, and the tokens that were loaded for it, which a line reports."""
    reply = server.ask(prompt)
    loaded = mode.loaded(reply)
    print(f"{when}: {loaded} of {len(prompt)} prompt tokens loaded from the pool", flush=True)
    return reply, loaded


def main(mode: Mode) -> int:
    """The exit code."""
    (prompt,) = prompts(seed=0, n=1)
    with tempfile.TemporaryDirectory(prefix="tutti-try-") as scratch:
        folder = Path(scratch)
        print("making a model of 4 layers with random weights", flush=True)
        model, log = make_model(folder / "model"), folder / "server.log"
        arguments = mode.arguments(folder / "pools")
        print(f"starting SGLang on the CPU with Tutti ({mode.name} mode)", flush=True)
        with Server(model, log, arguments) as server:
            first, _ = ask(server, mode, prompt, "first request")
            server.settle()
            server.flush()
            later = [ask(server, mode, prompt, "after a flush of SGLang's caches")]
            server.stop()
        print("starting a second server on the same pool", flush=True)
        with Server(model, log, arguments) as server:
            later.append(ask(server, mode, prompt, "after the restart"))
            server.stop()
    if all(loaded > 0 and reply.tokens == first.tokens for reply, loaded in later):
        print("works: the KV came from the pool, and all three answers are the same")
        return 0
    print("FAILED: a prompt was computed again, or its answer changed", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Mode(*sys.argv[1:])))
