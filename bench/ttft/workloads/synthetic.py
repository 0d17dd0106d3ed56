"""Prompts with the lengths of LEval and LooGLE, for machines without the data sets.

Documents and questions are counts of the papers' tables (LEval: An et al., arXiv 2307.11088;
LooGLE: Li et al., arXiv 2311.04939), `mean` and `tokens_max` their document lengths. The spread
of lengths and the (mu, sigma) of the natural logarithm of question and answer tokens were fitted
to the published files with another tokenizer; without a file at hand they are guesses, marked so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tutti.bench.ttft.workloads.prompt import Prompt, PromptPart

_PREAMBLE_TOKENS = 16


@dataclass(frozen=True)
class TaskShape:
    """One task: numbers of documents and questions, and their lengths in tokens.

    documents_of: tasks with the same value share their documents.
    """

    task: str
    documents: int
    questions: int
    mean: int
    tokens_max: int
    sigma: float
    question: tuple[float, float]
    answer: tuple[float, float]
    documents_of: str = ""


# Task, documents, questions, mean, tokens_max, sigma, question, answer, documents_of.
_LEVAL = """
tpo                15   269   3907    4171  0.04  4.17 0.19  0.00 0.00
gsm100              1   100   5557    5638  0.00  4.18 0.31  0.74 0.41
quality            15   202   7169    8560  0.31  4.32 0.37  2.60 0.56
coursera           15   172   9075   17185  0.36  4.16 0.32  0.12 0.27
topic_retrieval    50   150  12506   15916  0.26  3.00 0.00  1.85 0.21
sci_fi              7    64  16381   26918  0.52  3.56 0.21  1.79 0.00
codeU              90    90  31575   36509  0.10  4.00 0.30  1.00 0.50  # spread guessed
multidoc_qa        20   136   3905    7888  0.25  2.67 0.68  3.13 0.55
qasper             20   160   5019    6547  0.31  2.18 0.33  2.32 1.34
financial_qa        6    52   6032    7824  0.14  3.77 0.20  4.28 0.54
natural_question   20   104  23698   47726  0.62  2.43 0.18  1.54 0.74
legal_contract_qa  20   130  30966   68625  0.58  3.89 0.14  4.18 0.73
narrative_qa       20   182  62335  210541  0.60  2.40 0.30  1.80 0.70  # spread guessed
news_summ          11    11   7320   19278  0.58  1.79 0.00  5.88 0.12
gov_report_summ    13    13   7495   27128  0.56  2.08 0.00  5.82 0.28
patent_summ        13    13   7718   12867  0.43  2.64 0.00  4.89 0.49
tv_show_summ       13    13  10688   14544  0.33  1.95 0.00  4.77 0.36
openreview         20    60  11170   33303  0.45  3.67 1.54  5.80 0.50
meeting_summ       20   156  16692   33310  0.55  2.47 0.42  4.20 0.39
review_summ        20   120  19978   22158  0.06  2.89 0.18  4.62 0.58
"""
# The paper's table has no maxima for LooGLE; four times the mean cuts almost nothing.
# Questions and answers: means of five documents each, and a guessed spread.
_LOOGLE = """
summarization     516   516  20887   83548  0.30  2.00 0.00  5.25 0.30
shortdep_qa       105  1951  21017   84068  0.30  2.52 0.30  2.90 0.30  wiki
shortdep_cloze    155  2880  36412  145648  0.30  4.95 0.30  3.00 0.30  scripts
longdep_qa        105   459  21017   84068  0.30  3.09 0.30  3.17 0.30  wiki
longdep_qa        155   642  36412  145648  0.30  3.09 0.30  3.17 0.30  scripts
"""


def _shapes(rows: str) -> Iterator[TaskShape]:
    for row in rows.strip().splitlines():
        task, *numbers = row.partition("#")[0].split()
        documents, questions, mean, tokens_max = map(int, numbers[:4])
        sigma, *spread = map(float, numbers[4:9])
        ask, answer, of = (spread[0], spread[1]), (spread[2], spread[3]), "".join(numbers[9:])
        yield TaskShape(task, documents, questions, mean, tokens_max, sigma, ask, answer, of)


LEVAL, LOOGLE = tuple(_shapes(_LEVAL)), tuple(_shapes(_LOOGLE))
TABLES = {"leval": LEVAL, "loogle": LOOGLE}


def generate_documents(
    shapes: tuple[TaskShape, ...], seed: int, *, scale: float = 1.0
) -> list[Prompt]:
    """Generates every question of every task in the table's order; depends only on the seed.

    scale: multiplies the lengths of documents, for servers of a small context.
    """
    lengths: dict[str, list[int]] = {}
    prompts = []
    for number, shape in enumerate(shapes):
        name = shape.documents_of or shape.task
        if name not in lengths:
            lengths[name] = _lengths(shape, np.random.default_rng([seed, number, 0]), scale)
        rng = np.random.default_rng([seed, number, 1])
        prompts += _prompts(shape, f"{name}-{seed}", lengths[name], rng)
    return prompts


def _lengths(shape: TaskShape, rng: np.random.Generator, scale: float) -> list[int]:
    """Log-normal lengths with the table's mean, cut at the table's maximum."""
    mu = np.log(shape.mean) - shape.sigma**2 / 2
    drawn = np.minimum(rng.lognormal(mu, shape.sigma, shape.documents), shape.tokens_max)
    return [max(1, round(float(tokens) * scale)) for tokens in drawn]


def _prompts(
    shape: TaskShape, name: str, lengths: list[int], rng: np.random.Generator
) -> list[Prompt]:
    preamble = PromptPart("preamble", _PREAMBLE_TOKENS)
    prompts = []
    for number in range(shape.questions):
        place = number % shape.documents
        document = PromptPart(f"{name}-{place}", lengths[place])
        asked = PromptPart(f"{shape.task}-{name}-question-{number}", _tokens(rng, shape.question))
        parts = (preamble, document, asked)
        prompts.append(Prompt(shape.task, document.name, parts, _tokens(rng, shape.answer)))
    return prompts


def _tokens(rng: np.random.Generator, shape: tuple[float, float]) -> int:
    return max(1, round(float(rng.lognormal(*shape))))
