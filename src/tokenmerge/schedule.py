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
    """The layers at which most pruning methods act: after each quarter of the depth, 4, 7 and 10 of 12."""
    return tuple(sorted({depth // 4 + 1, depth // 2 + 1, 3 * depth // 4 + 1}))


def spread(total: int, depth: int) -> tuple[int, ...]:
    """As equal as can be in all layers, the rest in the first ones."""
    return tuple(total // depth + (i < total % depth) for i in range(depth))


def by_strength(strength: float, depth: int, tokens: int) -> tuple[int, ...]:
    """From nothing to half of the tokens in every layer, in finer steps where there is little to take away."""
    return spread(round(strength**2 * tokens * depth / 2), depth)


def ramp(r: int, kind: str | Sequence[int], depth: int) -> tuple[int, ...]:
    """Tokens to merge per layer: the same r, r + 1 or r − 1 more per layer (Fig. 5), or a list as it is."""
    if not isinstance(kind, str):
        return tuple(kind)
    slope = {"constant": 0, "increasing": 1, "decreasing": -1}[kind]
    return tuple(max(r + slope * i, 0) for i in range(depth))
