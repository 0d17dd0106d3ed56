"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """One that nothing listens on, below those that the kernel gives to connections: no other test
    gets it by chance before the server has it.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
