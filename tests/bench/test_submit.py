"""`tutti bench submit`: what a layer costs the driver does not grow with the pages."""

from __future__ import annotations

import json

import pytest

from tutti import cli
from tutti.bench import submit
from tutti.gio_uring.gpu.batch import TableImage

FEW, MANY = 128, 2048


def of_a_layer(way: str, pages: int) -> tuple[int, int]:
    """(calls, argument bytes) that sixteen more layers take."""
    short, long = (submit.cost_of(way, pages, layers) for layers in (16, 32))
    return long.calls - short.calls, long.argument_nbytes - short.argument_nbytes


@pytest.mark.parametrize("way", ["host, kernel", "launch", "resident", "persistent"])
def test_a_layer_costs_the_same_however_many_pages_it_has(way: str) -> None:
    for pages in (FEW, MANY):  # a place that is free from the start takes one call less
        calls, nbytes = of_a_layer(way, pages)
        assert calls <= 16 * 5
        assert nbytes <= 16 * 256


def test_a_copy_engine_is_told_every_fragment() -> None:
    (_, few), (calls, many) = (of_a_layer("host, copy-batch", n) for n in (FEW, MANY))
    assert many > MANY / FEW * few / 2
    assert calls <= 16 * 5


@pytest.mark.parametrize("way", ["host, kernel", "launch", "resident", "persistent"])
def test_tables_are_written_once_for_all_layers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], TableImage.write

    def counted(image: TableImage, address: int) -> None:
        written.append(image.nbytes)
        write(image, address)

    monkeypatch.setattr(TableImage, "write", counted)
    totals = []
    for layers in (8, 32):
        written.clear()
        submit.cost_of(way, FEW, layers, repeats=3)
        totals.append(len(written))
    assert totals[0] == totals[1] >= 4


def test_the_command_reports_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "submit", "--pages", "16", "--repeats", "1", "--json"]
    assert cli.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in result["rows"]] == list(submit.WAYS)
    assert "stand-in" in result["source"]
