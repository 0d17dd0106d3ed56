"""Every combination of mode, layout, page size and overlap on a real server; takes long."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from medium_damage import flip_objects, pool_files
from server_modes import HICACHE, LINKER, Mode, again, both_modes, near, prompts, right_or_503
from sglang_server import Server, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LAYOUTS = [(HICACHE, layout) for layout in ("layer_first", "page_first", "page_first_direct")]
MATRIX = list(itertools.product([*LAYOUTS, (LINKER, "")], (16, 64), (True, False)))


@pytest.mark.parametrize(
    ("what", "page_size", "overlap"),
    MATRIX,
    ids=["-".join(map(str, (what[0].name, what[1], *more))) for what, *more in MATRIX],
)
def test_a_prompt_comes_back_and_damage_does_not(
    tiny_model: Path,
    tmp_path: Path,
    what: tuple[Mode, str],
    page_size: int,
    overlap: bool,
    seed: int,
) -> None:
    mode, layout = what
    pools = tmp_path / "pools"
    tokens = 600 // page_size * page_size
    arguments = mode.arguments(pools, layout)
    asked = prompts(seed, 3)
    log = tmp_path / "log"
    with Server(tiny_model, log, arguments, page_size=page_size, overlap=overlap) as server:
        computed = [server.ask(prompt) for prompt in asked]
        mode.served(computed, again(server, asked), tokens)
        server.settle()
        server.flush()
        flip_objects(pool_files(pools)[0])
        for prompt, want in zip(asked, computed, strict=True):
            assert right_or_503(server, prompt, want) or right_or_503(server, prompt, want)
        mode.recovers(server, asked, computed, tokens)


@both_modes
def test_latent_attention(
    mode: Mode, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """The test model's latent is so small that shorter pages would waste too much."""
    model = make_model(tmp_path_factory.mktemp("latent"), kind="mla")
    asked = prompts(seed, 2)
    arguments = mode.arguments(tmp_path / "pools")
    log = tmp_path / "log"
    with Server(model, log, arguments, page_size=128, overlap=False) as server:
        computed = [server.ask(prompt) for prompt in asked]
        # Restored from SGLang's own cache: the same computation as after a load.
        cached = [server.ask(prompt) for prompt in asked]
        mode.served(cached, again(server, asked), 512)
        for reply, first in zip(cached, computed, strict=True):
            assert near(reply, first)
