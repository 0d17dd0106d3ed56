"""`tutti fsck`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from tutti.arguments import add_paths, natural, positive
from tutti.commands.outcome import EXIT_FAILED, EXIT_OK, Outcome
from tutti.fsck import FsckReport, RepairReport, check_files, repair
from tutti.terminal import facts, progress, table
from tutti.units import format_nbytes

_SHOWN_MAX = 20
_DESCRIPTION = """\
Reads a whole pool that nobody has open and compares every object with the digests of its record.
Without --repair not one byte is written. With it, damaged objects are quarantined: they are misses
from then on, and the engine computes them again. Superblocks and snapshots are written anew, and
records lost together with the snapshot that named them are given up, with their number."""
_EXAMPLE = """\
example:
  tutti fsck pool.tutti
  tutti fsck pool.tutti --sample 1000 --json
  tutti fsck disk0.tutti disk1.tutti --repair

exits with 1 when there is damage that was not repaired."""


def add_fsck(parser: argparse.ArgumentParser) -> None:
    """Describes `tutti fsck`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    add_paths(parser)
    parser.add_argument("--repair", action="store_true", help="quarantine what is damaged")
    parser.add_argument(
        "--sample", type=positive, metavar="N", help="compare N objects drawn at random, not all"
    )
    parser.add_argument(
        "--seed", type=natural, default=0, help="of that choice (default %(default)s)"
    )
    parser.set_defaults(run=run_fsck)


def run_fsck(args: argparse.Namespace) -> Outcome:
    """Checks, and repairs if that is asked for and needed."""
    report = check_files(args.paths, progress, sample=args.sample, seed=args.seed)
    repaired = None
    if args.repair and not report.sound:
        repaired = repair(args.paths, report, progress)
    is_good = report.sound or (repaired is not None and repaired.left == 0)
    return Outcome(
        _result(report, repaired), _text(report, repaired), EXIT_OK if is_good else EXIT_FAILED
    )


def _result(report: FsckReport, repaired: RepairReport | None) -> dict[str, Any]:
    result = asdict(report)
    del result["damaged_keys"], result["blind_keys"]  # in the findings
    result["sound"] = report.sound
    result["repaired"] = None if repaired is None else asdict(repaired)
    return result


def _text(report: FsckReport, repaired: RepairReport | None) -> str:
    amount = f"{report.verified} ({format_nbytes(report.verified_nbytes)})"
    rows: list[tuple[str, object]] = [
        ("pool", report.pool_uuid),
        ("last closed", "in order" if report.state == "clean" else "not in order"),
        ("slots", report.slots),
        ("objects", report.objects),
        ("verified", amount),
        ("without digests", report.without_digests),
        ("quarantined before", report.quarantined),
        ("torn records", _torn(report)),
        ("lost records", report.lost),
        ("damaged objects", report.damaged),
    ]
    parts = [facts(rows)]
    if report.findings:
        shown = report.findings[:_SHOWN_MAX]
        lines = [
            (f.kind, f.member, "-" if f.slot < 0 else f.slot, f.key or "-", f.message)
            for f in shown
        ]
        parts.append(table(("damage", "member", "slot", "key", "what"), lines))
    if report.found > _SHOWN_MAX:
        parts.append(f"and {report.found - _SHOWN_MAX} more")
    parts.append(_verdict(report, repaired))
    return "\n\n".join(parts)


def _torn(report: FsckReport) -> str:
    if report.torn == 0 or report.lost:
        return f"{report.torn}"  # which of them are empty slots, nobody knows where some are lost
    return f"{report.torn} (empty slots)"


def _verdict(report: FsckReport, repaired: RepairReport | None) -> str:
    if report.sound:
        return "The pool is sound."
    if repaired is None:
        return "The pool is damaged; run again with --repair to quarantine what is."
    done = (
        f"{repaired.quarantined} quarantined, {repaired.gone} gone before, {repaired.sound} sound"
        " in another copy"
    )
    if repaired.given_up:
        records = "record" if repaired.given_up == 1 else "records"
        done += f"; {repaired.given_up} lost {records} given up: what they held is gone"
    if repaired.left:
        return f"Repaired in part: {done}; {repaired.left} could not be quarantined."
    return f"Repaired: {done}."
