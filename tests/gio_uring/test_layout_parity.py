"""Every struct and constant that Python shares with C++ is the same on both sides."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import memory_controller
import pytest
from gio_uring.kernel_stand_in import LayerWordStruct
from gio_uring.ring_model import ControllerQueueStruct

from tutti import native as native_library
from tutti.bench import controller_memory
from tutti.gio_uring import (
    controller,
    controller_file,
    controller_vfio,
    engine,
    engine_structs,
    iocb,
    layer_words,
    nvme_spec,
    queue_pair,
)
from tutti.gio_uring.gpu import parameters as device_batch
from tutti.medium.slot_record import RecordState
from tutti.placement.index import SlotState
from tutti.pool import slot_extents, slot_jobs

KERNELS = Path(__file__).parents[2] / "kernels"
HEADERS = ("gio_uring/controller_queue.h", "gio_uring/iocb.h", "gio_uring/queue_pair.h")

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "Sqe": nvme_spec.Sqe,
    "Cqe": nvme_spec.Cqe,
    "SglDescriptor": nvme_spec.SglDescriptor,
    "DsmRange": nvme_spec.DsmRange,
    "QueuePair": queue_pair.QueuePairStruct,
    "ControllerQueue": ControllerQueueStruct,
    "ControllerInfo": controller.ControllerInfoStruct,
    "MemoryConfig": controller_memory.MemoryConfigStruct,
    "FaultConfig": memory_controller.FaultConfigStruct,
    "RangeFault": memory_controller.RangeFaultStruct,
    "MemoryStats": memory_controller.MemoryStats,
    "FileNamespace": controller_file.FileNamespaceStruct,
    "BufferedRange": controller_file.BufferedRangeStruct,
    "FileConfig": controller_file.FileConfigStruct,
    "FileStats": controller_file.FileStats,
    "VfioConfig": controller_vfio.VfioConfigStruct,
    "Iocb": iocb.IocbStruct,
    "JobConfig": engine_structs.JobConfig,
    "LayerWord": LayerWordStruct,
    "QueueShare": device_batch.QueueShareStruct,
    "RunState": device_batch.RunStateStruct,
    "LayerTally": device_batch.LayerTallyStruct,
    "SliceTable": device_batch.SliceTableStruct,
    "Batch": device_batch.BatchStruct,
    "Post": device_batch.PostStruct,
    "Mailbox": device_batch.MailboxStruct,
    "JobReport": engine_structs.JobReport,
    "EngineStats": engine_structs.EngineStats,
    "ServiceThreadConfig": engine_structs.ServiceThreadConfig,
    "Route": engine_structs.RouteStruct,
    "EngineConfig": engine_structs.EngineConfig,
    "WindowStats": engine_structs.WindowStats,
    "Cut": iocb.CutStruct,
    "SlotPlaces": slot_extents.SlotPlaces,
    "tutti_index": native_library.NativeIndex,
    "tutti_reuse": native_library.NativeReuse,
    "tutti_digests": native_library.NativeDigests,
    "tutti_load_tables": native_library.NativeLoadTables,
    "tutti_allocator": native_library.NativeAllocator,
    "tutti_put_tables": native_library.NativePutTables,
    "tutti_placement": native_library.NativePlacement,
    "tutti_insertion": native_library.NativeInsertion,
    "tutti_record_identity": native_library.NativeRecordIdentity,
    "tutti_slot_job": slot_jobs.SlotJobStruct,
    "tutti_put": slot_jobs.PutStruct,
}
# Fields that C++ has no name for: padding before an aligned member.
UNNAMED = {("QueuePair", "padding")}

# C++ name or expression -> value, of what is not an enumerator or constant of nvme_spec.h.
CONSTANTS = {
    "offsetof(LayerWords,moved)": 0,
    "offsetof(LayerWords,layers)": layer_words.HEAD_NBYTES,
    "sizeof(LayerWord)": layer_words.LAYER_NBYTES,
    "kCompleted": queue_pair.COMPLETED,
    "kNoCid": queue_pair.NO_CID,
    "kRunPending": device_batch.RUN_PENDING,
    "kBlockThreadsMax": device_batch.BLOCK_THREADS_MAX,
    "kHasFua": controller.HAS_FUA,
    "kHasDeallocate": controller.HAS_DEALLOCATE,
    "kHasVolatileCache": controller.HAS_VOLATILE_CACHE,
    "kHasPrp": controller.HAS_PRP,
    "kModeCopy": controller_memory.MODES.index("copy"),
    "kModeZeroCopy": controller_memory.MODES.index("zero_copy"),
    "kModeVirtual": controller_memory.MODES.index("virtual"),
    "kDigestNone": engine.DIGEST_NONE,
    "kDigestCompute": engine.DIGEST_COMPUTE,
    "kDigestCompare": engine.DIGEST_COMPARE,
    "kSegmentsMax": iocb.SEGMENTS_MAX,
    "kTuttiSlotVoided": SlotState.VOIDED,
    "kTuttiSlotWriting": SlotState.WRITING,
    "kTuttiSlotReady": SlotState.READY,
    "kTuttiRecordReady": RecordState.READY,
}


def spec_constants() -> dict[str, int]:
    """The constants of nvme_spec.h, by their C++ names, with the values that Python gives them."""
    source = (KERNELS / "include/gio_uring/nvme_spec.h").read_text()
    named: dict[str, str] = {}
    for kind, body in re.findall(r"enum (\w+) : u\d+ \{(.*?)\}", source, re.DOTALL):
        prefix = {"Opcode": "OPCODE_", "Status": "STATUS_"}.get(kind, "")
        named |= dict.fromkeys(re.findall(r"\b(k\w+) =", body), prefix)
    named |= dict.fromkeys(re.findall(r"constexpr u32 (k\w+) =", source), "")
    assert len(named) > 30, "the header reads otherwise than this test expects"
    words = {name: re.sub(r"(?<!^)(?=[A-Z])", "_", name[1:]).upper() for name in named}
    return {name: getattr(nvme_spec, prefix + words[name]) for name, prefix in named.items()}


def program() -> str:
    lines = [f'#include "{header}"' for header in HEADERS]
    native = ("controller_file", "controller_memory", "controller_vfio", "allocator", "slot_jobs")
    for header in native:
        lines.append(f'#include "native/{header}.h"')
    lines.append('#include "device/parameters.cuh"')
    lines += ["#include <cstddef>", "#include <cstdio>", "using namespace gio;", "int main() {"]
    for name, mirror in STRUCTS.items():
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in mirror._fields_:
            if (name, field) not in UNNAMED:
                place = f"offsetof({name}, {field}), sizeof({name}::{field})"
                lines.append(f'  printf("{name}.{field} %zu:%zu\\n", {place});')
    for name in (*spec_constants(), *CONSTANTS):
        lines.append(f'  printf("{name} %u\\n", static_cast<unsigned>({name}));')
    for field in iocb.RUN_DTYPE.names or ():
        lines.append(f'  printf("Run.{field} %zu\\n", offsetof(Run, {field}));')
    lines.append('  printf("Run %zu\\n", sizeof(Run));\n}')
    return "\n".join(lines)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What C++ says, by name: sizes, "offset:size" of fields, values of constants."""
    folder = tmp_path_factory.mktemp("parity")
    source, binary = folder / "parity.cpp", folder / "parity"
    source.write_text(program())
    includes = [f"-I{KERNELS}", f"-I{KERNELS / 'include'}"]
    command = ["g++", "-std=c++17", "-Wno-invalid-offsetof", *includes, source, "-o", binary]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stderr
    printed = subprocess.run([binary], capture_output=True, text=True, timeout=20, check=True)
    return dict(line.split() for line in printed.stdout.splitlines())


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(native: dict[str, str], name: str) -> None:
    mirror = STRUCTS[name]
    assert int(native[name]) == ctypes.sizeof(mirror)
    for field, *_ in mirror._fields_:
        if (name, field) not in UNNAMED:
            place = getattr(mirror, field)
            assert native[f"{name}.{field}"] == f"{place.offset}:{place.size}", field


def test_run(native: dict[str, str]) -> None:
    assert int(native["Run"]) == iocb.RUN_DTYPE.itemsize
    for field, (_, offset, *_) in (iocb.RUN_DTYPE.fields or {}).items():
        assert int(native[f"Run.{field}"]) == offset, field


def test_constants(native: dict[str, str]) -> None:
    expected = {**spec_constants(), **CONSTANTS}
    assert {name: int(native[name]) for name in expected} == expected


def test_python_names_nothing_of_its_own() -> None:
    mine = {n for n in vars(nvme_spec) if n.startswith(("STATUS_", "OPCODE_", "PSDT_", "SGL_"))}
    both = {n for n in spec_constants() if not re.match("k(Fua|Dsm|Page|Nlb)", n)}
    assert len(mine) == len(both)
