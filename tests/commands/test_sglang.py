"""What `tutti sglang command` and `tutti sglang doctor` refuse and report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti import cli

COMMAND = ["sglang", "command", "--model=m", "--capacity=1MiB"]


@pytest.mark.parametrize(
    ("mode", "more", "says"),
    [
        ("hicache", ["--page-size", "32"], "leave it out, and use --page-size before the `--`"),
        (
            "linker",
            ["--model=x"],
            "--model contradicts what this command sets; leave it out, and u",
        ),
        ("hicache", ["--hicache-io-backend", "direct"], "use --layout before"),
        ("hicache", ["--hicache-storage-backend", "file"], "what this command sets; leave it out"),
        ("linker", ["--unified-cache-external-linker-config={}"], "use --option before"),
    ],
)
def test_arguments_that_contradict_the_commands_own(
    mode: str, more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, f"--path={tmp_path}", "--mode", mode]
    assert cli.main([*command, "--", *more]) == 2
    assert says in capsys.readouterr().err
    same = ["--page-size", "64", "--model=m", "--hicache-storage-prefetch-policy=wait_complete"]
    assert cli.main([*command, "--", *same]) == 0


def test_an_option_of_the_other_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*COMMAND, f"--path={tmp_path}"]
    assert cli.main([*command, "--option=min_tokens=5"]) == 2
    assert "hicache: it needs --mode linker" in capsys.readouterr().err
    assert cli.main([*command, "--mode=linker", "--option=hugepages=off"]) == 2
    assert "linker: it needs --mode hicache" in capsys.readouterr().err


def test_a_path_that_must_be_given_has_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    for command, has_default in (("command", False), ("doctor", True)):
        with pytest.raises(SystemExit):
            cli.main(["sglang", command, "--help"])
        assert ("(default: .)" in " ".join(capsys.readouterr().out.split())) == has_default
