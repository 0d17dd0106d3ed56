"""The SGLang that these tests run on."""

from __future__ import annotations

from tutti.integration.sglang.launch import VERSIONS, installed_version


def test_the_sglang_that_is_supported_is_installed() -> None:
    assert installed_version() in VERSIONS
