"""What a real server on CPU must notice: other weights; and what it does not without digests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from medium_damage import flip_objects, pool_files
from safetensors.torch import load_file, save_file
from server_modes import Mode, again, both_modes, far, prompts
from sglang_server import Server

pytestmark = pytest.mark.timeout(600)


def with_other_weights(model: Path, folder: Path) -> Path:
    """The model with its rows in another order."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights = {name: tensor.roll(1, 0) for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return folder


@both_modes
def test_without_digests_damage_is_seen_and_new_weights_miss(
    mode: Mode, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """The other tests could fail: here damaged KV does change what the model says."""
    pools = tmp_path / "pools"
    other = with_other_weights(tiny_model, tmp_path / "other")
    arguments = mode.arguments(pools, "layer_first", verify="off")
    asked = prompts(seed, 2)
    with Server(tiny_model, tmp_path / "log", arguments, page_size=64, overlap=False) as server:
        computed = [server.ask(prompt) for prompt in asked]
        mode.served(computed, again(server, asked), 576)
        for model in (other, tiny_model):
            server.settle()
            body = {"model_path": str(model)}
            status, text = server.call("POST", "/update_weights_from_disk", body)
            assert status == 200, text
            replies = [server.ask(prompt) for prompt in asked]
            assert [reply.cached for reply in replies] == [0, 0]
            same = [reply.logprobs for reply in replies] == [r.logprobs for r in computed]
            assert same == (model == tiny_model)
        mode.served(computed, again(server, asked), 576)
        server.settle()
        server.flush()
        flip_objects(pool_files(pools)[0])
        damaged = [server.ask(prompt) for prompt in asked]
        assert [mode.loaded(reply) for reply in damaged] == [576, 576]
        for reply, right in zip(damaged, computed, strict=True):
            assert far(reply, right)
