"""Zero-TPrune: a page rank of tokens by their attention, then pruning of the similar and of the unimportant."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ..joining import arrange
from ..matching import Split, best_pairs
from ..precision import without_autocast
from ..tokens import Move
from .base import Placed, Stage, View


@dataclass(frozen=True, repr=False)
class ZeroTPrune(Placed):
    """Zero-TPrune (CVPR 2024). In five layers, of the patches ⌈keep · patches⌉ stay. I′: weighted page rank, s ← s·A for
    each head's map of attention; heads whose scores vary too little or too much are left out, the others are joined by the
    root of the mean square. S: the less important half is compared by its keys with the more important one, and the most
    similar are dropped, a share `similar` of all that go. I: of the others, the least important are dropped.

    `layers`, from 1; None: 1, 3, 6, 9 and 11 of 12. `iterations`: of the page rank in the first, middle and last third of
    the depth. `variance`: the range of a head's variance, of scores with mean 1."""

    keep: float
    similar: float = 0.5
    iterations: Sequence[int] = (30, 5, 1)
    variance: Sequence[float] = (0.01, 0.7)
    prop_attn: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("keep", 0.0, 1.0)
        self._check_range("similar", 0.0, 1.0)
        self._check_list("iterations", 1, math.inf, int)
        self._check_list("variance", 0.0, math.inf, float)
        if len(self.iterations) != 3 or len(self.variance) != 2:
            raise ValueError(
                "ZeroTPrune: iterations are three numbers, one a third of the depth, and variance is two, from and to; "
                f"not {self.iterations!r} and {self.variance!r}"
            )

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(1 - strength)

    def stage(self, layer: int, depth: int) -> Stage:
        return "map" if self.acts(layer, depth) else "tokens"

    def usual(self, depth: int) -> Collection[int]:
        return {max(round(depth * part / 12), 1) for part in (1, 3, 6, 9, 11)}

    def __call__(self, view: View) -> Move | None:
        patches, prefix = view.patches, view.prefix
        gone = patches - max(math.ceil(self.keep * patches), 1)
        if view.map is None or gone == 0:
            return None
        rank = self._rank(view)[:, prefix:]
        order = rank.argsort(dim=1, descending=True, stable=True) + prefix
        half = patches - patches // 2
        split = Split(order[:, half:], order[:, :half])
        alike = min(round(self.similar * gone), patches // 2)
        stay = order
        pairs = best_pairs(view.metric("keys"), split) if alike else None
        if pairs is not None:
            view.spend(split.compared(order.shape[0]) * view.k.shape[-1])
            least = pairs.score.argsort(dim=1, stable=True)[:, : patches // 2 - alike].sort(dim=1).values
            stay = torch.cat((split.target, split.source.gather(1, least)), 1)  # still the most important first
        stay = stay[:, : patches - gone].sort(dim=1).values
        return arrange(view.tokens, torch.cat((view.tokens.index[:prefix].expand(stay.shape[0], -1), stay), 1))

    def _rank(self, view: View) -> Tensor:
        """How important each token is, [B,N]."""
        assert view.map is not None
        weights = view.map.detach()  # [B,H,N,N]
        b, h, n, _ = weights.shape
        times = self.iterations[min(3 * (view.layer - 1) // view.depth, 2)]
        score = weights.new_full((b, h, 1, n), 1 / n)
        with without_autocast(weights.device.type):
            for _ in range(times):
                score = score @ weights
        view.spend(times * h * n * n)
        score = score.squeeze(2) * n
        spread = score.var(2)
        useful = ((spread >= self.variance[0]) & (spread <= self.variance[1])).float()
        useful = torch.where(useful.sum(1, keepdim=True) > 0, useful, torch.ones_like(useful)).unsqueeze(2)
        return ((score.square() * useful).sum(1) / useful.sum(1)).sqrt()
