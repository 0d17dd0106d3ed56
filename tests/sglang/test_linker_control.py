"""A linker is cleared, detached and attached while its server runs; its pool is closed cleanly."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import linker_engine
import pytest
import torch
from linker_engine import Rig, damage, names, wait_for
from prometheus_client import REGISTRY
from sglang.srt.plugins.hook_registry import HookRegistry

import tutti
from tutti import cli
from tutti.errors import CapacityError, ConfigError, DeviceTimeout, PoolClosed
from tutti.integration.sglang import linker as linker_module
from tutti.integration.sglang import weights
from tutti.integration.sglang.direct import control_requests as control
from tutti.integration.sglang.direct.model_steps import STEPS
from tutti.integration.sglang.metrics import _OF_MODE, METRICS
from tutti.integration.sglang.options import HICACHE
from tutti.store_numbers import DRIVES


def scheduler(idle: bool = True, other_fails: bool = False) -> Any:
    """Of the first of two ranks."""

    def reduce(failed: torch.Tensor, op: object) -> None:
        failed.fill_(max(int(failed), other_fails))

    tree = SimpleNamespace(_all_reduce_attn_groups=reduce)
    return SimpleNamespace(is_fully_idle=lambda: idle, tree_cache=tree)


def test_clear_forgets_every_page_and_the_linker_goes_on(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.stored(8)
        assert rig.lookup(names(8)) == 8
        busy = control._clear(pytest.fail, scheduler(idle=False), None)
        assert (busy.success, rig.lookup(names(8))) == (False, 8)
        assert control._clear(pytest.fail, scheduler(), None).success
        assert rig.lookup(names(8)) == 0
        want = rig.content(range(8))
        assert rig.store(names(8), range(8))
        rig.wipe()
        rig.check_restored(names(8), range(8, 16), want)


def test_a_detached_linker_finds_nothing_and_its_pool_is_clean(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.stored(8)
        rig.offload(names(4, "more"), range(8, 12))
        assert not control._detach(pytest.fail, scheduler(idle=False), None).success
        assert control._detach(pytest.fail, scheduler(), None).success
        assert control._detach(pytest.fail, scheduler(), None).success, "a second call is welcome"
        assert rig.linker.num_completed_offloads() == 1, "SGLang still asks for it"
        assert rig.linker.pop_completed_offload()
        assert rig.lookup(names(8)) == 0
        assert not rig.load(names(8), range(8))
        assert rig.offload(names(2, "late"), range(2)), "as a rank that is attached answers"
        assert rig.linker.num_completed_offloads() == 1
        assert not rig.linker.pop_completed_offload(), "it was not stored"
        assert rig.linker.start_layer_wise_loading() == -1
        with pytest.raises(PoolClosed, match="attach it first"):
            rig.linker.clear()
        assert not control._clear(pytest.fail, scheduler(), None).success
        rig.linker.reset()
        with tutti.open(rig.file(tmp_path)) as pool:
            assert pool.stats()["slots"]["unproven"] == 0, "it was closed cleanly"
            assert pool.stats()["slots"]["ready"] == 12
    with Rig(tmp_path) as rig:
        assert rig.lookup(names(8)) == 8


def test_a_detach_reports_a_pool_that_was_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process could not open it, and it could not be attached again."""
    with Rig(tmp_path) as rig:
        close = rig.stored_pool.store.close

        def late() -> None:
            close()
            raise DeviceTimeout("the device does not answer")

        monkeypatch.setattr(rig.stored_pool.store, "close", late)
        answer = control._detach(pytest.fail, scheduler(), None)
        assert not answer.success
        assert "until this server ends: kv (the device does not answer)" in answer.message
        assert rig.lookup(names(1)) == 0 and not rig.linker.stats()
        assert control._detach(pytest.fail, scheduler(), None).success


@pytest.mark.parametrize("what", ["clear", "detach", "attach"])
def test_what_failed_on_another_rank_has_failed(tmp_path: Path, what: str) -> None:
    """SGLang returns the answer of the first rank alone."""
    with Rig(tmp_path) as rig:
        rig.stored(8)
        request = getattr(control, f"_{what}")
        asked = attach_request() if what == "attach" else None
        answer = request(pytest.fail, scheduler(other_fails=True), asked)
        assert not answer.success
        if what != "clear":
            assert "another rank" in answer.message
        assert request(pytest.fail, scheduler(), asked).success


def test_an_error_of_any_kind_is_an_answer_and_the_scheduler_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise OSError(28, "No space left on device")

    with Rig(tmp_path) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(rig.linker, "detach", fails)
            answer = control._detach(pytest.fail, scheduler(), None)
        assert (answer.success, "No space left" in answer.message) == (False, True)
        assert "Traceback" in caplog.text
        rig.stored(8)


def test_updates_that_sglang_refuses_leave_the_cache_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, real_manager: Any
) -> None:
    """Through SGLang's own requests, with the plugin: what only a session takes, without one."""
    watch = weights.WeightsWatch()
    monkeypatch.setattr(weights, "WATCH", watch)
    for refused in (
        real_manager.update_weights_from_distributed,
        real_manager.update_weights_from_tensor,
        real_manager.end_weight_update,
    ):
        assert not refused(None).success
    assert watch.namespace == b""
    real_manager._session = SimpleNamespace(loaded_weights=False)
    assert not real_manager.begin_weight_update(None).success
    assert watch.namespace == b""
    assert not caplog.records


def test_the_plugin_leaves_another_version_of_sglang_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch, hooks = weights.WeightsWatch(), defaultdict[str, list[Any]](list)
    monkeypatch.setattr(weights, "WATCH", watch)
    monkeypatch.setattr(HookRegistry, "_hooks", hooks)
    monkeypatch.setattr(weights, "installed_version", lambda: "0.5.99")
    weights.activate()
    assert not hooks and not watch.watched
    assert "0.5.99" in caplog.text


def test_an_update_that_fails_says_that_nothing_is_found_until_a_flush(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, real_manager: Any
) -> None:
    watch = weights.WeightsWatch()
    monkeypatch.setattr(weights, "WATCH", watch)
    for _ in range(2):  # there is no model
        with pytest.raises(AttributeError):
            real_manager.update_weights_from_disk(None)
    assert watch.namespace is None
    (record,) = caplog.records
    assert "/flush_cache" in record.getMessage()
    watch.flushed()
    with pytest.raises(AttributeError):
        real_manager.update_weights_from_disk(None)
    assert len(caplog.records) == 2


def test_pages_that_were_never_asked_for_are_no_misses(tmp_path: Path) -> None:
    with Rig(tmp_path, max_load_tokens=4 * linker_engine.PAGE) as rig:
        rig.stored(8)
        assert rig.lookup(names(8)) == 4, "as many as one batch takes"
        assert rig.linker.metrics.snapshot().get("miss_pages", 0) == 0


def test_a_cap_below_a_page_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=f"a page has {linker_engine.PAGE} tokens"),
        Rig(tmp_path, max_load_tokens=linker_engine.PAGE - 1),
    ):
        pass
    with Rig(tmp_path, max_load_tokens=linker_engine.PAGE) as rig:
        with pytest.raises(ConfigError, match="0 for no limit"):
            rig.linker.attach({"path": str(tmp_path), "capacity": "8MiB", "max_load_tokens": 1})
        rig.stored(2)
        assert rig.lookup(names(2)) == 1


def attach_request(config: object = None) -> Any:
    text = None if config is None else json.dumps(config)
    return SimpleNamespace(hicache_storage_backend_extra_config_json=text)


def test_an_attached_linker_goes_on_where_it_was(tmp_path: Path) -> None:
    with Rig(tmp_path / "a") as rig:
        want = rig.stored(8)
        counter = rig.linker.layer_done_counter
        rig.offload(names(4, "more"), range(8, 12))
        assert control._detach(pytest.fail, scheduler(), None).success
        rig.offload(names(2, "late"), range(2))
        assert not control._attach(pytest.fail, scheduler(idle=False), attach_request()).success
        assert control._attach(pytest.fail, scheduler(), attach_request()).success
        assert control._attach(pytest.fail, scheduler(), attach_request()).success, "twice is fine"
        assert rig.linker.layer_done_counter is counter, "SGLang has it since the start"
        assert rig.linker.num_completed_offloads() == 2, "those from before come first"
        assert [rig.linker.pop_completed_offload() for _ in range(2)] == [True, False]
        rig.wipe()
        assert (rig.lookup(names(8)), rig.lookup(names(4, "more"), "m")) == (8, 4)
        rig.check_restored(names(8), range(16, 24), want)
        assert rig.store(names(2, "new"), range(16, 18))


def test_attaching_takes_other_options_and_refuses_wrong_ones(tmp_path: Path) -> None:
    with Rig(tmp_path / "a") as rig:
        rig.stored(8)
        other = {"path": str(tmp_path / "b"), "capacity": "8MiB", "allow_unwatched_weights": True}
        answer = control._attach(pytest.fail, scheduler(), attach_request(other))
        assert (answer.success, "detach it first" in answer.message) == (False, True)
        assert control._detach(pytest.fail, scheduler(), None).success
        for wrong, sentence in (
            ({**other, "pathh": "x"}, "did you mean 'path'?"),
            ([1], "not an object"),
            ({**other, "path": "/proc/nowhere"}, "/proc/nowhere"),
        ):
            answer = control._attach(pytest.fail, scheduler(), attach_request(wrong))
            assert (answer.success, sentence in answer.message) == (False, True), answer.message
            assert rig.lookup(names(8)) == 0, "it is still detached"
        whole = {"linker": "TuttiLinker", "linker_extra_config": other}
        assert control._attach(pytest.fail, scheduler(), attach_request(whole)).success
        assert rig.lookup(names(8)) == 0
        assert rig.store(names(8), range(8))
        assert rig.lookup(names(8)) == 8
        assert rig.file(tmp_path / "b").exists()


@pytest.mark.parametrize("part", ["Backlog", "Maintenance", "DiskEvents"])
def test_a_failed_attach_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise CapacityError("no memory is left")

    monkeypatch.setattr(linker_module, "publishes", lambda: True)
    with Rig(tmp_path, kv_events=True) as rig:
        rig.stored(8)
        assert control._detach(pytest.fail, scheduler(), None).success
        threads = set(threading.enumerate())
        other = {"path": str(tmp_path / "b"), "capacity": "8MiB", "kv_events": True}
        other["allow_unwatched_weights"] = True
        with monkeypatch.context() as patch:
            patch.setattr(linker_module, part, fails)
            answer = control._attach(pytest.fail, scheduler(), attach_request(other))
        assert (answer.success, answer.message) == (False, "attach: no memory is left")
        wait_for(lambda: set(threading.enumerate()) <= threads)
        assert not STEPS._followers, "no queue is told of steps"
        assert rig.lookup(names(8)) == 0, "it is still detached"
        assert control._attach(pytest.fail, scheduler(), attach_request()).success
        assert rig.lookup(names(8)) == 8, "with the options of before"
        assert rig.store(names(2, "new"), range(2))


def test_damage_that_fsck_finds_while_detached_costs_no_load(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        want = rig.stored(8)
        assert control._detach(pytest.fail, scheduler(), None).success
        damage(rig.file(tmp_path))
        cli.main(["fsck", str(rig.file(tmp_path)), "--repair"])
        assert control._attach(pytest.fail, scheduler(), attach_request()).success
        found = rig.lookup(names(8))
        assert found < 8
        if found:
            assert rig.restore(names(found), range(8, 8 + found)), "no 503"
            assert rig.content(range(8, 8 + found)) == want[:found]
        assert rig.linker.metrics.snapshot().get("errors", 0) == 0


def test_a_small_pool_keeps_what_it_promises(tmp_path: Path) -> None:
    with Rig(tmp_path, capacity="8MiB", pin_lookups=1) as rig:
        stats = rig.stored_pool.store.stats()
        usable = stats["usable_objects"]
        assert usable >= 0.9 * stats["capacity_objects"]
        rig.fill(1)
        for start in range(0, usable - usable % 8, 8):
            assert rig.store([f"{start + i:064x}" for i in range(8)], range(8))
        rig.linker._maintenance["kv"].refresh()
        counts = rig.linker.metrics.snapshot()
        assert counts.get("evicted_objects", 0) == 0
        assert counts["fullness"] > 0.95


def test_every_metric_is_published_at_0_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linker_engine.server_args()
    with_metrics = SimpleNamespace(enable_metrics=True)
    monkeypatch.setattr(linker_engine, "server_args", lambda: with_metrics)
    with Rig(tmp_path) as rig:
        labels = {"mode": "linker", "pool": "kv", "rank": "tp0-pp0-cp0-dp0"}
        later = {"ahead_pieces", *DRIVES}  # each with the first value of a path or a drive
        own = {
            name: kind
            for name, (kind, _) in METRICS.items()
            if _OF_MODE.get(name) != HICACHE and name not in later
        }
        for name, kind in own.items():
            full = f"tutti:{name}" + ("_total" if kind == "counter" else "")
            plain = REGISTRY.get_sample_value(full, labels)
            loads = REGISTRY.get_sample_value(full, {**labels, "direction": "load"})
            assert plain is not None or loads is not None, name
        (info,) = [
            sample
            for family in REGISTRY.collect()
            if family.name == "tutti:info"
            for sample in family.samples
            if str(tmp_path) in sample.labels["path"]  # other tests' pools stay on the page
        ]
        assert info.value == 1
        assert info.labels["version"] == tutti.__version__
        assert info.labels["executor"] in ("uring", "threads")
        assert info.labels["profile"] == rig.stored_pool.store.stats()["profile"] != "off"


def test_pages_beyond_the_write_budget_are_dropped_and_counted(tmp_path: Path) -> None:
    with Rig(tmp_path, write_budget="2MiB") as rig:  # an hour's share of it is three pages
        rig.fill(8)
        assert not rig.store(names(8), range(8))
        assert rig.lookup(names(8)) == 3
        wait_for(lambda: rig.linker.metrics.snapshot().get("over_budget_pages") == 5)
        counts = rig.linker.metrics.snapshot()
        assert counts["dropped_pages"] == 5
        assert counts["written_today_bytes"] == counts["device_written_bytes"] > 0
        assert 1 <= counts["bytes_written_per_byte_stored"] < 2
