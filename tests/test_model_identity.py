"""A pool knows its model: pages of another model with the same shape never match."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tutti
from tutti import cli
from tutti.errors import ConfigError, PoolMismatch
from tutti.medium.layout import KVLayout

SHAPE = ["--layers", "4", "--kv-heads", "2", "--head-dim", "64", "--page-size", "64"]
UNNAMED = KVLayout.mha(4, 2, 64, 64, "bfloat16")
USAGE = 2


def info(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert cli.main(["info", str(path), "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert isinstance(layout, dict)
    return layout


def test_a_new_pool_needs_a_model(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    for make in (tutti.format, tutti.open):
        with pytest.raises(ConfigError, match=r"pass model= and weights= .*or model=None"):
            make(path, UNNAMED, "64MiB")
    assert not path.exists()


def test_the_model_of_the_command_line_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A known model, and one of the caller's dimensions."""
    known, own, free = tmp_path / "known", tmp_path / "own", tmp_path / "free"
    command = ["format", str(known), "--capacity", "64MiB", "--model", "tiny", "--weights", "7"]
    assert cli.main(command) == 0
    assert info(known, capsys)["model"] == "tiny"
    assert info(known, capsys)["weights"] == "7"
    assert info(known, capsys)["warning"] is None
    assert cli.main(["format", str(own), "--capacity", "64MiB", "--model", "mine", *SHAPE]) == 0
    layout = replace(UNNAMED, model="mine")
    with tutti.open(own, layout) as store:
        assert store.layout.model == "mine"
    with pytest.raises(PoolMismatch):
        tutti.open(own, replace(UNNAMED, model="other"))
    assert cli.main(["format", str(free), "--capacity", "64MiB", "--any-model", *SHAPE]) == 0
    assert "every model" in str(info(free, capsys)["warning"])
    assert cli.main(["info", str(free)]) == 0
    assert "warning: none is named" in capsys.readouterr().out
    with tutti.open(free, replace(UNNAMED, model=None)) as store:
        assert store.layout.model is None
    for words in ([], ["--model", "a", "--any-model"], ["--model", "unknown"]):
        shape = [] if "unknown" in words else SHAPE
        assert cli.main(["format", str(tmp_path / "x"), "--capacity", "1GiB", *words, *shape]) == 2


def test_pages_of_another_model_never_match(tmp_path: Path) -> None:
    """Following README: keys come from the layout's fingerprint, so they differ too."""
    tokens = np.arange(4 * 64)
    first, second = (replace(UNNAMED, model=name) for name in ("model-a", "model-b"))
    with tutti.open(tmp_path / "pool", first, "64MiB") as store:
        memory = store.allocate_memory(4)
        for page in range(4):
            memory.write(page, bytes([page]) * first.object_nbytes)
        keys = tutti.chain_keys(first.fingerprint, tokens, first.page_size)
        assert store.put(keys, np.arange(4)).wait(10).stored == 4
        assert store.match(keys) == 4
        assert store.match(tutti.chain_keys(second.fingerprint, tokens, 64)) == 0


def test_an_explicit_none_is_not_an_empty_name() -> None:
    none = replace(UNNAMED, model=None)
    assert KVLayout.from_json(none.to_json()) == none
    assert none.fingerprint != UNNAMED.fingerprint
    with pytest.raises(ConfigError, match="must be a string"):
        replace(UNNAMED, model=5)
