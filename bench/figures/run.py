"""`tutti bench figures`: PNG, SVG and CSV of one figure, from results or from a CSV.

rate: TTFT and ITL against request rate.  bandwidth: retrieve and store against context length.
prefix: TTFT against the cached prefix.  hit-rate: the same against the share that hits, with
crossings.  cost: dollars for a million tokens.  share, bubble: how long the GPU waits.  residency:
reads under a memory limit.  paper: all figures of the papers, from a folder of CSVs.  Without
matplotlib (pip install matplotlib) only the CSV is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tutti.arguments import positive
from tutti.base.terminal import ProgressFactory, table
from tutti.bench.figures import data
from tutti.bench.figures.cost import Prices, per_million_tokens
from tutti.bench.figures.draw import TITLES, crossings_of, draw
from tutti.bench.figures.paper import PaperFigure, draw_paper
from tutti.bench.writable import check_writable, options
from tutti.errors import CapacityError, ConfigError

# Dollars per hour, from the Tutti paper (arXiv 2605.03375), section 4.3.
PRICES = Prices(gpu=5.0, dram_gb=0.0088, ssd_gb=0.000082)
#: The only limit in the paper.
TTFT_LIMIT_MS = 1000.0
PAPER = "paper"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    option("kind", None, "what to draw", (*data.KINDS, PAPER))
    option("inputs", None, "results (JSON or folder), or CSVs", Path, nargs="+", metavar="INPUT")
    what = "write STEM.png, STEM.svg and STEM.csv; for paper, a folder"
    option("--out STEM", None, what, Path, required=True)
    option("--title", "", "title of the figure")
    option("--slo-ms", TTFT_LIMIT_MS, "TTFT limit to draw")
    option("--page-tokens", 64, "tokens per page, for bandwidth", positive)
    option = options(
        parser.add_argument_group(
            "cost", "prices in dollars per hour; --machine gives a system's hardware"
        )
    )
    option("--gpu-price", PRICES.gpu, "price of a GPU")
    option("--dram-price", PRICES.dram_gb, "price of 1 GB DRAM")
    option("--ssd-price", PRICES.ssd_gb, "price of 1 GB SSD")
    what = "hardware of a system (default: 1,0,0)"
    option("--machine SYSTEM:GPUS,DRAM_GB,SSD_GB", [], what, action="append")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Writes the CSV and draws it.

    Raises ConfigError for inputs of another kind, CapacityError if files cannot be written.
    """
    machines = dict(_machine(text) for text in args.machine)
    prices = Prices(args.gpu_price, args.dram_price, args.ssd_price)

    def paper_figure(one: PaperFigure, rows: list[data.Row], stem: Path) -> list[str]:
        return write_figure(
            one.kind, rows, stem, title=one.title, slo_ms=args.slo_ms, prices=prices
        )

    with progress("drawing", 1) as bar:
        if args.kind == PAPER:
            rows, files = draw_paper(args.inputs[0], args.out, paper_figure)
        else:
            pages = args.page_tokens
            rows = [row for path in args.inputs for row in _read(path, args.kind, machines, pages)]
            files = paper_figure(PaperFigure("", args.kind, args.title), rows, args.out)
        bar.advance(1)
    return {
        "benchmark": "figures",
        "kind": args.kind,
        "rows": len(rows),
        "systems": list(dict.fromkeys(row["system"] for row in rows)),
        "sources": sorted({row["source"] for row in rows}),
        "files": files,
        "crossings": crossings_of(rows) if args.kind == data.HIT_RATE else [],
        "cost": _costs(rows, prices) if args.kind == data.COST else [],
    }


def write_figure(
    kind: str,
    rows: list[data.Row],
    stem: Path,
    *,
    title: str = "",
    slo_ms: float = TTFT_LIMIT_MS,
    prices: Prices = PRICES,
) -> list[str]:
    """Writes <stem>.csv, .png and .svg; returns the names of the files.

    Without matplotlib writes only the CSV.  Raises CapacityError if files cannot be written.
    """
    csv_path = stem.with_name(f"{stem.name}.csv")
    check_writable(*(stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")))
    data.write_csv(csv_path, rows, kind)
    try:
        drawn = draw(kind, rows, stem, title=title or TITLES[kind], slo_ms=slo_ms, prices=prices)
    except OSError as error:
        raise CapacityError(f"cannot draw {stem.name}: {error}; give --out elsewhere") from error
    return [csv_path.name, *(path.name for path in drawn)]


def report(result: dict[str, Any]) -> str:
    """The files written, and the numbers that the figure computes."""
    lines = [f"wrote {', '.join(result['files'])}: {result['rows']} rows"]
    if len(result["files"]) == 1:
        lines.append("drew nothing: matplotlib is not installed (pip install matplotlib)")
    if result["sources"] != ["measured"]:
        lines.append(f"the rows are {', '.join(result['sources'])}, as the figure's title shows")
    for found in result["crossings"]:
        where = ", ".join(f"{place:.1f} %" for place in found["hit_rates_percent"]) or "nowhere"
        lines.append(f"{found['a']} and {found['b']} cross at: {where}")
    if result["cost"]:
        rows = [(c["system"], c["rate"], f"{c['dollars']:.3f}") for c in result["cost"]]
        lines.append(table(("system", "req/s", "$ for 10^6 tokens"), rows))
    return "\n".join(lines)


def _read(
    path: Path, kind: str, machines: dict[str, dict[str, float]], page_tokens: int
) -> list[data.Row]:
    if path.suffix == ".csv":
        return data.read_csv(path, kind)
    result = data.read_result(path, "a result or a CSV")
    nothing = {"gpus": 1.0, "dram_gb": 0.0, "ssd_gb": 0.0}
    machine = machines.get(str(result.get("system")), nothing)
    return data.rows_of(result, kind, path.name, page_tokens=page_tokens, **machine)


def _machine(text: str) -> tuple[str, dict[str, float]]:
    name, _, amounts = text.rpartition(":")
    try:
        gpus, dram_gb, ssd_gb = (float(amount) for amount in amounts.split(","))
    except ValueError as error:
        raise ConfigError(f"--machine {text!r}: write SYSTEM:GPUS,DRAM_GB,SSD_GB") from error
    return name, {"gpus": gpus, "dram_gb": dram_gb, "ssd_gb": ssd_gb}


def _costs(rows: list[data.Row], prices: Prices) -> list[dict[str, Any]]:
    costs = [(row, per_million_tokens(row, prices)) for row in rows]
    return [
        {"system": row["system"], "rate": data.value(row, "rate"), "dollars": cost}
        for row, cost in costs
        if cost is not None
    ]
