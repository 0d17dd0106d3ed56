"""Modules of tests that cannot be imported here: they skip by name in the suite that has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest


class Absent(pytest.File):
    """In the place of a module of tests, which cannot be imported for the reason `why`."""

    why = ""

    @classmethod
    def of(cls, why: str, path: Path, parent: pytest.Collector) -> Self:
        """A module that is skipped for this reason."""
        made = cls.from_parent(parent, path=path)
        made.why = why
        return made

    def collect(self) -> Iterator[pytest.Item]:
        yield Skipped.from_parent(self, name="needs_what_is_absent")


class Skipped(pytest.Item):
    """An item and no skip of the whole module: suites that do not select it do not report it."""

    def runtest(self) -> None:
        assert isinstance(self.parent, Absent)
        pytest.skip(self.parent.why)

    def reportinfo(self) -> tuple[Path, int, str]:
        """A line as well, which pytest wants of what another mark skips."""
        return self.path, 0, self.name
