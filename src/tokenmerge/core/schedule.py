"""How much to merge in which layer. Layers are numbered from 1, as in the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

RAMPS = ("constant", "increasing", "decreasing")


def theta(layer: int, alpha: float, beta: float, theta_min: float) -> float:
    """Eq. 1: θ(l) = max(α − (e^{β(l−1)} − 1), θ_min)."""
    return max(alpha - math.expm1(beta * (layer - 1)), theta_min)


def default_split_layer(depth: int) -> int:
    """l_s, the last layer with alternate matching: three quarters of the depth."""
    return 3 * depth // 4


def quarters(depth: int) -> tuple[int, ...]:
    """The layers in which most pruning methods act: after each quarter of the depth, 4, 7 and 10 of 12."""
    return tuple(sorted({depth // 4 + 1, depth // 2 + 1, 3 * depth // 4 + 1}))


def divide_evenly(total: int, depth: int) -> tuple[int, ...]:
    """Integers that add up to `total`, as equal as possible; the first ones get the remainder."""
    return tuple(total // depth + (i < total % depth) for i in range(depth))


def r_for_strength(strength: float, depth: int, tokens: int) -> tuple[int, ...]:
    """r per layer: from nothing (0) to half of the tokens in every layer (1), in finer steps where there is little to
    remove."""
    return divide_evenly(round(strength**2 * tokens * depth / 2), depth)


def ramp(r: int, kind: str | Sequence[int], depth: int) -> tuple[int, ...]:
    """Tokens to merge per layer: the same r, one more or one fewer per layer (Fig. 5), or a list as it is."""
    if not isinstance(kind, str):
        return tuple(kind)
    slope = {"constant": 0, "increasing": 1, "decreasing": -1}[kind]
    return tuple(max(r + slope * i, 0) for i in range(depth))
