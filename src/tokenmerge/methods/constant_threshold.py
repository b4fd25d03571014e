"""One threshold for all layers: the baseline that layer-dependent thresholds are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ..tokens import Move
from .base import Batch, Method, Metric, View


@dataclass(frozen=True, repr=False)
class ConstantThreshold(Method):
    """The constant θ of Fig. 5 and 6, alternate matching in every layer."""

    theta: float
    batch: Batch = "mean"
    metric: Metric = "keys"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("theta", -1.0, 1.0)
        self._check_choice("batch", ("mean", "each"))
        self._check_choice("metric", ("keys", "tokens"))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(1 - strength)

    def __call__(self, view: View) -> Move | None:
        return view.above(self.theta, self.batch, self.metric)
