"""When a medium crawls.  Pure policy."""

from __future__ import annotations


def crawls(nbytes: int, waited_s: float, *, least_mbs: float, patience_s: float) -> bool:
    """Whether a transfer that was waited for was unbearably slow.

    least_mbs: 10^6 bytes a second.  patience_s: no wait below it counts.
    """
    return waited_s > patience_s and nbytes < least_mbs * 1e6 * waited_s
