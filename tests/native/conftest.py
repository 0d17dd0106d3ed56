"""Fixtures that compile and start the native test programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from native.programs import Build, Program, Start, compile_program
from native.stand_in import environment_with, headers_of_cuda


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build(name, sanitizer)`: the compiled program, from pytest's cache where it is fresh."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("native-programs") if cache else tmp_path_factory.mktemp("programs")
    return partial(compile_program, Path(folder))


@pytest.fixture
def start(build: Build) -> Iterator[Start]:
    """`start(name)`: a line-wise program under the address sanitizer."""
    with ExitStack() as programs:

        def start_program(name: str) -> Program:
            program = Program(build(name, "asan"))
            programs.callback(program.close)
            return program

        yield start_program


@pytest.fixture
def environment(build: Build, tmp_path: Path) -> dict[str, str]:
    """Of a process that finds the stand-in of libcuda.so.1."""
    return environment_with(build("device_cuda", "library", system=[headers_of_cuda()]), tmp_path)
