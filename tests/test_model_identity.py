"""A pool knows its model: pages of another model with the same shape never match."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tutti
from tutti import cli
from tutti.errors import ConfigError, PoolMismatch
from tutti.integration.sglang.identity import (
    ServedModel,
    identity_of,
    version_at_start,
    weights_version,
)
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
    assert "any model" in str(info(free, capsys)["warning"])
    assert cli.main(["info", str(free)]) == 0
    assert "warning: no model is named" in capsys.readouterr().out
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


OPTIONS = {"weights": "", "model": ""}


def change(file: Path, content: bytes = b"1") -> None:
    """Writes a file whose times are another's, however coarse the clock is."""
    times = file.stat().st_mtime_ns + 1 if file.exists() else 1
    file.write_bytes(content)
    os.utime(file, ns=(times, times))


def after_restart(model: ServedModel, **options: str) -> str:
    version_at_start.cache_clear()
    return identity_of({**OPTIONS, **options}, model).weights


def test_an_adapter_that_was_trained_again_is_another_identity(tmp_path: Path) -> None:
    """Its id, and so SGLang's page hashes, stays the same."""
    weights = tmp_path / "adapter_model.safetensors"
    change(weights)
    base = ServedModel(path="base/model")
    model = replace(base, adapters=(("a", str(tmp_path)),))
    for options in ({}, {"weights": "mine"}):
        first = after_restart(model, **options)
        assert first == after_restart(model, **options) != after_restart(base, **options)
        change(weights)
        assert after_restart(model, **options) != first


def test_adapters_are_the_same_in_any_order() -> None:
    two = (("a", "x/one"), ("b", "x/two"))
    first, other = (ServedModel(path="m", adapters=order) for order in (two, two[::-1]))
    assert after_restart(first) == after_restart(other)


def test_the_snapshot_is_that_of_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = {None: "c-main", "dev": "c-dev"}
    kept = {"org/model": "config.json", "org/adapter": "adapter_config.json"}

    def look(repository: str, name: str, *, revision: str | None = None) -> str | None:
        return f"/cache/{commits[revision]}/{name}" if kept[repository] == name else None

    hub: Any = SimpleNamespace(try_to_load_from_cache=look)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert weights_version("org/model") == "c-main"
    assert weights_version("org/model", "dev") == "c-dev"
    assert weights_version("org/adapter") == "c-main"
    assert after_restart(ServedModel(path="org/model", revision="dev")).startswith("c-dev|dev|")


@pytest.mark.parametrize("name", ["modeling_mine.py", "configuration_mine.py"])
def test_code_of_a_model_that_is_run_has_a_version(name: str, tmp_path: Path) -> None:
    """Other code may compute other KV for the same tokens."""
    change(tmp_path / "model.safetensors")
    plain = ServedModel(path=str(tmp_path))
    trusted = replace(plain, runs_code=True)
    first = after_restart(plain)
    assert after_restart(trusted) == first, "no code: pools of such servers stay the same"
    change(tmp_path / name)
    assert after_restart(plain) == first
    second = after_restart(trusted)
    change(tmp_path / name)
    assert len({first, second, after_restart(trusted)}) == 3
    assert after_restart(trusted, weights="7") == "7"


def test_a_single_file_has_a_version(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    versions = []
    for changed in (file, file, tmp_path / "config.json"):
        change(changed)
        versions.append(weights_version(str(file)))
    assert all(versions)
    assert len(set(versions)) == 3


def test_weights_in_folders_of_a_checkpoint_have_a_version(tmp_path: Path) -> None:
    """Cosmos 3 has them in `transformer` and `vision_encoder`."""
    change(tmp_path / "config.json")
    versions = [weights_version(str(tmp_path))]
    for part in ("transformer", "vision_encoder"):
        (tmp_path / part).mkdir()
        for _ in range(2):
            change(tmp_path / part / "model.safetensors")
            versions.append(weights_version(str(tmp_path)))
    assert len(set(versions)) == 5
    change(tmp_path / "model.safetensors")
    whole = weights_version(str(tmp_path))
    change(tmp_path / "transformer" / "model.safetensors")
    assert weights_version(str(tmp_path)) == whole, "these are not loaded"


@pytest.mark.parametrize("changed_at", [0, 3 << 20])
def test_files_whose_times_are_constant_are_told_apart_by_their_bytes(
    changed_at: int, tmp_path: Path
) -> None:
    """Reproducible images give all files one time; other weights of a model have the same sizes."""
    file = tmp_path / "model.safetensors"
    versions = []
    for time_s in (0, 1, 946_684_800, 1_800_000_000):  # epoch, Nix and Jib, Bazel, a real one
        for value in (1, 2):
            weights = bytearray(8 << 20)
            weights[changed_at : changed_at + (64 << 10)] = bytes([value]) * (64 << 10)
            file.write_bytes(weights)
            os.utime(file, (time_s, time_s))
            versions.append(weights_version(str(tmp_path)))
    assert len(set(versions)) == 7, "only a real time stands for the bytes"


@pytest.mark.parametrize("path", ["s3://bucket/model", "org/model:Q4_K_M"])
def test_weights_without_a_version_are_warned_about(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        after_restart(ServedModel(path=path), weights="mine")
        assert not caplog.records
        after_restart(ServedModel(path=path))
    (record,) = caplog.records
    assert path in record.getMessage()
    assert '"weights"' in record.getMessage()


def test_dummy_weights_do_not_have_the_version_of_the_real_ones() -> None:
    """A server that is tried with dummies first has the other arguments in common with them."""
    real = ServedModel(path="org/model")
    dummy = replace(real, load_format="dummy")
    assert after_restart(real, weights="7") == "7"
    assert after_restart(dummy, weights="7") == after_restart(dummy) != after_restart(real)


def test_weights_of_another_process_need_a_version() -> None:
    """They may have been updated there, or be older than the files."""
    model = ServedModel(path="org/model", weights_from="--load-format remote_instance")
    with pytest.raises(ConfigError, match=r'remote_instance .* set the option "weights"'):
        after_restart(model)
    assert after_restart(model, weights="7") == "7"


def test_a_pool_that_is_opened_again_is_that_of_the_weights_that_were_loaded(
    tmp_path: Path,
) -> None:
    change(tmp_path / "model.safetensors")
    model = ServedModel(path=str(tmp_path))
    first = after_restart(model)
    change(tmp_path / "model.safetensors")
    assert identity_of(OPTIONS, model).weights == first
    assert after_restart(model) != first
