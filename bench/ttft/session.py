"""One server under test: checked, filled if asked, and measured one rate and seed at a time."""

from __future__ import annotations

import argparse
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tutti.arguments import positive
from tutti.base.terminal import ProgressFactory
from tutti.bench.ttft.arrivals import arrival_times_s, traced_times_s
from tutti.bench.ttft.client import Record, Run, TimedCall, drive
from tutti.bench.ttft.http import Endpoint, ServerError, parse_endpoint
from tutti.bench.ttft.metrics import Slo, summarise
from tutti.bench.ttft.protocol import ChatProtocol, Generate, ServerApi
from tutti.bench.ttft.server_control import Control
from tutti.bench.ttft.sweep import Point, Stopped
from tutti.bench.ttft.workloads.prompt import FORMS, IDS, TEXT, Prompt, PromptPart, Renderer, salted
from tutti.bench.ttft.workloads.source import Workload, build_workload
from tutti.bench.writable import options
from tutti.errors import ConfigError

COLD, POPULATED, AS_IS = "cold", "populated", "as-is"
POISSON, TRACE = "poisson", "trace"
GENERATE, CHAT = "generate", "chat"
_PROBE_TOKENS = 4
#: Called for every point with its facts (rate and seed) and records.
Listener = Callable[[dict[str, Any], Sequence[Record]], None]


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Options: the server, its API, and its state at the start."""
    option = options(parser.add_argument_group("server"))
    option("--url", "http://127.0.0.1:30000", "address of the server")
    option("--api-key", None, "sent as a bearer token; a flush may need the admin key")
    what = "SGLang's own API, or OpenAI's chat for other servers"
    option("--api", GENERATE, what, (GENERATE, CHAT))
    what = "prompts as token ids or text (default: text for real texts, ids for generated ones)"
    option("--form", None, what, FORMS)
    option("--vocabulary", 32_000, "generated token ids are below this number", positive)
    option("--timeout-s", 600.0, "deadline of a request")
    what = "initial state. cold: no earlier KV can hit, at any point; populated: every document "
    what += "was computed once, then the server's own cache flushed"
    option("--start", COLD, what, (COLD, POPULATED, AS_IS))
    option("--no-flush", False, "never flush the server's cache between points")
    option("--settle-s", 2.0, "pause for write-through before a flush")
    what = "share of the requests that are sent first and not counted (default 0.1)"
    option("--warmup SHARE", 0.1, what)


@dataclass
class BenchSession:
    """A reachable server, and the workload for its context length."""

    endpoint: Endpoint
    control: Control
    api: ServerApi
    renderer: Renderer
    model: str
    facts: dict[str, Any]
    context_tokens: int | None
    args: argparse.Namespace
    workload: Workload
    slos: Sequence[Slo]
    progress: ProgressFactory
    listener: Listener = lambda facts, records: None
    # Random for every run: KV that an earlier run stored must not count as a hit.
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        timeout_s = self.args.timeout_s
        self._drive = partial(drive, self.endpoint, self.api, timeout_s=timeout_s)

    def ask(self, prompt: Prompt, number: int) -> Run:
        """Sends one request alone."""
        run = Run()
        self._drive(self.calls([prompt], [0.0], ""), run)
        run.records[0].number = number
        return run

    def probe(self) -> None:
        """Sends one small request.  Raises ServerError for a server that cannot be measured."""
        prompt = Prompt("probe", "probe", (PromptPart("probe", 8),), _PROBE_TOKENS)
        run = Run()
        self._drive(self.calls([prompt], [0.0], "probe"), run)
        if run.records[0].error:
            raise ServerError(
                f"a first small request failed: {run.records[0].error}; see the server's log, and "
                "give --vocabulary where its model knows fewer tokens"
            )

    def populate(self) -> None:
        """Sends every document once, so that the server computes and stores it."""
        shared = {prompt.parts[:-1]: prompt for prompt in self.workload.prompts}
        shared.pop((), None)
        prompts = [Prompt(p.task, p.document, parts, 1) for parts, p in shared.items()]
        run = Run()
        with self.progress("documents computed once", len(prompts)) as bar:
            calls = self.calls(prompts, [0.0] * len(prompts), "")
            self._drive(calls, run, concurrency=4, advance=bar.advance)
        failed = [record for record in run.records if record.error]
        if run.stopped or len(failed) == len(prompts) > 0:
            raise ServerError(f"no document could be computed: {failed[0].error}")
        self.flush()

    def flush(self) -> None:
        """Waits for writes and empties the server's cache, unless --no-flush is given."""
        if not self.args.no_flush:
            time.sleep(self.args.settle_s)
            self.control.flush()

    def prompts_at(self, rate: float) -> list[Prompt]:
        """All prompts, or as many as --seconds needs at this rate."""
        prompts = self.workload.prompts
        if self.args.seconds is None:
            return prompts
        return prompts[: max(1, math.ceil(rate * self.args.seconds))]

    def due_s(self, prompts: Sequence[Prompt], rate: float, seed: int) -> list[float]:
        """Due time of each prompt in seconds, according to --arrivals."""
        if self.args.arrivals == TRACE:
            return traced_times_s([prompt.arrival_ms for prompt in prompts], rate)
        return arrival_times_s(len(prompts), rate, seed)

    def salt(self, rate: float, seed: int) -> str:
        """A first part that no stored prompt has, for a cold start; empty for other starts."""
        return f"{self.nonce}-{rate:g}-{seed}" if self.args.start == COLD else ""

    def measure(self, rate: float, seed: int) -> Point:
        """Measures one point.  Raises Stopped with a partial point if it ended early."""
        self.flush()
        prompts = self.prompts_at(rate)
        self.renderer.prepare(prompts)
        n = len(prompts)
        calls = self.calls(prompts, self.due_s(prompts, rate, seed), self.salt(rate, seed))
        run, reason, interrupted = Run(), "", False
        try:
            with self.progress(f"{rate:g} requests/s, seed {seed}", n) as bar:
                self._drive(calls, run, advance=bar.advance)
            reason = run.stopped
        except KeyboardInterrupt:
            reason, interrupted = "interrupted", True
        warmup = min(int(self.args.warmup * n), n - 1)
        point = summarise(run.records, self.slos, warmup=warmup, planned=n)
        point["partial"] |= bool(reason)
        self.listener({"rate": rate, "seed": seed}, run.records)
        if reason:
            raise Stopped(point, reason, interrupted=interrupted)
        return point

    def calls(
        self, prompts: Iterable[Prompt], due_s: Iterable[float], salt: str
    ) -> list[TimedCall]:
        """Requests with their due times; bodies are encoded when sent."""
        return [
            TimedCall(
                number, at_s, prompt.task, prompt.output_tokens, partial(self._value, prompt, salt)
            )
            for number, (prompt, at_s) in enumerate(zip(prompts, due_s, strict=True))
        ]

    def _value(self, prompt: Prompt, salt: str) -> bytes:
        return self.renderer.json_value(salted(prompt, salt))


def open_session(
    args: argparse.Namespace, slos: Sequence[Slo], progress: ProgressFactory
) -> BenchSession:
    """Checks the server and builds the workload for its context length.

    Raises ServerError for one that cannot be reached or measured, ConfigError for a workload that
    does not fit it.
    """
    if not 0 <= args.warmup < 1:
        raise ConfigError(f"--warmup is {args.warmup}; it is a share, from 0 to below 1")
    endpoint = parse_endpoint(args.url, args.api_key)
    control = Control(endpoint)
    facts = control.facts()
    model, listed = control.model()
    told = facts.get("context_length")  # None unless the server was started with one
    context_tokens = told if isinstance(told, int) else listed
    workload = build_workload(args, context_tokens)
    form = _form(args, workload, facts)
    api: ServerApi = ChatProtocol(model) if args.api == CHAT else Generate(form)
    session = BenchSession(
        endpoint,
        control,
        api,
        Renderer(form, args.vocabulary),
        model.rstrip("/").rpartition("/")[2],
        facts,
        context_tokens,
        args,
        workload,
        slos,
        progress,
    )
    session.probe()
    return session


def _form(args: argparse.Namespace, workload: Workload, facts: dict[str, Any]) -> str:
    if args.api == CHAT:
        if args.form == IDS:
            raise ConfigError("the chat API takes no token ids; leave out --form, or --api chat")
        return TEXT
    has_text = any(part.text is not None for part in workload.prompts[0].parts)
    chosen: str = args.form or (TEXT if has_text else IDS)
    return IDS if facts.get("skip_tokenizer_init") else chosen
