"""A whole installation in virtual time: servers, nodes, tiers and the scheduler's own policy.

Serves a workload and reports latencies.  Times come from a calibration, or from a profile of this
machine.  All results are simulated.  `--validate` compares them with published points, `--fit` fits
the calibration again, and `--paper` writes the CSVs of the Tutti paper's figures.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tutti.arguments import above_zero, positive
from tutti.base.terminal import ProgressFactory
from tutti.base.units import TiB, parse_nbytes
from tutti.bench.environment import commit_of, describe
from tutti.bench.figures.data import RATE, Row, write_csv
from tutti.bench.simulate import report as simulate_report
from tutti.bench.simulate.calibration import (
    FILE,
    Calibration,
    ServerTimes,
    drive_of,
    gpu_of,
    load_calibration,
)
from tutti.bench.simulate.cluster import ROUND_ROBIN, ROUTERS, Cluster, ClusterShape
from tutti.bench.simulate.fit import fit
from tutti.bench.simulate.hardware import drive_names
from tutti.bench.simulate.intervals import settings_for, spans, workload_for
from tutti.bench.simulate.paper import SIMULATED, write_paper
from tutti.bench.simulate.points import residuals
from tutti.bench.simulate.remote import FIRST, SECOND, Remote
from tutti.bench.simulate.report import system_of
from tutti.bench.simulate.settings import ASSUMED, WITHOUT_FIRST, Setting, arrivals
from tutti.bench.traces import TraceRequest
from tutti.bench.ttft.metrics import mean_interval
from tutti.bench.ttft.workloads.source import (
    Workload,
    add_workload_arguments,
    build_workload,
    mooncake_requests,
)
from tutti.bench.writable import check_writable, options
from tutti.errors import ConfigError
from tutti.scheduler.profile import TableProfile, load_profile
from tutti.scheduler.roofline import GPUS

report = simulate_report.report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    group = parser.add_argument_group("simulation")
    option = options(group)
    option(
        "--systems",
        ["hbm", "dram", "gds", "tutti"],
        "caches to compare: hbm (GPU memory alone), dram, ssd, gds, tutti-paper, tutti; with "
        "-whole or -layers, one that awaits whole loads or single layers (dram-whole, ssd-layers)",
    )
    option("--software", "sglang", "simulated server: sglang, vllm-0.12 or vllm-0.17")
    option("--gpu", "H100", "GPU of a server", tuple(GPUS))
    what = "drive or drives whose published speeds are used"
    option("--drive", "2x D7-PS1010", what, drive_names())
    what = "file with the times of software and systems (default: the installed one)"
    option("--calibration", FILE, what, Path)
    what = "tokens of KV that fit into a server's GPU memory (default: the calibration's)"
    option("--hbm-tokens", None, what, positive)
    what = "file of `tutti profile`; its compute and drive times replace --gpu and --drive"
    option("--profile", None, what, Path)
    _add_cluster_arguments(group)
    _add_remote_arguments(parser)
    _add_paper_arguments(parser)


def _add_cluster_arguments(group: argparse._ArgumentGroup) -> None:
    """How many servers there are, and how requests reach them."""
    option = options(group)
    option("--servers", 1, "number of servers", positive)
    option("--servers-per-node", 8, "servers on one machine, which share its drives", positive)
    option("--media", None, "drives per machine (default: half its number of servers)", positive)
    what = "round-robin: servers in turn; prefix: the server with the fewest tokens to compute"
    option("--routers", [ROUND_ROBIN], what, ROUTERS)
    what = "requests per second, at random times (default: the trace's own times)"
    option("--rates R", [], what, float, nargs="*")
    option("--seeds", 1, "number of seeds of the arrival times", positive)
    option("--warm N", 0, "requests that fill the caches first; they are not counted")
    what = "run once, with the assumed settings. Default: repeat with each unpublished setting "
    what += "changed, to show intervals (ten times as long; not for a trace)"
    option("--as-assumed", False, what)
    option("--unit-layers", 4, "layers per transfer", positive)
    option("--csv", None, "file for TTFT and ITL by rate", Path)


def _add_remote_arguments(parser: argparse.ArgumentParser) -> None:
    """The tier below the drives."""
    option = options(parser.add_argument_group("second tier"))
    what = "bandwidth between each machine and a shared remote store, per direction; 0: no store"
    option("--remote-gb-per-s B", [0.0], what)
    option("--remote-latency-us", 1000.0, "latency of reading 512 tokens")
    option("--remote-capacity", TiB, "size of the remote store in bytes", parse_nbytes)
    option("--remote-replicate", SECOND, "copy pages when stored, or when loaded", (SECOND, FIRST))


def _remotes(args: argparse.Namespace) -> list[Remote | None]:
    """The second tiers that the arguments describe.  Raises ConfigError."""
    more = (args.remote_latency_us, args.remote_capacity, args.remote_replicate)
    return [Remote(rate * 1e9, *more) if rate else None for rate in args.remote_gb_per_s]


def _add_paper_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of commands other than a simulation."""
    option = options(parser.add_argument_group("calibration"))
    option("--fit", False, "fit the calibration to published points, then stop")
    option("--validate", False, "compare simulated with published times, then stop")
    option("--paper FOLDER", None, "write the CSVs of the paper's figures, then stop", Path)
    what = "names of figures for --paper, or first letters of points for --validate"
    option("--only NAME", [], what, nargs="+")
    what = "factor for the number of requests in --validate and --paper"
    option("--effort", 0.5, what, above_zero)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Simulates each system with each router at each rate.

    Raises ConfigError for invalid arguments.
    """
    calibration = load_calibration(args.calibration)
    result: dict[str, Any] = {"benchmark": "simulate", "source": SIMULATED, "rows": []}
    if args.paper:
        with progress("figures", 1) as bar:
            result["files"] = write_paper(calibration, args.paper, args.only, args.effort)
            bar.advance(1)
    elif args.fit or args.validate:
        result |= _validated(calibration, args, progress)
    else:
        result |= _simulated(calibration, args, progress)
    return {**result, "machine": describe()}


def _validated(
    calibration: Calibration, args: argparse.Namespace, progress: ProgressFactory
) -> dict[str, Any]:
    with progress("published points", 2) as bar:
        if args.fit:
            calibration = fit(calibration)
        bar.advance(1)
        found = residuals(calibration, args.effort, "fit" if args.fit else "", args.only)
        bar.advance(1)
    return {"points": found, "fitted": fitted_values(calibration)}


def fitted_values(calibration: Calibration) -> dict[str, float]:
    """The values of a calibration that are fits, by their places in the file."""
    return {
        f"{kind}.{name}.{value}": getattr(record, value)
        for kind in ("servers", "systems", "workloads")
        for name, record in getattr(calibration, kind).items()
        for value in record.fitted
    }


def _simulated(
    calibration: Calibration, args: argparse.Namespace, progress: ProgressFactory
) -> dict[str, Any]:
    if args.csv:
        check_writable(args.csv)
    per_node = min(args.servers_per_node, args.servers)
    media = args.media or -(-per_node // 2)
    profile = load_profile(args.profile) if args.profile else None
    calibration = replace(calibration, hbm_tokens=args.hbm_tokens or calibration.hbm_tokens)
    all_times = {name: _times(calibration, name, args, profile) for name in args.systems}
    workload = build_workload(args)
    if not 0 <= args.warm < len(workload.prompts):
        raise ConfigError(f"--warm {args.warm} of {len(workload.prompts)} requests leaves nothing")
    steps = calibration.server(args.software).chunk_tokens
    settings = settings_for(args.workload, steps, drawn=bool(args.rates))
    settings = settings[:1] if args.as_assumed else settings
    streams = zip(*(_streams(args, workload, s) for s in settings), strict=True)
    rows = []
    runs = list(itertools.product(all_times, args.routers, _remotes(args), streams))
    with progress("simulate", len(runs) * len(settings)) as bar:
        for name, router, remote, varied in runs:
            shape = ClusterShape(args.servers, per_node, media, router, args.unit_layers, remote)
            found = []
            for setting, (_, _, requests) in zip(settings, varied, strict=True):
                cluster = Cluster(_times(calibration, name, args, profile, setting), shape)
                cluster.warm(requests[: args.warm])
                found.append(cluster.run(requests[args.warm :]))
                if setting == ASSUMED:
                    found.append(cluster.after(WITHOUT_FIRST.warm))
                bar.advance(1)
            rate, seed, _ = varied[0]
            rows.append({"system": name, "router": router, "seed": seed, **found[0]})
            if not args.as_assumed:
                rows[-1] |= spans(found)
            if remote is not None and cluster.links:
                rows[-1]["remote"] = asdict(remote)
            if rate is not None:
                rows[-1]["rate"] = rate
    if args.csv:
        write_csv(args.csv, csv_rows(rows), RATE)
    return {
        "rows": rows,
        "servers": args.servers,
        "servers_per_node": per_node,
        "media_per_node": media,
        "drive": next(iter(all_times.values())).drive.name,
        "gpu": args.gpu if profile is None else "profile",
        "profile_estimated": [] if profile is None else list(profile.estimated),
        "server": args.software,
        "hbm_tokens": calibration.hbm_tokens,
        "unit_layers": args.unit_layers,
        "warm": args.warm,
        "workload": workload.facts(),
        "varied": [] if args.as_assumed else [WITHOUT_FIRST.name, *(s.name for s in settings[1:])],
        "fitted": fitted_values(calibration),
    }


def _times(
    calibration: Calibration,
    name: str,
    args: argparse.Namespace,
    profile: TableProfile | None,
    setting: Setting = ASSUMED,
) -> ServerTimes:
    return ServerTimes(
        calibration,
        setting.steps_of(calibration.server(args.software)),
        calibration.system(name),
        gpu=gpu_of(args.gpu),
        drive=drive_of(args.drive),
        profile=profile,
    )


def _streams(
    args: argparse.Namespace, assumed: Workload, setting: Setting
) -> list[tuple[float | None, int, list[TraceRequest]]]:
    """(rate, seed, requests) of each run.  The same for every system."""
    workload = workload_for(args, setting, assumed)
    if args.rates:
        runs, more = itertools.product(args.rates, range(1, args.seeds + 1)), setting.arrivals
        return [(r, s, arrivals(workload, r, s + more, args.warm)) for r, s in runs]
    times_ms = [p.arrival_ms for p in workload.prompts if p.arrival_ms is not None]
    if len(times_ms) < len(workload.prompts):
        raise ConfigError(f"{workload.name} has no times of its own; give --rates")
    if times_ms != sorted(times_ms):
        raise ConfigError("the trace's times are out of order; sort it, or give --rates")
    return [(None, 0, mooncake_requests(workload, times_ms))]


def csv_rows(rows: list[dict[str, Any]]) -> list[Row]:
    """Rows of the figure of TTFT and ITL against rate, with intervals over seeds."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((system_of(row), row["router"], row["rate"]), []).append(row)
    found, several = [], len({row["router"] for row in rows}) > 1
    commit = commit_of(Path(__file__).parent)
    for (system, router, rate), runs in groups.items():
        line = {
            "system": f"{system}, {router}" if several else system,
            "source": SIMULATED,
            "commit": commit,
            "rate": str(rate),
        }
        for name in ("ttft", "itl"):
            known = [run[f"{name}_ms"]["mean"] for run in runs if run[f"{name}_ms"]]
            interval = mean_interval(known) if known else dict.fromkeys(("mean", "low", "high"), "")
            line[f"{name}_ms"] = str(interval["mean"])
            spans_ms = [run.get("intervals", {}).get(f"{name}_ms_mean", ()) for run in runs]
            ends = [x for span in spans_ms for x in span] + [interval["low"], interval["high"]]
            line[f"{name}_low_ms"] = str(min(ends)) if known else ""
            line[f"{name}_high_ms"] = str(max(ends)) if known else ""
        line["unstable"] = "yes" if any(run["unstable"] for run in runs) else "no"
        found.append({**line, "partial": "no"})
    return found
