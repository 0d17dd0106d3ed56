"""Shared start of benchmark commands: adding options, and checking that files are writable."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tutti.errors import CapacityError, ConfigError, system_message


def options(parser: argparse._ActionsContainer) -> Callable[..., None]:
    """A short way to add options to a parser or a group of it."""

    def option(
        name: str,
        default: Any,
        what: str | None,
        kind: Callable[[str], Any] | Collection[str] = (),
        **more: Any,
    ) -> None:
        """name: the option, with its metavar if that differs.  kind: a type, or the choices.

        A number's type follows from the default.  A list takes one or more values; False is a flag.
        """
        name, _, metavar = name.partition(" ")
        given: dict[str, Any] = {"default": default, "help": what}
        if metavar:
            given["metavar"] = metavar
        first = default
        if isinstance(default, list | tuple) and "action" not in more:
            given["nargs"], first = "+", default[0] if default else None
        if default is False:
            given["action"] = "store_true"
        elif isinstance(first, int | float):
            given["type"] = type(first)
        if kind:
            given["type" if callable(kind) else "choices"] = kind
        parser.add_argument(name, **given | more)

    return option


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
