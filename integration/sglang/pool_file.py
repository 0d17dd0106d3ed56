"""Opens the pool in a file below the folder that the options name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tutti.errors import ConfigError
from tutti.medium.layout import KVLayout
from tutti.scheduler.dispatcher import Schedule
from tutti.store import ObjectStore
from tutti.store import open as open_pool
from tutti.transfers.core import StoreConfig

#: For the options that HiCache does not have.
_DEFAULTS = StoreConfig()


def open_store(
    path: Path,
    layout: KVLayout,
    capacity: int,
    options: Mapping[str, Any],
    schedule: Schedule | None = None,
) -> ObjectStore:
    """The pool in a file, made when it is not there.  Raises TuttiError.

    schedule: when its puts and loads are launched; None for at once.
    """
    _make_folder(path)
    config = StoreConfig(
        verify=options["verify"],
        durability=options["durability"],
        timeout_s=options["timeout_s"],
        pin_lookups=options.get("pin_lookups", _DEFAULTS.pin_lookups),
        pin_share=min(1.0, options.get("pin_share", _DEFAULTS.pin_share)),
        schedule=schedule,
        page_cache_share=options.get("page_cache_share", _DEFAULTS.page_cache_share),
    )
    return open_pool(str(path), layout, capacity, executor=options["executor"], config=config)


def _make_folder(path: Path) -> None:
    """The folder of a pool, for its owner alone.  Raises ConfigError with what to do."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path.parent}: {error.strerror}; choose another path, or give "
            "this user the right to write there"
        ) from error
