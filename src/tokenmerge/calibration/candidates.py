"""The parametrisations among which a calibration chooses: how tokens are removed, given how many in each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol

import torch

from ..backbones.base import BlockCost
from ..core.matching import Metric, View, assign_each
from ..core.schedule import default_split_layer
from ..core.tokens import Decision
from ..evaluation.measurement import Measurement
from ..evaluation.reference import Reference
from ..methods.atm import ATM
from ..methods.base import Method
from ..methods.diffrate import DiffRate


class Candidate(Protocol):
    """Chosen once for all layers."""

    max_fraction: ClassVar[float]  # of the patches that one layer can remove

    def matching_macs(self, patches: float, removed: float, cost: BlockCost) -> float:
        """MACs of finding what is removed, to estimate the cost."""

    def measure(self, reference: Reference, pairs: Sequence[float]) -> tuple[Measurement, tuple[float, ...]]:
        """Remove this many tokens in each layer, on average over each batch; also the thresholds that did it, if any."""

    def method(self, pairs: Sequence[float], thresholds: Sequence[float], tokens: int) -> Method:
        """The config to ship."""


def pair_matching(metric: Metric, patches: float, cost: BlockCost) -> float:
    """MACs of comparing half of the patches with the other half."""
    return patches**2 / 4 * (cost.head_dim if metric == "keys" else cost.width)


@dataclass(frozen=True)
class ATMCandidate:
    """How ATM finds pairs. Thresholds follow from the numbers of pairs. `static`: every image merges the same number."""

    max_fraction: ClassVar[float] = 0.45  # at most half are sources
    metric: Metric
    split_layer: int
    size_weight: float
    attention_weight: float
    static: bool = False

    def matching_macs(self, patches: float, removed: float, cost: BlockCost) -> float:
        return pair_matching(self.metric, patches, cost)

    def measure(self, reference: Reference, pairs: Sequence[float]) -> tuple[Measurement, tuple[float, ...]]:
        if self.static:
            return reference.measure(self.method(pairs, (), reference.tokens)), ()
        probe = QuotaProbe(pairs, self)
        measurement = reference.measure(probe)
        return measurement, probe.thresholds(reference.depth)

    def method(self, pairs: Sequence[float], thresholds: Sequence[float], tokens: int) -> Method:
        options: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "static"}
        if self.static:
            return ATM(counts=whole_counts(pairs), **options)
        return ATM(thresholds=thresholds, batch="each", **options)


def whole_counts(pairs: Sequence[float]) -> list[int]:
    """Whole numbers with the same sums up to each layer, rounded; 0 stays 0."""
    return [b - a for a, b in pairwise((0, *(round(done) for done in accumulate(pairs))))]


@dataclass(frozen=True)
class DiffRateCandidate:
    """The fraction of the removed tokens that DiffRate drops; the others merge."""

    max_fraction: ClassVar[float] = 0.95
    pruned: float

    def matching_macs(self, patches: float, removed: float, cost: BlockCost) -> float:
        return (1 - self.pruned) * removed * (patches - removed) * cost.width

    def measure(self, reference: Reference, pairs: Sequence[float]) -> tuple[Measurement, tuple[float, ...]]:
        return reference.measure(self.method(pairs, (), reference.tokens)), ()

    def method(self, pairs: Sequence[float], thresholds: Sequence[float], tokens: int) -> Method:
        return DiffRate.from_counts(pairs, tokens, self.pruned)


def _atm(depth: int) -> list[Candidate]:
    return [
        ATMCandidate("tokens", depth, 0.25, 0.5),
        ATMCandidate("tokens", depth, 0.0, 0.5),
        ATMCandidate("keys", depth, 0.25, 0.5),
        ATMCandidate("tokens", depth, 0.5, 0.0),
        ATMCandidate("keys", default_split_layer(depth), 0.0, 0.0),  # the paper's
    ]


def _atm_for_time(depth: int, adaptive: bool) -> list[Candidate]:
    """The most accurate and the cheapest matching, each with thresholds per image and with static r."""
    rules = (False, True) if adaptive else (True,)
    kinds: list[tuple[Metric, int, float, float]] = [("tokens", depth, 0.25, 0.5), ("keys", depth, 0.0, 0.0)]
    return [ATMCandidate(*kind, static=static) for kind in kinds for static in rules]


def _diffrate(depth: int) -> list[Candidate]:
    return [DiffRateCandidate(0.5), DiffRateCandidate(0.0), DiffRateCandidate(1.0)]


# The methods that can be calibrated, by name: what is tried for a goal in GMACs or quality, and for a goal in time.
CANDIDATES: dict[str, tuple[Callable[[int], list[Candidate]], Callable[[int, bool], list[Candidate]]]] = {
    "ATM": (_atm, _atm_for_time),
    "DiffRate": (_diffrate, lambda depth, adaptive: _diffrate(depth)),
}


def candidates_for(method: str, depth: int) -> list[Candidate]:
    """What a calibration tries; the impact of each layer is measured with the first."""
    return _find(method)[0](depth)


def candidates_for_time(method: str, depth: int, adaptive: bool) -> list[Candidate]:
    """The same for a goal in time. `adaptive`: also configs whose token counts depend on the image."""
    return _find(method)[1](depth, adaptive)


def _find(method: str) -> tuple[Callable[[int], list[Candidate]], Callable[[int, bool], list[Candidate]]]:
    if method not in CANDIDATES:
        raise ValueError(f"{method!r} cannot be calibrated; known: {', '.join(CANDIDATES)}")
    return CANDIDATES[method]


@dataclass(frozen=True, repr=False)
class QuotaProbe(Method):
    """Merges a given number of pairs in each layer, on average over the batch, by one threshold; collects the thresholds."""

    pairs: Sequence[float]
    candidate: ATMCandidate
    found: dict[int, list[float]] = field(default_factory=dict, compare=False)  # by layer, one per batch

    def thresholds(self, depth: int) -> tuple[float, ...]:
        """The mean over the batches, per layer; 1 where nothing merged."""
        means = {layer: sum(found) / len(found) for layer, found in self.found.items()}
        return tuple(round(means.get(layer, 1.0), 6) for layer in range(1, depth + 1))

    def __call__(self, view: View) -> Decision | None:
        quota = self.pairs[view.layer - 1]
        if quota <= 0:
            return None
        candidate = self.candidate
        by_size = view.layer > candidate.split_layer
        pairs = view.pairs(candidate.metric, by_size, candidate.size_weight, candidate.attention_weight)
        if pairs is None:
            return None
        scores = pairs.score[pairs.score > -torch.inf].sort(descending=True).values
        count = min(round(quota * len(pairs.score)), len(scores) - 1)
        if count < 1:
            return None
        least = scores[count - 1]
        below = scores[scores < least]  # ties merge together: strictly above means above all lower scores
        theta = float((least + below[0]) / 2 if len(below) else least - 1e-4)
        theta = min(theta, 1 - 1e-6)  # 1 means never
        self.found.setdefault(view.layer, []).append(theta)
        return assign_each(view.tokens, view.prefix, pairs, theta)
