"""Results on disk: result.json after every point, and every request in requests.jsonl.gz.

A full disk stops the writing, not the measurement: the files written so far stay and are marked
partial, and the whole result is still printed.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.bench.figures import data
from tutti.bench.figures.data import RESULT
from tutti.bench.ttft.client import Record
from tutti.errors import ConfigError

REQUESTS = "requests.jsonl.gz"


class Output:
    """A folder of results; without a folder nothing is written.

    failed: why the folder is incomplete; empty while it is complete.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.failed = ""
        if folder is not None and (folder / RESULT).exists():
            raise ConfigError(f"{folder.name} holds a result already; name a new folder")

    def make_folder(self) -> None:
        """Creates the folder when the measurement starts.  Raises ConfigError."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make --out: {error}; name another folder") from error

    def requests(self, facts: Mapping[str, Any], records: Sequence[Record]) -> None:
        """Appends the requests of one point, each with the facts that identify the point."""
        if self._folder is None or self.failed:
            return
        lines = "".join(json.dumps({**facts, **record.to_dict()}) + "\n" for record in records)
        path = self._folder / REQUESTS
        kept = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as out:
                out.write(gzip.compress(lines.encode()))
        except OSError as error:
            self._fail(error)
            with contextlib.suppress(OSError):
                os.truncate(path, kept)

    def result(self, result: dict[str, Any]) -> None:
        """Replaces the result; if that fails, the previous one stays."""
        if self._folder is None:
            return
        if self.failed:
            result = {**result, "partial": True, "output": self.failed}
        new = self._folder / f"{RESULT}.new"
        try:
            new.write_text(json.dumps(result, indent=1) + "\n")
            new.replace(self._folder / RESULT)
        except OSError as error:
            self._fail(error)
            new.unlink(missing_ok=True)

    def _fail(self, error: OSError) -> None:
        self.failed = (
            f"{REQUESTS} and {RESULT} are incomplete: {error}; make room and run it again, or keep "
            "what was printed"
        )


def read_result(path: Path) -> dict[str, Any]:
    """A result of `tutti bench ttft`: its folder or its JSON file.  Raises ConfigError."""
    result = data.read_result(path, "a result.json")
    if result.get("benchmark") not in ("ttft", "ttft-prefix"):
        raise ConfigError(f"{path.name} is not a result of `tutti bench ttft`")
    return result
