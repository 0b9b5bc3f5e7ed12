"""Sizes in, sizes out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.base.units import format_number, format_size, parse_size

UNITS = {"": 1, "B": 1, "K": 1024, "KiB": 1024, "kB": 1000, "M": 1 << 20, "MiB": 1 << 20, "MB": 10**6, "GiB": 1 << 30}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4MiB", 4 << 20),
        ("256KiB", 256 << 10),
        (" 64 kB ", 64_000),
        ("1.5KiB", 1536),
        ("0.5 GiB", 1 << 29),
        ("1mib", 1 << 20),
        (1 << 20, 1 << 20),
        (np.int64(7), 7),
    ],
)
def test_a_size_is_bytes_or_a_number_with_its_unit(text, nbytes):
    size = parse_size(text)
    assert size == nbytes
    assert type(size) is int


@given(number=st.integers(1, 10**17), unit=st.sampled_from(sorted(UNITS)))
def test_whole_numbers_are_exact(number, unit):
    assert parse_size(f"{number}{unit}") == number * UNITS[unit]


BAD = ["", "abc", "0", "-1", "4 XiB", "1e6", "MiB", "4MiB4", "0.5", "0.3KiB", "1.2.3", "9" * 400, "∞", "nan"]


@pytest.mark.parametrize("value", [0, -1, 1.5, 4.0, True, None, b"4MiB", [1], *BAD])
def test_anything_else_is_refused_in_one_line_that_names_the_argument(value):
    with pytest.raises(ArgumentError) as caught:
        parse_size(value)
    message = str(caught.value)
    assert message.startswith("bucket_size: expected a positive number of bytes such as 1048576, '1MiB'")
    assert message.endswith(f"got {value!r}")
    assert "\n" not in message


def test_the_argument_is_named_as_the_caller_calls_it():
    with pytest.raises(ArgumentError, match=r"^nbytes: expected"):
        parse_size(0, "nbytes")


@given(st.text(max_size=12))
def test_no_text_raises_anything_but_argument_error(text):
    try:
        assert parse_size(text) >= 1
    except ArgumentError as error:
        assert repr(text) in str(error)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (827_688, "808.3 KiB"), (1 << 20, "1 MiB"), (5 << 30, "5.0 GiB")],
)
def test_sizes_are_shown_in_powers_of_1024(nbytes, text):
    assert format_size(nbytes) == text


@given(st.integers(1, 1 << 40))
def test_what_is_shown_is_right_to_its_last_digit(nbytes):
    amount, unit = format_size(nbytes).split()
    assert abs(float(amount) * UNITS[unit] - nbytes) <= 0.05 * UNITS[unit]


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        (0, 3, "0"), (1487.54, 1, "1,487.5"), (10.04, 1, "10.0"), (0.0374, 1, "0.0374"), (0.61449, 3, "0.614"),
        (0.0456, 3, "0.0456"), (4.56e-4, 3, "0.000456"), (999.7, 0, "1,000"), (3.1549, 0, "3.15"), (2e-5, 0, "2e-05"),
    ],
)  # fmt: skip
def test_numbers_have_three_significant_digits_or_more(value, places, text):
    assert format_number(value, places) == text
