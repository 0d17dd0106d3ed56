"""`tutti bench submit`: what a layer costs the driver does not grow with the pages."""

from __future__ import annotations

import json

import pytest

from tutti import cli
from tutti.bench import submit
from tutti.commands.bench import report_of
from tutti.gio_uring.gpu.device_batch import TableImage

FEW, MANY = 128, 2048


def of_a_layer(way: str, pages: int) -> tuple[int, int]:
    """(calls, argument bytes) that sixteen more layers take."""
    (short,), (long,) = submit.costs_of(way, pages, (16, 32))
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
        submit.costs_of(way, FEW, (layers,), repeats=3)
        totals.append(len(written))
    assert totals[0] == totals[1] >= 4


def test_a_kernel_that_stays_takes_any_number_of_loads() -> None:
    (costs,) = submit.costs_of("persistent", 16, (64,), repeats=40)
    assert len(costs) == 40


def test_the_command_reports_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "submit", "--pages", "16", "--repeats", "1", "--json"]
    assert cli.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in result["rows"]] == list(submit.WAYS)
    assert "stand-in" in result["source"]


@pytest.mark.parametrize(
    ("long_us", "is_said"), [([40.0, 96.0], "below noise (0.5)"), ([680.0, 736.0], "10.0")]
)
def test_a_layer_below_the_noise_is_not_given_a_time(
    long_us: list[float], is_said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def costs_of(
        way: str, pages: int, layers: tuple[int, ...], repeats: int, *, is_whole: bool = True
    ) -> list[list[submit.Cost]]:
        short = [submit.Cost(120.0, 1, 1)] * repeats
        return [short, [submit.Cost(us, 1, 1) for us in long_us]][-len(layers) :]

    monkeypatch.setattr(submit, "costs_of", costs_of)
    row = submit.measure("launch", 16, 2)
    assert is_said in report_of(submit, {"rows": [row], "source": ""})
    assert row["batch_us"] == pytest.approx(120.0 if "below" in is_said else 40.0)
