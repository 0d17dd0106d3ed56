"""Routes the pages of a pool to the tenants of a remote store, and finds them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tutti.cluster.remote_store import RemoteStore, ValueStatus

OTHERS = 0  # not the number of a namespace: stands for all without a tenant of their own


class TenantStores:
    """The stores of tenants, by namespace number; ``exists`` asks them in that order.

    Names do not contain the namespace: ``get`` reads a value where the last ``exists`` found it.
    """

    def __init__(self, stores: Mapping[int, RemoteStore]) -> None:
        self._stores = stores
        self._found: dict[str, int] = {}  # tenants by name, from the last exists, except OTHERS

    def exists(self, names: Sequence[str]) -> list[ValueStatus]:
        """See RemoteStore; each tenant is asked for what those before it do not have."""
        answers = [ValueStatus.ABSENT] * len(names)
        missing = list(range(len(names)))
        self._found = {}
        for tenant, store in self._stores.items():
            for row, answer in zip(missing, store.exists([names[i] for i in missing]), strict=True):
                answers[row] = answer
                if tenant != OTHERS and answer == ValueStatus.DONE:
                    self._found[names[row]] = tenant
            missing = [row for row in missing if answers[row] != ValueStatus.DONE]
            if not missing:
                break
        return answers

    def get(self, names: Sequence[str], addresses: Sequence[int], nbytes: int) -> list[ValueStatus]:
        """See RemoteStore."""
        tenants = [self._found.get(name, OTHERS) for name in names]
        return self._each(tenants, names, addresses, lambda store, *own: store.get(*own, nbytes))

    def put(
        self, names: Sequence[str], tenants: Sequence[int], addresses: Sequence[int], nbytes: int
    ) -> list[ValueStatus]:
        """See RemoteStore.  tenants: numbers of the namespaces, one per value."""
        own = [tenant if tenant in self._stores else OTHERS for tenant in tenants]
        return self._each(own, names, addresses, lambda store, *own: store.put(*own, nbytes))

    def remove(self, names: Sequence[str]) -> list[ValueStatus]:
        """See RemoteStore; removes from all tenants."""
        each = list(zip(*(store.remove(names) for store in self._stores.values()), strict=True))
        order = (ValueStatus.FAILED, ValueStatus.DONE)
        return [next((s for s in order if s in own), ValueStatus.ABSENT) for own in each]

    def _each(
        self,
        tenants: Sequence[int],
        names: Sequence[str],
        addresses: Sequence[int],
        call: Callable[[RemoteStore, list[str], list[int]], list[ValueStatus]],
    ) -> list[ValueStatus]:
        """Calls each tenant's store with its values; returns the answers in the order of names."""
        answers = [ValueStatus.FAILED] * len(names)
        for tenant in set(tenants):
            rows = [row for row, other in enumerate(tenants) if other == tenant]
            own = [names[row] for row in rows], [addresses[row] for row in rows]
            for row, answer in zip(rows, call(self._stores[tenant], *own), strict=True):
                answers[row] = answer
        return answers
