"""The control: as ToMe, but chance says what merges."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..joining import join_top
from ..matching import Pairs, split_alternate
from ..tokens import Move
from .base import Counted, View


@dataclass(frozen=True, repr=False)
class RandomMerge(Counted):
    """Every image merges r pairs that are drawn at random, the same ones for the same seed, layer and shape of the batch."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("seed")

    def __call__(self, view: View) -> Move | None:
        split = split_alternate(view.tokens, view.prefix)
        sources, targets = len(split.source), len(split.target)
        if self.count(view.layer) == 0 or not sources or not targets:
            return None
        generator = torch.Generator().manual_seed(1000 * self.seed + view.layer)
        shape = (view.tokens.size.shape[0], sources)
        score = torch.rand(shape, generator=generator).to(view.tokens.size.device)
        best = torch.randint(targets, shape, generator=generator).to(score.device)
        pairs = Pairs(split, best, score)
        if view.ledger is not None:
            view.ledger.pairs = pairs
        return join_top(view.tokens, view.prefix, pairs, self.count(view.layer))
