"""A network of its own behind a cable that a test can cut, slow down, or make lie.  Needs root.

The cable is two TUN devices, one of them in another network namespace, and a thread that carries
packets between them: so a byte can be changed behind the sender's checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time

import pytest
from waiting import wait_until

WAIT_S = 30.0
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000  # linux/if_tun.h
_MTU = 60_000
_LONG_NBYTES = 4096  # a packet that carries values
_TCP = 6
_SLOW_S = 0.3


class Cable:
    """near, address: of this side and of the other.  enter: begins a command on the other side.

    fault: "", or "cut" (packets are lost without an error), "slow" (long packets wait), "flip" (a
    bit of long packets that come from the other side is wrong, and their checksum fits).
    flipped: how many did.
    """

    near, address = "10.199.83.1", "10.199.83.2"

    def __init__(self) -> None:
        if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
            pytest.skip("network namespaces need root, ip, unshare and nsenter")
        if not os.path.exists("/dev/net/tun"):
            pytest.skip("this kernel has no TUN devices")
        self.fault = ""
        self.flipped = 0
        self._ends: list[int] = []
        self._carrier: threading.Thread | None = None
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        self.enter = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net")
        try:
            self._lay()
        except BaseException:
            self.close()
            raise

    def _lay(self) -> None:
        ours = os.readlink("/proc/self/ns/net")
        wait_until(lambda: os.readlink(f"/proc/{self._holder.pid}/ns/net") != ours, "no namespace")
        for name in ("tutti-near", "tutti-far"):
            self._ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            request = struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(self._ends[-1], _TUNSETIFF, request)
        _run("ip", "link", "set", "tutti-far", "netns", str(self._holder.pid))
        for enter, name, own in (
            ((), "tutti-near", self.near),
            (self.enter, "tutti-far", self.address),
        ):
            _run(*enter, "ip", "addr", "add", f"{own}/30", "dev", name)
            _run(*enter, "ip", "link", "set", name, "mtu", str(_MTU), "up")
        _run(*self.enter, "ip", "link", "set", "lo", "up")
        self._carrier = threading.Thread(target=self._carry, daemon=True)
        self._carrier.start()

    def _carry(self) -> None:
        near, far = self._ends
        while self._ends:
            for end in select.select([near, far], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # a full queue loses the packet, as a cable's
                    packet = os.read(end, 1 << 16)
                    if self.fault == "cut":
                        continue
                    if len(packet) > _LONG_NBYTES:
                        if self.fault == "slow":
                            time.sleep(_SLOW_S)
                        if self.fault == "flip" and end == far:
                            packet = self._flip(packet)
                    os.write(far if end == near else near, packet)

    def _flip(self, packet: bytes) -> bytes:
        """Changes a bit in the middle of a TCP segment, and its checksum with it (RFC 1624)."""
        head = 4 * (packet[0] & 15)
        if packet[0] >> 4 != 4 or packet[9] != _TCP:
            return packet
        changed = bytearray(packet)
        at = head + (len(packet) - head) // 4 * 2  # a whole word of the checksum's
        (old,) = struct.unpack_from("!H", changed, at)
        (total,) = struct.unpack_from("!H", changed, head + 16)
        new = old ^ 1
        sums = (~total & 0xFFFF) + (~old & 0xFFFF) + new
        sums = (sums & 0xFFFF) + (sums >> 16)
        sums = (sums & 0xFFFF) + (sums >> 16)
        struct.pack_into("!H", changed, at, new)
        struct.pack_into("!H", changed, head + 16, ~sums & 0xFFFF)
        self.flipped += 1
        return bytes(changed)

    def close(self) -> None:
        """The devices end with their descriptors."""
        ends, self._ends = self._ends, []
        if self._carrier is not None:
            self._carrier.join(WAIT_S)
        for end in ends:
            os.close(end)
        self._holder.kill()
        self._holder.wait(WAIT_S)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=WAIT_S)
