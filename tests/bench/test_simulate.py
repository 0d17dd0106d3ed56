"""The simulator: what goes in comes out, limits that are known in closed form, and monotony."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_drive import VirtualDrive

import tutti
from tutti.bench.simulate.cached_blocks import Blocks
from tutti.bench.simulate.calibration import (
    Calibration,
    ServerTimes,
    drive_of,
    gpu_of,
    load_calibration,
)
from tutti.bench.simulate.cluster import PREFIX, ROUND_ROBIN, Cluster, ClusterShape
from tutti.bench.simulate.device import READ, WRITE, Device, Timeline
from tutti.bench.simulate.hardware import SimulatedDrive, machine
from tutti.bench.simulate.remote import FIRST, SECOND, Remote
from tutti.bench.slack.conditions import Conditions
from tutti.bench.slack.server import LayeredServer, Noise
from tutti.bench.slack.workload import SlackRequest
from tutti.bench.traces import BLOCK_TOKENS, Synthetic, TraceRequest, generate
from tutti.errors import ConfigError, DeviceTimeout
from tutti.medium.layout import KVLayout
from tutti.profiles import at_open
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.policy import SlackPolicy

CALIBRATION = load_calibration()
PAPER_DRIVE = "2x D7-PS1010"
SYSTEMS = tuple(CALIBRATION.systems)


def times_of(
    system: str, server: str = "sglang", calibration: Calibration = CALIBRATION, **changes: Any
) -> ServerTimes:
    changed = replace(calibration.system(system), **changes)
    gpu, drive = gpu_of("H100"), drive_of(PAPER_DRIVE)
    return ServerTimes(calibration, calibration.server(server), changed, gpu=gpu, drive=drive)


def serve(times: ServerTimes, requests: list[TraceRequest], **shape: Any) -> dict[str, Any]:
    return Cluster(times, ClusterShape(**shape)).run(requests)


def without_speed(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "speed"}


def alone(times: ServerTimes, total: int, cached: int, **shape: Any) -> tuple[Cluster, Any]:
    cluster = Cluster(times, ClusterShape(**shape))
    ids = tuple(range(-(-total // BLOCK_TOKENS)))
    cluster.servers[0].store.add(ids[: cached // BLOCK_TOKENS])
    cluster.run([TraceRequest(0, total, 1, ids)])
    return cluster, cluster.req(0)


def prefill_us(times: ServerTimes, new: int, prefix: int) -> float:
    return times.calibration.model.layers * times.layer_us(new, prefix)


# What goes in comes out.


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("server", ["vllm-0.12", "sglang"])
@pytest.mark.parametrize("router", [ROUND_ROBIN, PREFIX])
def test_work_in_is_work_out(system: str, server: str, router: str) -> None:
    requests = generate(Synthetic(requests=40, gap_ms=60, seed=3))
    cluster = Cluster(times_of(system, server), ClusterShape(3, 2, 1, router, 8))
    result = cluster.run(requests)  # its own checks: requests, tokens, pages, bytes
    reqs = [cluster.req(number) for number in range(len(requests))]
    assert all(req.arrived_ns <= req.began_ns <= req.first_ns <= req.last_ns for req in reqs)
    assert all(req.left == 0 and req.hit_tokens >= 0 and req.computed_tokens > 0 for req in reqs)
    assert result["offered_pages"] == result["written_pages"]
    assert 0 < result["gpu_busy"] <= 1
    for server in cluster.servers:
        spent_ns = server.work.prefill_ns + server.work.decode_ns + server.work.bubble_ns
        assert spent_ns <= cluster.timeline.now_ns


@pytest.mark.parametrize("system", ["tutti", "tutti-paper", "gds"])
def test_a_server_has_the_limits_of_an_opened_store(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store with this profile and these pages; how much is read ahead is the system's own."""
    model = CALIBRATION.model
    times = times_of(system, calibration=replace(CALIBRATION, page_tokens=1))
    layout = KVLayout.mha(model.layers, 8, 128, 1, "bfloat16", model=model.name)
    assert layout.object_nbytes == times.calibration.page_nbytes
    monkeypatch.setattr(at_open, "find_profile", lambda *_, **__: (times, "given"))
    with tutti.open(tmp_path / "pool.tutti", layout, "96MiB") as store:
        schedule = store.config.schedule
    assert schedule is not None and schedule.limits.pressing_pages is not None
    policy = Cluster(times, ClusterShape()).servers[0].io._scheduler.policy
    assert isinstance(policy, SlackPolicy | ImmediatePolicy)
    ahead_nbytes = times.system.read_ahead_nbytes
    assert policy.limits == replace(schedule.limits, read_ahead_nbytes=ahead_nbytes)
    assert system != "tutti" or policy.limits == schedule.limits


@pytest.mark.parametrize("system", ["tutti", "gds"])
def test_a_put_of_any_length_is_written(system: str) -> None:
    """Callers of a store hold the pages, so none is dropped."""
    blocks = 2560
    prompt = TraceRequest(0, blocks * BLOCK_TOKENS, 1, tuple(range(blocks)))
    result = serve(times_of(system), [prompt])
    pages = blocks * BLOCK_TOKENS // CALIBRATION.page_tokens
    assert result["written_pages"] == result["offered_pages"] == pages
    assert result["backlog_pages_max"] == pages


def test_a_lost_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of a run can fail."""
    cluster = Cluster(times_of("gds"), ClusterShape())
    monkeypatch.setattr(cluster.media[0], "moved_nbytes", lambda direction: 1)
    with pytest.raises(AssertionError, match="every byte"):
        cluster.run(generate(Synthetic(requests=3)))


def test_the_same_seed_gives_the_same_run() -> None:
    requests = generate(Synthetic(requests=30, gap_ms=80))
    runs = [serve(times_of("tutti"), requests, servers=2, servers_per_node=2) for _ in range(2)]
    assert without_speed(runs[0]) == without_speed(runs[1])
    other = serve(times_of("tutti"), generate(Synthetic(requests=30, gap_ms=80, seed=2)), servers=2)
    assert without_speed(other) != without_speed(runs[0])


# Limits that are known.


@pytest.mark.parametrize("server", ["vllm-0.12", "sglang"])
def test_one_request_takes_its_prefill(server: str) -> None:
    times = times_of("hbm", server)
    _, req = alone(times, 20_000, 0)
    chunk, expected_us, prefix = times.server.chunk_tokens, 0.0, 0
    while prefix < 20_000:
        tokens = min(chunk, 20_000 - prefix)
        expected_us += prefill_us(times, tokens, prefix)
        prefix += tokens
    assert req.first_ns / 1e3 == pytest.approx(expected_us, rel=1e-4)


@pytest.mark.parametrize("policy", ["immediate", "slack"])
@pytest.mark.parametrize("system", ["dram", "tutti-paper"])
@pytest.mark.parametrize(("cached", "total"), [(30_720, 32_768), (32_256, 32_768), (2048, 40_960)])
def test_a_layerwise_load_is_the_known_pipeline(
    system: str, policy: str, cached: int, total: int
) -> None:
    """load + 31 max(load, compute) + compute, of one layer each, for an idle machine."""
    times = times_of(system, "vllm-0.12", policy=policy)
    _, req = alone(times, total, cached)
    nbytes = cached * CALIBRATION.model.kv_nbytes_per_token // 32
    compute_us = times.layer_us(total - cached, cached)
    load_us = times.read_us(nbytes) - times.latency_us
    pipeline_us = load_us + 31 * max(load_us, compute_us) + compute_us
    assert req.first_ns / 1e3 == pytest.approx(pipeline_us, rel=0.03)
    # A unit of layers is a coarser simulation, not another system.
    _, coarse = alone(times, total, cached, unit_layers=4)
    assert req.first_ns <= coarse.first_ns <= req.first_ns + 4000 * max(load_us, compute_us)


def test_every_layerwise_system_waits_for_about_a_layer_where_compute_takes_longer() -> None:
    """64K tokens, 48K of them cached: only the first layer is waited for, whatever the policy."""
    total, cached = 65_536, 49_152
    nbytes = cached * CALIBRATION.model.kv_nbytes_per_token // 32
    layerwise = [name for name, one in CALIBRATION.systems.items() if one.layerwise]
    assert {"dram", "tutti", "tutti-paper"} <= set(layerwise)
    for name in layerwise:
        for policy in ("immediate", "slack"):
            times = times_of(name, policy=policy)
            _, req = alone(times, total, cached)
            assert req.bubble_ns / 1e3 == pytest.approx(times.read_us(nbytes), rel=0.05), name
    times = times_of("ssd")
    _, whole = alone(times, total, cached)
    assert whole.bubble_ns / 1e3 == pytest.approx(times.read_us(32 * nbytes), rel=0.05)


def test_a_load_before_the_step_adds_up() -> None:
    times = times_of("gds", "vllm-0.12")
    _, req = alone(times, 65_536, 49_152)
    load_us = times.read_us(49_152 * CALIBRATION.model.kv_nbytes_per_token)
    expected_us = times.system.fixed_us + load_us + prefill_us(times, 16_384, 49_152)
    assert req.first_ns / 1e3 == pytest.approx(expected_us, rel=1e-3)
    bubble_us = times.system.fixed_us + load_us
    assert req.bubble_ns / 1e3 == pytest.approx(bubble_us, rel=1e-3)


def test_decode_steps_add_up() -> None:
    times = times_of("hbm")
    cluster = Cluster(times, ClusterShape())
    cluster.run([TraceRequest(0, 600, 101, (1, 2))])
    req = cluster.req(0)
    expected_us = sum(times.decode_us(1, 600 + 1 + i) for i in range(100))
    assert (req.last_ns - req.first_ns) / 1e3 == pytest.approx(expected_us, rel=1e-5)


def test_an_arrival_waits_for_the_decode_step_that_runs() -> None:
    times = times_of("hbm")
    cluster = Cluster(times, ClusterShape())
    cluster.run([TraceRequest(0, 600, 1000, (1, 2)), TraceRequest(1000, 600, 1, (3, 4))])
    waited_us = (cluster.req(1).began_ns - cluster.req(1).arrived_ns) / 1e3
    assert 0 <= waited_us <= times.decode_us(1, 1600)


def test_equal_jobs_at_random_wait_as_in_a_queue_of_one_server() -> None:
    """M/D/1: the mean wait is rho s / (2 (1 - rho)), by Pollaczek and Khinchine."""
    times = times_of("hbm")
    service_s = prefill_us(times, 4096, 0) / 1e6
    rng, now_s, requests, load = random.Random(5), 0.0, [], 0.6
    for number in range(6000):
        now_s += rng.expovariate(load / service_s)
        ids = tuple(range(8 * number, 8 * number + 8))
        requests.append(TraceRequest(round(now_s * 1000), 4096, 1, ids))
    result = serve(times, requests)
    wait_s = result["ttft_ms"]["mean"] / 1e3 - service_s
    assert wait_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.15)
    assert result["gpu_busy"] == pytest.approx(load, rel=0.05)


def test_a_device_without_interference_serves_both_ways_at_once() -> None:
    timeline = Timeline()
    device = Device(timeline, 1e9, 0.5e9, 1.0)
    ends: dict[str, int] = {}
    for direction in (READ, WRITE):
        device.start(direction, 1000, lambda d=direction: ends.update({d: timeline.now_ns}))
    timeline.run(100)
    assert ends == {READ: 1000, WRITE: 2000}


def test_a_device_is_slower_while_both_ways_have_work() -> None:
    timeline = Timeline()
    device = Device(timeline, 1e9, 1e9, 2.5)
    ends: dict[str, int] = {}
    device.start(READ, 1000, lambda: ends.update(read=timeline.now_ns))
    device.start(WRITE, 3000, lambda: ends.update(write=timeline.now_ns))
    timeline.run(100)
    # Both at 0.4 bytes a nanosecond until the read ends; then the write has 2000 left, alone.
    assert ends == {"read": 2500, "write": 4500}
    assert device.busy_s(READ) == pytest.approx(2.5e-6)


@given(
    st.lists(
        st.tuples(st.sampled_from((READ, WRITE)), st.integers(1, 10**9), st.integers(0, 10**8)),
        min_size=1,
        max_size=20,
    ),
    st.floats(1.0, 4.0),
)
@settings(max_examples=60, deadline=None)
def test_a_device_moves_every_byte_and_never_faster(
    transfers: list[tuple[str, int, int]], slower: float
) -> None:
    timeline = Timeline()
    device = Device(timeline, 29e9, 12e9, slower)
    ended: list[int] = []
    for direction, nbytes, at_ns in transfers:
        start = lambda d=direction, n=nbytes: device.start(d, n, lambda: ended.append(1))  # noqa: E731
        timeline.at(at_ns, start)
    timeline.run(100_000)
    assert len(ended) == len(transfers)
    for direction, rate in ((READ, 29), (WRITE, 12)):
        nbytes = sum(n for d, n, _ in transfers if d == direction)
        assert device.moved_nbytes(direction) == nbytes
        least_ns = nbytes / rate
        assert least_ns * 0.999 - 10 <= device.busy_s(direction) * 1e9
        assert device.busy_s(direction) * 1e9 <= least_ns * slower * 1.001 + 40


def seconds_to_write(nbytes: int, parts: int) -> float:
    """On a drive with a cache, in so many writes."""
    drive, timeline = SimulatedDrive("test", 29e9, 12e9, 60, 2.5, ""), Timeline()
    device = Device(timeline, drive.read_bytes_per_s, drive.write_bytes_per_s, drive.interference)
    ended: list[int] = []
    for _ in range(parts):
        device.start(WRITE, nbytes // parts, lambda: ended.append(timeline.now_ns))
    conditions = Conditions(drive, cache_nbytes=1.2e9)
    conditions.follow(timeline, device, lambda: len(ended) < parts)
    timeline.run(100_000)
    return ended[-1] / 1e9


def test_the_cache_of_a_drive_ends_within_one_write_as_between_many() -> None:
    whole_s = seconds_to_write(12 * 10**9, 1)
    assert whole_s == pytest.approx(seconds_to_write(12 * 10**9, 1000), rel=0.05)
    assert whole_s > 3  # at full speed 1


@pytest.mark.parametrize("pattern", ["reads", "both", "read in writes"])
def test_the_fluid_drive_agrees_with_the_memory_controller(pattern: str) -> None:
    """Real commands through real queue pairs take about as long."""
    drive = SimulatedDrive("test", 29e9, 12e9, 60, 2.5, "")
    plans = {
        "reads": [(READ, 300 << 20)] * 3,
        "both": [(READ, 400 << 20), (WRITE, 400 << 20)],
        "read in writes": [(WRITE, 900 << 20), (READ, 100 << 20)],
    }
    plan = plans[pattern]
    timeline = Timeline()
    fluid = Device(timeline, drive.read_bytes_per_s, drive.write_bytes_per_s, drive.interference)
    ends: dict[int, int] = {}
    for number, (direction, nbytes) in enumerate(plan):
        fluid.start(direction, nbytes, lambda n=number: ends.update({n: timeline.now_ns}))
    timeline.run(1000)
    with closing(VirtualDrive(drive)) as virtual:
        for number, (direction, nbytes) in enumerate(plan):
            virtual.start(direction, number, nbytes)
        seen: dict[int, int] = {}
        for _ in range(len(plan)):
            for tag in virtual.run(10**12):
                assert isinstance(tag, int)
                seen[tag] = virtual.now_ns
    for number in range(len(plan)):
        assert ends[number] == pytest.approx(seen[number], rel=0.02), (pattern, number)


# Monotony.


@given(
    total=st.integers(2, 120).map(lambda blocks: blocks * BLOCK_TOKENS),
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    system=st.sampled_from(("dram", "tutti-paper")),
)
@settings(max_examples=40, deadline=None)
def test_more_cached_takes_no_longer_than_before_or_than_the_load(
    total: int, shares: list[float], system: str
) -> None:
    """A token is dearer to compute than to load here, so only the load itself may be the limit."""
    few, many = sorted(round(total * share) // BLOCK_TOKENS * BLOCK_TOKENS for share in shares)
    times = times_of(system)
    many = min(many, total - BLOCK_TOKENS)
    few = min(few, many)
    load_us = times.read_us(many * CALIBRATION.model.kv_nbytes_per_token) + 32 * times.latency_us
    load_ns = 1000 * (load_us + times.layer_us(total - many, many))
    before_ns = alone(times, total, few)[1].first_ns
    assert alone(times, total, many)[1].first_ns <= 1.02 * max(before_ns, load_ns)


@given(st.floats(0, 50), st.floats(0, 50), st.integers(1, 100))
@settings(max_examples=30, deadline=None)
def test_slower_submission_never_helps(first_us: float, second_us: float, blocks: int) -> None:
    quick, slow = sorted((first_us, second_us))
    total = (blocks + 4) * BLOCK_TOKENS
    found = [
        alone(times_of("gds", submit_read_us=us), total, blocks * BLOCK_TOKENS)[1].first_ns
        for us in (quick, slow)
    ]
    assert found[0] <= found[1]


def test_interference_does_not_help_and_slack_avoids_it() -> None:
    requests = generate(Synthetic(requests=80, gap_ms=250, continue_chance=0.7))
    bubbles = {}
    for policy in ("immediate", "slack"):
        for interference in (1.0, 2.5):
            times = times_of("tutti-paper", policy=policy)
            times.drive = replace(times.drive, interference=interference)
            times = ServerTimes(
                CALIBRATION, times.server, times.system, gpu=gpu_of("H100"), drive=times.drive
            )
            bubbles[policy, interference] = serve(times, requests, unit_layers=4)["bubble_s"]
    assert bubbles["immediate", 1.0] <= bubbles["immediate", 2.5]
    assert bubbles["slack", 2.5] < bubbles["immediate", 2.5]


def test_more_servers_and_a_router_that_looks_help() -> None:
    requests = generate(Synthetic(requests=200, gap_ms=60, continue_chance=0.7))
    few = serve(times_of("gds"), requests, servers=2, servers_per_node=2)
    many = serve(times_of("gds"), requests, servers=6, servers_per_node=6)
    assert many["ttft_ms"]["mean"] < few["ttft_ms"]["mean"]
    found = {
        router: serve(times_of("hbm"), requests, servers=4, router=router)
        for router in (ROUND_ROBIN, PREFIX)
    }
    assert found[PREFIX]["hit_hbm"] > found[ROUND_ROBIN]["hit_hbm"]
    assert found[PREFIX]["ttft_ms"]["mean"] < found[ROUND_ROBIN]["ttft_ms"]["mean"]


def test_a_rate_that_is_too_high_is_said() -> None:
    requests = generate(Synthetic(requests=150, gap_ms=20))
    assert serve(times_of("hbm"), requests)["unstable"]
    assert not serve(times_of("hbm"), requests, servers=64)["unstable"]


# Tiers.


@given(st.lists(st.lists(st.integers(0, 30), max_size=10), max_size=30), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_a_tier_keeps_the_most_recently_used(batches: list[list[int]], capacity: int) -> None:
    tier, model = Blocks(capacity), list[int]()
    for batch in batches:
        tier.add(batch)
        for block in reversed(batch):
            model = [b for b in model if b != block] + [block]
        model = model[len(model) - capacity :] if capacity < len(model) else model
        assert len(tier) == len(model) and all(block in tier for block in model)


def test_a_simulation_that_does_not_end_is_said() -> None:
    timeline = Timeline()

    def again() -> None:
        timeline.at(timeline.now_ns + 1, again)

    timeline.at(0, again)
    with pytest.raises(DeviceTimeout, match="does not end"):
        timeline.run(1000)


def test_a_shape_without_servers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ClusterShape(servers=0)
    with pytest.raises(ConfigError, match="no requests"):
        Cluster(times_of("hbm"), ClusterShape()).run([])


def test_it_agrees_with_the_server_of_bench_slack() -> None:
    """The same requests, layer by layer."""
    truth = machine(PAPER_DRIVE, "H100")
    rng, now_ns, wanted = random.Random(7), 0, []
    for _ in range(12):
        now_ns += round(rng.expovariate(5) * 1e3) * 10**6
        hit, new = rng.choice((0, 16, 64, 128)), rng.randint(1, 4)
        wanted.append(SlackRequest(now_ns, hit * BLOCK_TOKENS, new * BLOCK_TOKENS, 20))
    quiet = Noise(step=0.0, layer=0.0)
    policy = SlackPolicy(at_open.store_limits(truth, truth.model.page_nbytes))
    server = LayeredServer(truth, wanted, policy, truth, noise=quiet, seed=1)
    there = server.run()
    times = times_of("tutti", submit_read_us=0.0, submit_write_us=0.0)
    times.server = replace(times.server, chunk_tokens=1 << 20)
    cluster, requests, first = Cluster(times, ClusterShape()), [], 0
    for one in wanted:
        blocks = (one.hit_tokens + one.new_tokens) // BLOCK_TOKENS
        ids = tuple(range(first, first + blocks))
        cluster.servers[0].store.add(ids[: one.hit_tokens // BLOCK_TOKENS])
        first += blocks
        total = one.hit_tokens + one.new_tokens
        requests.append(TraceRequest(one.arrival_ns // 10**6, total, one.out_tokens, ids))
    here = cluster.run(requests)
    mean_s = sum(there.first_token_s) / len(wanted)
    assert here["ttft_ms"]["mean"] / 1e3 == pytest.approx(mean_s, rel=0.03)
    assert here["bubble_s"] == pytest.approx(there.bubble_s, rel=0.05)
    assert here["written_pages"] == there.stored_pages


def loaded_elsewhere(remote: Remote | None) -> tuple[int, Cluster]:
    """Blocks that a request loads on a node that never had them, after it waited in a queue."""
    document = tuple(range(32))
    sent = [
        TraceRequest(0, 33 * BLOCK_TOKENS, 1, (*document, 1000)),
        TraceRequest(20_000, 64 * BLOCK_TOKENS, 1, tuple(range(2000, 2064))),  # on the second node
        TraceRequest(20_000, BLOCK_TOKENS, 1, (3000,)),
        TraceRequest(20_000, 33 * BLOCK_TOKENS, 1, (*document, 1001)),  # behind the long one
    ]
    cluster = Cluster(times_of("tutti"), ClusterShape(servers=2, servers_per_node=1, remote=remote))
    cluster.run(sent)
    return cluster.req(3).loaded_tokens // BLOCK_TOKENS, cluster


def test_a_queued_request_is_served_from_another_nodes_pages() -> None:
    fast, slow = (Remote(rate, 100.0, 1 << 40, FIRST) for rate in (50e9, 1e7))
    assert loaded_elsewhere(None)[0] == 0
    blocks, cluster = loaded_elsewhere(fast)
    assert blocks == sum(link.fetched_blocks for link in cluster.links) == 32
    blocks, cluster = loaded_elsewhere(slow)
    assert blocks == 0, "a look-up does not wait"
    assert sum(link.late_blocks for link in cluster.links) > 0


def test_pages_are_copied_at_their_second_use_unless_told_otherwise() -> None:
    counts = {}
    for replicate in (FIRST, SECOND):
        cluster = Cluster(
            times_of("tutti", calibration=replace(CALIBRATION, hbm_tokens=BLOCK_TOKENS)),
            ClusterShape(remote=Remote(10e9, 100.0, 1 << 40, replicate)),
        )
        ids = tuple(range(8))
        asked = [
            TraceRequest(at_ms, 9 * BLOCK_TOKENS, 1, (*ids, 100 + at_ms)) for at_ms in (0, 60_000)
        ]
        cluster.run(asked)
        counts[replicate] = cluster.links[0].copied_blocks
    assert counts == {FIRST: 10, SECOND: 7}, "one block is hit in GPU memory"
    with pytest.raises(ConfigError, match="bandwidth"):
        Remote(0.0, 1.0, 1)
