"""DiffRate: of the patches by importance, the tail is dropped and the next ones merge into the head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ..joining import arrange
from ..matching import Split, best_pairs
from ..schedule import by_strength
from ..tokens import Move
from .base import Method, View


@dataclass(frozen=True, repr=False)
class DiffRate(Method):
    """Differentiable Compression Rate (ICCV 2023), with rates that are given. Patches are sorted by the class token's
    attention. In layer l, `prune`[l] tokens stay (the prefix counted), and of these the last ones merge, each with the most
    similar of the first `merge`[l], by plain mean. A merged token brings its similarity times its size to its place."""

    prune: Sequence[int]
    merge: Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_list("prune", 1, math.inf, int)
        self._check_list("merge", 1, math.inf, int)

    def check_depth(self, depth: int) -> None:
        self._check_length("prune", depth)
        self._check_length("merge", depth)

    @classmethod
    def from_counts(cls, counts: Sequence[float], tokens: int, pruned: float = 0.5) -> Self:
        """Take so many tokens away in each layer, and drop a share of them."""
        left, prune, merge = float(tokens), [], []
        for count in counts:
            prune.append(max(round(left - pruned * count), 2))
            left = max(left - count, 2.0)
            merge.append(round(left))
        return cls(tuple(prune), tuple(merge))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls.from_counts((0, *by_strength(strength, depth, tokens)[: depth - 1]), tokens)

    def __call__(self, view: View) -> Move | None:
        tokens, prefix, patches = view.tokens, view.prefix, view.patches
        pruned = min(max(self.prune[view.layer - 1] - prefix, 1), patches)
        left = min(max(self.merge[view.layer - 1] - prefix, 1), pruned)
        if left >= patches:
            return None
        order = view.class_attention().mean(1)[:, prefix:].argsort(dim=1, descending=True, stable=True) + prefix
        first = tokens.index[:prefix].expand(order.shape[0], -1)
        keep, join = torch.cat((first, order[:, :left]), 1), order[:, left:pruned]
        split = Split(join, order[:, :left])
        pairs = best_pairs(view.metric("tokens"), split)
        if pairs is None:
            return arrange(tokens, keep)
        if view.ledger is not None:
            view.spend(split.compared(order.shape[0]) * tokens.x.shape[-1])
            view.ledger.pairs = pairs
        ones = torch.ones_like(tokens.size)
        gain = ones.scatter(1, join, pairs.score.clamp(min=0))
        return arrange(tokens, keep, join, prefix + pairs.best, weight=ones, gain=gain)
