"""Error types: one root, messages as written, what a failed transfer carries."""

from __future__ import annotations

import inspect

import pytest

from tutti import errors

TYPES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", TYPES)
def test_every_type_has_the_root_a_docstring_and_the_raisers_message(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.TuttiError)
    assert cls.__doc__
    assert str(cls("what is wrong; what to do")) == "what is wrong; what to do"


def test_a_failed_transfer_says_which_pages() -> None:
    error = errors.ChecksumMismatch("slot 7", status=0x281, pages=[1, 3])
    assert isinstance(error, errors.MediumError)
    assert (error.status, error.pages) == (0x281, (1, 3))


def test_builtin_families() -> None:
    assert issubclass(errors.LayoutError, ValueError)
    assert issubclass(errors.KeyMissing, KeyError)
    assert issubclass(errors.PageRangeError, IndexError)
