"""Table of a run of the soak (`make soak`), for the page of results."""

from __future__ import annotations

from typing import Any

HEAD = ("what", "count")

#: Names of counts in the result, and their titles on the page.
_ROWS = (
    ("operations", "operations of the store"),
    ("objects stored", "objects stored"),
    ("bytes verified", "bytes compared with what their key stands for"),
    ("kills", "processes killed by SIGKILL"),
    ("agents killed", "agents of a node killed by SIGKILL"),
    ("agents stopped", "agents of a node stopped, and continued later"),
    ("clients killed", "clients of an agent killed by SIGKILL"),
    ("pages loaded through agents", "pages that clients of an agent loaded, compared"),
    ("pages stored through agents", "pages that clients of an agent stored"),
    ("recoveries checked", "pools opened and compared after kills"),
    ("torn copies", "torn copies of a live pool, opened and compared"),
    ("power losses", "losses of power, modelled from the log of writes"),
    ("refused openings", "second openings of a live pool, all refused"),
    ("forks", "forked children of a process with an open pool"),
    ("signals", "SIGINT in a thread that uses a store"),
    ("drive commands", "NVMe commands of the drive in memory"),
    ("linker pages verified", "pages that SGLang's linker loaded, compared"),
    ("ring commands", "ring commands under seeded schedules"),
    ("ring schedules", "seeded schedules"),
    ("ring schedules under sanitizers", "of these under AddressSanitizer and UBSan"),
    ("ring commands of threads", "ring commands of real threads"),
)


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    """Rows of work done, faults by kind, and findings; see HEAD."""
    counts = result["counts"]
    rows: list[list[object]] = [[text, counts[name]] for name, text in _ROWS if counts.get(name)]
    faults = _by_kind(counts, "faults ")
    errors = _by_kind(counts, "error ")
    if faults:
        rows.append(["injected faults by kind", faults])
    if errors:
        rows.append(["typed errors that callers got", errors])
    rows.append(["findings", result["found"]])
    return rows


def _by_kind(counts: dict[str, int], prefix: str) -> str:
    """Counts whose name has this prefix; phases without faults only reorder commands."""
    kinds = {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}
    return ", ".join(f"{kind} {n}" for kind, n in kinds.items() if n and kind != "none")


def notes_of(result: dict[str, Any]) -> list[str]:
    """Notes: duration, seed, and every finding."""
    episodes = ", ".join(f"{name} {n}" for name, n in result["episodes"].items())
    notes = [f"{result['elapsed_s'] / 60:.0f} minutes, seed {result['seed']}; episodes: {episodes}"]
    for finding in result["findings"]:
        minute = finding["after_s"] / 60
        notes.append(
            f"finding in minute {minute:.0f}, {finding['actor']} with seed {finding['seed']}: "
            f"{finding['what']}"
        )
    return notes
