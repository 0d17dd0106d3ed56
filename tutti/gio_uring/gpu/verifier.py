"""Digests of pages in GPU memory: a kernel compares or computes them in place.

For a read it runs after the copies: damage, also by the copies, is known before the layer is
released.  For a write it reads the pages themselves, so that the digest does not depend on the
copies.  The CPU does not read the bytes.
"""

from __future__ import annotations

from tutti.base.arrays import U32, U64
from tutti.base.process import Owned
from tutti.base.units import MiB
from tutti.gio_uring.gpu.device_batch import BatchRequest, DeviceBatch, launch_layer
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner, TableMemory
from tutti.gio_uring.layer_words import LayerWords
from tutti.gio_uring.nvme_spec import OPCODE_READ

TABLES_NBYTES = 16 * MiB


class Verifier(Owned):
    """The kernel `gio_verify`, and memory for its tables.

    tables_nbytes: memory for the tables of reads, and again of writes; each must fit twice, or
    the host handles the digests.  blocks: number of blocks of the kernel, which limits the
    multiprocessors it uses.
    """

    def __init__(
        self,
        driver: Driver,
        modules: Modules,
        *,
        tables_nbytes: int = TABLES_NBYTES,
        blocks: int = 16,
    ) -> None:
        self._driver, self._function = driver, modules["gio_verify"]
        self._nbytes, self.blocks = tables_nbytes, blocks
        self._of_reads = TableMemory(driver, tables_nbytes)
        try:
            self._of_writes = TableMemory(driver, tables_nbytes)  # a load never waits for a put
        except BaseException:
            self._of_reads.close()
            raise

    @staticmethod
    def tables_nbytes(pages: int, layers: int) -> int:
        """Bytes of the tables of two transfers of this size."""
        return 2 * DeviceBatch.nbytes_max(pages, layers)

    def prepare(self, request: BatchRequest, owner: LeaseOwner) -> Verification | None:
        """A verification of one transfer; None if its tables are too large.

        request: has digests.  Those of a read may be filled later; those of a write are filled by
        the verification.
        """
        digests = request.digests
        assert digests is not None, "there is something to compare with, or to fill"
        if self.tables_nbytes(*digests.shape) > self._nbytes:
            return None
        is_read = request.opcode == OPCODE_READ
        tables = self._of_reads if is_read else self._of_writes
        batch = DeviceBatch(tables, request, owner, own_words=True)
        batch.write()
        return Verification(
            self._driver, self._function, batch, self.blocks, digests, computes=not is_read
        )

    def close(self) -> None:
        """Frees the tables, which must not be in use."""
        self._of_reads.close()
        self._of_writes.close()


class Verification:
    """The digests of one transfer.  computes: True for a write; a read's digests are compared."""

    def __init__(
        self,
        driver: Driver,
        function: int,
        batch: DeviceBatch,
        blocks: int,
        digests: U64,
        *,
        computes: bool,
    ) -> None:
        self._driver, self._function = driver, function
        self._batch, self._blocks = batch, blocks
        self._digests, self._computes = digests, computes
        self.words: LayerWords = batch.words

    def refresh(self) -> None:
        """Copies the digests, which are filled now, to the tables in pinned memory, and nothing
        else: a cancelled read may have been verified already.
        """
        self._batch.digests()[:] = self._digests

    def upload(self, stream: int) -> None:
        """Enqueues the copy of the tables to the device."""
        self._batch.copy_up(stream)

    def put_layer(self, layer: int, stream: int) -> None:
        """Enqueues the kernel for one layer; a read's copies must have been enqueued before."""
        launch_layer(
            self._driver, self._function, self._batch, layer, stream, self._blocks, publish=1
        )

    def put_outcome(self, stream: int) -> None:
        """Enqueues the copy of the outcome of all layers, after their kernels."""
        batch, driver = self._batch, self._driver
        if self._computes:
            batch.download_digests(driver, stream)
        batch.download_outcome(driver, stream)
        driver.write_value(stream, batch.device_words, 1)

    @property
    def is_over(self) -> bool:
        """Whether the outcome of all layers is known."""
        return bool(self.words.moved)

    def is_wrong(self, layers: int) -> bool:
        """Whether one of the first `layers` layers, which must have ended, has a damaged slice."""
        return any(self.words.status(layer) for layer in range(layers))

    def status(self) -> U32:
        """uint32 (pages,), 0 or `STATUS_DIGEST_MISMATCH`; only after the end.  Fills the digests of
        a write.
        """
        if self._computes:
            self._digests[:] = self._batch.digests()
        return self._batch.outcome()[0]
