"""`tutti ls`, `rm` and `pin`, on a closed pool and through an agent."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from node.agents import LAYOUT, running

import tutti
from store.pools import some_keys
from tutti.cli import main
from tutti.medium.layout import KVLayout
from tutti.medium.slot_record import tenant_of
from tutti.transfers.put_limits import Quota
from tutti.transfers.store_config import StoreConfig


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_prompts_pages_are_named_by_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    pool, file = str(tmp_path / "pool.tutti"), tmp_path / "prompt.json"
    tokens = np.random.default_rng(seed).integers(0, 1 << 17, 5 * LAYOUT.page_size + 3)
    keys = tutti.chain_keys(LAYOUT.fingerprint, tokens, LAYOUT.page_size)
    with tutti.open(pool, LAYOUT, "32MiB") as store:
        store.allocate_memory(4)
        store.put(keys[:4], np.arange(4)).wait(30)
    file.write_text(json.dumps(tokens.tolist()))
    assert run(capsys, "pin", pool, "--tokens", str(file)) == {"pinned": 4}
    file.write_text(" ".join(map(str, tokens[:33])))
    assert run(capsys, "pin", pool, "--tokens", str(file), "--undo") == {"unpinned": 2}
    for text, reason, code in (
        (b"1, two", "not a list of token ids", 2),
        (b"1, \xff", "not a list of token ids", 2),
        (b"9" * 30, "not a list of token ids", 2),
        (b"7 " * 40, "no page of this", 1),
    ):
        file.write_bytes(text)
        assert main(["rm", pool, "--tokens", str(file)]) == code
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("where", ["file", "files", "agent"])
def test_chains_are_listed_pinned_and_removed(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    keys = some_keys(rng, 6)
    first, members = keys[0].tobytes().hex(), []
    quotas = (Quota("team", 1 << 20),)
    with running(tmp_path, config=StoreConfig(quotas=quotas)) as agent:
        if where == "agent":
            pool, store = f"unix:{agent.path}", agent.connect()
        else:
            files = [str(tmp_path / f"pool{i}.tutti") for i in range(1 + (where == "files"))]
            store = tutti.open(files, LAYOUT, "32MiB")
            pool, *more = files
            members = [word for file in more for word in ("--member", file)]
        store.allocate_memory(6)
        store.put(keys[:4], np.arange(4)).wait(30)
        store.put(keys[4:5], [4], parent=keys[1].tobytes(), depth=2).wait(30)
        store.put(keys[5:], [5], namespace="team").wait(30)
        store.close()

        def on(command: str, *words: str) -> dict[str, Any]:
            return run(capsys, command, pool, *words, *members)

        found = on("ls")
        assert (found["objects"], found["chains"]) == (6, 3)
        of_team = on("ls", "--namespace", "team")
        assert of_team["objects"] == 1
        assert [info["namespace"] for info in of_team["listed"]] == ["team"]
        # A name comes from the agent's quotas; a pool has only the number.
        name = "team" if where == "agent" else f"#{tenant_of('team')}"
        assert sorted(info["namespace"] for info in found["listed"]) == [""] * 5 + [name]
        assert main(["ls", pool, *members]) == 0
        shown = capsys.readouterr().out
        assert first in shown and "namespace" in shown and name in shown
        assert on("pin", first, "--chain", "--ttl", "600") == {"pinned": 5}
        listed = on("ls")["listed"]
        assert isinstance(listed, list)
        assert sum(info["pinned"] for info in listed) == 5
        assert on("pin", first, "--undo") == {"unpinned": 1}
        second = keys[1].tobytes().hex()
        assert on("rm", second, "--chain") == {"removed": 4}
        assert on("rm", "--namespace", "team") == {"removed": 1}
        assert on("ls")["objects"] == 1
        if where == "files":
            assert main(["ls", pool]) != 0, "a part of a pool"
        if where == "agent":
            assert main(["ls", pool, "--member", str(tmp_path / "other")]) == 2
            assert "--member is only for closed pools" in capsys.readouterr().err


def test_an_expired_object_that_is_still_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Objects are removed a moment after their time is over."""
    pool = str(tmp_path / "pool.tutti")
    with tutti.open(pool, LAYOUT, "32MiB") as store:
        store.allocate_memory(1)
        store.put(some_keys(np.random.default_rng(seed), 1), [0], ttl_s=60).wait(30)
    late = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    monkeypatch.setattr("tutti.transfers.catalogue.time", late)
    assert main(["ls", pool]) == 0
    shown = capsys.readouterr().out
    assert "expires" in shown and shown.rstrip().endswith("  0 s"), shown


def test_the_followers_of_a_key_that_is_not_there_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    pool = str(tmp_path / "pool.tutti")
    chain = some_keys(np.random.default_rng(seed), 3)
    with tutti.open(pool, LAYOUT, "32MiB") as store:
        store.allocate_memory(3)
        store.put(chain, range(3)).wait(30)
    assert main(["rm", pool, chain[1].tobytes().hex()]) == 0
    assert main(["rm", pool, chain[1].tobytes().hex(), "--chain"]) == 1
    capsys.readouterr()
    assert main(["ls", pool, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["objects"] == 2


def test_an_object_that_is_named_twice_is_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """By its key and its namespace, in two of the blocks in which records are read."""
    monkeypatch.setattr("tutti.pool.record_table._BLOCK_RECORDS_MAX", 64)
    pool, keys = str(tmp_path / "pool.tutti"), some_keys(np.random.default_rng(seed), 70)
    with tutti.open(pool, LAYOUT, "32MiB") as store:
        store.allocate_memory(70)
        store.put(keys, range(70), namespace="team").wait(30)
        last = store.catalogue.keys("team")[-1].tobytes().hex()
    words = [pool, last, "--namespace", "team"]
    assert run(capsys, "pin", *words) == {"pinned": 70}
    assert run(capsys, "export", *words, "--out", str(tmp_path / "a.tkv"))["exported"] == 70


def test_wrong_keys_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = str(tmp_path / "pool.tutti")
    tutti.open(pool, LAYOUT, "32MiB").close()
    assert main(["rm", pool]) == 2
    assert "no objects are named" in capsys.readouterr().err
    assert main(["rm", pool, "abc"]) == 2
    assert "32 hexadecimal digits" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["rm"], ["pin"], ["pin", "--undo"], ["export", "--out"]])
def test_keys_that_are_not_in_the_pool_are_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """The others are done; a namespace without objects is not an error."""
    pool, out = str(tmp_path / "pool.tutti"), tmp_path / "docs.tkv"
    there, absent = (key.tobytes().hex() for key in some_keys(np.random.default_rng(seed), 2))
    with tutti.open(pool, LAYOUT, "32MiB") as store:
        store.allocate_memory(1)
        store.put([bytes.fromhex(there)], [0]).wait(30)
    command, *more = [*words, str(out)] if "--out" in words else words
    assert main([command, pool, absent, absent, "--chain", *more]) == 1
    assert capsys.readouterr().err == f"tutti: not in the pool: {absent}\n"
    assert not out.exists()
    assert main([command, pool, *(f"{n:032x}" for n in range(20)), *more]) == 1
    assert capsys.readouterr().err.endswith(f", {7:032x} and 12 more\n")
    assert main([command, pool, "--namespace", "none", *more]) == 0
    out.unlink(missing_ok=True)
    assert main([command, pool, absent, there, *more]) == 1
    assert absent in capsys.readouterr().err
    assert out.exists() == (command == "export")
    (found,) = run(capsys, "ls", pool)["listed"] or [None]
    assert (found is None) == (command == "rm")
    assert found is None or found["pinned"] == (more == [])


def test_an_agent_with_several_pools_lists_each_and_is_asked_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    """Also pools that no process has asked for since the agent started."""
    other = KVLayout.mha(
        layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="other-model"
    )
    names = {layout.fingerprint.hex(): n for n, layout in ((3, LAYOUT), (1, other))}
    with running(tmp_path) as agent:
        assert run(capsys, "ls", f"unix:{agent.path}") == {"pools": {}}
        for layout, n in ((LAYOUT, 3), (other, 1)):
            with agent.connect(layout) as store:
                store.allocate_memory(n)
                store.put(some_keys(rng, n), np.arange(n)).wait(30)
    with running(tmp_path) as agent:
        socket = f"unix:{agent.path}"
        pools = run(capsys, "ls", socket)["pools"]
        assert isinstance(pools, dict)
        assert {name: found["objects"] for name, found in pools.items()} == names
        assert main(["stat", socket]) == 0
        shown = capsys.readouterr().out
        assert all(f"pool  {name}" in shown for name in names)
        assert main(["rm", socket, "--namespace", ""]) != 0
        refused = capsys.readouterr().err
        assert all(name in refused for name in names), "it names what to choose from"
        one_name = other.fingerprint.hex()
        one = one_name[:8]
        assert run(capsys, "ls", socket, "--pool", one)["objects"] == 1
        assert run(capsys, "rm", socket, "--pool", one, "--namespace", "") == {"removed": 1}
        assert run(capsys, "stat", socket, "--pool", one)["evicted"] == 0
        assert main(["ls", socket, "--pool", "nonsense"]) != 0
        for bad in ("bad", "bad-too"):  # the whole name of one is the beginning of the other's
            (tmp_path / f"{bad}.tutti").write_bytes(bytes(range(256)) * 64)
        assert main(["ls", socket, "--json"]) == 3
        listed = json.loads(capsys.readouterr().out)["pools"]
        for bad in ("bad", "bad-too"):
            assert f"{bad}.tutti" in listed.pop(bad)["error"]["message"]
        assert {name: found["objects"] for name, found in listed.items()} == {**names, one_name: 0}
        assert main(["stat", socket]) == 3
        said = capsys.readouterr()
        assert all(f"pool  {name}" in said.out for name in (*names, "bad", "bad-too"))
        assert "error: " in said.out and "tutti: pool bad-too: " in said.err
        assert main(["ls", socket, "--member", str(tmp_path / "other")]) == 2, "of all pools"
    assert main(["ls", str(tmp_path / "pool.tutti"), "--pool", one]) == 2
    assert "pool.tutti is not one; remove it" in capsys.readouterr().err
