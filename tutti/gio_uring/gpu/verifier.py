"""Digests of pages in GPU memory: a kernel compares or computes them where the pages lie.

After the copies of a read, so a damaged slice is known before its layer is released, with what the
copies did to it.  Beside the copies of a write, so the digest is that of the page, whatever the
copies do.  No processor of the host reads the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.base.arrays import U32, U64
from tutti.base.process import Owned
from tutti.base.units import MiB
from tutti.gio_uring.gpu.device_batch import BatchRequest, DeviceBatch, launch_layer
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner, TableMemory
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.layer_words import LayerWords
from tutti.gio_uring.nvme_spec import OPCODE_READ

TABLES_NBYTES = 16 * MiB
#: Of tables that are not digests: pages, statuses, bases and words, at most.
_PAGE_NBYTES, _LAYER_NBYTES, _HEAD_NBYTES = 8, 256, 4096
_DIGEST_NBYTES = 8


@dataclass(frozen=True)
class Expected:
    """Pages of GPU memory and their digests, uint64 (pages, layers): of a read, which may be filled
    later; of a write, to be filled.
    """

    opcode: int
    memory: PagedMemory
    pages: U32
    digests: U64
    slice_nlb: int
    lba_shift: int


class Verifier(Owned):
    """The kernel `gio_verify`, and memory for its tables.

    tables_nbytes: of those of reads and of those of writes: two at once have a place there; the
    digests of longer ones are compared by the host.  blocks: of the kernel, which bounds the
    multiprocessors it takes.
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
        """Tables of two transfers of so many pages."""
        nbytes = pages * (_PAGE_NBYTES + layers * _DIGEST_NBYTES) + layers * _LAYER_NBYTES
        return 2 * (nbytes + _HEAD_NBYTES)

    def prepare(self, expected: Expected, owner: LeaseOwner) -> Verification | None:
        """A verification of one transfer; None where its tables are too long."""
        if self.tables_nbytes(*expected.digests.shape) > self._nbytes:
            return None
        request = BatchRequest(
            expected.memory,
            expected.pages,
            opcode=expected.opcode,
            slice_nlb=expected.slice_nlb,
            lba_shift=expected.lba_shift,
            digests=expected.digests,
        )
        is_read = expected.opcode == OPCODE_READ
        tables = self._of_reads if is_read else self._of_writes
        batch = DeviceBatch(tables, request, owner, own_words=True)
        batch.write()
        return Verification(
            self._driver, self._function, batch, self.blocks, expected.digests, computes=not is_read
        )

    def close(self) -> None:
        """Frees the tables; nothing may use them any more."""
        self._of_reads.close()
        self._of_writes.close()


class Verification:
    """The digests of one transfer.  computes: those of a write, else a read's are compared."""

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
        """The digests are filled now.  A cancelled read is verified by then: nothing else is
        written.
        """
        self._batch.digests()[:] = self._digests

    def upload(self, stream: int) -> None:
        """Enqueues the copy of its tables to the device."""
        self._batch.copy_up(stream)

    def put_layer(self, layer: int, stream: int) -> None:
        """Enqueues the kernel of one layer; a read's is copied by then."""
        launch_layer(
            self._driver, self._function, self._batch, layer, stream, self._blocks, publish=1
        )

    def put_outcome(self, stream: int) -> None:
        """Enqueues what became of all layers, whose kernels have ended by then."""
        batch, driver = self._batch, self._driver
        if self._computes:
            batch.download_digests(driver, stream)
        batch.download_outcome(driver, stream)
        driver.write_value(stream, batch.device_words, 1)

    @property
    def is_over(self) -> bool:
        """Whether the outcome of all layers is there."""
        return bool(self.words.moved)

    def is_wrong(self, layers: int) -> bool:
        """Whether one of the first layers, which are released, has a slice that is damaged."""
        return any(self.words.status(layer) for layer in range(layers))

    def status(self) -> U32:
        """uint32 (pages,), 0 or `STATUS_DIGEST_MISMATCH`; once it is over.  Fills the digests of a
        write.
        """
        if self._computes:
            self._digests[:] = self._batch.digests()
        return self._batch.outcome()[0]
