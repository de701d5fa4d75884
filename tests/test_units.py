from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.units import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_memory,
    parse_seconds,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GB", 12 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("4096", 4096),
        (".5kib", 512),
        ("2T", 2 * 2**40),
        (7, 7),
    ],
)
def test_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1..2GB", "4-6", "12 bananas", -3, float("nan"), True]
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(InputError) as caught:
        parse_bytes(text)
    assert "12GB" in caught.value.fix


def test_shares_and_seconds():
    assert parse_share("75%") == parse_share("0.75") == parse_share(0.75) == 0.75
    assert parse_seconds("5min") == 300
    assert parse_seconds("250ms") == 0.25
    for text in ("101%", "1.5", "x%"):
        with pytest.raises(InputError):
            parse_share(text)


@given(st.floats(0, 1e15))
def test_formatted_bytes_parse_back_to_within_half_a_percent(number):
    number = float(int(number))
    assert parse_bytes(format_bytes(number).replace(" ", "")) == pytest.approx(
        number, rel=5e-3, abs=1
    )


def test_unknown_reads_na_and_units_grow():
    assert (
        format_bytes(None)
        == format_seconds(None)
        == format_rate(None, 1)
        == format_count(None)
        == "n/a"
    )
    assert format_rate(10, 0) == "n/a"
    assert [format_seconds(s) for s in (5e-6, 0.25, 1.5, 125, 11220)] == [
        "5 µs",
        "250 ms",
        "1.50 s",
        "2 min 05 s",
        "3 h 07 min",
    ]
    assert format_count(1, "shard") == "1 shard"
    assert format_count(300_000, "shard") == "300,000 shards"


@pytest.mark.parametrize("text", ["16", " 512 ", "1"])
def test_memory_without_a_unit_is_asked_for_one(text):
    with pytest.raises(InputError, match="bytes") as caught:
        parse_memory(text, "--ram")
    assert caught.value.fix == f"--ram {text.strip()}GB"
    assert parse_memory("4096", "--ram") == parse_bytes("4096") == 4096
    assert parse_memory("16GB", "--ram") == 16 * 2**30


def test_what_is_no_share_is_answered_with_what_is():
    with pytest.raises(InputError) as caught:
        parse_share("abc")
    assert caught.value.allowed == "a number of 0 or more"
