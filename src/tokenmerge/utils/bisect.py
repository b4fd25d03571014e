"""The two numerical loops that searches share: bisection, and "aim, measure, correct by the miss"."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Candidate = TypeVar("Candidate")


def bisect(go_up: Callable[[float], bool], low: float, high: float, steps: int) -> tuple[float, float]:
    """Halve [low, high] `steps` times: keep the upper half where `go_up(middle)`, else the lower half."""
    for _ in range(steps):
        middle = (low + high) / 2
        if go_up(middle):
            low = middle
        else:
            high = middle
    return low, high


def bisect_int(go_up: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
    """The same for whole numbers, until `low` and `high` are neighbours."""
    while high - low > 1:
        middle = (low + high) // 2
        if go_up(middle):
            low = middle
        else:
            high = middle
    return low, high


def approach(attempt: Callable[[float, int], tuple[Candidate, float]], aim: float, turns: int) -> list[Candidate]:
    """Aim, measure, correct: `attempt(aim, turn)` returns a candidate and the correction that the next aim needs; 0 ends the
    loop. Returns all candidates, in order."""
    tried = []
    for turn in range(turns):
        candidate, correction = attempt(aim, turn)
        tried.append(candidate)
        if correction == 0:
            break
        aim += correction
    return tried
