"""Which writes one decision issues, where several wait.

gone: writes that the same decision copies or drops.
"""

from __future__ import annotations

from tutti.scheduler.loads_and_writes import Write
from tutti.scheduler.state import Issue


def first_write(unwritten: dict[str, Write], gone: tuple[str, ...]) -> Write | None:
    """The oldest write that stays."""
    return next((write for write in unwritten.values() if write.name not in gone), None)


def fewest_left_first(unwritten: dict[str, Write]) -> dict[str, Write]:
    """The writes with the fewest pages left first: this order frees memory soonest."""
    left = sorted(unwritten.values(), key=lambda write: write.pages - write.issued)
    return {write.name: write for write in left}


def writes_for(
    unwritten: dict[str, Write], budget_ns: float, gone: tuple[str, ...]
) -> tuple[Issue, ...]:
    """Writes that take ``budget_ns`` by the profile, at least one unit, in the given order."""
    issues: list[Issue] = []
    for write in unwritten.values():
        if write.name in gone:
            continue
        page_ns = write.write_ns or 1
        pages = write.whole_units(int(budget_ns // page_ns))
        if not pages and not issues:
            pages = write.unit
        if pages:
            issues.append(Issue(write.name, write.issued, pages))
        budget_ns -= pages * page_ns
        if pages < write.pages - write.issued:
            break
    return tuple(issues)
