"""ATS: sample tokens by their significance; those that are never drawn are dropped."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ..joining import arrange, keep_each
from ..tokens import Move
from .base import Batch, Placed, Stage, View
from .ppt import significance


@dataclass(frozen=True, repr=False)
class ATS(Placed):
    """Adaptive Token Sampling (ECCV 2022). The scores of the patches (see PPT) are sorted and added up to a distribution,
    which is read at `samples` equally spaced heights; tokens that are hit, once or more, stay. Where few patches matter,
    few are hit: each image keeps its own number.

    `samples`: None, as many as the host has tokens. `layers`, from 1; None: from the end of the first quarter on.
    `batch`: "each", as published; "mean", all images keep as many as they would on average, the unhit by their score."""

    samples: int | None = None
    batch: Batch = "each"
    prop_attn: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None:
            self._check_count("samples")
        self._check_choice("batch", ("mean", "each"))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        # Even as many samples as tokens drop some, so that the weakest setting has more of them.
        return cls(max(round(tokens * 200 ** (1 - 2 * strength)), 4))

    def stage(self, layer: int, depth: int) -> Stage:
        return "queries" if self.acts(layer, depth) else "tokens"

    def usual(self, depth: int) -> Collection[int]:
        return range(depth // 4 + 1, depth + 1)

    def __call__(self, view: View) -> Move | None:
        if not self.acts(view.layer, view.depth) or view.patches < 2:
            return None
        score, tokens = significance(view), view.tokens
        there = tokens.size[:, view.prefix :] > 0
        hit = sample(score, there, (self.samples or tokens.original) - 1)
        always = torch.ones_like(tokens.size[:, : view.prefix], dtype=torch.bool)
        if self.batch == "each":
            return keep_each(tokens, torch.cat((always, hit), 1))
        left = int(hit.count_nonzero()) // hit.shape[0]
        if left >= view.patches:
            return None
        order = (score + 2 * hit).argsort(dim=1, descending=True, stable=True)[:, :left].sort(dim=1).values
        first = tokens.index[: view.prefix].expand(order.shape[0], -1)
        return arrange(tokens, torch.cat((first, order + view.prefix), 1))


def sample(score: Tensor, there: Tensor, samples: int) -> Tensor:
    """Which of the tokens [B,N] are hit when the distribution of their scores is read at equally spaced heights, from its
    lowest positive value to 1: the token whose value is nearest."""
    score = torch.where(there, score, -1.0)  # padding first in the order
    order = score.argsort(dim=1, stable=True)
    there = there.gather(1, order)
    height = score.gather(1, order).clamp(min=0).cumsum(1)
    low = torch.where(there, height, torch.inf).amin(1, keepdim=True)
    height = (height - low) / (height[:, -1:] - low).clamp(min=1e-12)  # 0 at the least token, 1 at the last
    start = torch.where(there & (height > 0), height, 1.0).amin(1, keepdim=True)
    steps = torch.linspace(0, 1, max(samples, 2), device=score.device)
    wanted = (start + steps * (1 - start)).contiguous()
    # heights are sorted: the nearest is one of the two around
    height = torch.where(there, height, -1.0).contiguous()
    above = torch.searchsorted(height, wanted).clamp(1, height.shape[1] - 1)
    below = above - 1
    nearer = (wanted - height.gather(1, below)) <= (height.gather(1, above) - wanted)
    found = torch.where(nearer, below, above)
    return torch.zeros_like(there).scatter(1, order.gather(1, found), True)
