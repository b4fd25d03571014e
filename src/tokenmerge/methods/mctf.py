"""MCTF: similar, little attended and small tokens become one, before the values of the same block are computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..joining import arrange
from ..matching import Pairs, cosines, split_alternate
from ..schedule import by_strength
from ..tokens import Move
from .base import Placed, Stage, View

LEAST = 10  # tokens that always stay


@dataclass(frozen=True, repr=False)
class MCTF(Placed):
    """Multi-criteria Token Fusion (CVPR 2024): r tokens in every layer but the first, half of them from the one group of
    ToMe's split into the other, then half the other way. Pairs rank by similarity, how little both are attended to, and how
    small both are; tokens of a group are weighed by size and the attention that they get. The map of attention merges with
    the tokens ("one step ahead"), so that values, projection and MLP are those of fewer tokens.

    `r`: a number, a list with one a layer, or a share of the patches below 1. `layers`, from 1; None: from the second on.
    `tau_sim`, `tau_info`, `tau_size`: each criterion enters to the power 1/τ; 0 leaves it out."""

    r: float | Sequence[int]
    tau_sim: float = 1.0
    tau_info: float = 20.0
    tau_size: float = 40.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.r, Sequence):
            self._check_list("r", 0, math.inf, int)
        elif isinstance(self.r, float) and self.r < 1:
            self._check_range("r", 0.0, 1.0)
        else:
            self._check_count("r")
        for name in ("tau_sim", "tau_info", "tau_size"):
            self._check_range(name, 0.0, math.inf)

    def check_depth(self, depth: int) -> None:
        super().check_depth(depth)
        if isinstance(self.r, Sequence):
            self._check_length("r", depth)

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls((0, *by_strength(strength, depth, tokens)[: depth - 1]))

    def stage(self, layer: int, depth: int) -> Stage:
        return "values" if self.acts(layer, depth) and self._asked(layer) > 0 else "tokens"

    def usual(self, depth: int) -> Collection[int]:
        return range(2, depth + 1)

    def _asked(self, layer: int) -> float:
        return self.r[layer - 1] if isinstance(self.r, Sequence) else self.r

    def __call__(self, view: View) -> Move | None:
        tokens, prefix = view.tokens, view.prefix
        n = tokens.size.shape[1]
        r = self._asked(view.layer)
        r = min(int(view.patches * r) if r < 1 else int(r), n - LEAST, view.patches // 2)
        if view.map is None or r <= 0:
            return None
        split = split_alternate(tokens, prefix)
        attended = view.map.mean((1, 2)).clamp(min=1e-12)  # [B,N]: by all heads and tokens
        score = self._score(view, split.source, split.target, attended)  # [B,S,T]
        best, target = score.max(2)
        if view.ledger is not None:
            view.spend(split.compared(score.shape[0]) * tokens.x.shape[-1])
            view.ledger.pairs = Pairs(split, target, best)

        # There: the best half of the sources go to their targets.
        there, sources = r // 2, len(split.source)
        order = best.argsort(dim=1, descending=True, stable=True)
        stay, go = order[:, there:].sort(dim=1).values, order[:, :there]
        # And back: targets go to the sources that stayed.
        back = r - there
        best, source = score.gather(1, stay.unsqueeze(2).expand(-1, -1, score.shape[2])).max(1)  # [B,T]
        order = best.argsort(dim=1, descending=True, stable=True)
        go_back, stay_back = order[:, :back], order[:, back:]

        b = score.shape[0]
        first = tokens.index[:prefix].expand(b, -1)
        keep = torch.cat((first, split.source[stay], split.target[stay_back]), 1)
        place = torch.arange(keep.shape[1], device=keep.device).expand(b, -1)
        into_source = prefix + source  # place of the source that each target likes best
        place = place[:, prefix + sources - there :]
        into_target = into_source.scatter(1, stay_back, place)  # place of each target, wherever it went itself
        join = torch.cat((split.source[go], split.target[go_back]), 1)
        into = torch.cat((into_target.gather(1, target.gather(1, go)), into_source.gather(1, go_back)), 1)
        return arrange(tokens, keep, join, into, weight=attended * tokens.size)

    def _score(self, view: View, source: Tensor, target: Tensor, attended: Tensor) -> Tensor:
        """The product of the criteria for all pairs, [B,S,T]. Constant factors are left out: they change no rank."""
        score = attended.new_ones(())
        if self.tau_sim:
            cos = cosines(view.metric("tokens"), source, target)
            score = ((cos + 1) / 2).clamp(min=0) ** (1 / self.tau_sim)
        for tau, value in ((self.tau_info, attended), (self.tau_size, view.tokens.size)):
            if tau:
                small = (1 / value) ** (1 / tau)
                score = score * small[:, source].unsqueeze(2) * small[:, target].unsqueeze(1)
        return score.expand(attended.shape[0], len(source), len(target))
