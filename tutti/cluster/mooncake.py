"""Mooncake Store as a RemoteStore.  It is imported in the worker's process only."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from tutti.cluster.remote_store import ValueStatus
from tutti.errors import RemoteFailed

_NOT_FOUND = -704  # Mooncake's OBJECT_NOT_FOUND
_REFUSED = (-1700, -1701)  # TENANT_QUOTA_EXCEEDED, TENANT_NOT_REGISTERED
_PORT = 9  # any; no packet is sent


class MooncakeStore:
    """A client of a Mooncake cluster that offers no memory of its own.

    options: see tutti.cluster.remote_store.OPTIONS.  Raises RemoteFailed.
    """

    def __init__(self, options: Mapping[str, str], address: int, nbytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        master = options["master_server_address"]
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            options.get("local_hostname") or _own_address(master),
            options.get("metadata_server", "P2PHANDSHAKE"),
            0,
            0,
            options.get("protocol", "tcp"),
            options.get("device_name", ""),
            master,
            tenant_id=options.get("tenant_id", "default"),
        )
        if code == 0:
            code = self._store.register_buffer(address, nbytes)
        if code != 0:
            raise RemoteFailed(
                f"no client of the Mooncake master at {master} can be set up (error {code}); check"
                " that the master runs"
            )
        self._replicas = ReplicateConfig()
        self._replicas.replica_num = int(options.get("replica_num", "1"))

    def exists(self, names: Sequence[str]) -> list[ValueStatus]:
        """See RemoteStore."""
        found = self._store.batch_is_exist(list(names))
        if error := next((code for code in found if code < 0), 0):
            raise RemoteFailed(f"Mooncake's master answered error {error}")
        return [ValueStatus.DONE if code == 1 else ValueStatus.ABSENT for code in found]

    def get(self, names: Sequence[str], addresses: Sequence[int], nbytes: int) -> list[ValueStatus]:
        """See RemoteStore."""
        codes = self._store.batch_get_into(list(names), list(addresses), [nbytes] * len(names))
        missing = {nbytes: ValueStatus.DONE, _NOT_FOUND: ValueStatus.ABSENT}
        return [missing.get(code, ValueStatus.FAILED) for code in codes]

    def put(self, names: Sequence[str], addresses: Sequence[int], nbytes: int) -> list[ValueStatus]:
        """See RemoteStore."""
        sizes = [nbytes] * len(names)
        codes = self._store.batch_put_from(list(names), list(addresses), sizes, self._replicas)
        refused = dict.fromkeys(_REFUSED, ValueStatus.ABSENT)
        return [{0: ValueStatus.DONE, **refused}.get(code, ValueStatus.FAILED) for code in codes]

    def remove(self, names: Sequence[str]) -> list[ValueStatus]:
        """See RemoteStore; removes values even while Mooncake has leased them to readers."""
        gone = {0: ValueStatus.DONE, _NOT_FOUND: ValueStatus.ABSENT}
        codes = self._store.batch_remove(list(names), force=True)
        return [gone.get(code, ValueStatus.FAILED) for code in codes]


def _own_address(master: str) -> str:
    """Address of this machine on the route to the master.  Raises RemoteFailed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master.rpartition(":")[0], _PORT))
        except OSError as error:
            raise RemoteFailed(
                f"there is no way to the Mooncake master {master} ({error}); correct its name in"
                " --remote, or the network"
            ) from error
        return str(probe.getsockname()[0])
