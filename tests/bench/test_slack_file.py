"""Puts during loads on a real file: what is compared there, and what is reported of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tutti import cli
from tutti.base.interrupts import is_main_thread
from tutti.bench.slack import file as slack_file
from tutti.bench.slack import report as slack_report
from tutti.scheduler.policy import SlackPolicy
from tutti.store import ObjectStore
from tutti.transfers.tickets import PutTicket


def measured(folder: Path, rounds: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    words = ["bench", "slack", "--json", "--workloads", "--dir", str(folder)]
    assert cli.main([*words, "--rounds", str(rounds)]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not list(folder.iterdir())
    return result


def test_a_file_alone_is_measured_and_nothing_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_done, alone = PutTicket.on_done, slack_file._alone
    written: dict[Any, int] = {}

    def late(ticket: PutTicket, call: Callable[[PutTicket], None]) -> None:
        """The callback runs some time after the threads that wait for the put have been woken."""
        on_done(ticket, lambda done: threading.Timer(0.3, call, (done,)).start())

    def counted(store: ObjectStore, pages: int, rng: np.random.Generator) -> dict[str, float]:
        took_s = alone(store, pages, rng)
        if store.scheduler is not None:
            policy = slack_file._schedule_of(store).policy
            written[policy] = store.scheduler.counters()["written_pages"]
        return took_s

    monkeypatch.setattr(slack_file, "_SHAPES", {"long": (slack_file._LOADED, 1), "short": (1, 2)})
    monkeypatch.setattr(slack_file, "WARM_ROUNDS", 0)
    monkeypatch.setattr(PutTicket, "on_done", late)
    monkeypatch.setattr(slack_file, "_alone", counted)
    result = measured(tmp_path, 1, capsys)
    assert result["simulated"] is False
    text = slack_report.report(result)
    assert "measured on a file" in text
    assert "simulated" not in text
    file, cells = result["file"], result["cost"]["cells"]
    assert file["rounds"] == 1
    stored_s = file["mean_stored_s"]
    assert f"after {stored_s['none']:.3f} s with `none`, {stored_s['slack']:.3f} s with" in text
    assert set(stored_s) == {"none", "slack", "as opened"}
    assert file["as opened"]["profile"] in ("cache", "measured", "estimated")
    assert file["as opened"]["limits"]["pressing_pages"] >= 64
    assert text.count("with a store as `tutti.open` opens it, ") == 2
    assert {name: len(waits_s) for name, waits_s in file["waits_s"].items()} == dict.fromkeys(
        ("none", "slack", "as opened", "no puts"), 1
    )
    costs = file["none - no puts, s"]["low"] > 0  # else no part of it means anything
    assert text.count("of it is closed with") == (2 if costs else 0)
    assert "profiles, and what was learned: with `slack` " in text
    assert text.count("(goal 0.5 ") == text.count("(goal 1 ") == 2
    counts = {name: cell["transfers"] for name, cell in cells.items()}
    assert counts == {"long put": 1, "long load": 1, "short put": 2, "short load": 2}
    for cell in cells.values():
        for pair in ("auto / off", "at once / off", "auto / at once", "control / off"):
            assert 0 < cell[pair]["low"] <= cell[pair]["high"]
    for part in ("queue ", "policy ", "control "):
        assert text.count(part) == len(cells)
    assert set(written) == {SlackPolicy, slack_file._AtOnce} and min(written.values()) > 0


def test_systems_open_one_pool_with_one_memory_in_turns_and_have_queues_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: dict[str, list[Any]] = {"rounds": [], "long": [], "short": []}
    places: set[Any] = set()
    on_main: set[bool] = set()
    few = {"long": (slack_file._LOADED, 1), "short": (1, 1)}

    def seen(kind: str, store: ObjectStore, keys: npt.NDArray[np.uint8]) -> None:
        [memory] = store._resources.memories
        slots = store._core.index.find(keys).tolist() if kind != "short" else ()
        places.add((kind, store.members.uuid, *memory.buffers, *slots))
        on_main.add(is_main_thread())

    def one_round(system: slack_file._Rounds, store: ObjectStore) -> tuple[float, float]:
        turns["rounds"].append(system)
        queues["rounds"].add(store.scheduler)
        seen("rounds", store, system._prefix)
        return 0.01 if system._stored else 0.005, 0.02

    def alone(store: ObjectStore, pages: int, rng: np.random.Generator) -> dict[str, float]:
        kind = "long" if pages > 1 else "short"
        keys = rng.integers(0, 256, (pages, 16), np.uint8)
        store.put(keys, np.arange(pages)).wait(60.0)
        turns[kind].append(id(store.config.schedule))
        queues["cost"].add(store.scheduler)
        if store not in opened:
            seen(kind, store, keys)
        opened.append(store)
        store.catalogue.delete(keys)
        return {"put": 0.01, "load": 0.01}

    queues: dict[str, set[Any]] = {"rounds": set(), "cost": set()}
    opened: list[ObjectStore] = []
    monkeypatch.setattr(slack_file, "_SHAPES", few)
    monkeypatch.setattr(slack_file._Rounds, "round", one_round)
    monkeypatch.setattr(slack_file, "_alone", alone)
    result = measured(tmp_path, 2, capsys)
    assert on_main == {False}, "calls of a server come from other threads"
    assert sorted(kind for kind, *_ in places) == ["long", "rounds"], "all is in one place"
    for taken in turns.values():
        taken = taken[::2]  # a turn has two of each
        assert len(taken) == 16
        assert all(len(set(taken[at::4])) == len(set(taken)) for at in range(4))
    assert all(len(found) == 3 and None in found for found in queues.values())
    note, *_ = slack_report.notes_of(result)
    assert note.count("1.000 [1.000, 1.000] of that (goal 0.5 **not reached**)") == 2
    assert note.count("1.000 [1.000, 1.000] of that (goal 1 reached)") == 2


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.3, 0.5, "reached"), (0.4, 0.6, "**not resolved**"), (0.51, 0.6, "**not reached**")],
)
def test_a_goal_is_judged_by_the_interval(low: float, high: float, said: str) -> None:
    waited = {"median": 0.45, "low": low, "high": high}
    stored = {"median": 1.0, "low": 2 * low, "high": 2 * high}
    found = {
        "rounds": 1,
        "profile": {"interference": 1.5},
        "bubble_s": {"none": 0.02, "slack": 0.01, "no puts": 0.01},
        "mean_stored_s": {"none": 0.1, "slack": 0.1},
        **{f"{name} / none": waited for name in ("slack", "no puts")},
        "stored / none": {"slack": stored},
    }
    [note] = slack_report.notes_of({"rows": [], "file": found})
    assert note.count(f"(goal 0.5 {said})") == 1, "there is none for rounds without puts"
    assert note.count(f"(goal 1 {said})") == 1


@pytest.mark.parametrize(
    ("least_s", "said"),
    [
        (0.004, "0.200 [0.200, 0.200] of `none`, and more than 0.5 of it in 0 of 3 rounds: this"
         " does not exclude the goal; puts cost 16.0 [16.0, 16.0] ms a round: 0.625 ["),
        (0.012, "in 3 of 3 rounds: this excludes the goal; puts cost 8.0 [8.0, 8.0] ms a round"),
        (0.024, "puts cost -4.0 [-4.0, -4.0] ms a round (**not resolved**)"),
    ],
)  # fmt: skip
def test_the_rounds_without_puts_tell_what_can_be_reached(least_s: float, said: str) -> None:
    waits_s = {"none": [0.02] * 3, "slack": [0.01] * 3, "no puts": [least_s] * 3}
    gap_s, part = 0.02 - least_s, least_s / 0.02
    found = {
        "rounds": 3,
        "waits_s": waits_s,
        "no puts / none": dict.fromkeys(("median", "low", "high"), part),
        "none - no puts, s": dict.fromkeys(("median", "low", "high"), gap_s),
        "closed": {"slack": slack_file._closed(waits_s, "slack").to_dict()},
    }
    assert said in slack_report._floor(found)


@pytest.mark.parametrize(
    ("more_us", "noise_us", "said"),
    [
        ((-20.0, 40.0), (-30.0, 30.0), "bar 50 us reached"),
        ((-20.0, 80.0), (-30.0, 30.0), "bar 50 us **not resolved**"),
        ((60.0, 80.0), (-30.0, 30.0), "bar 50 us **not reached**"),
        ((60.0, 80.0), (-30.0, 70.0), "bar 50 us **not resolved**"),
        ((-20.0, 40.0), (-70.0, 30.0), "bar 50 us reached"),
        ((-20.0, 40.0), (-70.0, -30.0), "bar 50 us **not resolved**"),
        ((-20.0, 40.0), (10.0, 30.0), "bar 50 us reached"),
    ],
)
def test_a_cost_is_judged_by_its_interval_and_a_control(
    more_us: tuple[float, float], noise_us: tuple[float, float], said: str
) -> None:
    cell: dict[str, object] = {"off_us": 5e3, "count": 384}
    for name, ends in (("auto", more_us), ("control", noise_us)):
        low, high = ends
        cell[f"{name} - off, us"] = {"median": low, "low": low, "high": high}
        cell[f"{name} / off"] = {"median": 1.0, "low": 1.0, "high": 1.0}
    found = {"cells": {"short put": cell, "long put": cell}}
    notes = " ".join(slack_report.notes_of({"rows": [], "cost": found}))
    assert said in notes and "bar 1.03 reached" in notes
