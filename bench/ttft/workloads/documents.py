"""Reads LEval and LooGLE from their jsonl files, local or from the Hugging Face hub.

LEval (OpenLMLab/LEval): {"input": str, "instructions": [str], "outputs": [str], ...}, one row per
document.  LooGLE (bigai-nlco/LooGLE): {"input": str, "output": str, "qa_pairs": str}, where
qa_pairs is the text of a Python list of {"Q", "A", ...}, or "none" for a summary; some exports have
a flat "context", "question", "answer" instead.  Texts are parsed, never evaluated.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.base.checks import open_regular
from tutti.bench.ttft.workloads.prompt import Prompt, PromptPart, text_part
from tutti.errors import ConfigError, Unsupported

#: Repositories on the hub.  Only data files are fetched; no script is run.
HUB = {"leval": "L4NLP/LEval", "loogle": "bigai-nlco/LooGLE"}

_PREAMBLE = text_part("Read the document and answer the question that follows it.\n\n")
_OUTPUT_TOKENS_MAX = 512
#: LooGLE's own limits on generated tokens (its README), by the beginning of a file's name.
_LOOGLE_LIMITS = {"shortdep_qa": 300, "longdep_qa": 500, "shortdep_cloze": 50}
_LOOGLE_SUMMARY_LIMIT = 500
_SUMMARY_QUESTION = "\n\nWrite a summary of the document."
_LITERAL_CHARACTERS_MAX = 1 << 22


@dataclass
class Documents:
    """Prompts in file order, numbers of left-out rows by reason, and the digest of the files."""

    prompts: list[Prompt] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    sha256: str = ""


class _Malformed(ValueError):
    """A row that violates the format."""


def load_documents(
    name: str,
    folder: Path | None,
    *,
    hub: bool = False,
    tasks: Sequence[str] = (),
    skip_malformed: bool = False,
) -> Documents:
    """All questions of `name` ("leval" or "loogle") below a folder, or fetched from the hub.

    tasks: names of files without .jsonl; empty for all.
    Raises ConfigError for missing files, and for malformed rows without `skip_malformed`;
    Unsupported without the hub's client.
    """
    root = _fetched(name) if hub else folder
    if root is None:
        raise ConfigError(f"no files of {name}: give --data FOLDER, or --hub to fetch them")
    files = sorted(path for path in root.rglob("*.jsonl") if not tasks or path.stem in tasks)
    missing = set(tasks) - {path.stem for path in files}
    if missing or not files:
        wanted = ", ".join(sorted(missing)) or "any task"
        raise ConfigError(f"no .jsonl of {wanted} below {root.name}; name other --tasks or --data")
    found, digest = Documents(), hashlib.sha256()
    for path in files:
        with open_regular(path) as file:
            content = file.read()
        digest.update(content)
        for number, line in enumerate(content.split(b"\n"), 1):
            if line.strip():
                _row(found, name, path, number, line, skip_malformed)
    found.sha256 = digest.hexdigest()
    if not found.prompts:
        raise ConfigError(f"{root.name} holds no question of {name}; look at its rows")
    return found


def _row(
    found: Documents, name: str, path: Path, number: int, line: bytes, skip_malformed: bool
) -> None:
    try:
        prompts = list(_prompts(name, path.stem, json.loads(line)))
    except (ValueError, RecursionError) as error:
        if not skip_malformed:
            raise ConfigError(
                f"{path.name}, line {number}: {error}; repair the row, or leave such rows out "
                "with --skip-malformed"
            ) from error
        found.left_out["malformed row"] += 1
        return
    found.prompts += prompts
    if not prompts:
        found.left_out["row without a question"] += 1


def _prompts(name: str, task: str, row: Any) -> Iterator[Prompt]:
    if not isinstance(row, dict):
        raise _Malformed("the row is not a JSON object")
    document = text_part(_string(row, "context" if "context" in row else "input"))
    pairs = _leval_pairs(row) if name == "leval" else _loogle_pairs(row)
    limit = _OUTPUT_TOKENS_MAX
    if name == "loogle":
        limit = _LOOGLE_LIMITS.get(task, _LOOGLE_SUMMARY_LIMIT)
    for question, answer in pairs:
        asked: PromptPart = text_part(f"\n\n{question}\n")
        output_tokens = min(limit, text_part(answer).tokens)
        yield Prompt(task, document.name, (_PREAMBLE, document, asked), output_tokens)


def _leval_pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
    questions, answers = _strings(row.get("instructions")), _strings(row.get("outputs"))
    if len(questions) != len(answers):
        raise _Malformed("instructions and outputs are not equally many")
    return list(zip(questions, answers, strict=True))


def _loogle_pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
    if "question" in row and "answer" in row:
        return [(_string(row, "question"), _string(row, "answer"))]
    pairs = _string(row, "qa_pairs")
    if pairs.strip().lower() == "none":
        return [(_SUMMARY_QUESTION, _string(row, "output"))]
    try:
        if len(pairs) > _LITERAL_CHARACTERS_MAX:
            raise _Malformed("qa_pairs is too long to be questions")
        listed = ast.literal_eval(pairs)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise _Malformed(f"qa_pairs is not a list of questions ({error})") from error
    if not isinstance(listed, list) or not all(isinstance(pair, dict) for pair in listed):
        raise _Malformed("qa_pairs is not a list of questions")
    return [(_string(pair, "Q"), str(pair.get("A", ""))) for pair in listed]


def _string(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise _Malformed(f"{name} is not text")
    return value


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise _Malformed("instructions and outputs are not lists of texts")
    return value


def _fetched(name: str) -> Path:
    """The data set's files in the hub's cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise Unsupported(
            "huggingface_hub is not installed; pip install huggingface_hub, or give --data FOLDER"
        ) from error
    try:
        return Path(snapshot_download(HUB[name], repo_type="dataset", allow_patterns=["*.jsonl"]))
    except Exception as error:  # the client raises its own, requests' and OSErrors
        raise Unsupported(f"cannot fetch {HUB[name]}: {error}; give --data FOLDER") from error
