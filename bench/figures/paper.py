"""The figures of the papers: a CSV of each in one folder, drawn by one command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tutti.bench.figures import data
from tutti.errors import ConfigError


class PaperFigure(NamedTuple):
    """name: of the files.  kind: how it is drawn."""

    name: str
    kind: str
    title: str


#: Tutti is arXiv 2605.03375, Dual-Blade arXiv 2604.26557.
FIGURES = (
    PaperFigure("tutti-fig02", data.SHARE, "As Tutti's Figure 2: 64K tokens, 75 % of them cached"),
    PaperFigure("tutti-fig08-leval", data.RATE, "As Tutti's Figure 8: LEval"),
    PaperFigure("tutti-fig08-loogle", data.RATE, "As Tutti's Figure 8: LooGLE"),
    PaperFigure("tutti-fig09", data.BANDWIDTH, "As Tutti's Figure 9: two drives"),
    PaperFigure("tutti-fig11", data.PREFIX, "As Tutti's Figure 11: one request of 128K tokens"),
    PaperFigure("tutti-fig12", data.PREFIX, "As Tutti's Figure 12: one request of 640K, two GPUs"),
    PaperFigure("tutti-fig13", data.BUBBLE, "As Tutti's Figure 13: one request of 32K tokens"),
    PaperFigure("tutti-fig14", data.COST, "As Tutti's Figure 14: LooGLE"),
    PaperFigure("dual-blade-residency", data.RESIDENCY, "As Dual-Blade: reading a set of 1 GiB"),
)


def draw_paper(
    folder: Path, out: Path, draw_one: Callable[[PaperFigure, list[data.Row], Path], list[str]]
) -> tuple[list[data.Row], list[str]]:
    """Draws every figure from its CSV in a folder; returns all rows and the files written.

    Raises ConfigError for a missing CSV, before anything is drawn.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the one with the CSVs of the figures")
    missing = [one.name for one in FIGURES if not (folder / f"{one.name}.csv").exists()]
    if missing:
        raise ConfigError(
            f"{folder.name} lacks {', '.join(missing)} (.csv); `tutti simulate --paper` and "
            "`tutti bench figures residency` make them"
        )
    read = [(one, data.read_csv(folder / f"{one.name}.csv", one.kind)) for one in FIGURES]
    files = [name for one, rows in read for name in draw_one(one, rows, out / one.name)]
    return [row for _, rows in read for row in rows], files
