"""The exact binomial bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmerge.utils.statistics import lower_bound


@pytest.mark.parametrize("n", [1, 20, 1000])
def test_bound_without_a_failure_is_the_rule_of_three(n: int) -> None:
    assert lower_bound(n, n) == pytest.approx(0.05 ** (1 / n), rel=1e-9)
    assert lower_bound(0, n) == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.data())
def test_bound_is_where_the_tail_has_five_percent(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    p = lower_bound(k, n)
    tail = sum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k, n + 1))
    assert tail == pytest.approx(0.05, rel=1e-6)
    assert p < k / n
