"""ToMe and its schedules: a fixed number of merges per layer, alternate matching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from ..core.matching import Metric, TopRule, View
from ..core.schedule import RAMPS, r_for_strength, ramp
from ..core.tokens import Decision
from .base import FixedR, LayerRules, Rule, register


@register
@dataclass(frozen=True, repr=False)
class ToMe(FixedR):
    """Token Merging: Your ViT But Faster (ICLR 2023): every image merges its r most similar pairs in every layer."""

    summary = "merges the r most similar pairs in every layer"
    paper = "ICLR 2023"
    exports = True

    metric: Metric = "keys"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("metric", ("keys", "tokens"))

    def rule_for(self, r: int) -> Rule:
        return TopRule(self.metric, r=r) if type(self).select is ToMe.select else super().rule_for(r)

    def select(self, view: View, r: int) -> Decision | None:
        return view.top(r, self.metric)


@register
@dataclass(frozen=True, repr=False)
class TopR(LayerRules):
    """The top-r schedules of Fig. 5. `ramp`: "constant"; "increasing", r + (l − 1) in layer l; "decreasing",
    r − (l − 1), not below 0; or a list with one number per layer, and then r is left out."""

    summary = "merges the r most similar pairs, with r constant, increasing or decreasing over the layers (ablation of ATM)"
    paper = "ECAI 2025, Fig. 5"
    ablation = True
    exports = True

    r: int | None = None
    ramp: str | Sequence[int] = "constant"
    metric: Metric = "keys"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.ramp, str):
            self._check_choice("ramp", RAMPS)
            self._check_count("r")
        elif self.r is not None:
            raise ValueError(f"TopR: ramp gives a number per layer already; leave out r={self.r!r}")
        else:
            self._check_list("ramp", 0, math.inf, int)
        self._check_choice("metric", ("keys", "tokens"))

    def scaled(self, fraction: float, depth: int) -> Self:
        counts = ramp(self.r or 0, self.ramp, depth)
        return replace(self, r=None, ramp=tuple(round(fraction * count) for count in counts))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(ramp=r_for_strength(strength, depth, tokens))

    def check_depth(self, depth: int) -> None:
        if not isinstance(self.ramp, str):
            self._check_length("ramp", depth)

    def layer_rule(self, layer: int, depth: int) -> Rule | None:
        r = ramp(self.r or 0, self.ramp, depth)[layer - 1]
        return TopRule(self.metric, r=r) if r > 0 else None
