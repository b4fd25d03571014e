"""One threshold for all layers: the ablation of ATM's layer-dependent thresholds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ..core.matching import Batch, Metric, ThresholdRule
from .base import LayerRules, Rule, register


@register
@dataclass(frozen=True, repr=False)
class ConstantThreshold(LayerRules):
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

    def scaled(self, fraction: float, depth: int) -> Self:
        return replace(self, theta=1 - fraction * (1 - self.theta))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(1 - strength)

    def layer_rule(self, layer: int, depth: int) -> Rule | None:
        return ThresholdRule(self.metric, theta=self.theta, batch=self.batch) if self.theta < 1 else None
