"""Random merging: the control. Like ToMe, but pairs are drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.matching import Pairs, View, assign_top, split_alternate
from ..core.tokens import Decision
from .base import FixedR, register


@register
@dataclass(frozen=True, repr=False)
class RandomMerge(FixedR):
    """Every image merges r pairs that are drawn at random, the same ones for the same seed, layer and batch shape."""

    summary = "merges random pairs: the control"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("seed")

    def select(self, view: View, r: int) -> Decision | None:
        split = split_alternate(view.tokens, view.prefix)
        sources = len(split.source)
        targets = len(split.target)
        if not sources or not targets:
            return None
        generator = torch.Generator().manual_seed(1000 * self.seed + view.layer)
        shape = (view.tokens.size.shape[0], sources)
        score = torch.rand(shape, generator=generator).to(view.tokens.size.device)
        best = torch.randint(targets, shape, generator=generator).to(score.device)
        pairs = Pairs(split, best, score)
        view.record(pairs)
        return assign_top(view.tokens, view.prefix, pairs, min(r, view.num_patches // 2))
