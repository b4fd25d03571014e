"""θ(l), l_s, ramps, and the merging error with its bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmerge as tm
from tokenmerge.core.schedule import default_split_layer, ramp, theta


def test_theta_is_equation_1() -> None:
    """The values of the notes on DeiT-S (0.985, 0.045, 0.88)."""
    assert [round(theta(layer, 0.985, 0.045, 0.88), 3) for layer in (1, 2, 3, 4, 12)] == [
        0.985,
        0.939,
        0.891,
        0.88,
        0.88,
    ]
    assert theta(5, 1.0, 0.025, 0.8) == pytest.approx(1 - (math.exp(0.1) - 1))


def test_split_layer_is_three_quarters() -> None:
    assert [default_split_layer(depth) for depth in (12, 14, 16, 19, 20)] == [9, 10, 12, 14, 15]


def test_ramps() -> None:
    assert ramp(3, "constant", 4) == (3, 3, 3, 3)
    assert ramp(3, "increasing", 4) == (3, 4, 5, 6)
    assert ramp(2, "decreasing", 4) == (2, 1, 0, 0)
    assert ramp(0, [5, 0, 1], 3) == (5, 0, 1)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(2, 64), st.integers(0, 2**31))
def test_theorem_1_and_the_closed_form(n_i: int, n_j: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_i, x_j = torch.nn.functional.normalize(torch.randn(2, width, dtype=torch.float64, generator=generator), dim=-1)
    sizes = torch.tensor(float(n_i), dtype=torch.float64), torch.tensor(float(n_j), dtype=torch.float64)
    delta = 1 - x_i @ x_j
    error = tm.merging_error(x_i, x_j, *sizes)
    torch.testing.assert_close(tm.merging_error_of(delta, *sizes), error, atol=1e-9 * (n_i + n_j), rtol=1e-9)
    low, high = tm.merging_error_bounds(delta, *sizes)
    slack = 1e-9 * (n_i + n_j)
    assert low - slack <= error <= high + slack


def test_the_papers_examples() -> None:
    one, hundred = torch.tensor(1.0), torch.tensor(100.0)
    assert [float(b) for b in tm.merging_error_bounds(one, one, one)] == [0.5, 1.0]
    assert [round(float(b), 2) for b in tm.merging_error_bounds(one, hundred, one)] == [0.99, 1.98]
    assert [float(b) for b in tm.merging_error_bounds(one, hundred, hundred)] == [50.0, 100.0]
