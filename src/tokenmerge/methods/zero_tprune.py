"""Zero-TPrune: graph-based importance of tokens from the attention map, then pruning of similar and unimportant tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ..core.attention import without_autocast
from ..core.matching import Split, View, best_pairs
from ..core.tokens import Decision, assign
from .base import SomeLayers, Stage, register


@register
@dataclass(frozen=True, repr=False)
class ZeroTPrune(SomeLayers):
    """Zero-TPrune (CVPR 2024). In five layers, ⌈keep · patches⌉ of the patches are kept. I′: weighted page rank, s ← s·A for
    each head's attention map; heads whose scores vary too little or too much are ignored, the others are combined by the
    root of the mean square. S: the less important half is compared by its keys with the more important half, and the most
    similar are dropped, a fraction `similar` of all dropped tokens. I: of the others, the least important are dropped.

    `layers`, from 1; None: 1, 3, 6, 9 and 11 of 12. `iterations`: of the page rank in the first, middle and last third of
    the depth. `variance`: the allowed range of a head's variance, of scores with mean 1."""

    summary = "drops tokens by page rank on the attention map and by similarity"
    paper = "CVPR 2024"

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
                "ZeroTPrune: iterations are three numbers, one per third of the depth, and variance is two, low and high; "
                f"not {self.iterations!r} and {self.variance!r}"
            )

    @property
    def drops_tokens(self) -> bool:
        return True

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(1 - strength)

    def stage(self, layer: int, depth: int) -> Stage:
        return "map"

    def default_layers(self, depth: int) -> Collection[int]:
        return {max(round(depth * part / 12), 1) for part in (1, 3, 6, 9, 11)}

    def __call__(self, view: View) -> Decision | None:
        patches = view.num_patches
        prefix = view.prefix
        dropped = patches - max(math.ceil(self.keep * patches), 1)
        if view.map is None or dropped == 0:
            return None
        importance = self._importance(view)[:, prefix:]
        order = importance.argsort(dim=1, descending=True, stable=True) + prefix
        half = patches - patches // 2
        split = Split(order[:, half:], order[:, :half])
        similar = min(round(self.similar * dropped), patches // 2)
        stay = order
        pairs = best_pairs(view.metric("keys"), split) if similar else None
        if pairs is not None:
            view.record(macs=split.compared(order.shape[0]) * view.k.shape[-1])
            least = pairs.score.argsort(dim=1, stable=True)[:, : patches // 2 - similar].sort(dim=1).values
            stay = torch.cat((split.target, split.source.gather(1, least)), 1)  # still the most important first
        return assign(view.tokens, view.keep(stay[:, : patches - dropped].sort(dim=1).values))

    def _importance(self, view: View) -> Tensor:
        """How important each token is, [B,N]."""
        assert view.map is not None
        weights = view.map.detach()  # [B,H,N,N]
        b, h, n, _ = weights.shape
        times = self.iterations[min(3 * (view.layer - 1) // view.depth, 2)]
        score = weights.new_full((b, h, 1, n), 1 / n)
        with without_autocast(weights.device.type):
            for _ in range(times):
                score = score @ weights
        view.record(macs=times * h * n * n)
        score = score.squeeze(2) * n
        variance = score.var(2)
        useful = ((variance >= self.variance[0]) & (variance <= self.variance[1])).float()
        useful = torch.where(useful.sum(1, keepdim=True) > 0, useful, torch.ones_like(useful)).unsqueeze(2)
        return ((score.square() * useful).sum(1) / useful.sum(1)).sqrt()
