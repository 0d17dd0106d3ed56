"""A disposable Linux guest with QEMU's NVMe controller; also `python tests/qemu/guest.py setup`.

The guest boots the host's own root file system, read-only below a scratch layer, by software
emulation: it needs no KVM, no image and no network. Times taken inside are no benchmark.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_CACHE = os.environ.get("TUTTI_GUEST_CACHE") or os.environ.get("XDG_CACHE_HOME")
HOME = Path(_CACHE or Path.home() / ".cache") / "tutti-guest"
QEMU = "qemu-system-x86_64"
MODULES = ("9p", "9pnet_virtio", "virtio_pci", "overlay")
PACKAGES = ("busybox-static", "kmod", "xz-utils", "zstd", "cpio")
KERNEL = "linux-image-6"
#: A boot takes 4 s on an idle host. One of some hundred hung with nothing on its console.
#: Every limit is this many times as long, for machines that are busy with other work.
PATIENCE = float(os.environ.get("TUTTI_GUEST_PATIENCE", "2"))
BOOT_S = 60.0 * PATIENCE
BOOTS_MAX = 3
#: Seconds of the guest's clock in one of the host's; once it was 9.6.
CLOCK_MAX = 1.5
DEVICE_SHIFT = 0x10  # the first NVMe function's place on the guest's bus
#: Transfers to addresses without a mapping take a bounce buffer. QEMU 10.0 frees the queues of a
#: drive that is reset while a transfer waits for one, and crashes; so none ever waits.
BOUNCE = "x-max-bounce-buffer-size=1073741824"

_MAGIC = {b"\x28\xb5\x2f\xfd": ("zstd", "-dc"), b"\xfd7zX": ("xz", "-dc", "--single-stream")}
_GZIP = b"\x1f\x8b\x08\x00"


def missing() -> str | None:
    """Why no guest can be started here; None when one can."""
    if shutil.which(QEMU) is None:
        return f"there is no {QEMU}; run `python tests/qemu/guest.py setup` as root on Debian 12"
    if not (HOME / "ready").exists():
        return "there is no guest kernel; run `python tests/qemu/guest.py setup` as root"
    return None


def setup() -> None:
    """Packages, a kernel and an initramfs, once; needs root and Debian's package mirror."""
    if missing() is None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit("setup installs Debian packages: run it as root on Debian 12, or skip these tests")
    HOME.mkdir(parents=True, exist_ok=True)
    environment = _apt_environment()
    _apt(environment, "-q", "update")
    _apt(environment, "-qy", "install", "--no-install-recommends", *PACKAGES)
    # QEMU 7.2 of Debian 12 loses completions of its NVMe controller now and then; 10.0 does not.
    release = ("-t", "bookworm-backports")
    options = ("-qy", "install", "--no-install-recommends", *release)
    _apt(environment, *options, "qemu-system-x86", "seabios")
    modules = _unpack_kernel(environment)
    (HOME / "initramfs.gz").write_bytes(_initramfs(modules))
    image = HOME / "kernel" / "boot" / f"vmlinuz-{modules.name}"
    (HOME / "vmlinux").write_bytes(_vmlinux(image.read_bytes()))
    (HOME / "modules").write_text(str(modules.parent))
    (HOME / "ready").touch()


def _apt_environment() -> dict[str, str]:
    """A configuration of its own, which adds backports of the mirror that the machine uses."""
    folder = HOME / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sources = Path("/etc/apt/sources.list.d/debian.sources").read_text().splitlines()
    mirror = next(line.split()[1] for line in sources if line.startswith("URIs:"))
    key = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    (folder / "sources.list").write_text(
        f"deb {key} {mirror} bookworm main\ndeb {key} {mirror} bookworm-backports main\n"
    )
    (folder / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{folder}/sources.list";\nDir::Etc::sourceparts "-";\n'
        f'Dir::State::lists "{folder}/lists";\nDir::Cache "{folder}/cache";\n'
    )
    return {
        **os.environ,
        "APT_CONFIG": f"{folder}/apt.conf",
        "DEBIAN_FRONTEND": "noninteractive",
    }


def _apt(environment: dict[str, str], *arguments: str) -> None:
    subprocess.run(["apt-get", *arguments], env=environment, check=True)


def _unpack_kernel(environment: dict[str, str]) -> Path:
    """Downloads the newest 6.x kernel; the folder of its modules, named by its version."""
    listed = subprocess.run(
        ["apt-cache", "pkgnames", KERNEL], env=environment, check=True, capture_output=True
    ).stdout.decode()
    packages = [p for p in listed.split() if p.endswith("+deb12-amd64-unsigned")]
    # linux-image-6.12.9+... is version (6, 12, 9)
    newest = max(
        packages, key=lambda name: [int(n) for n in name.split("-")[2].split("+")[0].split(".")]
    )
    target = HOME / "kernel"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    subprocess.run(["apt-get", "-q", "download", newest], env=environment, check=True, cwd=target)
    [package] = target.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, target], check=True)
    package.unlink()
    [modules] = [*target.glob("lib/modules/*"), *target.glob("usr/lib/modules/*")]
    base = modules.parents[2]
    subprocess.run(["depmod", "-b", base, modules.name], check=True)
    return modules


def _initramfs(modules: Path) -> bytes:
    """busybox, the first process, and the modules that reach the host's root."""
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    by_name = {Path(p).name.split(".ko")[0].replace("-", "_"): p for p in needs}
    order: list[str] = []
    for name in MODULES:
        if name in by_name:  # else it is built in
            path = by_name[name]
            order += [p for p in [*reversed(needs[path]), path] if p not in order]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "bin").mkdir()
        (root / "modules").mkdir()
        shutil.copy(shutil.which("busybox") or "/bin/busybox", root / "bin/busybox")
        shutil.copy(HERE / "init.sh", root / "init")
        (root / "init").chmod(0o755)
        for path in order:
            content = (modules / path).read_bytes()
            content = lzma.decompress(content) if path.endswith(".xz") else content
            (root / "modules" / Path(path).name.removesuffix(".xz")).write_bytes(content)
        names = [Path(path).name.removesuffix(".xz") for path in order]
        (root / "modules/order").write_text("\n".join(names) + "\n")
        command = "find . | cpio -o -H newc --quiet"
        packed = subprocess.run(command, shell=True, cwd=root, check=True, capture_output=True)
    return gzip.compress(packed.stdout, 1)


def _vmlinux(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage (Linux, Documentation/arch/x86/boot.rst, payload_offset)."""
    sectors = image[0x1F1] or 4
    offset, nbytes = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    payload = image[start : start + nbytes]
    if payload[:4] == _GZIP:
        return gzip.decompress(payload)
    command = _MAGIC[payload[:4]]
    # Behind the payload follows its size, which the tools call trailing garbage.
    return subprocess.run(command, input=payload, capture_output=True, check=False).stdout


@dataclass(frozen=True)
class Drive:
    """One NVMe drive of a guest.

    blocks: size of its blocks in bytes. namespaces: image files, one each. mdts: power of two of
    4 KiB pages. backend: how an image is opened, with {path} for its name. hotplug: behind a root
    port.
    """

    name: str
    namespaces: Sequence[Path]
    blocks: int = 4096
    mdts: int = 8
    queues: int = 8
    backend: str = "driver=raw,file.driver=file,file.filename={path},discard=unmap"
    hotplug: bool = False

    def arguments(self, place: int) -> list[str]:
        """QEMU's arguments; `place` is its number among the drives."""
        bus, address = "pcie.0", f"addr={DEVICE_SHIFT + place:#x}"
        options: list[str] = []
        if self.hotplug:
            port = f"port{place}"
            options = ["-device", f"pcie-root-port,id={port},chassis={place + 1},{address}"]
            bus, address = port, "addr=0"
        options += ["-device", f"nvme-subsys,id=sub-{self.name},nqn=sub-{self.name}"]
        options += [
            "-device",
            f"nvme,id={self.name},serial={self.name},mdts={self.mdts},subsys=sub-{self.name},"
            f"max_ioqpairs={self.queues},msix_qsize=4,bus={bus},{address},{BOUNCE}",
        ]
        for i, path in enumerate(self.namespaces):
            node = f"{self.name}-{i}"
            backend = self.backend.format(path=path)
            options += ["-blockdev", f"node-name={node},{backend}"]
            options += [
                "-device",
                f"nvme-ns,drive={node},bus={self.name},nsid={i + 1},"
                f"logical_block_size={self.blocks},physical_block_size={self.blocks}",
            ]
        return options


class Guest:
    """One boot: the drives, and a Python program that runs inside as root.

    What the program writes to /out is in `out` here. objects: QEMU's -object arguments, for the
    drives' backends. environment: the program's, besides its own. python: the interpreter of the
    program. A context manager; the guest is gone afterwards, whatever happened.
    """

    def __init__(
        self,
        folder: Path,
        drives: Sequence[Drive],
        program: Sequence[str],
        *,
        python: str | Path = sys.executable,
        memory: str = "1536M",
        objects: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir(parents=True, exist_ok=True)
        self.console = folder / "console"
        self._monitor = folder / "qmp"
        (self.out / "run.sh").write_text(self._script([str(python), *program], environment or {}))
        words = [QEMU, "-M", "q35,kernel-irqchip=off", "-accel", "tcg,thread=multi", "-cpu", "max"]
        words += ["-m", memory, "-smp", "2", "-nic", "none", "-nographic", "-no-reboot"]
        words += ["-bios", "/usr/share/qemu/qboot.rom"]
        words += ["-device", "intel-iommu,intremap=on,caching-mode=on,aw-bits=48"]
        words += ["-kernel", f"{HOME}/vmlinux", "-initrd", f"{HOME}/initramfs.gz", "-append"]
        # no_timer_check: on a busy host the emulated timer is late, and the kernel would give up.
        # nohz, highres: a one-shot timer of a CPU may be lost, and the next one of a period is not.
        kernel = "console=ttyS0 quiet panic=-1 mitigations=off intel_iommu=on"
        words += [f"{kernel} tsc=reliable no_timer_check nohz=off highres=off"]
        words += ["-qmp", f"unix:{self._monitor},server=on,wait=off"]
        for name, path, more in (("host", "/", ",readonly=on"), ("out", self.out, "")):
            words += [
                "-fsdev",
                f"local,id={name},path={path},security_model=none,multidevs=remap{more}",
            ]
            words += ["-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
        for text in objects:
            words += ["-object", text]
        for place, drive in enumerate(drives):
            words += drive.arguments(place)
        self._words = words

    def trace(self, path: Path, events: Sequence[str]) -> None:
        """Before it boots: QEMU writes a line to `path` for each of these events of its trace."""
        for event in events:
            self._words += ["-trace", f"enable={event}"]
        self._words += ["-D", str(path)]

    def _script(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """What the guest runs: modules for vfio, then the program with a Python of the host."""
        paths = [
            str(HERE.parent),
            *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
        ]
        modules = (HOME / "modules").read_text()
        more = [f"export {name}={shlex.quote(text)}\n" for name, text in environment.items()]
        return (
            "cat /proc/uptime > /out/up\n"
            f"mount --bind {shlex.quote(modules)} /lib/modules\n"
            f"export PATH={shlex.quote(os.environ['PATH'])} HOME=/tmp\n"
            f"export PYTHONPATH={shlex.quote(os.pathsep.join(paths))} PYTHONDONTWRITEBYTECODE=1\n"
            f"export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 TUTTI_GUEST_PATIENCE={PATIENCE:g}\n"
            f"{''.join(more)}"
            "modprobe -a vfio-pci vfio_iommu_type1\n"
            f"cd {shlex.quote(str(HERE.parents[1]))}\n"
            f"exec {shlex.join(command)}\n"
        )

    def __enter__(self) -> Guest:
        self._log = self.console.open("wb")
        for boot in range(BOOTS_MAX):
            if boot:
                warnings.warn(
                    f"no boot to the program, or a clock that runs fast: again\n{self.text()}",
                    stacklevel=2,
                )
            (self.out / "up").unlink(missing_ok=True)
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
            if self._reaches_program():
                return self
            self.kill()
        self._log.close()
        raise AssertionError(f"no boot of {BOOTS_MAX} came to the program\n{self.text()}")

    def _reaches_program(self) -> bool:
        """Whether the boot gets as far as the program; nothing has touched a drive before.

        On a busy host a kernel may mistake the rate of its clock, and all waits inside end early.
        """
        began_s = time.monotonic()
        up = self.out / "up"
        while not (up.exists() and up.read_text().endswith("\n")):
            if self._process.poll() is not None or time.monotonic() > began_s + BOOT_S:
                return False
            time.sleep(0.05)
        return float(up.read_text().split()[0]) < CLOCK_MAX * (time.monotonic() - began_s)

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._log.close()

    def wait(self, timeout_s: float) -> None:
        """Until the program has ended and the guest is off; fails when it ended badly."""
        timeout_s *= PATIENCE
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the guest did not end in {timeout_s:g} s\n{self.text()}"
            ) from None
        rc = self.out / "rc"
        assert rc.exists(), f"the guest died\n{self.text()}"
        assert rc.read_text().strip() == "0", f"the program failed\n{self.text()}"

    def wait_file(self, name: str, timeout_s: float) -> Path:
        """Until the program has made a file in /out."""
        timeout_s *= PATIENCE
        deadline_s = time.monotonic() + timeout_s
        path = self.out / name
        while not path.exists():
            assert self._process.poll() is None, f"the guest ended early\n{self.text()}"
            assert time.monotonic() < deadline_s, f"no {name} in {timeout_s:g} s\n{self.text()}"
            time.sleep(0.05)
        return path

    def command(self, name: str, **arguments: Any) -> None:
        """One command of QEMU's monitor protocol."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(10)
            monitor.connect(str(self._monitor))
            lines = monitor.makefile("rw")
            for request in (
                {"execute": "qmp_capabilities"},
                {"execute": name, "arguments": arguments},
            ):
                lines.write(json.dumps(request) + "\n")
                lines.flush()
                reply: dict[str, Any] = {}
                while "return" not in reply:  # bounded: the socket times out
                    reply = json.loads(lines.readline())
                    assert "error" not in reply, reply

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)

    def text(self) -> str:
        """The end of the guest's console."""
        return self.console.read_text(errors="replace")[-4000:]


if __name__ == "__main__":
    if sys.argv[1:] != ["setup"]:
        sys.exit(__doc__)
    setup()
