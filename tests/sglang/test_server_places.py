"""A real server on CPU whose pool lies in two files, or in two folders of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from medium_damage import pool_files
from server_modes import Mode, again, both_modes, prompts
from sglang_server import Server
from test_server_ranks import _bound, needs_two

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@both_modes
def test_a_pool_in_two_files(mode: Mode, tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """Served after a flush, and by a second server after the first one was killed."""
    files = [str(tmp_path / name / "kv.tutti") for name in "ab"]
    asked = prompts(seed, 6)
    arguments = mode.arguments(files, capacity="64MiB")
    with Server(tiny_model, tmp_path / "log", arguments, page_size=64) as server:
        computed = [server.ask(prompt) for prompt in asked]
        mode.served(computed, again(server, asked), 576)
    with Server(tiny_model, tmp_path / "log", arguments, page_size=64) as server:
        mode.recovers(server, asked, computed, 576)
    assert all(Path(file).stat().st_blocks for file in files)


@needs_two
@both_modes
def test_two_ranks_in_two_folders(mode: Mode, tiny_model: Path, tmp_path: Path, seed: int) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    asked = prompts(seed, 3)
    arguments = [*mode.arguments(folders, capacity="96MiB"), "--tp", "2"]
    with Server(tiny_model, tmp_path / "log", arguments, page_size=64, env=_bound()) as server:
        computed = [server.ask(prompt) for prompt in asked]
        mode.served(computed, again(server, asked), 576)
    assert [len(pool_files(Path(folder))) for folder in folders] == [2, 2]
