"""No merging: the baseline model, traced and costed like the other methods, with or without the CLS-only last layer."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.assignment import Decision
from .base import Method, Rule, register
from .view import View

BASELINE = "baseline"  # the name of the unmodified model in results
BASELINE_CLS_ONLY = "CLS-only last layer"  # the same with the exact saving in the last layer


@register
@dataclass(frozen=True, repr=False)
class NoMerge(Method):
    """Merges nothing."""

    summary = "nothing: the baseline, with or without the CLS-only last layer"
    ablation = True
    exports = True

    def __call__(self, view: View) -> Decision | None:
        return None

    def rule(self, layer: int, depth: int) -> Rule | None:
        return self if self._overrides_call(NoMerge) else None
