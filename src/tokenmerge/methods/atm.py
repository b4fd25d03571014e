"""Adaptive Token Merging: thresholds that fall with depth, and matching by token size in the last quarter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ..core.matching import Batch, Metric, ThresholdRule, TopRule
from ..core.schedule import default_split_layer, theta
from .base import LayerRules, Rule, register
from .presets import PRINTED, find_preset


@register
@dataclass(frozen=True, repr=False)
class ATM(LayerRules):
    """Lossless Token Merging Even Without Fine-Tuning in Vision Transformers (ECAI 2025), Algorithm 1.

    A pair merges when its cosine exceeds θ(l) = max(α − (e^{β(l−1)} − 1), θ_min). `thresholds`, one per layer, replace the
    three parameters; `counts`, one per layer, replace the thresholds by a static number of pairs.
    `split_layer` is l_s, the last layer with alternate matching (None: ¾ of the depth); later layers match by token size
    (the paper calls it merging size).
    `batch`: "mean" is the paper's rule, one number of merges for the whole batch; "each" decides per image, so that
    predictions are batch-invariant.
    `size_weight` p > 0 (ours; 0 in the paper): large tokens must be more similar to merge. The score that is compared with
    θ is 1 − (2 n_i n_j / (n_i + n_j))^p · (1 − cos) instead of cos.
    `attention_weight` q > 0 (ours, too): tokens with high CLS attention must be more similar to merge. 1 − cos is
    multiplied by (a_i a_j)^(q/2), with the CLS attention a, 1 on average over the patches.
    """

    summary = "merges pairs above a threshold that falls with depth"
    paper = "ECAI 2025"
    exports = True

    alpha: float | None = None
    beta: float | None = None
    theta_min: float | None = None
    split_layer: int | None = None
    thresholds: Sequence[float] | None = None
    counts: Sequence[int] | None = None
    batch: Batch = "mean"
    metric: Metric = "keys"
    size_weight: float = 0.0
    attention_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("size_weight", 0.0, 1.0)
        self._check_range("attention_weight", 0.0, 2.0)
        family = (self.alpha, self.beta, self.theta_min)
        by_family = any(v is not None for v in family)
        given = by_family + (self.thresholds is not None) + (self.counts is not None)
        if given != 1 or (by_family and None in family):
            raise ValueError(
                "ATM: give alpha, beta and theta_min together, or thresholds, or counts (one entry per layer); "
                f"not alpha={self.alpha!r}, beta={self.beta!r}, theta_min={self.theta_min!r}, "
                f"thresholds={self.thresholds!r}, counts={self.counts!r}"
            )
        if by_family:
            self._check_range("alpha", 0.0, 1.0)
            self._check_range("beta", 0.0, 1.0)
            self._check_range("theta_min", 0.0, 1.0)
        elif self.thresholds is not None:
            weighted = self.size_weight > 0 or self.attention_weight > 0
            self._check_list("thresholds", -math.inf if weighted else -1.0, 1.0, float)
        else:
            self._check_list("counts", 0, math.inf, int)
            if self.batch != "mean":
                raise ValueError("ATM: counts are the same for every image; leave batch out")
        if self.split_layer is not None:
            self._check_count("split_layer")
        self._check_choice("batch", ("mean", "each"))
        self._check_choice("metric", ("keys", "tokens"))

    @classmethod
    def preset(
        cls,
        model: str,
        *,
        gmacs: float | None = None,
        lossless: bool = False,
        tolerance: float = PRINTED,
        **options: object,
    ) -> ATM:
        """A row of the paper's full-result tables: the nearest at or below `gmacs`, or the cheapest without loss. Without
        loss means, as in the paper's Table 1, that top-1 at one decimal is not below the baseline's; `tolerance=0` compares
        the two decimals of the full results."""
        row = find_preset(model, gmacs=gmacs, lossless=lossless, tolerance=tolerance)
        defaults: dict[str, object] = {}
        if row.model.endswith(".mae"):  # plain attention, and all tokens in the last layer
            defaults = {"prop_attn": False, "last_layer": "full"}
        return cls(row.alpha, row.beta, row.theta_min, **(defaults | options))  # type: ignore[arg-type]

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        """θ_min of the paper's family falls; α and β are those of most rows of its tables."""
        return cls(1.0, 0.03 * 12 / depth, 1 - 0.6 * strength)

    def scaled(self, fraction: float, depth: int) -> Self:
        """Static r by the fraction; of thresholds, the distance to 1."""
        if self.counts is not None:
            return replace(self, counts=tuple(round(fraction * count) for count in self.counts))
        thresholds = tuple(1 - fraction * (1 - self.threshold(layer)) for layer in range(1, depth + 1))
        return replace(self, alpha=None, beta=None, theta_min=None, thresholds=thresholds)

    def check_depth(self, depth: int) -> None:
        self._check_length("thresholds", depth)
        self._check_length("counts", depth)
        if self.split_layer is not None and self.split_layer > depth:
            raise ValueError(f"ATM: split_layer must be in [0, {depth}] for {depth} blocks, not {self.split_layer}")

    def threshold(self, layer: int) -> float:
        """θ of a layer, from 1."""
        if self.thresholds is not None:
            return self.thresholds[layer - 1]
        if self.alpha is None or self.beta is None or self.theta_min is None:
            raise ValueError("ATM: a config with counts has no thresholds")
        return theta(layer, self.alpha, self.beta, self.theta_min)

    def layer_rule(self, layer: int, depth: int) -> Rule | None:
        split_layer = default_split_layer(depth) if self.split_layer is None else self.split_layer
        matching: Any = (self.metric, layer > split_layer, self.size_weight, self.attention_weight)
        if self.counts is not None:
            r = self.counts[layer - 1]
            return TopRule(*matching, r=r) if r > 0 else None
        threshold = self.threshold(layer)
        if threshold >= 1:  # no score exceeds 1
            return None
        return ThresholdRule(*matching, theta=threshold, batch=self.batch)
