"""A simple policy, with which `SlackPolicy` is compared."""

from __future__ import annotations

from tutti.scheduler.baselines import all_reads
from tutti.scheduler.policy import Limits
from tutti.scheduler.room import overflow
from tutti.scheduler.state import Decision, Issue, State


class FixedWindow:
    """Writes, per time window, what a constant bandwidth moves in it; issues reads at once.

    window_us: interval of writes; longer if the bandwidth does not move a page in it.
    bytes_per_s: assumed write bandwidth of the device.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        window_us: float = 10_000.0,
        bytes_per_s: float = 10 * 2**30,
    ) -> None:
        self.limits = limits or Limits()
        self._window_us, self._bytes_per_s = window_us, bytes_per_s

    def decide(self, state: State) -> Decision:
        """See Policy."""
        copy_outs, drops = overflow(state, self.limits)
        gone = {*copy_outs, *drops}
        reads = all_reads(state, self.limits)
        waiting = [write for write in state.unwritten.values() if write.name not in gone]
        if not waiting:
            return Decision(reads, (), copy_outs, drops)
        unit_nbytes = waiting[0].unit * waiting[0].page_nbytes
        left = max(round(self._window_us * 1e-6 * self._bytes_per_s), unit_nbytes)
        window_ns = round(left / self._bytes_per_s * 1e9)
        last_ns = state.write_issued_ns
        if last_ns is not None and state.now_ns < last_ns + window_ns:
            return Decision(reads, (), copy_outs, drops, wake_ns=last_ns + window_ns)
        writes: list[Issue] = []
        for write in waiting:
            pages = write.whole_units(left // write.page_nbytes)
            if pages:
                writes.append(Issue(write.name, write.issued, pages))
            left -= pages * write.page_nbytes
            if pages < write.pages - write.issued:
                break
        return Decision(reads, tuple(writes), copy_outs, drops, wake_ns=state.now_ns + window_ns)
