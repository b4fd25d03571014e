"""BAT: cluster the tokens that the CLS token does not attend to, merge similar ones among those that it does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ..core.attention import without_autocast
from ..core.matching import View, cosines
from ..core.tokens import Decision, assign
from .base import SomeLayers, register


@register
@dataclass(frozen=True, repr=False)
class BAT(SomeLayers):
    """Beyond Attentive Tokens (CVPR 2023). In three layers, the ⌈keep · patches⌉ with the highest CLS attention are
    attentive. The others form clusters by density peaks, each of which becomes one token. As many pairs of similar attentive
    tokens merge as there are clusters, so that ⌈keep · patches⌉ tokens remain. Means are weighted by CLS attention.

    `clusters`: their number, as a fraction of the patches that remain. `neighbours`: tokens that the density of a token is
    taken from, itself included. `layers`, from 1; None: after each quarter of the depth."""

    summary = "clusters tokens with low CLS attention, merges similar ones of the others"
    paper = "CVPR 2023"

    keep: float
    clusters: float = 0.1
    neighbours: int = 5
    prop_attn: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("keep", 0.0, 1.0)
        self._check_range("clusters", 0.0, 1.0)
        self._check_count("neighbours")
        if self.neighbours < 1:
            raise self._error("neighbours must be 1 or more: a token is its own first neighbour")

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(1 - strength)

    def __call__(self, view: View) -> Decision | None:
        prefix = view.prefix
        patches = view.num_patches
        left = max(math.ceil(self.keep * patches), 1)
        if left >= patches:
            return None
        attention = view.cls_attention().mean(1)  # [B,N]
        order = attention[:, prefix:].argsort(dim=1, descending=True, stable=True) + prefix
        attentive = order[:, :left].sort(dim=1).values
        others = order[:, left:].sort(dim=1).values
        count = max(1, min(round(self.clusters * left), patches - left, left // 2))
        x = view.metric("tokens")
        kept, sources, into = _match(x, attentive, min(count, left // 2))
        centres, members, cluster = _cluster(x, others, count, self.neighbours)
        compared = others.shape[1] ** 2 + (left - left // 2) * (left // 2)
        view.record(macs=compared * x.shape[-1])
        weight = attention.clamp(min=1e-12)
        weight[:, :prefix] = 1
        return assign(
            view.tokens,
            view.keep(kept, centres),
            torch.cat((sources, members), 1),
            torch.cat((into + prefix, cluster + prefix + kept.shape[1]), 1),
            weight=weight,
        )


def _match(x: Tensor, attentive: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` most similar pairs of alternate groups of the tokens at the positions `attentive` [B,A]: the positions
    that stay, those that merge, and into which of those that stay."""
    source, target = attentive[:, ::2], attentive[:, 1::2]
    if not count:
        return attentive, attentive[:, :0], attentive[:, :0]
    score, best = cosines(x, source, target).max(2)
    chosen = score.argsort(dim=1, descending=True, stable=True)[:, :count]
    stays = torch.ones_like(attentive, dtype=torch.bool).scatter_(1, 2 * chosen, False)
    first = stays.long().argsort(dim=1, descending=True, stable=True)  # those that stay, in their order
    kept = attentive.gather(1, first[:, : attentive.shape[1] - count])
    into = (stays.long().cumsum(1) - 1).gather(1, 2 * best.gather(1, chosen) + 1)
    return kept, source.gather(1, chosen), into


def _cluster(x: Tensor, others: Tensor, count: int, neighbours: int) -> tuple[Tensor, Tensor, Tensor]:
    """Density peaks among the tokens at the positions `others` [B,R]: the positions of `count` centres, those of the
    members, and the cluster of each member. A centre is dense and far from any denser token."""
    values = x.gather(1, others.unsqueeze(2).expand(-1, -1, x.shape[2]))
    values = values - values.mean(1, keepdim=True)  # small numbers: the squares below lose less
    with without_autocast(x.device.type):
        products = torch.bmm(values, values.transpose(1, 2))
    norms = products.diagonal(dim1=1, dim2=2)
    squares = norms.unsqueeze(1) + norms.unsqueeze(2) - products - products.transpose(1, 2)  # symmetric to the last bit
    distance = (squares / x.shape[2]).clamp(min=0).sqrt()  # [B,R,R]
    distance.diagonal(dim1=1, dim2=2).zero_()
    near = distance.topk(min(neighbours, others.shape[1]), dim=2, largest=False).values
    density = (-near.square().mean(2)).exp()
    a, b = density.unsqueeze(2), density.unsqueeze(1)
    earlier = torch.ones_like(distance[0], dtype=torch.bool).tril(-1)  # ties go by position
    denser = (b > a) | ((b == a) & earlier)
    farthest = distance.amax((1, 2)).unsqueeze(1)
    lonely = distance.masked_fill(~denser, torch.inf).amin(2).minimum(farthest)
    peaks = (density * lonely).argsort(dim=1, descending=True, stable=True)[:, :count]
    is_centre = torch.zeros_like(others).scatter_(1, peaks, 1)
    order = is_centre.argsort(dim=1, descending=True, stable=True)
    centres, members = order[:, :count], order[:, count:]
    rows = distance.gather(1, members.unsqueeze(2).expand(-1, -1, others.shape[1]))
    nearest = rows.gather(2, centres.unsqueeze(1).expand(-1, members.shape[1], -1)).argmin(2)
    return others.gather(1, centres), others.gather(1, members), nearest
