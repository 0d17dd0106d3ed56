"""The simulator against published points: what is fitted, what is held out, and its figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tutti.bench.figures.data import STARS, read_csv
from tutti.bench.figures.paper import FIGURES
from tutti.bench.simulate import fit as simulate_fit
from tutti.bench.simulate import report as simulate
from tutti.bench.simulate.calibration import FILE, load_calibration
from tutti.bench.simulate.fit import FITTED, fit, fit_loss
from tutti.bench.simulate.paper import NAMES, write_paper
from tutti.bench.simulate.points import PaperMachine, points, residuals
from tutti.bench.simulate.run import fitted_values
from tutti.bench.simulate.settings import ASSUMED, SETTINGS, Setting
from tutti.errors import ConfigError

CALIBRATION = load_calibration()


def test_the_calibration_is_what_the_fit_makes() -> None:
    """Each fitted value has less error than its neighbours one percent away.

    Hits change in steps with the lengths of documents: there, a tenth away.
    """
    named = set()
    for kind, name, value, _, _, names in FITTED:
        number = getattr(getattr(CALIBRATION, kind)[name], value)
        step = 0.1 if value == "token_scale" else 0.01
        losses = [
            fit_loss(CALIBRATION.with_value(kind, name, value, number * factor), names, server)
            for server in [name if kind == "servers" else ""]
            for factor in (1 - step, 1.0, 1 + step)
        ]
        assert losses[1] < losses[0] and losses[1] < losses[2], (name, value, losses)
        named.add(f"{kind}.{name}.{value}")
    ours = {f"systems.tutti.submit_{way}_us" for way in ("read", "write")}
    assert named | ours == set(fitted_values(CALIBRATION))
    for way in ("submit_read_us", "submit_write_us"):
        same = [getattr(CALIBRATION.systems[name], way) for name in ("tutti", "tutti-paper")]
        assert same[0] == same[1]


def test_no_point_that_is_held_out_has_a_part_in_the_fit() -> None:
    used = {name for *_, names in FITTED for name in names}
    assert used == {point["name"] for point in points() if point["use"] == "fit"}
    fitted, tested = (
        {(figure, p.get("with")) for p in points() if p["use"] == use for figure in named(p)}
        for use in ("fit", "test")
    )
    sources = named(FILE.read_text())
    assert sources == {f for f, _ in fitted} == {"Figure 2", "Figure 9", "Figure 11", "Table 1"}
    assert {f for f, _ in tested} == {f"Figure {n}" for n in (2, 8, 11, 12, 13)}
    assert {one for one in tested if one[0] == "Figure 2"} == {("Figure 2", "base_share")}
    [row] = simulate.point_rows({"points": residuals(CALIBRATION, only=("recompute",))})
    assert row[1] == "test with base_share, simulation"


def named(source: object) -> set[str]:
    """Figures and tables that a text names."""
    return set(re.findall(r"(?:Figure|Table) \d+", str(source)))


def test_the_fit_finds_a_value_again(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("systems", "gds", "submit_read_us")
    lost = CALIBRATION.with_value(*place, 3.0)
    monkeypatch.setattr(simulate_fit, "FITTED", [f for f in FITTED if f[:3] == place])
    assert fit(lost).systems["gds"].submit_read_us == pytest.approx(
        CALIBRATION.systems["gds"].submit_read_us, rel=1e-3
    )


def test_points_that_take_one_request_stay_where_they_were() -> None:
    paper, old = PaperMachine(CALIBRATION), "vllm-0.12"
    assert paper.value("bubble tutti-paper 32K 93.75%", old) == pytest.approx(6.0, rel=0.3)
    assert paper.value("bubble tutti-paper 32K mean", old) == pytest.approx(25.0, rel=0.2)
    assert paper.value("prefix tutti-paper 112K", old) == pytest.approx(3.43, rel=0.01)
    for server, base in ((old, 9.4), ("vllm-0.17", 1.7)):
        assert paper.value("bubble share hbm 64K 0%", server) == pytest.approx(base, rel=1e-3)


def test_one_time_to_submit_does_not_fit_both_figures_of_dram() -> None:
    """Figure 2's wait needs less of it than Figure 11's ratio, which it is fitted to."""
    figure_2, figure_11 = "bubble share dram-whole 64K 75%", "prefix tutti-paper/dram 128K"

    def values(us: float) -> tuple[float, float]:
        machine = PaperMachine(CALIBRATION.with_value("systems", "dram", "submit_read_us", us))
        return machine.value(figure_2, "vllm-0.17"), machine.value(figure_11, "vllm-0.12")

    assert values(33.5362) == pytest.approx((16.3, 1.206), rel=0.01)
    assert values(28.0) == pytest.approx((14.2, 1.44), rel=0.01)
    assert values(0.0)[0] == pytest.approx(11.4, rel=0.01)


def test_every_published_point_has_a_counterpart() -> None:
    found = residuals(CALIBRATION, effort=0.002)
    assert [point["name"] for point in found] == [point["name"] for point in points()]
    assert {point["use"] for point in found} == {"fit", "test", "reading"}
    for point in found:
        if point["simulated"] is None:
            assert point["saturated"], "only what is saturated is not compared"
        else:
            assert 0 <= point["low"] <= point["simulated"] <= point["high"] and point["source"]
    with pytest.raises(ConfigError, match="nothing is known"):
        PaperMachine(CALIBRATION).value("price of tea", "vllm-0.12")


def test_a_saturated_point_is_not_compared_and_each_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grows = {"ttft_ms": 1.0, "itl_ms": 1.0, "tpot_ms": 1.0, "unstable": True}
    monkeypatch.setattr(PaperMachine, "loaded", lambda *_: grows)
    found = [p for p in residuals(CALIBRATION, effort=0.002) if p["name"].startswith("ttft")]
    assert all(p["simulated"] is None and p["error"] is None and not p["within"] for p in found)
    result = {"points": found, "fitted": {}}
    assert simulate.notes_of(result) == [
        "by simulation: of 4 points that were not fitted 4 are saturated: nothing is compared"
    ]
    assert {row[5] for row in simulate.point_rows(result)} == {""}


def test_a_point_that_no_setting_changes_has_no_interval() -> None:
    found = residuals(CALIBRATION, only=("prefix tutti-paper 112K", "retrieve gds", "bubble share"))
    cells = {row[0]: row[5] for row in simulate.point_rows({"points": found})}
    assert cells["prefix tutti-paper 112K"] == cells["retrieve gds"] == "nothing to vary"
    assert " to 41.2" in cells["bubble share ssd-layers 64K 75%"]
    notes = simulate.notes_of({"points": found, "fitted": {}})
    assert "unpublished settings change 2, of which 0 lie within" in notes[0]


def test_what_the_source_leaves_open_is_part_of_the_interval() -> None:
    only = ("bubble tutti-paper 32K mean", "prefix tutti-paper/dram 96K", "tp2")
    found = residuals(CALIBRATION, only=only)
    ends = {point["name"]: (point["low"], point["high"]) for point in found}
    machine = PaperMachine(CALIBRATION)
    for hits, value in (("50,62.5,75,87.5,93.75%", 3.88), ("75,87.5,93.75,100%", 34.2)):
        asked = machine.value(f"bubble tutti-paper 32K {hits}", "vllm-0.12")
        assert (
            asked == pytest.approx(value, rel=0.01) and asked in ends["bubble tutti-paper 32K mean"]
        )
    shortest = machine.value("prefix tutti-paper/dram 16K", "vllm-0.12")
    assert ends["prefix tutti-paper/dram 96K"][0] == shortest
    cells = {row[0]: row[-1] for row in simulate.point_rows({"points": found})}
    assert cells["tp2 gds 128K"] == "-6.6%, by accident"
    assert cells["tp2 tutti-paper/gds 128K"] == "+32.4%", "beside it, and not counted"
    notes = simulate.notes_of({"points": found, "fitted": {}})
    assert "2 are within 10 % as assumed, 1 of them by accident and 0 in their whole" in notes[0]
    assert notes[1].startswith("tp2 gds 128K, by accident: here GDS and Tutti take as long")


def test_arrivals_are_drawn_again_in_some_settings() -> None:
    machine, found = PaperMachine(CALIBRATION, effort=0.02), []
    for setting in SETTINGS:
        if setting == replace(ASSUMED, name=setting.name, arrivals=setting.arrivals):
            machine.use("vllm-0.17", setting)
            found.append(machine.loaded("leval", "gds", 1.5)["ttft_ms"])
    assert len(set(found)) == len(found) == 5


def test_the_highest_rates_vary_in_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def value(_: object, name: str, server: str, setting: Setting) -> float:
        asked.append(setting.name)
        return 1.0

    monkeypatch.setattr(PaperMachine, "value", value)
    [point] = residuals(CALIBRATION, only=("rate tutti-paper/gds",))
    assert asked == [setting.name for setting in SETTINGS] and point["settings"] == len(SETTINGS)


def test_the_curves_vary_in_every_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    loaded = PaperMachine.loaded

    def watched(machine: PaperMachine, *args: Any) -> dict[str, Any]:
        asked.append(machine._setting)
        return loaded(machine, *args) | {"unstable": False}

    monkeypatch.setattr(PaperMachine, "loaded", watched)
    write_paper(CALIBRATION, tmp_path, ["tutti-fig14"], effort=0.002)
    assert set(asked) == set(SETTINGS)


def test_the_figures_of_the_paper_are_written(tmp_path: Path) -> None:
    names = write_paper(CALIBRATION, tmp_path, effort=0.002)
    drawn = {f"{one.name}.csv": one.kind for one in FIGURES}
    assert set(names) >= drawn.keys() - {"dual-blade-residency.csv"}
    for name in drawn.keys() & set(names):
        rows = read_csv(tmp_path / name, drawn[name])
        assert {row["source"] for row in rows} <= {"simulated", *STARS}
        assert all(bool(row["commit"]) == (row["source"] == "simulated") for row in rows)
        assert all(row["system"] in NAMES.values() for row in rows)
