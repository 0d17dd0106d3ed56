"""Workloads: parsing, what is refused, sharing, orders, the generators, and exports."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutti.base.terminal import progress
from tutti.bench.traces import Synthetic, generate, parse_trace
from tutti.bench.ttft.arrivals import arrival_times_s, traced_times_s
from tutti.bench.ttft.workloads import export
from tutti.bench.ttft.workloads.chat import CHATS
from tutti.bench.ttft.workloads.documents import load_documents
from tutti.bench.ttft.workloads.orders import arrange
from tutti.bench.ttft.workloads.prompt import (
    IDS,
    TEXT,
    Prompt,
    PromptPart,
    Renderer,
    block_ids,
    plain_text,
    salted,
    text_part,
)
from tutti.bench.ttft.workloads.source import add_workload_arguments, build_workload
from tutti.bench.ttft.workloads.synthetic import LEVAL, LOOGLE, generate_documents
from tutti.errors import ConfigError


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser)
    return parser.parse_args(argv)


def exported(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.run(parser.parse_args(argv), progress)


def leval_row(document: str, questions: int) -> dict[str, Any]:
    return {
        "input": document,
        "instructions": [f"What is {i}?" for i in range(questions)],
        "outputs": ["It is " + "so " * (i + 1) for i in range(questions)],
        "source": "made up",
    }


def write_rows(path: Path, *rows: object) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def test_leval_rows_become_prompts_that_share_their_document(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", leval_row("First text. " * 50, 3), leval_row("Second.", 1))
    write_rows(tmp_path / "b.jsonl", leval_row("First text. " * 50, 2))
    found = load_documents("leval", tmp_path)
    assert [prompt.task for prompt in found.prompts] == ["a", "a", "a", "a", "b", "b"]
    documents = [prompt.document for prompt in found.prompts]
    assert documents[0] == documents[1] == documents[4] != documents[3]
    assert found.prompts[0].parts[:2] == found.prompts[4].parts[:2], "the same text, another file"
    assert found.prompts[0].output_tokens < found.prompts[2].output_tokens
    assert "What is 1?" in plain_text(found.prompts[1].parts)
    assert len(load_documents("leval", tmp_path, tasks=["b"]).prompts) == 2
    assert len(found.sha256) == 64


def test_loogle_rows_of_every_form(tmp_path: Path) -> None:
    pairs = str([{"Q": 'Who "said" it?', "A": "O'Neill", "S": "x"}, {"Q": "When?", "A": 1918}])
    base = {"input": "A long text.", "title": "t", "output": "None"}
    write_rows(tmp_path / "shortdep_qa.jsonl", {**base, "qa_pairs": pairs})
    write_rows(
        tmp_path / "longdep_summarization.jsonl",
        {**base, "output": "In short. " * 500, "qa_pairs": "none"},
    )
    write_rows(
        tmp_path / "longdep_qa.jsonl", {"context": "A text.", "question": "Why?", "answer": "So."}
    )
    found = {prompt.task: prompt for prompt in load_documents("loogle", tmp_path).prompts}
    assert len(load_documents("loogle", tmp_path).prompts) == 4
    assert found["longdep_summarization"].output_tokens == 500, "LooGLE's own limit"
    assert found["shortdep_qa"].output_tokens == 1, "1918 is a short answer"
    assert "Why?" in plain_text(found["longdep_qa"].parts)


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[]",
        {"input": "x", "instructions": "one text", "outputs": ["a"]},
        {"input": "x", "instructions": ["q"], "outputs": []},
        {"input": 5, "instructions": ["q"], "outputs": ["a"]},
        {"instructions": ["q"], "outputs": ["a"]},
        "[" * 100_000,
    ],
)
def test_a_malformed_row_names_its_line_or_is_counted(tmp_path: Path, row: object) -> None:
    write_rows(tmp_path / "a.jsonl", leval_row("Text.", 1), row)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: .*--skip-malformed"):
        load_documents("leval", tmp_path)
    found = load_documents("leval", tmp_path, skip_malformed=True)
    assert (len(found.prompts), found.left_out) == (1, {"malformed row": 1})


@pytest.mark.parametrize(
    "pairs",
    [
        "__import__('os').abort()",
        "[{'Q': 'a'}",
        "['a']",
        "{'Q': 'a'}",
        "[{'A': 'a'}]",
        "(" * 5000,
        "[" + "-" * 100_000 + "1]",
    ],
)
def test_questions_are_parsed_and_never_run(tmp_path: Path, pairs: str) -> None:
    write_rows(tmp_path / "x.jsonl", {"input": "Text.", "output": "None", "qa_pairs": pairs})
    with pytest.raises(ConfigError, match="line 1"):
        load_documents("loogle", tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data"):
        load_documents("leval", None)
    with pytest.raises(ConfigError, match="any task"):
        load_documents("leval", tmp_path)
    write_rows(tmp_path / "a.jsonl", leval_row("Text.", 1))
    with pytest.raises(ConfigError, match=r"\.jsonl of b"):
        load_documents("leval", tmp_path, tasks=["a", "b"])


def some_prompts() -> list[Prompt]:
    return [
        Prompt(
            task,
            f"{task}{document}",
            (PromptPart(f"{task}{document}", 10), PromptPart(f"q{q}", 2)),
            1,
        )
        for task in "ab"
        for document in range(3)
        for q in range(4)
    ]


def test_orders(seed: int) -> None:
    prompts = some_prompts()
    shuffled = arrange(prompts, "shuffled", 24, seed)
    assert sorted(map(str, shuffled)) == sorted(map(str, prompts)) and shuffled != prompts
    turns = arrange(prompts, "round-robin", 24, seed)
    assert [p.task for p in turns] == ["a", "b"] * 12
    assert sorted(map(str, turns)) == sorted(map(str, prompts))
    whole = arrange(prompts, "documents", 24, seed)
    assert [p.task for p in whole] == ["a", "b"] * 12
    of_a = [p.document for p in whole if p.task == "a"]
    assert all(len(set(of_a[i : i + 4])) == 1 for i in range(0, 12, 4))
    assert arrange(prompts, "as-given", 30, seed) == prompts + prompts[:6]
    for order in ("shuffled", "round-robin", "documents"):
        again = arrange(prompts, order, 100, seed)
        assert again == arrange(prompts, order, 100, seed)
        assert {str(p) for p in again} == {str(p) for p in prompts}
    with pytest.raises(ConfigError, match="no prompts"):
        arrange([], "shuffled", 1, seed)


def test_the_generators_have_the_table_s_numbers(seed: int) -> None:
    for shapes, documents, questions in ((LEVAL, 409, 2197), (LOOGLE, 776, 6448)):
        prompts = generate_documents(shapes, seed)
        assert len({p.document for p in prompts}) == documents
        assert len(prompts) == questions
        assert prompts == generate_documents(shapes, seed) != generate_documents(shapes, seed + 1)
    by_task = {shape.task: shape for shape in LEVAL}
    lengths: dict[str, set[int]] = {}
    for prompt in generate_documents(LEVAL, seed):
        lengths.setdefault(prompt.task, set()).add(prompt.parts[1].tokens)
    assert all(max(found) <= by_task[task].tokens_max for task, found in lengths.items())
    assert 0.9 < np.mean(list(lengths["codeU"])) / by_task["codeU"].mean < 1.1
    halved = generate_documents(LEVAL, seed, scale=0.5)
    whole = generate_documents(LEVAL, seed)
    assert abs(halved[0].parts[1].tokens - whole[0].parts[1].tokens / 2) <= 1


def test_blocks_are_shared_as_far_as_the_content_is(seed: int) -> None:
    """Against token ids: blocks have one id exactly when all ids up to their end are equal."""
    rng = random.Random(seed)
    names = [PromptPart(name, rng.randint(1, 40)) for name in "abcd"]
    prompts = [
        Prompt("t", "d", tuple(rng.choices(names, k=rng.randint(1, 4))), 1) for _ in range(40)
    ]
    renderer = Renderer(IDS, 50_000)
    rows = [json.loads(renderer.json_value(prompt.parts)) for prompt in prompts]
    assert [len(row) for row in rows] == [prompt.input_tokens for prompt in prompts]
    blocks = block_ids(prompts, 16)
    for ids, row in zip(blocks, rows, strict=True):
        for other_ids, other in zip(blocks, rows, strict=True):
            for place in range(min(len(ids), len(other_ids))):
                end = 16 * (place + 1)
                same = row[:end] == other[:end]
                whole = end <= min(len(row), len(other)) or len(row) == len(other)
                if whole:
                    assert (ids[place] == other_ids[place]) == same


def test_a_salt_changes_the_first_token_and_nothing_else() -> None:
    prompt = some_prompts()[0]
    renderer = Renderer(IDS)
    plain, one, other = (
        json.loads(renderer.json_value(salted(prompt, salt))) for salt in ("", "one", "other")
    )
    assert one[-len(plain) :] == plain == json.loads(renderer.json_value(prompt.parts))
    assert one[:8] != other[:8] and len(one) == len(other)


def test_prepared_parts_are_not_made_again() -> None:
    prompts, renderer = some_prompts(), Renderer(IDS)
    renderer.prepare(prompts)
    made = renderer._encode.cache_info().misses
    values = [renderer.json_value(prompt.parts) for prompt in prompts]
    assert renderer._encode.cache_info().misses == made
    assert values == [Renderer(IDS).json_value(prompt.parts) for prompt in prompts]


def test_text_survives_the_wire() -> None:
    text = 'Line\n"quoted" \\ back, é, 漢字, \U0001f600, \x00, lone \ud83d'
    parts = (text_part(text), text_part("\ude00 more"), PromptPart("generated", 5))
    rendered = json.loads(Renderer(TEXT).json_value(parts))
    assert rendered.startswith('Line\n"quoted"')
    assert len(rendered.split()[-5:]) == 5
    assert rendered == json.loads(json.dumps(plain_text(parts)))


def test_what_does_not_fit_the_context_is_left_out_and_counted() -> None:
    whole = build_workload(parsed("--requests", "10"))
    assert whole.left_out.keys() <= {"longer than 131072 tokens"}
    small = build_workload(parsed("--requests", "10"), context_tokens=8192)
    assert small.left_out["longer than 8192 tokens"] > 500
    assert all(p.input_tokens + p.output_tokens <= 8192 for p in small.prompts)
    with pytest.raises(ConfigError, match="--scale"):
        build_workload(parsed(), context_tokens=1000)
    with pytest.raises(ConfigError, match="no task x"):
        build_workload(parsed("--tasks", "x", "tpo"))
    assert build_workload(parsed("--scale", "0.1"), context_tokens=1000).prompts


def test_leval_hits_as_rarely_as_the_paper_says() -> None:
    """Table 1 of the Tutti paper: 8 % from GPU memory of about 400K tokens, 84 % from an SSD."""
    rates = build_workload(parsed()).hit_rates([400_000])
    assert 0.05 < rates["400000"] < 0.12
    assert 0.80 < rates["unlimited"] < 0.87


def test_the_same_arguments_are_the_same_workload() -> None:
    one = build_workload(parsed("--requests", "50", "--workload-seed", "4"))
    again = build_workload(parsed("--requests", "50", "--workload-seed", "4"))
    other = build_workload(parsed("--requests", "50", "--workload-seed", "5"))
    assert one.digest() == again.digest() != other.digest()
    assert one.facts()["digest"] == one.digest()


def test_arrivals_are_poisson_absolute_and_scaled(seed: int) -> None:
    slow, fast = arrival_times_s(4000, 2.0, seed), arrival_times_s(4000, 8.0, seed)
    assert np.allclose(np.array(slow) / 4, fast), "two rates differ in speed alone"
    gaps = np.diff(slow)
    assert slow[0] == 0 and (gaps > 0).all()
    assert abs(gaps.mean() - 0.5) < 0.05 and abs(gaps.std() / gaps.mean() - 1) < 0.1
    assert arrival_times_s(3, 2.0, seed) == slow[:3]
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="positive rate"):
            arrival_times_s(3, rate, seed)


def test_a_trace_s_own_times_are_stretched_to_a_rate() -> None:
    assert traced_times_s([500, 600, 600, 1000], 1.5) == pytest.approx([0, 0.4, 0.4, 2.0])
    assert traced_times_s([7], 2.0) == [0]
    for wrong in ([1, None], [2, 1], [3, 3]):
        with pytest.raises(ConfigError, match="--arrivals poisson"):
            traced_times_s(wrong, 1.0)


def test_openai_export_keeps_order_and_content(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    argv = ["--workload", "leval-synthetic", "--tasks", "tpo", "--requests", "20"]
    result = exported(*argv, "--out", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    prompts = build_workload(parsed(*argv)).prompts
    assert [line["max_tokens"] for line in lines] == [p.output_tokens for p in prompts]
    assert lines[7]["messages"][0]["content"] == plain_text(prompts[7].parts)
    assert result["written_nbytes"] == out.stat().st_size
    assert "leval-synthetic" in export.report(result)


def test_a_trace_goes_through_mooncake_s_form_unchanged(tmp_path: Path, seed: int) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    requests = generate(Synthetic(requests=60, seed=seed, tokens_max=20_000))
    trace.write_text("".join(request.to_json() + "\n" for request in requests))
    argv = ["--workload", "mooncake", "--data", str(trace), "--format", "mooncake"]
    exported(*argv, "--out", str(out))
    back = parse_trace(out.read_text().splitlines())
    assert [(r.timestamp_ms, r.input_tokens, r.output_tokens) for r in back] == [
        (r.timestamp_ms, r.input_tokens, r.output_tokens) for r in requests
    ]
    renamed: dict[int, int] = {}
    for one, other in zip(requests, back, strict=True):
        for old, new in zip(one.hash_ids, other.hash_ids, strict=True):
            assert renamed.setdefault(old, new) == new
    assert len(set(renamed.values())) == len(renamed)


def test_a_file_that_cannot_be_written_does_not_stay(tmp_path: Path) -> None:
    def lines() -> Any:
        yield "x"
        raise OSError(28, "No space left on device")

    with pytest.raises(export.CapacityError, match=r"w\.jsonl.*No space"):
        export.write_lines(tmp_path / "w.jsonl", lines())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["sharegpt", "multiturn"])
def test_a_turn_holds_all_turns_before_it(name: str, seed: int) -> None:
    argv = ["--workload", f"{name}-synthetic", "--requests", "600", "--workload-seed", str(seed)]
    workload = build_workload(parsed(*argv))
    before: dict[str, tuple[PromptPart, ...]] = {}
    answers: dict[str, int] = {}
    for prompt in workload.prompts:
        last = before.get(prompt.document)
        if last is None:
            assert len(prompt.parts) == 2, "a first turn: what all share, and a question"
        else:
            assert prompt.parts[: len(last)] == last
            assert len(prompt.parts) == len(last) + 2, "an answer and a question more"
            assert prompt.parts[-2].tokens == answers[prompt.document]
        before[prompt.document] = prompt.parts
        answers[prompt.document] = prompt.output_tokens
    turns = len(workload.prompts) / len(before)
    chat = CHATS[name]
    assert len(before) >= chat.users and 0.4 * chat.turns < turns <= 1.5 * chat.turns
    questions = [prompt.parts[-1].tokens for prompt in workload.prompts]
    assert np.mean(questions) == pytest.approx(chat.question, rel=0.3)
    assert workload.hit_rates([10**9])["unlimited"] > 0.5
    with pytest.raises(ConfigError, match="one order"):
        build_workload(parsed(*argv, "--order", "shuffled"))
    with pytest.raises(ConfigError, match="positive"):
        build_workload(parsed(*argv, "--scale", "0"))
