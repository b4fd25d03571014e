"""No merging: the baseline model, traced and costed like the other methods, with or without the CLS-only last layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from .base import LayerRules, Rule, register

BASELINE = "baseline"  # the name of the unmodified model in results
BASELINE_CLS_ONLY = "CLS-only last layer"  # the same with the exact saving in the last layer


@register
@dataclass(frozen=True, repr=False)
class NoMerge(LayerRules):
    """Merges nothing."""

    summary = "nothing: the baseline, with or without the CLS-only last layer"
    ablation = True
    exports = True

    def scaled(self, fraction: float, depth: int) -> Self:
        return self

    def layer_rule(self, layer: int, depth: int) -> Rule | None:
        return None
