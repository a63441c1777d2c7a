"""Sizes are written so that people can read them and the CLI can read them back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.utils.units import exact_bytes, format_bytes, parse_bytes

SIZES = st.integers(0, 9999 << 40)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (1 << 30, "1GiB"),
        ((1 << 30) - 1, "1GiB"),
        (123_456_789, "117.7MiB"),
        (5 << 50, "5120TiB"),
        (-2048, "-2KiB"),
    ],
)
def test_rounded(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(SIZES)
def test_rounding_is_off_by_a_thousandth_at_most(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0B"), (1536, "1536B"), (2048, "2KiB"), (3 << 20, "3MiB"), (1 << 60, "1048576TiB")]
)
def test_exact(num_bytes: int, text: str) -> None:
    assert exact_bytes(num_bytes) == text


@given(SIZES, st.sampled_from([1, 1 << 10, 1 << 20, 1 << 30]))
def test_exact_is_read_back_as_the_same_number(num_bytes: int, unit: int) -> None:
    assert parse_bytes(exact_bytes(num_bytes * unit)) == num_bytes * unit
