"""One threshold for all layers: the ablation of ATM's layer-dependent thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ..core.assignment import Decision
from .base import Method, register
from .view import Batch, Metric, View


@register
@dataclass(frozen=True, repr=False)
class ConstantThreshold(Method):
    """The constant θ of Fig. 5 and 6, alternate matching in every layer."""

    summary = "merges pairs above one threshold for all layers (ablation of ATM)"
    paper = "ECAI 2025, Fig. 5 and 6"
    ablation = True
    exports = True

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

    def __call__(self, view: View) -> Decision | None:
        return view.above(self.theta, self.batch, self.metric)
