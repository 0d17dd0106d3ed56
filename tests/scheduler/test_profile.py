"""Profiles: what is loaded, what is refused and replaced, and interpolation that never falls."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import ProfileError
from tutti.scheduler.loads_and_writes import Profile
from tutti.scheduler.profile import (
    SCHEMA,
    TableProfile,
    estimated_document,
    load_profile,
)
from tutti.scheduler.profile_curves import Curve, Family
from tutti.scheduler.roofline import DENSE_MODELS, GPUS, PAPER_DRIVE, Roofline

MODEL, GPU = DENSE_MODELS["llama-3.1-8b"], GPUS["H100"]
ROOFLINE = Roofline(GPU, MODEL)
MACHINE = {"cpu": "a", "cores": 2, "memory": "8 GiB", "filesystem": "ext4", "disk": "d"}


def document() -> dict[str, Any]:
    """A small profile as if measured."""
    made = estimated_document(MODEL, GPU, machine=MACHINE)
    sizes, slices = (1 << 20, 4 << 20, 16 << 20), (65536, 262144)
    made["io"] = {
        "estimated": False,
        "read": [[n, s, 100 + n / 2000 - s / 10**5] for s in slices for n in sizes],
        "write": [[n, s, 200 + n / 1000] for s in slices for n in sizes],
        "both": [[n, s, 200 + n / 800, 400 + n / 500] for s in slices for n in sizes],
    }
    return made


def saved(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_profile_is_the_schedulers_profile(tmp_path: Path) -> None:
    profile: Profile = load_profile(saved(tmp_path, document()))
    assert profile.read_us(4 << 20) == pytest.approx(100 + (4 << 20) / 2000 - 2.62, rel=1e-3)
    assert profile.write_us(4 << 20) == pytest.approx(200 + (4 << 20) / 1000)
    assert 1.5 < profile.interference < 2.5
    assert isinstance(profile, TableProfile)
    assert profile.estimated == ("compute", "movers")
    assert profile.read_us(1) < profile.read_us(16 << 20)


def test_estimates_follow_the_roofline() -> None:
    profile = TableProfile(estimated_document(MODEL, GPU))
    assert profile.estimated == ("compute", "io", "movers")
    for new, prefix in ((1, 0), (512, 4096), (3000, 100_000), (65536, 0), (131072, 500_000)):
        exact = ROOFLINE.layer_us(new, prefix)
        assert exact <= profile.layer_us(new, prefix) * (1 + 1e-9)
        assert profile.layer_us(new, prefix) <= 1.01 * exact
    # The fit: 64K tokens in 3.25 s; 6.5 ms and 42.5 ns for each token of context.
    assert MODEL.layers * ROOFLINE.layer_us(65536, 0) == pytest.approx(3.25e6, rel=0.01)
    assert profile.decode_us(8, 100_000) == pytest.approx(6500 + 4250)
    assert Roofline(GPUS["H200"], MODEL).decode_us(0) < ROOFLINE.decode_us(0)
    assert profile.interference == pytest.approx(PAPER_DRIVE.interference)
    bigger = Roofline(GPU, DENSE_MODELS["llama-3.1-70b"]).layer_us(4096, 0)
    assert bigger > 3 * ROOFLINE.layer_us(4096, 0)


def change(path: str, *value: object) -> Callable[[dict[str, Any]], None]:
    """Puts a value at "io.read.0.2", or removes what is there."""

    def apply(made: dict[str, Any]) -> None:
        place: Any = made
        *parents, last = (int(name) if name.isdigit() else name for name in path.split("."))
        for name in parents:
            place = place[name]
        if value:
            (place[last],) = value
        else:
            del place[last]

    return apply


DAMAGE = [
    (change("kind", "other"), "is not a profile"),
    (change("schema", SCHEMA + 1), "schema"),
    (change("schema", None), "schema"),
    (change("io"), "no io"),
    (change("compute"), "no compute"),
    (change("movers"), "no movers"),
    (change("io", []), "no io"),
    (change("io.read"), "no points"),
    (change("io.read", []), "no points"),
    (change("io.read.1"), "lacks 1 of 6"),
    (change("compute.prefill.3"), "lacks 1 of"),
    (change("io.read.0.2", -1.0), "above 0"),
    (change("io.read.0.2", 0), "above 0"),
    (change("io.read.0.2", float("nan")), "numbers"),
    (change("io.read.0.2", float("inf")), "numbers"),
    (change("io.read.0.2", 10**400), "numbers"),
    (change("io.read.0.2", True), "numbers"),
    (change("io.read.0.2", "7"), "numbers"),
    (change("io.read.0.2", None), "numbers"),
    (change("io.read.0", "row"), "numbers"),
    (change("io.read.0.0", -4096), "amounts"),
    (change("io.read.0.2", 1e-3), "faster"),
    (change("io.write.2.2", 7e9), "most an hour"),
    (change("io.both.0", [1 << 20, 65536, 5.0]), "numbers"),
    (change("compute.decode.0.2", -3), "above 0"),
    (change("io.read.1.0", 1 << 20), "twice"),
    (change("slice_nbytes", 0), "slice_nbytes"),
    (change("slice_nbytes", "4096"), "slice_nbytes"),
    (change("movers.points", [[8, -1]]), "mover"),
    (change("movers.points", [[0, 1]]), "mover"),
    (change("movers.points", 5), "mover"),
    (change("engines", {"T0": {"host": -1.0}}), "engines"),
    (change("engines", {"T0": "5"}), "engines"),
    (change("engines", [1]), "engines"),
    (change("movers.points", [[float("nan"), 1]]), "mover"),
    (change("movers.points", [[float("inf"), 1]]), "mover"),
    (change("machine", None), "no machine"),
    (change("machine", []), "no machine"),
    (change("model", "llama"), "no model"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_profiles_are_refused(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    made = copy.deepcopy(document())
    damage(made)
    path = saved(tmp_path, made)
    with pytest.raises(ProfileError, match=message):
        load_profile(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", "[" * 100_000, "\x00\xff"])
def test_files_that_hold_no_profile(tmp_path: Path, content: str) -> None:
    with pytest.raises(ProfileError):
        load_profile(saved(tmp_path, content))
    with pytest.raises(ProfileError, match="cannot read"):
        load_profile(tmp_path / "missing.json")
    with pytest.raises(ProfileError, match="cannot read"):
        load_profile(tmp_path)


@pytest.mark.parametrize(
    ("machine", "model", "message"),
    [
        ({**MACHINE, "cpu": "b"}, MODEL, "cpu was 'a' and is 'b'"),
        ({**MACHINE, "disk": "e"}, MODEL, "disk"),
        (MACHINE, DENSE_MODELS["qwen3-32b"], "qwen3-32b"),
    ],
)
def test_profiles_of_others_are_known(
    tmp_path: Path, machine: dict[str, Any], model: Any, message: str
) -> None:
    found = load_profile(saved(tmp_path, document())).mismatches(machine, model)
    assert len(found) == 1
    assert message in found[0]


def test_a_new_kernel_is_the_same_machine(tmp_path: Path) -> None:
    profile = load_profile(saved(tmp_path, document()))
    assert profile.mismatches({**MACHINE, "kernel": "9"}, MODEL) == []


amounts = st.integers(1, 1 << 32)
points = st.lists(
    st.tuples(amounts, st.floats(0.01, 1e6)), min_size=1, max_size=8, unique_by=lambda p: p[0]
)


@given(points, st.floats(0, 1e11), st.floats(0, 1e11))
def test_a_curve_never_falls_and_meets_its_points(
    given_points: list[tuple[int, float]], a: float, b: float
) -> None:
    curve = Curve(given_points)
    low, high = curve.at(min(a, b)), curve.at(max(a, b))
    assert 0 <= low <= high * (1 + 1e-9)
    assert math.isfinite(high)
    ordered = sorted(given_points)
    for i, (amount, _) in enumerate(ordered):
        assert curve.at(amount) == pytest.approx(max(us for _, us in ordered[: i + 1]))
    assert curve.at(0) == 0


grid_axes = st.lists(st.integers(1, 10**6), min_size=1, max_size=4, unique=True)


@given(grid_axes, grid_axes, st.data())
def test_a_rising_family_never_falls_in_either_direction(
    xs: list[int], ys: list[int], data: st.DataObject
) -> None:
    times = st.floats(0.01, 1e6)
    rows = [[float(x), float(y), data.draw(times)] for x in xs for y in ys]
    family = Family.from_rows("test", rows, rising=True)
    place = st.floats(0, 3e6)
    x, y = data.draw(place), data.draw(place)
    more_x, more_y = x + data.draw(place), y + data.draw(place)
    here = family.at(x, y)
    assert here <= family.at(more_x, y) * (1 + 1e-9)
    assert here <= family.at(x, more_y) * (1 + 1e-9)


@given(grid_axes, grid_axes, st.data())
def test_slice_sizes_are_blended_and_bytes_still_rise(
    xs: list[int], ys: list[int], data: st.DataObject
) -> None:
    rows = [[float(x), float(y), data.draw(st.floats(0.01, 1e6))] for x in xs for y in ys]
    family = Family.from_rows("test", rows, rising=False)
    x, y = data.draw(st.floats(1, 3e6)), data.draw(st.floats(0, 3e6))
    assert family.at(x, y) <= family.at(x + data.draw(st.floats(0, 1e6)), y) * (1 + 1e-9)
    curves = [curve.at(x) for curve in family.curves]
    assert min(curves) * (1 - 1e-9) <= family.at(x, y) <= max(curves) * (1 + 1e-9)
