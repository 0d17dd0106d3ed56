"""KVLayout: sizes, identity, JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import ConfigError, LayoutError
from tutti.medium.layout import ITEMSIZE_NBYTES, KVLayout, itemsize_nbytes

LLAMA = KVLayout.mha(32, 8, 128, 64, "bfloat16", model="llama-3-8b")


def test_mha_has_a_segment_for_k_and_one_for_v() -> None:
    assert LLAMA.segments == (131072, 131072)
    assert LLAMA.slice_nbytes == 262144
    assert LLAMA.object_nbytes == 8 << 20
    assert LLAMA.model_layers == LLAMA.layers == 32


def test_v_heads_may_be_smaller() -> None:
    layout = KVLayout.mha(4, 2, 192, 16, "float16", v_head_dim=128)
    assert layout.segments == (16 * 2 * 192 * 2, 16 * 2 * 128 * 2)


def test_gqa_is_mha_with_the_kv_heads() -> None:
    assert KVLayout.gqa(32, 32, 8, 128, 64, "bfloat16", model="llama-3-8b") == LLAMA


def test_gqa_refuses_uneven_sharing() -> None:
    with pytest.raises(LayoutError, match="12 query heads cannot share 8 KV heads"):
        KVLayout.gqa(32, 12, 8, 128, 64, "bfloat16")


def test_mla_has_one_segment() -> None:
    layout = KVLayout.mla(61, 512, 64, 64, "bfloat16")
    assert layout.segments == (64 * 576 * 2,)
    assert layout.kind == "mla"


def test_token_major_moves_all_layers_in_one() -> None:
    blob = LLAMA.token_major()
    assert (blob.layers, blob.model_layers) == (1, 32)
    assert blob.segments == (4 << 20, 4 << 20)
    assert blob.object_nbytes == LLAMA.object_nbytes
    assert len({LLAMA.fingerprint, blob.fingerprint, LLAMA.token_major("other").fingerprint}) == 3
    with pytest.raises(LayoutError, match="layout by layers"):
        blob.token_major()


@pytest.mark.parametrize("dtype", ITEMSIZE_NBYTES)
def test_every_element_type_has_its_size(dtype: str) -> None:
    expected = {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)
    assert itemsize_nbytes(dtype) == expected
    assert KVLayout.mla(1, 512, 64, 64, dtype).slice_nbytes == 64 * 576 * expected


def test_an_unknown_element_type_is_refused() -> None:
    with pytest.raises(LayoutError, match="dtype 'int4' is not supported; use one of float32"):
        KVLayout.mha(1, 1, 1, 1, "int4")


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"layers": 481},
        {"layers": True},
        {"layers": 2.0},
        {"model_layers": -1},
        {"page_size": 0},
        {"segments": ()},
        {"segments": (1, 2, 3, 4, 5)},
        {"segments": [4096]},
        {"segments": (0,)},
        {"segments": ((1 << 30) + 1,)},
        {"dims": (0,)},
        {"dims": [1]},
        {"rank": -1},
        {"rank": 1},
        {"rank": "0"},
        {"world": 0},
        {"model": 7},
        {"model": "m" * 1024},
        {"dtype": "float3"},
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(LLAMA, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["kv_heads", "head_dim", "page_size"])
def test_mha_names_the_bad_number(field: str) -> None:
    numbers = {"kv_heads": 8, "head_dim": 128, "page_size": 64, field: 0}
    with pytest.raises(LayoutError, match=f"{field} is 0; it must be a positive integer"):
        KVLayout.mha(32, dtype="bfloat16", **numbers)  # type: ignore[arg-type]


def test_the_fingerprint_is_the_digest_of_canonical_json() -> None:
    text = LLAMA.to_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert LLAMA.fingerprint == xxhash.xxh3_128_digest(text.encode())
    # Pinned: a change here makes every pool in the world miss, and needs a new format version.
    assert LLAMA.fingerprint.hex() == "e55f76ef06ea4dbd4a854a6c2ac85fe8"


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 31},
        {"segments": (131072, 131073)},
        {"page_size": 32},
        {"dtype": "float16"},
        {"kind": "mla"},
        {"model_layers": 33},
        {"dims": (4, 256, 256)},
        {"order": "page_first"},
        {"model": "llama-3-8b-instruct"},
        {"weights": "1"},
        {"world": 2},
        {"world": 2, "rank": 1},
    ],
)
def test_every_field_counts_for_the_fingerprint(change: dict[str, object]) -> None:
    other = dataclasses.replace(LLAMA, **change)  # type: ignore[arg-type]
    assert other.fingerprint != LLAMA.fingerprint


@given(
    layers=st.integers(1, 480),
    segments=st.lists(st.integers(1, 1 << 30), min_size=1, max_size=4).map(tuple),
    page_size=st.integers(1, 4096),
    dtype=st.sampled_from(sorted(ITEMSIZE_NBYTES)),
    model=st.text(max_size=40),
)
def test_json_round_trip(
    layers: int, segments: tuple[int, ...], page_size: int, dtype: str, model: str
) -> None:
    layout = KVLayout(layers, segments, page_size, dtype, "other", layers, model=model)
    assert KVLayout.from_json(layout.to_json()) == layout
    assert layout.to_json().isascii()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[" * 5000,
        "null",
        "[]",
        "{}",
        '{"format":1}',
        LLAMA.to_json().replace('"format":1', '"format":2'),
        LLAMA.to_json().replace("[131072,131072]", "131072"),
        LLAMA.to_json().replace("131072", '"131072"'),
        LLAMA.to_json().replace("131072", "NaN"),
        LLAMA.to_json().replace('"layers":32', '"layers":1e3'),
        LLAMA.to_json().replace('"layers":32', '"stripes":32'),
        b"\xff\xfe\x00",
    ],
)
def test_other_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ConfigError):
        KVLayout.from_json(text)


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_json_raises_nothing_but_config_errors(place: int, octet: int) -> None:
    raw = bytearray(LLAMA.to_json().encode())
    raw[place % len(raw)] = octet
    try:
        layout = KVLayout.from_json(bytes(raw))
    except ConfigError:
        return
    assert isinstance(layout, KVLayout)
