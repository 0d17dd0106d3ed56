"""Options, identity and the launch command: what needs no SGLang."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands.test_sglang import doctor

from tutti.cli import main
from tutti.errors import CapacityError, ConfigError
from tutti.gio_uring import probe
from tutti.integration.sglang import launch
from tutti.integration.sglang.identity import (
    ModelIdentity,
    PageShape,
    ParallelRank,
    ServedModel,
    identity_of,
    layout_of,
    open_store,
    weights_version,
)
from tutti.integration.sglang.metrics import Metrics
from tutti.integration.sglang.options import HICACHE, LINKER, OPTIONS, option_table, parse_options
from tutti.integration.sglang.weights import WeightsWatch, _around_flush, _around_update
from tutti.transfers.store_config import StoreConfig

ROOT = Path(__file__).parent.parent
NEEDED = {"path": "/pools", "capacity": "1GiB"}
COMMAND = ["sglang", "command", "--model", "m", "--path", "/no/p", "--capacity", "1GiB"]
#: Each makes SGLang allocate its host pool on large pages.
HUGE = ("SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS", "SGLANG_HUGEPAGE_SIZE")
SHAPE = PageShape("kv", "mha", 1, 4, 0, (8192, 8192), 16, "bfloat16", "page_first", (4, 32, 32))
IDENTITY = ModelIdentity("llama", "v1")


def test_options_have_defaults_and_sizes_are_bytes() -> None:
    options = parse_options(NEEDED, HICACHE)
    assert options["capacity"] == 1 << 30
    assert options["verify"] == "always"
    assert set(options) == {option.name for option in option_table(HICACHE)}


def test_what_sglang_adds_to_every_backends_options_is_taken() -> None:
    """With --file-storage-path, even where the backend is another."""
    added = {**NEEDED, "file_storage_path": "/files"}
    assert parse_options(added, HICACHE) == parse_options(NEEDED, HICACHE)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"verfy": "off"}, "did you mean 'verify'"),
        ({"zzz": 1}, "known are path"),
        ({"tp_lcm_size": 4}, "unknown option 'tp_lcm_size'"),
        ({"verify": "maybe"}, "one of always, sampled, off"),
        ({"timeout_s": 0}, "at least 0.001"),
        ({"timeout_s": "1"}, "a number"),
        ({"timeout_s": float("nan")}, "a finite number"),
        ({"timeout_s": float("inf")}, "a finite number"),
        ({"second_touch": 1}, "true or false"),
        ({"capacity": 1.5}, "a size"),
        ({"capacity": "1G"}, "cannot read the size"),
        ({"path": ""}, "a string"),
        ({"namespace": ""}, "a string"),
        ({"namespace": "\ud800"}, "without surrogates"),
        ({"path": None}, "'path' is missing"),
    ],
)
def test_wrong_options_are_errors(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_options({**NEEDED, **wrong}, HICACHE)


@pytest.mark.parametrize(
    ("path", "options", "says"),
    [
        ("/pools", ["page_cache_share=1.5"], "page_cache_share is 1.5; pass a number from 0 to 1"),
        ("/pools", ["service_threads=65"], "service_threads is 65; pass an integer from 1 to 64"),
        ("/pools", ["service_threads=2"], "so give 1 at most, or more places"),
        ("/pools", ["sidecar_capacity=0"], "option 'sidecar_capacity' is '0'; give at least 1"),
        ("/pools", ["scheduler_trace=/t", "profile=off"], "remove one of them"),
        ("unix:/s", ["verify=off"], "verify: the agent at unix:/s has settings of its own"),
        ("unix:", [], "option 'path' is 'unix:', of 0 bytes; a socket's path has"),
        ("/pools", ["pin_share=-1"], "pin_share"),
        ("/pools", ["pin_share=0"], "pin_share"),
        ("/pools", ["pin_share=2.0"], "pin_share"),
        ("/pools", ["max_load_tokens=5"], "max_load_tokens"),
        (f"unix:/{107 * 's'}", [], "of 108 bytes; a socket's path has 1 to 107: choose another"),
    ],
)
@pytest.mark.parametrize("mode", [HICACHE, LINKER])
def test_the_command_refuses_what_a_server_refuses(
    mode: str, path: str, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for option in options for word in ("--option", option)]
    command = ["sglang", "command", "--model", "m", "--capacity", "1GiB", "--mode", mode]
    assert main([*command, "--path", path, *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "name"),
    [(HICACHE, "timeout_s"), (LINKER, "load_timeout_s"), (LINKER, "breaker_pause_s")],
)
def test_a_deadline_of_more_than_a_day_is_an_error(mode: str, name: str) -> None:
    """The store refuses such waits, so that every load would fail."""
    with pytest.raises(ConfigError, match=f"'{name}' is 86401; give at most 86400 seconds"):
        parse_options({**NEEDED, name: 86_401}, mode)


def test_options_of_the_other_mode_are_unknown() -> None:
    with pytest.raises(ConfigError, match="hugepages"):
        parse_options({**NEEDED, "hugepages": "off"}, LINKER)


def test_every_option_is_documented() -> None:
    for option in OPTIONS:
        page = "sglang.md" if HICACHE in option.modes else "sglang-linker.md"
        text = (ROOT / "docs" / page).read_text()
        assert f"* `{option.name}` (" in text, f"docs/{page} lacks option {option.name}"


@pytest.mark.parametrize(
    "other",
    [
        replace(SHAPE, dtype="float16"),
        replace(SHAPE, page_size=32),
        replace(SHAPE, order="layer_first"),
        replace(SHAPE, first_layer=4),
        replace(SHAPE, dims=(2, 64, 64)),
        replace(SHAPE, pool="swa"),
        replace(SHAPE, kind="mla"),
    ],
)
def test_every_part_of_a_shape_is_in_the_fingerprint(other: PageShape) -> None:
    one = layout_of(SHAPE, IDENTITY, ParallelRank()).fingerprint
    assert layout_of(other, IDENTITY, ParallelRank()).fingerprint != one


def test_identity_and_place_are_in_the_fingerprint() -> None:
    seen = {
        layout_of(SHAPE, identity, place).fingerprint
        for identity, place in (
            (IDENTITY, ParallelRank()),
            (replace(IDENTITY, model="qwen"), ParallelRank()),
            (replace(IDENTITY, weights="v2"), ParallelRank()),
            (replace(IDENTITY, quantization="fp8"), ParallelRank()),
            (replace(IDENTITY, kv_cache_dtype="fp8_e5m2"), ParallelRank()),
            (IDENTITY, ParallelRank(tp_size=2)),
            (IDENTITY, ParallelRank(tp_size=2, tp_rank=1)),
            (IDENTITY, ParallelRank(pp_size=2, pp_rank=1)),
            (IDENTITY, ParallelRank(cp_size=2, cp_rank=1)),
        )
    }
    assert len(seen) == 9


def test_replicas_hold_the_same_kv_in_pools_of_their_own() -> None:
    one, other = ParallelRank(dp_size=2), ParallelRank(dp_size=2, dp_rank=1)
    layout = layout_of(SHAPE, IDENTITY, one)
    assert layout == layout_of(SHAPE, IDENTITY, other)
    assert one.name != other.name
    latent = [ParallelRank(tp_size=2, tp_rank=rank, replicated=True) for rank in (0, 1)]
    assert layout_of(SHAPE, IDENTITY, latent[0]) == layout_of(SHAPE, IDENTITY, latent[1])
    assert ParallelRank(tp_size=2, pp_size=3, dp_size=2).ranks == 12


def test_other_files_of_weights_are_another_version(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    (tmp_path / "README.md").write_bytes(b"1")
    first = weights_version(str(tmp_path))
    (tmp_path / "README.md").write_bytes(b"22")
    assert weights_version(str(tmp_path)) == first
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert weights_version(str(tmp_path)) != first
    options = parse_options({**NEEDED, "weights": "mine"}, HICACHE)
    assert identity_of(options, ServedModel(path=str(tmp_path))).weights == "mine"


def test_a_pool_is_opened_with_what_the_options_say(tmp_path: Path) -> None:
    layout = layout_of(SHAPE, IDENTITY, ParallelRank())
    chosen = {"verify": "sampled", "timeout_s": 7.0, "durability": "flush", "eviction": "lru"}
    chosen |= {"page_cache_share": 0.25, "residency": "static", "write_budget": 1 << 40}
    chosen["service_threads"] = 1
    of_linker = {"pin_lookups": 5, "pin_share": 0.75}
    needed = {"path": str(tmp_path / "new"), "capacity": "16MiB"}
    hicache = parse_options({**needed, **chosen}, HICACHE)
    linker = parse_options({**needed, **chosen, **of_linker}, LINKER)
    config = StoreConfig(**chosen)
    store, _ = open_store(layout, "a", 16 << 20, hicache, ParallelRank())
    with store:
        assert next((tmp_path / "new").iterdir()).stat().st_mode & 0o777 == 0o700
        assert replace(store.config, schedule=None) == config
    store, _ = open_store(layout, "b", 16 << 20, linker, ParallelRank())
    with store:
        expected = replace(config, **of_linker)
        assert replace(store.config, schedule=None) == expected


def test_weights_are_unknown_from_an_update_until_a_flush() -> None:
    watch = WeightsWatch()
    assert watch.namespace == b""
    watch.flushed()
    assert watch.namespace == b"", "a flush alone forgets nothing"
    watch.changed()
    assert watch.namespace is None
    watch.flushed()
    first = watch.namespace
    watch.changed()
    watch.flushed()
    assert first
    assert watch.namespace not in (first, b"", None)


def test_hooks_follow_updates_and_successful_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = WeightsWatch()
    monkeypatch.setattr("tutti.integration.sglang.weights.WATCH", watch)
    with pytest.raises(RuntimeError):
        _around_update(_fails)
    assert watch.namespace is None, "an update that failed half way changed something"
    _around_flush(lambda _: False, None)
    assert watch.namespace is None
    _around_flush(lambda _: True, None)
    assert watch.namespace


def _fails() -> None:
    raise RuntimeError("half way")


def test_metrics_show_that_nothing_is_found_until_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    def unflushed() -> list[float]:
        return [metrics.snapshot()["weights_unflushed"] for metrics in pools]

    monkeypatch.setattr("tutti.integration.sglang.weights.WATCH", WeightsWatch())
    pools = [Metrics({"mode": mode, "pool": "kv", "rank": "tp0"}) for mode in (HICACHE, LINKER)]
    with pytest.raises(RuntimeError):
        _around_update(_fails)
    assert unflushed() == [1, 1]
    pools.append(Metrics({"mode": LINKER, "pool": "late", "rank": "tp0"}))  # attached meanwhile
    assert unflushed() == [1, 1, 1]
    _around_flush(lambda _: False, None)
    assert unflushed() == [1, 1, 1]
    _around_flush(lambda _: True, None)
    assert unflushed() == [0, 0, 0]


def test_the_launch_command(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("tutti.commands.sglang.installed_version", lambda: "")
    assert main([*COMMAND, "--option", "second_touch=true", "--", "--tp", "2"]) == 0
    line, _, note = capsys.readouterr().out.partition("\n")
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert words[-2:] == ["--tp", "2"]
    config = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    assert config["second_touch"] is True
    assert config["interface_v1"] == 1
    parse_options(config, HICACHE)
    assert "not checked" in note
    assert "capacity: 1 GiB (1073741824 bytes)" in note
    assert "append `--admin-api-key KEY` to this command" in note
    assert "--enable-cache-report" in words
    assert main([*COMMAND, "--", "--admin-api-key", "k"]) == 0
    assert "everyone who reaches" not in capsys.readouterr().out
    assert main([*COMMAND, "--mode", "linker"]) == 0
    words = shlex.split(capsys.readouterr().out.partition("\n")[0])
    config = json.loads(words[words.index("--unified-cache-external-linker-config") + 1])
    parse_options(config["linker_extra_config"], LINKER)


def test_options_that_sglang_reads_have_its_types(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """SGLang ends at a threshold that is a string."""
    monkeypatch.setattr("tutti.commands.sglang.installed_version", lambda: "")
    command = [*COMMAND]
    wanted = {
        "prefetch_threshold": 512,
        "prefetch_timeout_base": 2.5,
        "hicache_storage_pass_prefix_keys": False,
        "interface_v1": 0,
        "allocator": "shm",
    }
    for name, value in wanted.items():
        command += ["--option", f"{name}={str(value).lower()}"]
    assert main([*command, "--json"]) == 0
    words = json.loads(capsys.readouterr().out)["command"]
    config = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    found = {name: config[name] for name in wanted}
    assert found == wanted
    assert [type(value) for value in found.values()] == [int, float, bool, int, str]
    assert main([*command, "--option", "prefetch_threshold=many"]) == 2
    assert "write a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["verfy=off", "verify", "second_touch=maybe", "timeout_s=x", "capacity=2GiB"]
)
def test_the_launch_command_refuses_wrong_options(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--option", option]) == 2
    assert option.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "more", "says"),
    [
        ("linker", ["--pp-size", "2"], "--mode hicache"),
        ("linker", ["--pipeline-parallel-size=2"], "--mode hicache"),
        ("linker", ["--enable-hierarchical-cache"], "one server runs one of them"),
        ("hicache", ["--enable-unified-cache-external-linker"], "one server runs one of them"),
        ("linker", ["--enable-hicache"], "one server runs one of them"),
        ("linker", ["--pipeline-parallel", "2"], "--mode hicache"),
        ("hicache", ["--hicache-mem", "layer_first"], "use --layout before the `--`"),
    ],
)
def test_the_launch_command_refuses_what_does_not_go_together(
    mode: str, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--mode", mode, "--", *more]) == 2
    assert says in capsys.readouterr().err
    assert main([*COMMAND, "--mode", "hicache", "--", "--pp-size", "2"]) == 0


@pytest.mark.parametrize("mode", [HICACHE, LINKER])
@pytest.mark.parametrize(
    ("more", "given_by"),
    [
        (["--load-format", "remote_instance"], launch.WEIGHTS_FROM[0]),
        (["--load-f=remote_instance"], launch.WEIGHTS_FROM[0]),
        (["--weight-cache-mode", "client"], launch.WEIGHTS_FROM[1]),
    ],
)
def test_the_command_refuses_weights_without_a_version_as_the_server_does(
    mode: str, more: list[str], given_by: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tutti.commands.sglang.installed_version", lambda: "")
    command, options = [*COMMAND, "--mode", mode], parse_options(NEEDED, mode)
    with pytest.raises(ConfigError) as refusal:
        identity_of(options, ServedModel("m", weights_from=given_by))
    assert main([*command, "--", *more]) == 2
    assert str(refusal.value) in capsys.readouterr().err
    assert main([*command, "--option", "weights=7", "--", *more]) == 0
    other = ["--load-format", "auto", "--weight-cache-mode=daemon"]  # the last value is SGLang's
    assert main([*command, "--", *more, *other]) == 0


@pytest.mark.parametrize("mode", [HICACHE, LINKER])
def test_events_need_a_server_that_publishes(
    mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("tutti.commands.sglang.installed_version", lambda: "")
    arguments = [*COMMAND, "--mode", mode, "--option"]
    assert main([*arguments, "kv_events=true"]) == 2
    assert "append `-- --kv-events-config JSON` to" in capsys.readouterr().err
    for more in (["--kv-events-config", "{}"], ["--kv-events-config={}"], ["--config", "c.yaml"]):
        assert main([*arguments, "kv_events=true", "--", *more]) == 0
    assert main([*arguments, "kv_events=false"]) == 0


def test_a_disk_that_is_too_small_is_said_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "pools")
    arguments = ["sglang", "command", "--model", "m", "--path", path, "--capacity", "900TiB"]
    assert main(arguments) == 3
    assert "pass less, or another --path" in capsys.readouterr().err
    layout = layout_of(SHAPE, IDENTITY, ParallelRank())
    options = parse_options({"path": path, "capacity": "900TiB"}, HICACHE)
    with pytest.raises(CapacityError):
        open_store(layout, "kv", 900 << 40, options, ParallelRank())
    assert any("cannot open its kv pool" in message for message in caplog.messages)


def test_memory_is_not_taken_for_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    ((verdict, text),) = doctor(capsys, "disk", "--path", "/dev/shm/tutti-doctor")
    assert (verdict, "lost at a restart" in text) == ("slow", True)


def test_locked_memory_is_asked_for_by_drives_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, limits[1]))
    try:
        for path, verdicts in ((str(tmp_path), []), ("nvme:0000:03:00.0", ["slow"])):
            found = doctor(capsys, "memlock", "--path", path)
            assert [verdict for verdict, _ in found] == verdicts
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


@pytest.mark.parametrize(
    ("transparent", "refusal", "gpus", "verdict"),
    [
        ("madvise", "EINVAL", ("H100",), "ok"),
        ("never", "", ("H100",), "slow"),  # pinned, so not moved later
        ("never", "", (), "ok"),
        ("missing", "EINVAL", (), "slow"),
    ],
)
def test_the_doctor_says_whether_a_host_pool_gets_large_pages(
    transparent: str,
    refusal: str,
    gpus: tuple[str, ...],
    verdict: str,
    capsys: Any,
    monkeypatch: Any,
) -> None:
    def found(*more: str) -> list[tuple[str, str]]:
        return doctor(capsys, "host pool", "--path", ".", *more)

    facts = replace(probe.probe_memory(), transparent=transparent, collapse_refusal=refusal)
    monkeypatch.setattr(probe, "probe_memory", lambda *_: facts)
    monkeypatch.setattr(probe, "probe_cuda", lambda: probe.CudaFacts("13.0", gpus, ""))
    for name in HUGE:
        monkeypatch.delenv(name, raising=False)
    ((given, text),) = found()
    assert given == verdict and ("transparent_hugepage" in text) == (verdict == "slow")
    assert ((refusal or "pinned for a GPU") in text) == (verdict == "slow")
    monkeypatch.setenv("SGLANG_HUGEPAGE_SIZE", "2MB")  # reserved pages
    assert [given for given, _ in found()] == ["ok"]
    assert not found("--mode", "linker")


def test_the_doctor_finds_what_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("tutti.commands.sglang.installed_version", lambda: "0.4.0")
    pool = tmp_path / "llama-1" / "kv-tp0.tutti"
    pool.parent.mkdir()
    pool.write_bytes(b"")
    pool.chmod(0o644)
    arguments = ["sglang", "doctor", "--path", str(tmp_path), "--page-size", "1"]
    assert main([*arguments, "--capacity", "900TiB", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    failing = {finding["what"] for finding in findings if finding["verdict"] == "fails"}
    assert {"SGLang", "space", "pool"} <= failing
    (size,) = [finding for finding in findings if finding["what"] == "page size"]
    assert size["verdict"] == "slow", "a page of one token is 128 KiB in Llama-3.1-8B"


def test_the_plugin_that_is_registered_is_the_one_that_is_asked_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'[project.entry-points."{launch.PLUGIN_GROUP}"]\n{launch.PLUGIN} = ' in text
    bench = ROOT / "tests/sglang/stand_in/tutti_test_bench-1.dist-info/entry_points.txt"
    line = f"{launch.PLUGIN} = tutti.integration.sglang.weights:activate"
    assert line in bench.read_text()
    assert line.replace("= ", '= "') in text
