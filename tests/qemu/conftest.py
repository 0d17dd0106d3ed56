"""The order of the guests, of which two run at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

#: The longest, and the one that its worker runs next: each of two begins with a half of the list,
#: and the first that has ended its own takes from the other's end, but not the last two there.
FIRST = ("test_one_drive", "test_unplugged")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts FIRST before the others of this folder."""

    def place(item: pytest.Item) -> int:
        is_here = item.path.parent == Path(__file__).parent
        return FIRST.index(item.name) if is_here and item.name in FIRST else len(FIRST)

    items.sort(key=place)
