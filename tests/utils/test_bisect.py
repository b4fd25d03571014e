"""Bisection, and aim–measure–correct."""

from __future__ import annotations

import pytest

from tokenmerge.utils.bisect import approach, bisect, bisect_int


def test_bisection_closes_in_on_the_edge() -> None:
    low, high = bisect(lambda x: x**2 < 2, 0.0, 2.0, steps=40)
    assert low < 2**0.5 <= high
    assert high - low == pytest.approx(2 / 2**40)
    assert bisect_int(lambda n: n * n <= 50, 0, 100) == (7, 8)


def test_an_aim_is_corrected_by_the_miss() -> None:
    """A machine that always returns one tenth more than it was asked for."""
    asked = []

    def attempt(aim: float, turn: int) -> tuple[tuple[int, float], float]:
        asked.append(aim)
        value = 1.1 * aim
        miss = 1 - value
        return (turn, value), 0.0 if abs(miss) < 0.001 else miss

    tried = approach(attempt, 1.0, turns=10)
    assert asked[:2] == [1.0, pytest.approx(0.9)]
    assert [turn for turn, _ in tried] == list(range(len(tried)))
    assert len(tried) < 6, "it stops when the miss is small"
    assert tried[-1][1] == pytest.approx(1, abs=0.001)
    assert len(approach(lambda aim, turn: (aim, 1.0), 0.0, turns=3)) == 3
