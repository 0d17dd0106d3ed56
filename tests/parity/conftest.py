"""The controllers that every test of this folder runs against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_controller import MemoryController
from nvme_host import NAMESPACES, NvmeHost

from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import FileController, uring_refusal
from tutti.gio_uring.file_creation import allocate_file

KINDS = ("memory", "file-uring", "file-threads")


def make_controller(kind: str, folder: Path) -> NativeController:
    if kind == "memory":
        return MemoryController(NAMESPACES)
    executor = kind.removeprefix("file-")
    if executor == "uring" and (reason := uring_refusal()):
        pytest.skip(f"io_uring is refused here: {reason}")
    paths = [folder / f"member{i}" for i in range(len(NAMESPACES))]
    for path, nbytes in zip(paths, NAMESPACES, strict=True):
        allocate_file(path, nbytes)
    return FileController(paths, executor=executor)


@pytest.fixture(params=KINDS)
def controller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NativeController]:
    with make_controller(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def host(controller: NativeController) -> Iterator[NvmeHost]:
    made = NvmeHost(controller)
    yield made
    made.close()
