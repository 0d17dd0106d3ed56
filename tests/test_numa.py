"""Memory and threads on NUMA nodes: which processors their maker runs on meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gio_uring.cuda_stand_in import StandInDriver

import tutti
from tutti import store as store_module
from tutti.base import numa
from tutti.base.numa import on_node
from tutti.gio_uring.gpu import pinned_memory
from tutti.gio_uring.gpu.pinned_memory import PinnedStaging
from tutti.gio_uring.memory import HostBuffer
from tutti.medium.layout import KVLayout


class Processors:
    """A process that may use some processors of a machine with two nodes."""

    def __init__(self, usable: set[int]) -> None:
        self.now = usable
        self.log: list[set[int]] = []

    def move(self, pid: int, processors: set[int]) -> None:
        assert pid == 0
        self.now = set(processors)
        self.log.append(self.now)


@pytest.fixture
def processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processors:
    for node, text in enumerate(("0-3,8\n", "4-7\n", "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(text)
    made = Processors({2, 3, 5, 6, 8})
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(made.now))
    monkeypatch.setattr(os, "sched_setaffinity", made.move)
    return made


@pytest.mark.parametrize(("node", "there"), [(0, {2, 3, 8}), (1, {5, 6})])
def test_a_thread_is_on_a_node_and_back(processors: Processors, node: int, there: set[int]) -> None:
    before = processors.now
    with on_node(node):
        assert processors.now == there
    assert processors.now == before


@pytest.mark.parametrize("node", [None, 2, 7])
def test_a_node_that_has_none_of_its_processors_changes_nothing(
    processors: Processors, node: int | None
) -> None:
    with on_node(node):
        pass
    assert not processors.log


def test_a_system_that_refuses_changes_nothing(
    processors: Processors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, there: set[int]) -> None:
        raise PermissionError("sandbox")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    before = processors.now
    with on_node(0):
        assert processors.now == before


def test_staging_is_touched_on_the_gpus_node(
    processors: Processors, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[set[int]] = []

    def on_some_node(nbytes: int) -> HostBuffer:
        made.append(processors.now)
        return HostBuffer(nbytes)

    monkeypatch.setattr(pinned_memory, "HostBuffer", on_some_node)
    driver = StandInDriver()
    driver.numa_node = 1
    PinnedStaging(driver, None, 4096).close()
    driver.close()
    assert made == [{5, 6}]


def test_a_pool_and_its_threads_are_opened_on_the_drives_node(
    processors: Processors, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[set[int]] = []

    def opened(*arguments: object, **options: object) -> object:
        made.append(processors.now)
        return open_controller(*arguments, **options)

    before = processors.now
    open_controller = store_module.open_controller
    monkeypatch.setattr(store_module, "open_controller", opened)
    monkeypatch.setattr(store_module, "shared_node", lambda names: len(names) - 1)
    layout = KVLayout.mha(
        layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="float16", model="numa"
    )
    for members in (["one"], ["left", "right"]):
        paths = [str(tmp_path / f"{name}.tutti") for name in members]
        with tutti.open(paths, layout, "16MiB", profile=None):
            assert processors.now == before, "the caller's thread is back where it was"
    assert made == [{2, 3, 8}, {5, 6}]
