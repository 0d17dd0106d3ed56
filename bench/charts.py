"""Bars for a terminal and as SVG, without a package for figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_BAR = 44  # characters
_ROW_PX, _LABEL_PX, _WIDTH_PX, _VALUE_PX = 26, 170, 700, 90
_FIRST, _REST = "#2f6f9f", "#b8c4cc"


@dataclass(frozen=True)
class Bars:
    """One chart: a title with the unit, and for each name a value >= 0.  The first is ours."""

    title: str
    values: Sequence[tuple[str, float]]

    @property
    def longest(self) -> float:
        """The value that fills the width."""
        return max((value for _, value in self.values), default=0.0) or 1.0


def bars_text(charts: Sequence[Bars]) -> str:
    """The charts under each other, at most 80 columns wide."""
    width = max((len(name) for chart in charts for name, _ in chart.values), default=0)
    lines: list[str] = []
    for chart in charts:
        lines += ["", chart.title] if lines else [chart.title]
        for name, value in chart.values:
            filled = round(_BAR * value / chart.longest)
            lines.append(f"  {name.ljust(width)}  {'█' * max(1, filled)} {value:.2f}")
    return "\n".join(lines)


def bars_svg(title: str, charts: Sequence[Bars]) -> str:
    """The same as an SVG document."""
    y = 2 * _ROW_PX
    parts = [_text(10, _ROW_PX, title, weight="bold")]
    for chart in charts:
        parts.append(_text(10, y + 16, chart.title))
        y += _ROW_PX
        for at, (name, value) in enumerate(chart.values):
            length = (_WIDTH_PX - _LABEL_PX - _VALUE_PX) * value / chart.longest
            colour = _REST if at else _FIRST
            parts.append(_text(20, y + 16, name))
            parts.append(
                f'<rect x="{_LABEL_PX}" y="{y + 2}" width="{max(1.0, length):.1f}" height="18" '
                f'fill="{colour}"/>'
            )
            parts.append(_text(_LABEL_PX + length + 8, y + 16, f"{value:.2f}"))
            y += _ROW_PX
        y += _ROW_PX // 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH_PX} {y}" '
    head += 'font-family="sans-serif" font-size="14">'
    ground = f'<rect width="{_WIDTH_PX}" height="{y}" fill="white"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(text)}</text>'
