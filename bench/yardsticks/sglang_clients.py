"""SGLang's own clients in one long-lived process, because its packages take seconds to import.

    python -m tutti.bench.yardsticks.sglang_clients

reads a line of JSON for each run (a module, a script, or a function with its arguments) and writes
a line of JSON as the answer.  `Clients` starts it, and ends it if an answer is late.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from tutti.bench.ttft.http import ServerError
from tutti.errors import DeviceTimeout

_STEP_S = 600.0
_END_S = 10.0
_SAID_MAX = 4000


class Clients:
    """The process.  A run after a failure starts a new one."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._process: subprocess.Popen[str] | None = None

    def program(self, name: str, *words: object) -> None:
        """Runs a module or the script of a path, with arguments.  Raises ServerError."""
        answer = self.ask({"program": name, "words": [str(word) for word in words]})
        if "error" in answer:
            raise ServerError(f"{Path(name).name} failed: {answer['error']}: {answer['why']}")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Returns a run's answer.  Raises ServerError if the process ended, DeviceTimeout."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], _STEP_S)[0]:
            self.close()
            raise DeviceTimeout(f"a client of SGLang took more than {_STEP_S:g} s")
        line = process.stdout.readline()
        if not line:
            self.close()
            told = (self._home / "clients.log").read_text(errors="replace").split("\n")
            raise ServerError(f"SGLang's clients ended: {next(filter(None, told[::-1]), 'silent')}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        """SGLang's own cache files are in the temporary folder, which is deleted."""
        with (self._home / "clients.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", __name__],
                env={**os.environ, "HOME": str(self._home)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def close(self) -> None:
        """Ends the process, if it runs."""
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.wait(_END_S)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Runs one client; on failure its output contains the reason."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            value = _run(question)
    except (Exception, SystemExit) as error:
        failure = {"error": type(error).__name__, "why": str(error)}
        return {**failure, "said": said.getvalue()[-_SAID_MAX:]}
    return {"value": value, "said": said.getvalue()[-_SAID_MAX:]}


def _run(question: dict[str, Any]) -> Any:
    if "function" in question:
        module, _, name = question["function"].rpartition(".")
        return getattr(importlib.import_module(module), name)(**question["given"])
    program = question["program"]
    sys.argv = [program, *question["words"]]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__")
    return None


def main() -> None:
    """Answers until the input ends; output of clients is kept apart from answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
