"""ATS: sample tokens by their significance; tokens that are never sampled are dropped."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ..core.matching import Batch, View
from ..core.tokens import Decision, assign, assign_kept
from .base import SomeLayers, Stage, register


@register
@dataclass(frozen=True, repr=False)
class ATS(SomeLayers):
    """Adaptive Token Sampling (ECCV 2022). The scores of the patches (`View.significance`) are sorted and summed up to a
    cumulative distribution, which is inverted at `samples` equally spaced values; tokens that are sampled once or more are
    kept. Where few patches matter, few are sampled: each image keeps its own number.

    `samples`: None, as many as the model has tokens. `layers`, from 1; None: from the end of the first quarter on.
    `batch`: "each", as published; "mean", all images keep as many as they would on average, ranked by score."""

    summary = "samples tokens by significance; the number depends on the image"
    paper = "ECCV 2022"

    samples: int | None = None
    batch: Batch = "each"
    prop_attn: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None:
            self._check_count("samples")
        self._check_choice("batch", ("mean", "each"))

    @property
    def drops_tokens(self) -> bool:
        return True

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        # Even as many samples as tokens drop some, so the weakest config has more of them.
        return cls(max(round(tokens * 200 ** (1 - 2 * strength)), 4))

    def stage(self, layer: int, depth: int) -> Stage:
        return "queries"

    def default_layers(self, depth: int) -> Collection[int]:
        return range(depth // 4 + 1, depth + 1)

    def __call__(self, view: View) -> Decision | None:
        if view.num_patches < 2:
            return None
        tokens = view.tokens
        score = view.significance()
        valid = tokens.size[:, view.prefix :] > 0
        sampled = sample(score, valid, (self.samples or tokens.original) - 1)
        if self.batch == "each":
            always = torch.ones_like(tokens.size[:, : view.prefix], dtype=torch.bool)
            return assign_kept(tokens, torch.cat((always, sampled), 1))
        left = int(sampled.count_nonzero()) // sampled.shape[0]
        if left >= view.num_patches:
            return None
        order = (score + 2 * sampled).argsort(dim=1, descending=True, stable=True)[:, :left].sort(dim=1).values
        return assign(tokens, view.keep(order + view.prefix))


def sample(score: Tensor, valid: Tensor, samples: int) -> Tensor:
    """Which of the tokens [B,N] are sampled when the cumulative distribution of their scores is inverted at equally spaced
    values, from its lowest positive value to 1: the token whose cumulative score is nearest."""
    score = torch.where(valid, score, -1.0)  # padding comes first in the order
    order = score.argsort(dim=1, stable=True)
    valid = valid.gather(1, order)
    cdf = score.gather(1, order).clamp(min=0).cumsum(1)
    low = torch.where(valid, cdf, torch.inf).amin(1, keepdim=True)
    cdf = (cdf - low) / (cdf[:, -1:] - low).clamp(min=1e-12)  # 0 at the least token, 1 at the last
    start = torch.where(valid & (cdf > 0), cdf, 1.0).amin(1, keepdim=True)
    steps = torch.linspace(0, 1, max(samples, 2), device=score.device)
    wanted = (start + steps * (1 - start)).contiguous()
    # The distribution is sorted: the nearest value is one of the two around.
    cdf = torch.where(valid, cdf, -1.0).contiguous()
    above = torch.searchsorted(cdf, wanted).clamp(1, cdf.shape[1] - 1)
    below = above - 1
    nearer = (wanted - cdf.gather(1, below)) <= (cdf.gather(1, above) - wanted)
    nearest = torch.where(nearer, below, above)
    return torch.zeros_like(valid).scatter(1, order.gather(1, nearest), True)
