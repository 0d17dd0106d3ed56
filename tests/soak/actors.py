"""The actors by name, and the runners, which work at the same time."""

from __future__ import annotations

from soak import agents, disks, faults, forks, kills, linker, power, rings, signals
from soak.run import Actor

ACTORS: dict[str, Actor] = {
    "kills": kills.run,
    "agents": agents.run,
    "faults": faults.run,
    "power": power.run,
    "disks": disks.run,
    "forks": forks.run,
    "signals": signals.run,
    "linker": linker.run,
    "rings": rings.run,
    "ring-threads": rings.run_threads,
}
#: A name that occurs twice is drawn twice as often.
RUNNERS = [
    ["rings", "ring-threads"],
    [*["kills"] * 3, "agents"],
    [*["faults"] * 8, *["power"] * 4, *["disks"] * 3, *["signals"] * 2, "forks", "linker"],
]
