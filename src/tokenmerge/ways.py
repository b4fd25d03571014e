"""The ways of taking tokens away among which a calibration chooses; see calibration.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from .backbones.base import BlockShape
from .joining import join_each
from .methods import ATM, DiffRate, Method
from .methods.base import Metric, View
from .schedule import default_split_layer
from .tokens import Move


class Way(Protocol):
    """How tokens are taken away, so many in each layer: what is chosen once for all layers."""

    most: ClassVar[float]  # of the patch tokens that one layer can take away

    def compared(self, patches: float, taken: float, shape: BlockShape) -> float:
        """Multiply-accumulates of finding what goes, for the estimate of the cost."""

    def probe(self, pairs: Sequence[float], tokens: int) -> Method:
        """A method that takes so many tokens away in each layer, on average over the batch."""

    def found(self, probe: Method, depth: int) -> tuple[float, ...]:
        """What the probe found out: the thresholds of the layers, if the way has any."""

    def method(self, pairs: Sequence[float], thresholds: Sequence[float], tokens: int) -> Method:
        """What a trial found, as a setting to ship."""


def pairing_macs(metric: Metric, patches: float, taken: float, shape: BlockShape) -> float:
    """Multiply-accumulates of finding pairs among so many patches, half of them against the others."""
    return patches**2 / 4 * (shape.head if metric == "keys" else shape.width)


@dataclass(frozen=True)
class How:
    """ATM's ways: how pairs are found. Thresholds follow from the numbers."""

    most: ClassVar[float] = 0.45  # half are sources at most
    metric: Metric
    split_layer: int
    size_weight: float
    attention_weight: float

    def compared(self, patches: float, taken: float, shape: BlockShape) -> float:
        return pairing_macs(self.metric, patches, taken, shape)

    def probe(self, pairs: Sequence[float], tokens: int) -> Method:
        return Quota(pairs, self)

    def found(self, probe: Method, depth: int) -> tuple[float, ...]:
        assert isinstance(probe, Quota)
        thetas = {layer: sum(found) / len(found) for layer, found in probe.thetas.items()}
        return tuple(round(thetas.get(layer, 1.0), 6) for layer in range(1, depth + 1))

    def method(self, pairs: Sequence[float], thresholds: Sequence[float], tokens: int) -> Method:
        return ATM(thresholds=thresholds, batch="each", **vars(self))


@dataclass(frozen=True)
class Rates:
    """DiffRate's ways: the share of those that go which are dropped; the others merge."""

    most: ClassVar[float] = 0.95
    pruned: float

    def compared(self, patches: float, taken: float, shape: BlockShape) -> float:
        return (1 - self.pruned) * taken * (patches - taken) * shape.width

    def probe(self, pairs: Sequence[float], tokens: int) -> Method:
        return DiffRate.from_counts(pairs, tokens, self.pruned)

    def found(self, probe: Method, depth: int) -> tuple[float, ...]:
        return ()

    def method(self, pairs: Sequence[float], thresholds: Sequence[float], tokens: int) -> Method:
        return self.probe(pairs, tokens)


def ways(family: str, depth: int) -> list[Way]:
    """What a calibration tries; the first is the one that layers are judged by."""
    quarter = default_split_layer(depth)
    known: dict[str, list[Way]] = {
        "ATM": [
            How("tokens", depth, 0.25, 0.5),
            How("tokens", depth, 0.0, 0.5),
            How("keys", depth, 0.25, 0.5),
            How("tokens", depth, 0.5, 0.0),
            How("keys", quarter, 0.0, 0.0),  # the paper's
        ],
        "DiffRate": [Rates(0.5), Rates(0.0), Rates(1.0)],
    }
    if family not in known:
        raise ValueError(f"no search is known for {family!r}; known: {', '.join(known)}")
    return known[family]


@dataclass(frozen=True, repr=False)
class Quota(Method):
    """Merges so many pairs in each layer, on average over the batch, by one threshold; writes the thresholds down."""

    pairs: Sequence[float]
    how: How
    thetas: dict[int, list[float]] = field(default_factory=dict, compare=False)

    def __call__(self, view: View) -> Move | None:
        quota = self.pairs[view.layer - 1]
        how = self.how
        by_size = view.layer > how.split_layer
        pairs = view.pairs(how.metric, by_size, how.size_weight, how.attention_weight) if quota > 0 else None
        if pairs is None:
            return None
        scores = pairs.score[pairs.score > -torch.inf].sort(descending=True).values
        count = min(round(quota * len(pairs.score)), len(scores) - 1)
        if count < 1:
            return None
        least = scores[count - 1]
        below = scores[scores < least]  # ties merge together: strictly above means above all that are lower
        theta = float((least + below[0]) / 2 if len(below) else least - 1e-4)
        theta = min(theta, 1 - 1e-6)  # 1 means never
        self.thetas.setdefault(view.layer, []).append(theta)
        return join_each(view.tokens, view.prefix, pairs, theta)
