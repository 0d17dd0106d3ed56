"""The script for SGLang's own tests: which files it takes, and what its table says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CPU, GPU = "register_cpu_ci(est_time=1, suite='s')\n", "register_cuda_ci(est_time=1)\n"
#: As SGLang's tests do it, with SGLang's kit.
ROUND_TRIP = """
import unittest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

class TestHiCache(UnifiedRadixCacheStorageFixtures, CustomTestCase):
    cfg = CacheConfig(page_size=16)

    def test_storage(self):
        folder, tokens = self._make_storage_dir(), self._make_seq(1, 3)
        self._l3_produce(folder, tokens)
        tree, _, _ = self._l3_consumer(folder)
        self._consume_prefetch(tree, tokens, CacheRequestHandle("r", 0))

    def test_that_fails(self):
        self.fail("hicache")

    def test_of_the_backend_file(self):
        tree, _, _ = self._l3_consumer(self._make_storage_dir())
        self.assertEqual(type(tree.cache_controller.storage_backend).__name__, "HiCacheFile")

    def test_without_storage(self):
        pass
"""


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "upstream.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.timeout(300)
def test_the_table_says_what_ran_over_tutti(tmp_path: Path) -> None:
    folder = tmp_path / "test/registered/unit/mem_cache"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(ROUND_TRIP)
    (folder / "test_b.py").write_text(GPU + "# hicache")
    (folder / "test_c.py").write_text(CPU + "# of something else")
    done = script("--source", tmp_path, "--out", tmp_path / "table.md")
    assert done.returncode == 1, "one of them fails with Tutti only"
    text = (tmp_path / "table.md").read_text()
    row = "| `test_a.py` | 2 | 1 | 0 | 1 | 1 |"
    assert re.findall(r"^\| `.*", text, re.MULTILINE) == [row], text
    assert "Not run: 1 files" in text


@pytest.mark.parametrize("place", ["empty", "absent"])
def test_a_folder_that_is_no_checkout(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    done = script("--source", tmp_path / place)
    assert (done.returncode, "is it a checkout of SGLang?" in done.stderr) == (1, True)
