"""PPT: prune where the class token has made up its mind, merge where it has not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch

from ..tokens import Assignment, Move
from .base import Placed, View, as_lists


@dataclass(frozen=True, repr=False)
class PPT(Placed):
    """Token Pruning and Pooling (2023). In three layers every image loses r tokens. The scores of its patches are the class
    token's attention times the length of the value, and add up to 1. If their variance is below `threshold`, the r most
    similar pairs merge, as in ToMe; else the r lowest scores are dropped.

    `layers`, from 1; None: after each quarter of the depth."""

    r: int
    threshold: float = 7e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("r")
        self._check_range("threshold", 0.0, math.inf)

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        # Scores add up to 1, so that their variance falls with the square of the number of tokens; 7e-5 is for 197.
        return cls(round(strength * tokens / 2), 7e-5 * (197 / tokens) ** 2)

    def __call__(self, view: View) -> Move | None:
        r = min(self.r, view.patches // 2)
        if not self.acts(view.layer, view.depth) or r == 0:
            return None
        score = significance(view)  # [B,patches]
        pooled = score.var(1) < self.threshold  # [B]
        merged = as_lists(view.top(r))
        b, m = score.shape[0], view.tokens.size.shape[1] - r
        if merged is None:
            return None
        alive = score.argsort(dim=1, descending=True, stable=True)[:, : view.patches - r].sort(dim=1).values + view.prefix
        pruned = torch.cat((view.tokens.index[: view.prefix].expand(b, -1), alive), 1)
        keep = torch.where(pooled.unsqueeze(1), merged.kept.reshape(b, m), view.tokens.grid(pruned).reshape(b, m))
        joins = pooled.repeat_interleave(r)  # the pairs of each image lie together
        order = torch.cat((keep.reshape(-1), merged.order[b * m :][joins]))
        return Assignment(order, merged.into[joins], m)


def significance(view: View) -> torch.Tensor:
    """The class token's attention, added over heads, times the length of the value: [B,patches], adding up to 1. (ATS's
    score, too.)"""
    score = (view.class_attention().sum(1) * view.value_norms())[:, view.prefix :]
    return score / score.sum(1, keepdim=True).clamp(min=1e-12)
