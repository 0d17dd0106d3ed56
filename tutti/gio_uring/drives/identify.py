"""Decodes and checks a drive's CAP and CRTO registers and Identify structures.

Field offsets: NVM Express Base Specification 2.0, sections 3.1.3.1 (CAP), 3.1.3.21 (CRTO) and
5.17.2.1 (Identify Controller); NVM Command Set Specification 1.0, section 4.1.5.1 (Identify
Namespace). The drive's data is not trusted: reserved and inconsistent values are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from tutti.base.units import MiB
from tutti.errors import MediumError, Unsupported

IDENTIFY_NBYTES = 4096
NAMESPACES_MAX = 64

_SQES_64, _CQES_16 = 6, 4  # log2 of the entries' sizes
_MDTS_MAX = 20  # 4 GiB of the smallest pages; a larger power overflows 32 bits of bytes
_TRANSFER_NBYTES_MAX = 2 * MiB  # of one page of PRP entries: 512 pages of 4 KiB
_CSS_NVM = 1 << 0
_CSS_NONE = 1 << 7
_READY_WITH_MEDIA = 1 << 59  # CAP.CRMS.CRWMS: CRTO says how long that takes
_SHUTDOWN_MAX_S = 60.0


@dataclass(frozen=True)
class Capabilities:
    """CAP and CRTO. timeout_s: longest time to become ready or disabled. depth_max: most entries of
    a queue.

    doorbell_nbytes: distance of doorbells.
    """

    depth_max: int
    timeout_s: float
    doorbell_nbytes: int
    page_nbytes_min: int

    @classmethod
    def parse(cls, cap: int, read_crto: Callable[[], int]) -> Capabilities:
        """read_crto: reads CRTO; called only if the drive has this register.

        Raises Unsupported for a controller that this driver does not support.
        """
        entries = (cap & 0xFFFF) + 1
        if entries < 2:
            raise Unsupported(f"the drive's queues have {entries} entry; at least 2 are needed")
        css = cap >> 37 & 0xFF
        if not css & _CSS_NVM or css & _CSS_NONE:
            raise Unsupported("the drive does not speak the NVM command set; use another one")
        page_nbytes = 1 << (12 + (cap >> 48 & 0xF))
        if page_nbytes != 4096:
            raise Unsupported(f"the drive's smallest page has {page_nbytes} bytes; 4096 are needed")
        with_media = read_crto() & 0xFFFF if cap & _READY_WITH_MEDIA else 0
        return cls(
            depth_max=1 << (entries.bit_length() - 1),
            timeout_s=max(1, cap >> 24 & 0xFF, with_media) * 0.5,
            doorbell_nbytes=4 << (cap >> 32 & 0xF),
            page_nbytes_min=page_nbytes,
        )


@dataclass(frozen=True)
class IdentifyController:
    """Identify Controller.

    mdts_nbytes: largest transfer of one command. sgl: whether commands may use SGLs. sgl_advised:
    recommended limit of descriptors in one command, 0 = not reported. namespaces: highest nsid.
    shutdown_s: longest time of a shutdown (RTD3E), 0 = not reported, capped at a minute.
    """

    serial: str
    model: str
    mdts_nbytes: int
    namespaces: int
    sgl: bool
    sgl_advised: int
    has_deallocate: bool
    has_volatile_cache: bool
    has_shadow_doorbells: bool
    shutdown_s: float

    @classmethod
    def parse(cls, raw: bytes, page_nbytes: int) -> IdentifyController:
        """Raises MediumError for a structure that contradicts the specification."""
        if len(raw) != IDENTIFY_NBYTES:
            raise MediumError(f"Identify Controller has {len(raw)} bytes; reset the drive")
        mdts = raw[77]
        sqes, cqes = raw[512], raw[513]
        (shutdown_us,) = struct.unpack_from("<I", raw, 88)
        (namespaces,) = struct.unpack_from("<I", raw, 516)
        (oacs,) = struct.unpack_from("<H", raw, 256)
        (oncs,) = struct.unpack_from("<H", raw, 520)
        (sgls,) = struct.unpack_from("<I", raw, 536)
        _refuse_if(mdts > _MDTS_MAX, f"an MDTS of 2^{mdts} pages")
        _refuse_if(not sqes & 0xF <= _SQES_64 <= sqes >> 4, f"SQ entries {sqes:#x}")
        _refuse_if(not cqes & 0xF <= _CQES_16 <= cqes >> 4, f"CQ entries {cqes:#x}")
        _refuse_if(namespaces == 0, "no namespaces")
        _refuse_if(sgls & 3 == 3, "a reserved value of SGLS")
        nbytes = page_nbytes << mdts if mdts else _TRANSFER_NBYTES_MAX
        return cls(
            serial=_text(raw[4:24]),
            model=_text(raw[24:64]),
            mdts_nbytes=min(nbytes, _TRANSFER_NBYTES_MAX),
            namespaces=namespaces,
            sgl=sgls & 3 != 0,
            sgl_advised=sgls >> 8 & 0xFF,
            has_deallocate=bool(oncs & 1 << 2),
            has_volatile_cache=bool(raw[525] & 1),
            has_shadow_doorbells=bool(oacs & 1 << 8),
            shutdown_s=min(shutdown_us * 1e-6, _SHUTDOWN_MAX_S),
        )


@dataclass(frozen=True)
class NamespaceIdentity:
    """Identify Namespace: its size in blocks and its format in use.

    deallocated_reads: content of deallocated blocks (DLFEAT): "zeros", "ones" or "anything".
    refusal: why it cannot be used; None if it can.
    """

    nlb: int
    lba_shift: int
    deallocated_reads: str
    refusal: str | None

    @classmethod
    def parse(cls, raw: bytes) -> NamespaceIdentity:
        """Raises MediumError for a structure that contradicts itself."""
        if len(raw) != IDENTIFY_NBYTES:
            raise MediumError(f"Identify Namespace has {len(raw)} bytes; reset the drive")
        (nlb, capacity) = struct.unpack_from("<QQ", raw, 0)
        formats, flbas, dps, dlfeat = raw[25] + 1, raw[26], raw[29], raw[33]
        index = flbas & 0xF | (flbas >> 5 & 3) << 4
        _refuse_if(formats > 64, f"{formats} LBA formats")
        _refuse_if(index >= formats, f"LBA format {index} of {formats}")
        _refuse_if(capacity > nlb, "a capacity above its size")
        (metadata_nbytes, shift) = struct.unpack_from("<HB", raw, 128 + 4 * index)
        _refuse_if(nlb << max(shift, 9) >= 1 << 64, f"{nlb} blocks of 2^{shift} bytes")
        refusal = None
        if not 9 <= shift <= 16:
            refusal = f"its blocks have 2^{shift} bytes; format it with 512 to 65536"
        elif metadata_nbytes:
            refusal = f"its blocks carry {metadata_nbytes} bytes of metadata; format it without"
        elif dps & 7:
            refusal = "it uses protection information; format it without"
        elif raw[99] & 1:  # NSATTR
            refusal = "it is write protected; lift that with `nvme set-feature --feature-id=0x84`"
        elif nlb == 0:
            refusal = "it has no blocks"
        reads = {1: "zeros", 2: "ones"}.get(dlfeat & 7, "anything")
        return cls(nlb, shift, reads, refusal)


def parse_namespace_list(raw: bytes, highest: int) -> list[int]:
    """The active nsids: ascending, up to `highest`, terminated by a zero. Raises MediumError."""
    found: list[int] = []
    for (nsid,) in struct.iter_unpack("<I", raw):
        if nsid == 0:
            break
        _refuse_if(nsid > highest or (found and nsid <= found[-1]), f"namespace {nsid}")
        found.append(nsid)
    return found


def _refuse_if(is_wrong: object, what: str) -> None:
    if is_wrong:
        raise MediumError(
            f"the drive reports {what}, which the NVMe specification does not allow;"
            " update its firmware or use another drive"
        )


def _text(raw: bytes) -> str:
    """An ASCII field, padded with spaces; control characters are replaced."""
    return "".join(chr(c) if 32 <= c < 127 else "?" for c in raw.rstrip(b" \0"))
