"""`tutti fsck`: arguments, and the report of damage and repair as text."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from tutti import store
from tutti.arguments import add_paths, natural, options, positive
from tutti.base.terminal import facts, progress, table
from tutti.base.units import format_nbytes
from tutti.commands.members import existing_members
from tutti.commands.outcome import EXIT_FAILED, EXIT_OK, CommandResult
from tutti.fsck import FsckReport, RepairReport, check_files, repair
from tutti.pool import replacement
from tutti.transfers.store_config import StoreConfig

_SHOWN_MAX = 20
_DESCRIPTION = """\
Verifies every object of a closed pool against the digests in its record. Nothing is written without
--repair or --reuse-quarantined.

--repair removes damaged objects: they become misses, and the server recomputes them. Their slots
are quarantined (not used again), or free after an unclean close. It also rewrites superblocks and
snapshots, and drops and counts lost records. --reuse-quarantined frees quarantined slots."""
_EXAMPLE = """\
example:
  tutti fsck pool.tutti
  tutti fsck pool.tutti --sample 1000 --json
  tutti fsck disk0.tutti disk1.tutti --repair
  tutti fsck pool.tutti --reuse-quarantined     # after the cause of the damage was removed

The exit code is 1 when unrepaired damage remains."""


def add_fsck(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    add_paths(parser)
    option = options(parser)
    option("--repair", False, "remove damaged objects")
    what = "free the slots that are out of use because of earlier damage"
    option("--reuse-quarantined", False, what)
    option("--sample N", None, "verify only N objects drawn at random", positive)
    option("--seed", 0, "seed of the random sample", natural)
    parser.set_defaults(run=run_fsck)


def run_fsck(args: argparse.Namespace) -> CommandResult:
    """Checks the pool, and repairs it with --repair."""
    paths = existing_members(args.paths)
    if args.repair or args.reuse_quarantined:  # which open the pool
        replacement.finish(paths)
    with replacement.explained(paths):
        report = check_files(paths, progress, sample=args.sample, seed=args.seed)
    repaired = None
    if args.repair and not report.sound:
        repaired = repair(paths, report, progress)
    reused = _reuse_quarantined(paths) if args.reuse_quarantined else 0
    is_good = report.sound or (repaired is not None and repaired.left + repaired.found_again == 0)
    result, text = _result(report, repaired), _text(report, repaired)
    if args.reuse_quarantined:
        result["reused"] = reused
        text += f"\nQuarantined slots that are free again: {reused}."
    if left := replacement.leftovers(paths):
        text += f"\n{replacement.remedy(left)}"
    result["left_of_resize"] = left
    return CommandResult(result, text, EXIT_OK if is_good else EXIT_FAILED)


def _reuse_quarantined(paths: list[str]) -> int:
    # As in a repair: nothing is served, so files that other users can change are accepted.
    with store.open(paths, config=StoreConfig(any_owner=True), profile=None) as pool:
        pool.wait_recovered()
        return pool.reuse_quarantined()


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
        ("last closed", "cleanly" if report.state == "clean" else "not cleanly"),
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
        return f"{report.torn}"  # with lost records, not all of these are empty slots
    return f"{report.torn} (empty slots)"


def _verdict(report: FsckReport, repaired: RepairReport | None) -> str:
    if report.sound:
        return "The pool is sound."
    if repaired is None:
        return "The pool is damaged; run again with --repair to remove the damaged objects."
    done = (
        f"{repaired.quarantined} removed, {repaired.gone} already missing, {repaired.sound} intact"
        " in another copy"
    )
    if repaired.given_up:
        records = "record" if repaired.given_up == 1 else "records"
        done += f"; {repaired.given_up} lost {records} dropped: their objects are gone"
    if repaired.left:
        return f"Repaired in part: {done}; {repaired.left} could not be removed."
    if repaired.found_again:
        return f"Repaired in part: {done}; {repaired.found_again} findings remain. Format the pool."
    return f"Repaired: {done}."
