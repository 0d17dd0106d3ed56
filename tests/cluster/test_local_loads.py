"""The second tier's view of a pool's loads."""

from __future__ import annotations

import numpy as np
from memory_controller import Faults
from waiting import wait_until

from store.pools import controller_of, formatted, opened, some_keys
from tutti.cluster.local_loads import LocalLoads


def test_a_load_is_near_until_it_has_ended(seed: int) -> None:
    controller, waits = controller_of(formatted()), list[bool]()
    with opened([], controller=controller) as store:
        store.allocate_memory(4)
        keys = some_keys(np.random.default_rng(seed), 2)
        local = LocalLoads(store._loader, 60.0, lambda: waits.append(True), lambda: bool(waits))
        store.put(keys, range(2)).wait(5)
        wait_until(lambda: not local.near())
        controller.set_faults(Faults(stall_from=1))
        ticket = store.load(keys, [2, 3])
        assert not local.wait_for_pause(float("inf"))
        controller.recover()
        assert ticket.wait_settled(5)
        wait_until(lambda: not local.near())
        assert local.wait_for_pause(float("inf"))
        assert waits == [True]
