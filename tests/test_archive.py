"""`tutti export` and `tutti import`: chains of one pool in another, through both kinds of store."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node.agents import LAYOUT, RunningAgent, running

import tutti
from store.pools import fill, some_keys
from tutti.archive import export_objects, import_objects
from tutti.cli import main
from tutti.commands import catalogue
from tutti.errors import AgentRefused, PoolCorrupt, PoolMismatch
from tutti.medium.layout import KVLayout
from tutti.node.pool_service import ClientSession
from tutti.transfers.store_config import StoreConfig

OTHER = KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="another-model"
)


def stored(store: Any, rng: np.random.Generator, n: int = 6) -> tuple[Any, list[bytes]]:
    """A chain of n - 1 pages and one page that branches off after the second."""
    memory = store.allocate_memory(n)
    keys = some_keys(rng, n)
    contents = fill(memory, range(n), rng)
    store.put(keys[: n - 1], range(n - 1)).wait(30)
    store.put(keys[n - 1 :], [n - 1], parent=keys[1].tobytes(), depth=2, ttl_s=640).wait(30)
    store.unregister(memory)
    return keys, contents


def loaded(store: Any, keys: Any) -> list[bytes]:
    memory = store.allocate_memory(len(keys))
    ticket = store.load(keys, range(len(keys)), memory=memory)
    ticket.wait(30)
    assert ticket.wait_settled(30)
    contents = [memory.read(page) for page in range(len(keys))]
    store.unregister(memory)
    return contents


@pytest.mark.parametrize("target", ["file", "agent"])
def test_chains_travel(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    source, archive = str(tmp_path / "source.tutti"), str(tmp_path / "a.tkv")
    with tutti.open(source, LAYOUT, "32MiB") as store:
        keys, contents = stored(store, rng)
    first = keys[0].tobytes().hex()
    assert main(["export", source, first, "--chain", "--out", archive, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exported"] == 6
    with running(tmp_path / "node") as agent:
        pool = str(tmp_path / "target.tutti")
        if target == "agent":
            pool, opened = f"unix:{agent.path}", agent.connect
        else:
            opened = lambda: tutti.open(pool, LAYOUT, "32MiB")  # noqa: E731
        opened().close()
        with opened() as store:
            for expected in ({"stored": 6, "present": 0}, {"stored": 0, "present": 6}):
                if target == "file":
                    with open(archive, "rb") as file:
                        result = vars(import_objects(store, file, namespace="docs"))
                else:
                    assert main(["import", pool, archive, "--namespace", "docs", "--json"]) == 0
                    result = json.loads(capsys.readouterr().out)
                assert result == {**expected, "dropped": 0}
            assert store.match(keys[:5]) == 5
            assert loaded(store, keys) == contents
            infos = {
                info.key: info for info in store.catalogue.objects(store.catalogue.keys("docs"))
            }
    branch = infos[keys[5].tobytes()]
    assert (branch.parent, branch.depth) == (keys[1].tobytes(), 2)
    assert branch.expires_s is not None
    assert infos[keys[4].tobytes()].expires_s is None


def test_a_time_to_live_beyond_the_files_32_bits(tmp_path: Path, seed: int) -> None:
    """159 years are exported as 136."""
    source, archive = str(tmp_path / "source.tutti"), str(tmp_path / "a.tkv")
    with tutti.open(source, LAYOUT, "32MiB") as store:
        keys, _ = stored(store, np.random.default_rng(seed))
    first, target = keys[0].tobytes().hex(), str(tmp_path / "target.tutti")
    assert main(["pin", source, first, "--ttl", "5000000000"]) == 0
    assert main(["export", source, first, "--out", archive]) == 0
    with tutti.open(target, LAYOUT, "32MiB") as store, open(archive, "rb") as file:
        assert import_objects(store, file).stored == 1
        (info,) = store.catalogue.objects(keys[:1])
    assert info.expires_s is not None
    assert 2**32 - 60 < info.expires_s <= 2**32 + 64


def exported(tmp_path: Path, rng: np.random.Generator) -> tuple[bytes, Any, list[bytes]]:
    file = io.BytesIO()
    with tutti.open(str(tmp_path / "source.tutti"), LAYOUT, "32MiB") as store:
        keys, contents = stored(store, rng)
        assert export_objects(store, keys, file) == 6
    return file.getvalue(), keys, contents


def test_a_damaged_file_stores_no_wrong_byte(tmp_path: Path, rng: np.random.Generator) -> None:
    """Any one byte, and any end: refused, and what was stored before is right."""
    whole, keys, contents = exported(tmp_path, rng)
    by_key = {key.tobytes(): content for key, content in zip(keys, contents, strict=True)}
    with tutti.open(str(tmp_path / "target.tutti"), LAYOUT, "32MiB") as store:
        cuts = [*range(0, 40, 7), *rng.integers(0, len(whole), 6).tolist(), len(whole) - 1]
        damaged = [whole[:cut] for cut in cuts] + [whole + b"x"]
        for place in (*range(0, 24, 3), *rng.integers(0, len(whole), 16).tolist()):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << int(rng.integers(8))
            damaged.append(bytes(flipped))
        for raw in damaged:
            store.clear()
            with pytest.raises((PoolCorrupt, PoolMismatch)):
                import_objects(store, io.BytesIO(raw))
            there = store.catalogue.keys()
            if len(there):
                assert loaded(store, there) == [by_key[key.tobytes()] for key in there]


def test_what_comes_before_the_damage_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """Also objects that would have gone into one put with the damaged one."""
    whole, _, _ = exported(tmp_path, np.random.default_rng(seed))
    archive, pool = tmp_path / "torn.tkv", str(tmp_path / "target.tutti")
    archive.write_bytes(whole[: -2 * (LAYOUT.object_nbytes + 56) - 1])  # the fourth of six is torn
    tutti.open(pool, LAYOUT, "32MiB").close()
    for stored, present in ((3, 0), (0, 3)):
        assert main(["import", pool, str(archive)]) == 3
        said = capsys.readouterr().err
        assert f"{stored} were stored, {present} were in the pool already" in said
    with tutti.open(pool) as store:
        assert len(store.catalogue.keys()) == 3


def test_a_full_disk_and_a_foreign_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pool, out = str(tmp_path / "pool.tutti"), tmp_path / "docs.tkv"
    tutti.open(pool, LAYOUT, "32MiB").close()
    monkeypatch.setattr(catalogue, "export_objects", full)
    assert main(["export", pool, "--namespace", "docs", "--out", str(out)]) == 3
    assert f"{out}: No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pool.tutti"]
    out.write_bytes(b"other")
    assert main(["import", pool, str(out)]) == 3
    assert f"{out} was not written by `tutti export`" in capsys.readouterr().err


def test_another_model_and_another_version_are_refused(tmp_path: Path, seed: int) -> None:
    whole, _, _ = exported(tmp_path, np.random.default_rng(seed))
    with tutti.open(str(tmp_path / "other.tutti"), OTHER, "32MiB") as store:
        with pytest.raises(PoolMismatch, match=r"model is .another-model., not .*same model"):
            import_objects(store, io.BytesIO(whole))
        newer = whole[:8] + (9).to_bytes(4, "little") + whole[12:]
        with pytest.raises(PoolMismatch, match="version 9"):
            import_objects(store, io.BytesIO(newer))
        assert not len(store.catalogue.keys())


def test_what_is_exported_is_not_evicted_meanwhile(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Another client fills the pool during the export."""
    with running(tmp_path) as agent, agent.connect(capacity="12MiB") as store:
        keys, contents = stored(store, rng)
        file = Slow(lambda: crowd(agent, rng))
        assert export_objects(store, keys, file) == 6
        file.seek(0)
        store.clear()
        assert import_objects(store, file).stored == 6
        assert loaded(store, keys) == contents


def test_an_export_keeps_its_pins_while_there_are_look_ups(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pins end after some later look-ups, which servers make all the time."""
    monkeypatch.setattr("tutti.archive._RENEW_S", 0.0)
    monkeypatch.setattr("tutti.archive._BATCH_NBYTES", 1)  # an object at a time
    busy: list[int] = []
    with running(tmp_path, config=StoreConfig(pin_lookups=1)) as agent, agent.connect() as store:
        keys, _ = stored(store, rng)

        def count() -> None:
            busy.append(store.stats()["busy_objects"])

        def look_up() -> None:
            for _ in range(10):
                store.match(keys[:1])
            count()

        assert export_objects(store, keys, Slow(look_up, count)) == 6
    assert busy == [0, 6]


class Slow(io.BytesIO):
    """Calls back before the header is written, and then before each object is."""

    def __init__(self, *callbacks: Any) -> None:
        super().__init__()
        self._callbacks = list(callbacks)

    def write(self, data: Any) -> int:
        if self._callbacks:
            self._callbacks.pop(0)()
        return super().write(data)


def crowd(agent: RunningAgent, rng: np.random.Generator) -> None:
    with agent.connect() as other:
        n = other.stats()["capacity_objects"]
        memory = other.allocate_memory(n)
        other.put(some_keys(rng, n), np.arange(n), memory=memory).wait(60)
        assert other.stats()["evicted"] > 0 or other.stats()["dropped"] > 0


def test_an_export_that_leaves_objects_out_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """What no pin protects could be evicted before it is read."""
    argv = ["--namespace", "", "--out", str(tmp_path / "a.tkv"), "--json"]
    with running(tmp_path / "node", config=StoreConfig(pin_share=0.0)) as agent:
        with agent.connect() as store:
            stored(store, np.random.default_rng(seed))
        assert main(["export", f"unix:{agent.path}", *argv]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["exported"], result["left_out"]) == (0, 6)


def test_an_import_during_a_restart_of_the_agent_does_not_blame_the_pool(
    tmp_path: Path,
    rng: np.random.Generator,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, _, _ = exported(tmp_path, rng)
    (tmp_path / "a.tkv").write_bytes(whole)

    def away(session: ClientSession, message: Any) -> Any:
        raise AgentRefused("the agent is stopping; connect again later")

    with running(tmp_path / "node") as agent:
        agent.connect().close()
        monkeypatch.setattr(ClientSession, "plan_put", away)
        assert main(["import", f"unix:{agent.path}", str(tmp_path / "a.tkv")]) == 1
    said = capsys.readouterr().out
    assert "6 dropped: " in said and "or the agent was away" in said


def test_what_may_expire_during_an_export_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """It could be gone when its turn comes, and then there would be no file at all."""
    pool, out = str(tmp_path / "pool.tutti"), str(tmp_path / "a.tkv")
    with tutti.open(pool, LAYOUT, "32MiB") as store:
        keys, _ = stored(store, np.random.default_rng(seed))
        store.catalogue.expire(keys[:1], 30.0)
    assert main(["export", pool, "--namespace", "", "--out", out, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["exported"], result["left_out"]) == (5, 1)


def test_an_export_waits_for_a_busy_agent(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a server does for a look-up: it would miss, and all objects be left out."""
    present, out = ClientSession.present, tmp_path / "a.tkv"

    def late(session: ClientSession, message: Any) -> bytes:
        time.sleep(1.2)
        return present(session, message)

    with running(tmp_path / "node") as agent:
        with agent.connect() as store:
            stored(store, rng)
        monkeypatch.setattr(ClientSession, "present", late)
        assert main(["export", f"unix:{agent.path}", "--namespace", "", "--out", str(out)]) == 0


def test_the_command_line_keeps_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """An export never overwrites, and leaves nothing when it fails."""
    pool, out = str(tmp_path / "pool.tutti"), tmp_path / "a.tkv"
    with tutti.open(pool, LAYOUT, "32MiB") as store:
        keys, _ = stored(store, np.random.default_rng(seed))
    out.write_bytes(b"mine")
    argv = ["export", pool, keys[0].tobytes().hex(), "--out", str(out)]
    assert main(argv) == 2
    assert "exists" in capsys.readouterr().err
    assert out.read_bytes() == b"mine"
    assert main(["import", pool, str(out)]) == 3
    assert "tutti export" in capsys.readouterr().err
    assert main(["import", pool, str(tmp_path / "none")]) == 3
    assert main([*argv[:-1], str(tmp_path / "none" / "b")]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tkv", "pool.tutti"]
    assert main([*argv[:-1], str(tmp_path / "b.tkv")]) == 0
    assert (tmp_path / "b.tkv").stat().st_mode & 0o777 == 0o600
