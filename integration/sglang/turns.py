"""When offloads are written: the seam to a scheduler.  By default at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Writes go as they come."""

    def wait(self, nbytes: int) -> None:
        """Returns when ``nbytes`` may be written; never later than a bound of its own."""

    def wrote(self, nbytes: int, duration_s: float) -> None:
        """A write took so long."""

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """While inside, nobody waits for a turn: everything under way is to end."""
        yield
