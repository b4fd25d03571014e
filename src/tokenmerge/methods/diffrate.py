"""DiffRate: sort the patches by importance, drop the least important, merge the next ones into the most important."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ..core.matching import Split, View, best_pairs
from ..core.schedule import r_for_strength
from ..core.tokens import Decision, assign
from .base import Method, register


@register
@dataclass(frozen=True, repr=False)
class DiffRate(Method):
    """Differentiable Compression Rate (ICCV 2023), with rates that are given. Patches are sorted by CLS attention. In layer
    l, `prune`[l] tokens remain (the prefix included); the least important of them merge, each with the most similar of the
    first `merge`[l], by plain mean. A merged token adds its similarity times its size to the size of its group."""

    summary = "drops the least important tokens and merges the next, at rates per layer"
    paper = "ICCV 2023"
    soft_sizes = True

    prune: Sequence[int]
    merge: Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_list("prune", 1, math.inf, int)
        self._check_list("merge", 1, math.inf, int)

    @property
    def drops_tokens(self) -> bool:
        return True

    def check_depth(self, depth: int) -> None:
        self._check_length("prune", depth)
        self._check_length("merge", depth)

    @classmethod
    def from_counts(cls, counts: Sequence[float], tokens: int, pruned: float = 0.5) -> Self:
        """Remove this many tokens in each layer, and drop a fraction of them."""
        left = float(tokens)
        prune = []
        merge = []
        for count in counts:
            prune.append(max(round(left - pruned * count), 2))
            left = max(left - count, 2.0)
            merge.append(round(left))
        return cls(tuple(prune), tuple(merge))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls.from_counts((0, *r_for_strength(strength, depth, tokens)[: depth - 1]), tokens)

    def __call__(self, view: View) -> Decision | None:
        tokens = view.tokens
        prefix = view.prefix
        patches = view.num_patches
        pruned = min(max(self.prune[view.layer - 1] - prefix, 1), patches)
        left = min(max(self.merge[view.layer - 1] - prefix, 1), pruned)
        if left >= patches:
            return None
        order = view.cls_attention().mean(1)[:, prefix:].argsort(dim=1, descending=True, stable=True) + prefix
        keep = view.keep(order[:, :left])
        join = order[:, left:pruned]
        split = Split(join, order[:, :left])
        pairs = best_pairs(view.metric("tokens"), split)
        if pairs is None:
            return assign(tokens, keep)
        view.record(pairs, split.compared(order.shape[0]) * tokens.x.shape[-1])
        ones = torch.ones_like(tokens.size)
        gain = ones.scatter(1, join, pairs.score.clamp(min=0))
        return assign(tokens, keep, join, prefix + pairs.best, weight=ones, gain=gain)
