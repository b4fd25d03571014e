"""Zero-TPrune: graph-based importance of tokens from the attention map, then pruning of similar and unimportant tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from ..core.attention import without_autocast
from ..core.matching import Split, View, best_pairs
from ..core.tokens import Decision, assign
from .base import SomeLayers, Stage, register


@register
@dataclass(frozen=True, repr=False)
class ZeroTPrune(SomeLayers):
    """Zero-TPrune (CVPR 2024). In five layers, ⌈keep · patches⌉ of the patches are kept. Importance is a weighted page rank,
    s ← s·A for each head's attention map; heads whose scores vary too little or too much are ignored, the others are
    combined by the root of the mean square.

    `variant` "published", as far as it is known: I′, one vote gives a rough rank. S, the less important half is compared by
    its keys with the more important half, and the most similar are dropped, a fraction `similar` of all dropped tokens. I,
    the remaining tokens vote again, `iterations` times, and the least important are dropped. The CLS token starts with √N
    times the score of the others. "simplified": a uniform start, and one rank for both stages.

    `layers`, from 1; None: 1, 3, 6, 9 and 11 of 12. `iterations`: in the first three layers, in the middle, and in the last
    three ("simplified": in the thirds of the depth). `variance`: the allowed range of a head's variance, of scores with mean
    1."""

    version = 2
    summary = "drops tokens by page rank on the attention map and by similarity"
    paper = "CVPR 2024"

    keep: float
    similar: float = 0.5
    iterations: Sequence[int] = (30, 5, 1)
    variance: Sequence[float] = (0.01, 0.7)
    variant: Literal["published", "simplified"] = "published"
    prop_attn: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("keep", 0.0, 1.0)
        self._check_range("similar", 0.0, 1.0)
        self._check_list("iterations", 1, math.inf, int)
        self._check_list("variance", 0.0, math.inf, float)
        if len(self.iterations) != 3 or len(self.variance) != 2:
            raise ValueError(
                "ZeroTPrune: iterations are three numbers, for early, middle and late layers, and variance is two, low and "
                f"high; not {self.iterations!r} and {self.variance!r}"
            )
        self._check_choice("variant", ("published", "simplified"))

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

    def votes(self, layer: int, depth: int) -> int:
        """Iterations of the page rank in a layer."""
        if self.variant == "simplified":
            return self.iterations[min(3 * (layer - 1) // depth, 2)]
        return self.iterations[0 if layer <= 3 else 2 if layer > depth - 3 else 1]

    def __call__(self, view: View) -> Decision | None:
        patches = view.num_patches
        prefix = view.prefix
        dropped = patches - max(math.ceil(self.keep * patches), 1)
        if view.map is None or dropped == 0:
            return None
        weights = view.map.detach()  # [B,H,N,N]
        similar = min(round(self.similar * dropped), patches // 2)
        votes = self.votes(view.layer, view.depth)
        again = self.variant == "published" and similar > 0
        order = self._rank(view, weights, 1 if again else votes) + prefix
        half = patches - patches // 2
        split = Split(order[:, half:], order[:, :half])
        stay = order  # the most important first
        pairs = best_pairs(view.metric("keys"), split) if similar else None
        if pairs is not None:
            view.record(macs=split.compared(order.shape[0]) * view.k.shape[-1])
            least = pairs.score.argsort(dim=1, stable=True)[:, : patches // 2 - similar].sort(dim=1).values
            stay = torch.cat((split.target, split.source.gather(1, least)), 1)
            if again:
                stay = stay.sort(dim=1).values
                left = view.keep(stay)
                rows = left[:, None, :, None].expand(-1, weights.shape[1], -1, weights.shape[3])
                columns = left[:, None, None, :].expand(-1, weights.shape[1], left.shape[1], -1)
                weights = weights.gather(2, rows).gather(3, columns)
                weights = weights / weights.sum(3, keepdim=True)  # a vote is divided among the tokens that are left
                stay = stay.gather(1, self._rank(view, weights, votes))
        return assign(view.tokens, view.keep(stay[:, : patches - dropped].sort(dim=1).values))

    def _rank(self, view: View, weights: Tensor, votes: int) -> Tensor:
        """The patches, numbered from 0, from the most to the least important, by an attention map [B,H,N,N]."""
        b, h, n, _ = weights.shape
        score = weights.new_ones(b, h, 1, n)
        if self.variant == "published" and view.attention.has_cls:
            score[..., 0] = math.sqrt(n)
        score = score / score.sum(3, keepdim=True)
        with without_autocast(weights.device.type):
            for _ in range(votes):
                score = score @ weights
        view.record(macs=votes * h * n * n)
        score = score.squeeze(2) * n
        variance = score.var(2)
        useful = ((variance >= self.variance[0]) & (variance <= self.variance[1])).float()
        useful = torch.where(useful.sum(1, keepdim=True) > 0, useful, torch.ones_like(useful)).unsqueeze(2)
        importance = ((score.square() * useful).sum(1) / useful.sum(1)).sqrt()
        return importance[:, view.prefix :].argsort(dim=1, descending=True, stable=True)
