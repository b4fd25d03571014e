"""What a search pays with: GMACs, or time as a latency model predicts it. Both are fractions of the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ..evaluation.measurement import Measured
from ..evaluation.reference import Reference
from .candidates import Candidate
from .latency import LatencyModel


class SearchCost(Protocol):
    def expected(self, candidate: Candidate, pairs: Sequence[float]) -> float:
        """The cost if every image merged this many pairs in each layer."""

    def measured(self, candidate: Candidate, found: Measured) -> float:
        """The cost of a config, from what it did on the images."""


@dataclass(frozen=True)
class GmacsCost:
    reference: Reference

    def expected(self, candidate: Candidate, pairs: Sequence[float]) -> float:
        return self.reference.expected_ratio(pairs, candidate.matching_macs)

    def measured(self, candidate: Candidate, found: Measured) -> float:
        return found.ratio


@dataclass(frozen=True)
class TimeCost:
    latency: LatencyModel

    def expected(self, candidate: Candidate, pairs: Sequence[float]) -> float:
        left = [self.latency.tokens - done for done in accumulate(pairs)]
        return self.latency.ratio(left, repr(candidate))

    def measured(self, candidate: Candidate, found: Measured) -> float:
        return self.latency.ratio(found.tokens, repr(candidate))
