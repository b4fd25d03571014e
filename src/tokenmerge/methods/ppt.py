"""PPT: prune where the CLS attention is concentrated, merge where it is not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch

from ..core.matching import View
from ..core.tokens import Assignment, Decision, as_lists, flat_positions
from .base import SomeLayers, register


@register
@dataclass(frozen=True, repr=False)
class PPT(SomeLayers):
    """Token Pruning and Pooling (2023). In three layers every image loses r tokens. The score of a patch is its CLS
    attention times the norm of its value; the scores of an image add up to 1. If their variance is below `threshold`, the r
    most similar pairs merge, as in ToMe; else the r patches with the lowest scores are dropped.

    `layers`, from 1; None: after each quarter of the depth."""

    summary = "drops or merges r tokens, decided per image"
    paper = "2023"

    r: int
    threshold: float = 7e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("r")
        self._check_range("threshold", 0.0, math.inf)

    @property
    def drops_tokens(self) -> bool:
        return True

    def scaled(self, fraction: float, depth: int) -> Self:
        return replace(self, r=round(fraction * self.r))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        # Scores add up to 1, so their variance falls with the square of the number of tokens; 7e-5 is for 197.
        return cls(round(strength * tokens / 2), 7e-5 * (197 / tokens) ** 2)

    def __call__(self, view: View) -> Decision | None:
        r = min(self.r, view.num_patches // 2)
        if r == 0:
            return None
        score = view.significance()  # [B,patches]
        pooled = score.var(1) < self.threshold  # [B]
        merged = as_lists(view.top(r))
        if merged is None:
            return None
        b = score.shape[0]
        n = view.tokens.size.shape[1]
        m = n - r
        # In the order of their scores, as in the authors' code: a later layer splits them by rank.
        alive = score.argsort(dim=1, descending=True, stable=True)[:, : view.num_patches - r]
        pruned = flat_positions(view.keep(alive + view.prefix), n, view.tokens.positions).reshape(b, m)
        keep = torch.where(pooled.unsqueeze(1), merged.kept.reshape(b, m), pruned)
        joins = pooled.repeat_interleave(r)  # the pairs of each image are next to each other
        order = torch.cat((keep.reshape(-1), merged.order[b * m :][joins]))
        return Assignment(order, merged.into[joins], m)
