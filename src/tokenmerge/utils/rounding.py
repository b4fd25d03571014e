"""Numbers at the precision of print."""

from __future__ import annotations

import math


def round_half_up(value: float, step: float) -> int:
    """The nearest multiple of `step`, halves upwards, as a count of steps. (`round` takes 78.55 to 78.5.)"""
    return math.floor(value / step + 0.5 + 1e-9)


def not_below(value: float, baseline: float, tolerance: float) -> bool:
    """Whether a value is at least the baseline's when both are rounded to multiples of `tolerance`; 0: exactly."""
    if tolerance == 0:
        return value >= baseline
    return round_half_up(value, tolerance) >= round_half_up(baseline, tolerance)


def percent_down(fraction: float) -> str:
    """Rounded down to a tenth: a bound must not be rounded up."""
    return f"{math.floor(fraction * 1000 + 1e-9) / 10:.1f} %"
