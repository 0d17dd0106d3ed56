"""A real server on CPU above a disk that fails, lies, fills up, or does not answer at all."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from faulty_disk import Faults, FaultyDisk
from server_modes import NEAR, Mode, again, both_modes, prompts, right_or_503
from sglang_server import Reply, Server

pytestmark = pytest.mark.timeout(600)

#: A command fails after a second, and a request waits no longer than that.
IMPATIENT = {"hicache": {"timeout_s": 1.0}, "linker": {"timeout_s": 1.0, "load_timeout_s": 3.0}}
SAYS, _FORGETS_EVERY = 3, 20
ASKED = 3
KINDS = ("read_error", "write_error", "flip", "torn", "lost", "hang")


@pytest.mark.parametrize("rounds", [40, pytest.param(200, marks=pytest.mark.slow)])
@both_modes
def test_a_conversation_then_every_kind_of_fault(
    mode: Mode, rounds: int, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    with FaultyDisk(tmp_path / "files", tmp_path / "disk") as disk:
        if disk.refusal:
            pytest.skip(disk.refusal)
        more = IMPATIENT[mode.name]
        pools = disk.mountpoint / "pools"
        arguments = mode.arguments(pools, "page_first", "timeout", capacity="96MiB", **more)
        overlap = mode.name == "linker"
        log = tmp_path / "log"
        with Server(tiny_model, log, arguments, page_size=16, overlap=overlap) as server:
            _talk(mode, server, rounds, seed)
            asked = prompts(seed, ASKED)
            computed = [server.ask(prompt) for prompt in asked]
            mode.served(computed, again(server, asked), 592)
            for faults in _faults(seed):
                _survive(mode, server, disk, faults, asked, computed)
            assert "Traceback" not in server.text()


@both_modes
def test_one_of_two_disks_fails(mode: Mode, tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """As when a drive leaves below its file system: the other disk soon serves everything."""
    with FaultyDisk(tmp_path / "files", tmp_path / "disk") as disk:
        if disk.refusal:
            pytest.skip(disk.refusal)
        more = IMPATIENT[mode.name]
        pools = [str(disk.mountpoint / "pools"), str(tmp_path / "sound")]
        arguments = mode.arguments(pools, "page_first", "timeout", capacity="96MiB", **more)
        overlap = mode.name == "linker"
        log = tmp_path / "log"
        with Server(tiny_model, log, arguments, page_size=16, overlap=overlap) as server:
            asked, fresh = prompts(seed, ASKED), prompts(seed + 1, ASKED)
            computed = [server.ask(prompt) for prompt in asked]
            mode.served(computed, again(server, asked), 592)
            server.settle()
            server.flush()
            disk.set(Faults(seed, read_error=1.0, write_error=1.0))
            for prompt, want in zip(asked, computed, strict=True):
                right_or_503(server, prompt, want)
            computed += [server.ask(prompt) for prompt in fresh]
            mode.recovers(server, [*asked, *fresh], computed, 592)
            made = disk.set(Faults())
            assert made["read_error"] and made["write_error"], "the disk was not used"
            assert "Traceback" not in server.text()


def _faults(seed: int) -> list[Faults]:
    return [
        Faults(seed, read_error=0.3, write_error=0.3, delay_s=0.005),
        Faults(seed, flip=0.3, torn=0.2, lost=0.2),
        Faults(seed, write_error=1.0, number=errno.ENOSPC),
        Faults(seed, write_error=1.0, number=errno.EROFS),
        Faults(seed, hang=True),
    ]


def _survive(
    mode: Mode,
    server: Server,
    disk: FaultyDisk,
    faults: Faults,
    asked: Sequence[list[int]],
    computed: Sequence[Reply],
) -> None:
    """Right answers or a linker's 503 while it lasts; afterwards everything is served again."""
    fresh = prompts(hash(faults), 2)
    server.settle()
    server.flush()
    disk.set(faults)
    answers = 0
    for prompt, want in zip(asked, computed, strict=True):
        answers += right_or_503(server, prompt, want) is not None
    # What has never been stored is never loaded: no fault can keep its first answer.
    new = [server.ask(prompt) for prompt in fresh]
    assert answers == len(asked) or mode.name == "linker", "HiCache has no reason to refuse"
    server.settle()  # writes follow the answers
    made = disk.set(Faults())
    kinds = [name for name in KINDS if getattr(faults, name)]
    assert sum(made[name] for name in kinds) > 0, f"no {kinds} happened: the test says nothing"
    mode.recovers(server, asked, computed, 592)
    # What was stored meanwhile may be damaged: a linker's 503 once, and right on retry.
    for prompt, want in zip(fresh, new, strict=True):
        assert right_or_503(server, prompt, want) or right_or_503(server, prompt, want)


def _talk(mode: Mode, server: Server, rounds: int, seed: int) -> None:
    """One conversation of many turns, again and again taken up from the SSD alone.

    At the end every token that was ever generated is judged by a pass without any cache.
    """
    (talk,) = prompts(seed + 2, 1, 640)
    heard: list[tuple[int, float]] = []
    restored = 0
    for turn, question in enumerate(prompts(seed + 3, rounds, SAYS)):
        if turn % _FORGETS_EVERY == _FORGETS_EVERY - 1:
            server.settle()
            server.flush()
        talk += question
        reply = server.ask(talk, SAYS)
        restored += mode.loaded(reply)
        heard += zip(range(len(talk), len(talk) + SAYS), reply.logprobs, strict=True)
        talk += reply.tokens
    assert restored > rounds // _FORGETS_EVERY * 640, "little was loaded: the test says nothing"
    right = server.judge(talk)
    assert len(heard) == rounds * SAYS
    errors = sorted(abs(logprob - right[at - 1]) for at, logprob in heard)
    assert errors[-1] < 3 * NEAR, f"logprobs are wrong by {errors[-5:]}"
