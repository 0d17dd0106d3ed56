"""Settings of the agent's pools, from the command line of `tutti serve` to what its clients get."""

from __future__ import annotations

import argparse
import os
import re
import signal
from dataclasses import fields
from pathlib import Path
from subprocess import Popen, TimeoutExpired

import numpy as np
import pytest
from node.agents import LAYOUT, LOOKUP_S, WAIT_S, start_process

import tutti
from store.pools import some_keys
from tutti.cli import main
from tutti.commands import serve
from tutti.commands.settings import configure
from tutti.errors import CapacityError, ConfigError
from tutti.node.client import NodeStore
from tutti.transfers.put_limits import Quota
from tutti.transfers.store_config import StoreConfig

COUNT = 1024  # objects: more than a member takes before the next one has its turn
#: Of the engine that moves the data, which is each client's own.
OF_CLIENTS = {"page_cache_share", "residency", "window_nbytes", "service_threads", "schedule"}
GIVEN = {
    "--verify": ("verify", "sampled", "sampled"),
    "--durability": ("durability", "flush", "flush"),
    "--eviction": ("eviction", "lru", "lru"),
    "--timeout": ("timeout_s", "7.5", 7.5),
    "--pin-lookups": ("pin_lookups", "5", 5),
    "--pin-share": ("pin_share", "0.25", 0.25),
    "--digest-cache": ("digest_cache_nbytes", "1MiB", 1 << 20),
    "--write-budget": ("write_budget", "2GiB", 2 << 30),
    "--degraded": ("degraded", "yes", True),
    "--any-owner": ("any_owner", "true", True),
    "--quota": ("quotas", "team=1MiB", (Quota("team", 1 << 20),)),
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    serve.add_serve(made)
    return made


def config_of(*arguments: str) -> StoreConfig:
    return serve._config(parser().parse_args(["--socket", "s", *arguments]))


def test_every_setting_that_concerns_an_agent_has_an_option() -> None:
    offered = {field for field, _, _ in GIVEN.values()}
    assert offered | OF_CLIENTS == {field.name for field in fields(StoreConfig)}
    assert config_of() == StoreConfig()
    words = [word for option, (_, text, _) in GIVEN.items() for word in (option, text)]
    config = config_of(*words)
    assert config == StoreConfig(**{field: value for field, _, value in GIVEN.values()})
    from_file = parser()
    variables = {
        f"TUTTI_SERVE{o[1:].replace('-', '_').upper()}": t for o, (_, t, _) in GIVEN.items()
    }
    configure(from_file, "serve", variables, set())
    assert serve._config(from_file.parse_args(["--socket", "s"])) == config


def test_help_has_the_defaults() -> None:
    text = " ".join(parser().format_help().split())
    for said in ("drive, of clients' as well (default: 30)", "objects (default: 16 MiB)"):
        assert said in text
    for said in ("per day (default: no limit)", "protect (default: 1)", "miss (default: no)"):
        assert said in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--pin-share", "3"), "pin_share"),
        (("--timeout", "0"), "timeout_s"),
        (("--pin-lookups", "0"), "pin_lookups"),
    ],
)
def test_values_out_of_range_are_refused(words: tuple[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_of(*words)


def test_the_socket_may_be_given_as_clients_give_it(tmp_path: Path) -> None:
    end(start_process(f"unix:{tmp_path}/s", tmp_path))


def test_a_folder_has_one_agent_that_can_write_there(tmp_path: Path) -> None:
    folder = tmp_path / "pools"
    folder.mkdir()
    process = start_process(tmp_path / "s", folder)
    try:
        with pytest.raises(AssertionError, match=rf"pools is in use by process {process.pid};"):
            start_process(tmp_path / "other", folder)
    finally:
        end(process)
    end(start_process(tmp_path / "other", folder))


def test_a_folder_in_which_nothing_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pools").mkdir(0o555)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda *_: False)
    words = ["--folder", str(tmp_path / "pools"), "--socket", str(tmp_path / "s")]
    assert main(["serve", *words]) == 3
    assert "pools; change its permissions, or remount it writable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "says"),
    [("unix:", "is 'unix:', of 0 bytes"), (f"/{107 * 's'}", "a socket's path has 1 to 107")],
)
def test_a_path_that_no_socket_can_have(
    path: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = f"unix:{path.removeprefix('unix:')}"
    for words in (["serve", "--folder", str(tmp_path), "--socket", path], ["stat", agent]):
        assert main(words) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(ConfigError, match=says):
        tutti.connect(path)


def test_a_pool_is_served_with_the_size_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    tutti.format(paths, LAYOUT, "64MiB")
    served = []
    monkeypatch.setattr(serve, "_serve", lambda *_: served.append(1))
    for name, other in (("CAPACITY", "1GiB"), ("CAPACITY", "32MiB"), ("VERIFY", "always")):
        monkeypatch.setenv(f"TUTTI_SERVE_{name}", other)
        assert main(["serve", *paths, "--socket", str(tmp_path / "s")]) == 0
        assert bool(re.search("a has 6.* MiB, .*`tutti resize`", caplog.text)) == (
            name == "CAPACITY"
        )
        monkeypatch.delenv(f"TUTTI_SERVE_{name}")
        caplog.clear()
    Path(paths[1]).unlink()
    words = ["--socket", str(tmp_path / "s"), "--degraded", "yes", "--capacity", "64MiB"]
    assert main(["serve", paths[0], *words]) == 0
    assert "keeps its size" not in caplog.text
    assert len(served) == 4


def test_a_flag_is_yes_or_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert not config_of("--degraded", "no").degraded
    with pytest.raises(SystemExit):
        config_of("--degraded", "maybe")
    assert "'maybe' is neither yes nor no" in capsys.readouterr().err


def end(process: Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


def test_an_agent_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a child inherits that
    try:
        process = start_process(tmp_path / "s", tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(TimeoutExpired):  # an agent that stops needs a quarter of that
            process.wait(1.0)
        with NodeStore(str(tmp_path / "s"), LAYOUT, "16MiB", lookup_timeout_s=LOOKUP_S) as store:
            assert store.connected
    finally:
        end(process)


def test_clients_have_the_agents_settings(tmp_path: Path, seed: int) -> None:
    words = ("--timeout", "11.5", "--verify", "sampled", "--pin-share", "0.5", "--pin-lookups", "1")
    process = start_process(tmp_path / "s", tmp_path, *words)
    try:
        with NodeStore(str(tmp_path / "s"), LAYOUT, "16MiB", lookup_timeout_s=LOOKUP_S) as store:
            assert (store.config.timeout_s, store.config.verify) == (11.5, "sampled")
            usable = store.stats()["capacity_objects"]
            keys = some_keys(np.random.default_rng(seed), usable)
            store.allocate_memory(usable)
            store.put(keys, np.arange(usable)).wait(WAIT_S)
            kept = keys[store.present(keys)]
            with pytest.raises(CapacityError, match="pin_share"):
                store.catalogue.pin(kept)
            assert store.match(kept[:8], pin="a") == 8
            assert store.stats()["busy_objects"] == 8
            for _ in range(2):
                store.match(kept[:1])
            assert store.stats()["busy_objects"] == 0
    finally:
        end(process)


def test_a_pool_is_served_without_a_missing_member(tmp_path: Path, seed: int) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    keys = some_keys(np.random.default_rng(seed), COUNT)
    with tutti.open(paths, LAYOUT, "64MiB") as store:
        store.allocate_memory(COUNT)
        assert store.put(keys, np.arange(COUNT)).wait(WAIT_S).stored == COUNT
    Path(paths[1]).unlink()
    process = start_process(tmp_path / "s", None, "--degraded", "yes", paths[0])
    try:
        with NodeStore(str(tmp_path / "s"), LAYOUT, lookup_timeout_s=LOOKUP_S) as store:
            store.wait_recovered(WAIT_S)
            store.allocate_memory(COUNT)
            there = store.present(keys)
            assert 0 < np.count_nonzero(there) < COUNT
            found = keys[there]
            store.load(found, np.arange(len(found))).wait(WAIT_S)
            missing = keys[~there][:256]  # as many as fit without an eviction
            assert store.put(missing, np.arange(len(missing))).wait(WAIT_S).stored == len(missing)
    finally:
        end(process)
