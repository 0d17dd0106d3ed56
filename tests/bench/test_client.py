"""The builtin client: what it sends, what it times, and how servers disappoint."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence

import pytest
from stand_in_server import standing_in

from tutti.bench.ttft.client import LOST_AFTER, Run, TimedCall, drive
from tutti.bench.ttft.http import (
    Endpoint,
    NotStreaming,
    ServerError,
    _events,
    parse_endpoint,
)
from tutti.bench.ttft.protocol import ChatProtocol, Generate, ServerApi
from tutti.bench.ttft.server_control import Control, public
from tutti.errors import ConfigError


def calls(n: int, *, gap_s: float = 0.0, tokens: int = 5) -> list[TimedCall]:
    return [TimedCall(i, i * gap_s, "task", tokens, lambda: b"[1,2,3]") for i in range(n)]


def driven(
    url: str,
    n: int = 1,
    *,
    api: ServerApi | None = None,
    timeout_s: float = 30.0,
    gap_s: float = 0.0,
    tokens: int = 5,
) -> Run:
    run = Run()
    sent = calls(n, gap_s=gap_s, tokens=tokens)
    drive(parse_endpoint(url), api or Generate("ids"), sent, run, timeout_s=timeout_s)
    return run


def test_a_stream_is_timed_token_by_token() -> None:
    cached = {"device": 1, "host": 0, "storage": 2}
    with standing_in(first_s=0.05, gap_s=0.01, cached=cached) as server:
        (record,) = driven(server.url).records
    assert [count for _, count in record.tokens] == [1, 2, 3, 4, 5]
    times = [at for at, _ in record.tokens]
    assert times == sorted(times) and record.error == ""
    assert times[0] >= record.sent_s + 0.05 and record.done_s >= times[-1]
    assert (record.input_tokens, record.cached) == (3, cached)
    (asked,) = server.script.requests
    assert asked["input_ids"] == [1, 2, 3] and asked["stream"] is True
    assert asked["sampling_params"]["ignore_eos"] is True


def test_the_chat_api_is_spoken_too() -> None:
    with standing_in() as server:
        (record,) = driven(server.url, api=ChatProtocol('a "model"')).records
    assert record.error == "" and record.tokens[-1][1] == 5
    assert record.cached == {"unknown": 7}, "the server does not say where from"
    with standing_in(cached={"device": 0, "host": 3, "storage": 4}) as detailed:
        (other,) = driven(detailed.url, api=ChatProtocol("m")).records
    assert other.cached == {"device": 0, "host": 3, "storage": 4}, "a later total hides no places"
    (asked,) = server.script.requests
    assert asked["model"] == 'a "model"' and asked["stream_options"]["include_usage"] is True


def test_a_slow_server_does_not_slow_its_load() -> None:
    """Coordinated omission: all are sent on time although the first is not answered yet."""
    with standing_in(first_s=0.1, workers=1) as server:
        run = driven(server.url, 10, gap_s=0.01)
    assert all(record.error == "" for record in run.records)
    by_due = sorted(run.records, key=lambda record: record.due_s)
    assert by_due[-1].sent_s < by_due[5].done_s, "the last went out long before its turn"
    assert by_due[-1].tokens[0][0] - by_due[-1].due_s > 0.5, "its wait in the queue counts"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("refuse", "status 400: .*longer than the context"),
        ("garbage", "not JSON"),
        ("break", "broke off"),
        ("abort", "the server aborted: the pool is gone"),
        ("silent", "no token"),
    ],
)
def test_a_bad_answer_is_a_failure_of_its_request(mode: str, message: str) -> None:
    with standing_in(mode=mode) as server:
        run = driven(server.url, 3)
    assert len(run.records) == 3
    for record in run.records:
        assert re.search(message, record.error), record.error


@pytest.mark.parametrize("mode", ["plain", "lump"])
def test_a_server_without_streaming_cannot_be_measured(mode: str) -> None:
    with standing_in(mode=mode) as server, pytest.raises(NotStreaming, match="stream"):
        driven(server.url, 4, gap_s=10.0)
    assert len(server.script.requests) < 4, "it stopped at the first answer"


def test_one_token_has_nothing_to_stream() -> None:
    with standing_in(mode="lump") as server:
        (record,) = driven(server.url, tokens=1).records
    assert record.error == ""


def test_a_request_has_a_deadline() -> None:
    with standing_in(first_s=60) as server:
        (record,) = driven(server.url, timeout_s=0.1).records
    assert "no end of the answer within 0.1 s" in record.error


def test_a_server_that_goes_away_ends_the_run() -> None:
    with standing_in(dies_after=4) as server:
        run = driven(server.url, 200, gap_s=0.005)
    assert "the server is gone" in run.stopped
    assert sum(record.error == "" for record in run.records) == 4
    assert 4 + LOST_AFTER <= len(run.records) < 200


def test_addresses() -> None:
    assert parse_endpoint("http://a:81/x/").url == "http://a:81/x"
    assert parse_endpoint("https://a") == Endpoint("a", 443, tls=True)
    assert parse_endpoint("http://a", "k").headers == (("Authorization", "Bearer k"),)
    for wrong in ("a:81", "ftp://a", "http://", "http://a:port", "http://[a"):
        with pytest.raises(ConfigError, match="http://host:port"):
            parse_endpoint(wrong)


def test_nobody_at_the_address() -> None:
    with pytest.raises(ServerError, match=r"no server answers.*bench serve"):
        Control(Endpoint("127.0.0.1", 1)).facts()
    assert not Control(Endpoint("127.0.0.1", 1)).is_up()


@pytest.mark.parametrize(
    ("status", "advice"), [(404, "--no-flush"), (401, "--api-key"), (403, "--api-key")]
)
def test_a_flush_that_cannot_be_is_not_tried_again(status: int, advice: str) -> None:
    with standing_in(statuses={"/flush_cache": status, "/server_info": 404}) as server:
        control = Control(parse_endpoint(server.url))
        with pytest.raises(ServerError, match=advice):
            control.flush()
        assert server.script.calls == ["POST /flush_cache"]
        assert control.facts() == {} and control.model() == ("some/model", None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"data": []}', '{"data": ["a"]}'])
def test_what_is_no_list_of_models(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Control, "call", lambda self, method, path: (200, text))
    with pytest.raises(ServerError, match="not a list of models"):
        Control(Endpoint("127.0.0.1", 1)).model()


def test_facts_of_a_server_name_no_secret_and_no_place() -> None:
    info = {
        "admin_api_key": "s3cret",
        "model_path": "/somewhere/models/llama",
        "nested": {"host": "10.0.0.1", "tp_size": 2, "extra": '{"path": "/data/pool", "a": 1}'},
        "none": None,
        "list": [{"ssl_keyfile_password": "x", "b": 0}],
    }
    with standing_in(info=info) as server:
        found = Control(parse_endpoint(server.url)).facts()
    assert found == {
        "model_path": "llama",
        "nested": {"tp_size": 2, "extra": {"path": "pool", "a": 1}},
        "list": [{"b": 0}],
    }
    assert "s3cret" not in json.dumps(public(info))


def test_events_are_cut_at_blank_lines_alone() -> None:
    """However the bytes arrive, the same events come out."""
    text = b'data: {"a": 1}\r\n\r\ndata: x\ndata: y\n\n: comment\n\nevent: z\n\ndata: [DONE]\n\n'
    text += b"data: not ended"

    async def events(pieces: Sequence[bytes]) -> list[bytes]:
        async def body() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return [event async for event in _events(body())]

    whole = asyncio.run(events([text]))
    assert whole == [b'{"a": 1}', b"x\ny", b"[DONE]"]
    for size in range(1, 9):
        cut = [text[i : i + size] for i in range(0, len(text), size)]
        assert asyncio.run(events(cut)) == whole, size
