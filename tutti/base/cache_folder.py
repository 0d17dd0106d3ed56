"""The folder of what is kept between processes and can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/tutti, by default ~/.cache/tutti; it is made with the first file.

    Raises FileNotFoundError for a user without a home folder, as a container's may be.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "tutti"
    try:
        return Path.home() / ".cache" / "tutti"
    except RuntimeError as error:
        raise FileNotFoundError(
            "this user has no home folder; set XDG_CACHE_HOME to an absolute path"
        ) from error
