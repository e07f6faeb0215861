"""Bytes as people read them."""

import re

from hypothesis import given
from hypothesis import strategies as st

from sparse2d.units import size

UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@given(st.integers(0, 9 * 10**15))
def test_a_size_is_its_bytes_to_three_digits_without_an_exponent(num_bytes):
    number, unit = size(num_bytes).split()
    assert re.fullmatch(r"\d{1,4}(\.\d+)?", number)
    assert abs(float(number) * UNITS[unit] - num_bytes) <= 0.005 * num_bytes
    # In the largest unit that leaves a digit before the point.
    assert unit == "B" or float(number) >= 1
    assert unit == "TB" or float(number) < 1000
