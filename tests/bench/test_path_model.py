"""The model of a path through Python takes the steps that were recorded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

from tutti.bench.path_model import Frame, build, record


class Counted:
    def __init__(self) -> None:
        self.lock, self.items, self.seen = threading.Lock(), {3: 4}, 0

    def add(self, more: int) -> int:
        with self.lock:
            self.seen = self.items[3] + more
        return len([self.seen])

    def each(self) -> Iterator[int]:
        yield self.add(1)
        yield self.add(2)


def path() -> int:
    counted = Counted()
    return sum(counted.each()) + counted.add(5) + abs(-1)


def functions_of(tree: Frame) -> list[str]:
    """The shape of the tree, by how many functions each calls."""
    found = [str(len(tree.calls))]
    for call in tree.calls:
        found += functions_of(call)
    return found


def test_the_model_takes_the_steps_of_the_call() -> None:
    tree, result = record(path)
    assert result == 4 and sys.getprofile() is None and sys.gettrace() is None
    total = tree.total()
    assert total["functions"] == 1 + 1 + 3 + 3, "path, __init__, each thrice resumed, add"
    assert total["attribute writes"] == 3 + 3 and total["locks"] == total["items"] == 3
    model = build(tree)
    again, _ = record(model)
    assert again.total() == total and functions_of(again) == functions_of(tree)


def test_a_function_that_is_called_twice_is_one_function() -> None:
    counted = Counted()

    def twice() -> None:
        counted.add(1)
        counted.add(1)
        Counted().add(1)

    model = build(record(twice)[0])
    tree = record(model)[0]
    first, second, third = (call.who for call in tree.calls if call.steps["locks"])
    assert first == second != third
