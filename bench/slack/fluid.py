"""What a scheduler that knows the future could close of a gap, by a run without writes.

Pages are stored for nothing while the drive does not read.  Those that memory cannot keep until
then delay reads, each by its whole time.  An estimate and no bound: what such a delay changes
later is not counted, nor that some layers would not have waited.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Fluid:
    """What a run without writes shows: when the drive reads, and the puts of the server.

    edges: begins and ends of reading, in turns, in ns.  puts: (when, pages).
    """

    edges: list[int] = field(default_factory=list)
    puts: list[tuple[int, int]] = field(default_factory=list)
    _flying: int = 0

    def read_begins(self, now_ns: int) -> None:
        """One more read is in flight."""
        self._flying += 1
        if self._flying == 1:
            self.edges.append(now_ns)

    def read_ends(self, now_ns: int) -> None:
        """One less."""
        self._flying -= 1
        if not self._flying:
            self.edges.append(now_ns)

    def delayed_s(self, largest: int, memory: int, page_ns: float) -> float:
        """How long reads are delayed.  Puts of more pages than ``largest`` fit nowhere.

        memory: pages that may wait.  page_ns: of writing one.
        """
        times = np.array([0, *self.edges])
        is_idle = np.arange(len(times)) % 2 == 1  # before each: the drive was
        idle_ns = np.cumsum(np.diff(times, prepend=0) * is_idle)
        waiting = delayed = before_ns = 0.0
        for when_ns, pages in self.puts:
            if pages > largest:
                continue
            now_ns = float(np.interp(when_ns, times, idle_ns)) + max(0, when_ns - int(times[-1]))
            waiting = max(0.0, waiting - (now_ns - before_ns) / page_ns) + pages
            before_ns = now_ns
            if waiting > memory:
                delayed, waiting = delayed + waiting - memory, float(memory)
        return delayed * page_ns / 1e9
