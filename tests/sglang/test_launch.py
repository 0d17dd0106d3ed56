"""The printed launch command against the parser of the SGLang that is installed."""

from __future__ import annotations

import pytest

from tutti.integration.sglang import adapter, launch
from tutti.integration.sglang.identity import ServedModel
from tutti.integration.sglang.linker_options import LINKER_OPTIONS
from tutti.integration.sglang.options import HICACHE, LINKER

OPTIONS = {"path": "/pools", "capacity": "1GiB"}


@pytest.mark.parametrize("layout", launch.IO_BACKENDS)
def test_sglang_takes_the_command_of_hicache(layout: str) -> None:
    arguments = launch.server_arguments(HICACHE, "m", OPTIONS, page_size=64, layout=layout)
    assert launch.refused_arguments(arguments) == ""


def test_sglang_takes_the_command_of_the_linker() -> None:
    arguments = launch.server_arguments(LINKER, "m", OPTIONS, page_size=64, own=LINKER_OPTIONS)
    assert launch.refused_arguments(arguments) == ""


def test_a_wrong_argument_is_refused() -> None:
    assert "no-such" in launch.refused_arguments(["--model-path", "m", "--no-such-argument"])


def test_the_version_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.check_version()
    monkeypatch.setattr(adapter, "VERSIONS", ("9.9.9",))
    with pytest.raises(adapter.Unsupported, match=r"9\.9\.9"):
        adapter.check_version()


def test_a_process_without_a_server_has_an_empty_model() -> None:
    assert adapter.served_model() == ServedModel()
