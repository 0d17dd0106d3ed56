"""Shared start of benchmark commands: adding options, and checking that files are writable."""

from __future__ import annotations

from pathlib import Path

from tutti.arguments import options as options
from tutti.errors import CapacityError, ConfigError, system_message


def check_writable(*paths: Path) -> None:
    """Checks before a long measurement that files can be written, and creates their folders.

    Raises CapacityError, and ConfigError for a folder or a pipe, whose open would block.
    """
    for path in paths:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file in it")
        is_new = not path.exists()
        if not is_new and path.is_fifo():
            raise ConfigError(f"{path} is a pipe, not a regular file; name a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as error:
            raise CapacityError(f"cannot write {system_message(error)}") from error
