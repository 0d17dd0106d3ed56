"""Settings of servers' commands: a file, the environment over it, arguments over both."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutti import cli
from tutti.commands import serve
from tutti.commands.settings import configure
from tutti.errors import ConfigError
from tutti.model_config import model_layout

FILE = """
[sglang]
path = "/from/file"
capacity = "1GiB"
mode = "linker"
model = "m"
option = ["verify=sampled"]

[serve]
folder = "/pools"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tutti.toml"
    path.write_text(FILE)
    monkeypatch.setenv("TUTTI_CONFIG", str(path))
    return path


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = cli.main(["sglang", "command", "--json", *more])
    said = capsys.readouterr()
    return code, said.out if code == 0 else said.err


def given(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, str]:
    code, text = printed(capsys, *more)
    assert code == 0, text
    words = json.loads(text)["command"]
    (place,) = [word for word in words if word.startswith("{")]
    found = json.loads(place)
    options: dict[str, str] = found.get("linker_extra_config", found)
    return options


def test_arguments_win_over_the_environment_and_that_over_the_file(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"path": "/from/file", "capacity": "1GiB", "verify": "sampled"}
    assert given(capsys) == wanted
    monkeypatch.setenv("TUTTI_SGLANG_PATH", "/from/environment")
    assert given(capsys)["path"] == "/from/environment"
    monkeypatch.setenv("TUTTI_SGLANG_PATH", "/from/a, /from/b,")
    assert given(capsys)["path"] == ["/from/a", "/from/b"]
    assert given(capsys, "--path", "/from/argument")["path"] == "/from/argument"
    monkeypatch.setenv("TUTTI_SGLANG_MODE", "hicache")
    assert "class_name" in given(capsys)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[sglang]\npth = "x"', "unknown key 'pth' in [sglang]: did you mean 'path'?"),
        ('[sglang]\nmode = "both"', "setting mode = 'both'"),
        ("[sglang]\npage-size = 0", "setting page-size = '0'"),
        ("[sglang]\npath = []", "setting path = []: pass at least one value"),
        ("sglang = 1", "write [sglang]"),
        ("not toml", "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence(
    text: str, says: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(text)
    code, said = printed(capsys, "--model=m", "--path=/p", "--capacity=1GiB")
    assert (code, says in said) == (2, True), said


def test_a_file_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUTTI_CONFIG", "/no/such.toml")
    assert "set it to a TOML file" in printed(capsys)[1]


def test_the_agents_folder_comes_from_the_file(config: Path) -> None:
    args = cli.build_parser(["serve"]).parse_args(["serve", "--socket", "/s"])
    assert args.folder == "/pools"


def test_help_shows_a_setting_with_a_percent_sign(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text('[serve]\nfolder = "/pools/50%full"')
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert "(default: /pools/50%full)" in " ".join(capsys.readouterr().out.split())


def test_the_agent_refuses_keys_of_another_table(config: Path) -> None:
    config.write_text('[serve]\nmodel = "m"')
    with pytest.raises(ConfigError, match="unknown key 'model'"):
        cli.build_parser(["serve"])


def test_the_doctor_takes_the_same_file(config: Path) -> None:
    config.write_text(FILE.replace('model = "m"', 'model = "m"\nlayout = "layer_first"'))
    args = cli.build_parser(["sglang", "doctor"]).parse_args(["sglang", "doctor"])
    assert (args.path, args.mode, args.capacity) == (["/from/file"], "linker", 1 << 30)


def test_a_size_is_told_before_anything_is_allocated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p"
    layout = ["--model=tiny", "--page-size=64"]
    assert cli.main(["format", str(path), "--capacity", "64mb", *layout]) == 0
    assert "capacity: 61 MiB (64000000 bytes)" in capsys.readouterr().err
    assert cli.main(["resize", str(path), "--capacity", "128mb"]) == 0
    assert "capacity: 122 MiB (128000000 bytes)" in capsys.readouterr().err


def test_names_of_models_are_those_of_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_layout("org/unknown", 64, "bfloat16") is None
    known = model_layout("meta-llama/Llama-3.1-8B", 64, "bfloat16")
    assert known is not None and (known.layers, known.dims) == (32, (8, 128, 128))
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    config = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    (snapshot / "config.json").write_text(json.dumps({**config, "hidden_size": 4096}))
    cached = model_layout("Qwen/Qwen3-8B", 64, "bfloat16")
    assert cached is not None and (cached.layers, cached.dims) == (36, (8, 128, 128))
    latent = {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(latent))
    local = model_layout(str(tmp_path), 64, "bfloat16")
    assert local is not None and (local.kind, local.dims) == ("mla", (512, 64))


def test_the_shell_completes_commands(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    line = "tutti sglang command --pa"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    answer = tmp_path / "answer"
    environment = {**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    program = "import sys; sys.argv = ['tutti']; from tutti import cli; cli.main()"
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=True)
    assert {"--path", "--page-size"} <= {word.strip() for word in answer.read_text().split("\v")}


def test_options_that_may_be_repeated_are_lists(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(FILE.replace('"verify=sampled"', '"verify=off", "degraded=true"'))
    found = given(capsys)
    assert (found["verify"], found["degraded"]) == ("off", True)
    monkeypatch.setenv("TUTTI_SGLANG_OPTION", "verify=sampled,timeout_s=9")
    found = given(capsys, "--option", "degraded=true")
    assert (found["verify"], found["timeout_s"], found["degraded"]) == ("sampled", 9, True)
    parser = argparse.ArgumentParser()
    serve.add_serve(parser)
    configure(parser, "serve", {"TUTTI_SERVE_QUOTA": "a=1MiB,b=2MiB"}, set())
    assert parser.get_default("quota") == [("a", 1 << 20), ("b", 2 << 20)]
