"""MCTF: similar, little attended and small tokens merge, before the values of the same block are computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ..core.matching import Pairs, View, cosines, split_alternate
from ..core.schedule import r_for_strength
from ..core.tokens import Decision, assign
from .base import Rule, SomeLayers, Stage, register

MIN_TOKENS = 10  # tokens that always stay


@register
@dataclass(frozen=True, repr=False)
class MCTF(SomeLayers):
    """Multi-criteria Token Fusion (CVPR 2024): r tokens in every layer but the first. Half of them merge from one group of
    ToMe's split into the other, then half in the other direction. Pairs rank by similarity, by how little attention both
    receive, and by how small both are. Tokens of a group are weighted by size and by the attention that they receive. The
    attention map merges with the tokens ("one step ahead"), so that values, projection and MLP see fewer tokens.

    `r`: a number, a list with one number per layer, or a fraction of the patches below 1. `layers`, from 1; None: from the
    second on. `tau_sim`, `tau_info`, `tau_size`: each criterion enters to the power 1/τ; 0 leaves it out."""

    summary = "merges similar, little attended and small tokens, before the values are computed"
    paper = "CVPR 2024"

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

    def scaled(self, fraction: float, depth: int) -> Self:
        if isinstance(self.r, float) and self.r < 1:
            return replace(self, r=fraction * self.r)
        r = self.r if isinstance(self.r, Sequence) else (int(self.r),) * depth
        return replace(self, r=tuple(round(fraction * one) for one in r))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls((0, *r_for_strength(strength, depth, tokens)[: depth - 1]))

    def stage(self, layer: int, depth: int) -> Stage:
        return "values"

    def rule(self, layer: int, depth: int) -> Rule | None:
        return super().rule(layer, depth) if self._r_of(layer) > 0 else None

    def default_layers(self, depth: int) -> Collection[int]:
        return range(2, depth + 1)

    def _r_of(self, layer: int) -> float:
        return self.r[layer - 1] if isinstance(self.r, Sequence) else self.r

    def __call__(self, view: View) -> Decision | None:
        tokens = view.tokens
        prefix = view.prefix
        n = tokens.size.shape[1]
        r = self._r_of(view.layer)
        r = min(int(view.num_patches * r) if r < 1 else int(r), n - MIN_TOKENS, view.num_patches // 2)
        if view.map is None or r <= 0:
            return None
        split = split_alternate(tokens, prefix)
        attended = view.map.mean((1, 2)).clamp(min=1e-12)  # [B,N]: by all heads and tokens
        score = self._score(view, split.source, split.target, attended)  # [B,S,T]
        best, target = score.max(2)
        if view.ledger is not None:
            view.record(Pairs(split, target, best), split.compared(score.shape[0]) * tokens.x.shape[-1])

        # Forward: the best half of the sources merge into their targets.
        forward = r // 2
        sources = len(split.source)
        order = best.argsort(dim=1, descending=True, stable=True)
        stay = order[:, forward:].sort(dim=1).values
        join = order[:, :forward]
        # Backward: targets merge into the sources that stayed.
        backward = r - forward
        best, source = score.gather(1, stay.unsqueeze(2).expand(-1, -1, score.shape[2])).max(1)  # [B,T]
        order = best.argsort(dim=1, descending=True, stable=True)
        join_back = order[:, :backward]
        stay_back = order[:, backward:]

        b = score.shape[0]
        keep = view.keep(split.source[stay], split.target[stay_back])
        position = torch.arange(keep.shape[1], device=keep.device).expand(b, -1)[:, prefix + sources - forward :]
        into_source = prefix + source  # new position of the source that each target is most similar to
        into_target = into_source.scatter(1, stay_back, position)  # new position of each target, wherever it merged itself
        joining = torch.cat((split.source[join], split.target[join_back]), 1)
        into = torch.cat((into_target.gather(1, target.gather(1, join)), into_source.gather(1, join_back)), 1)
        return assign(tokens, keep, joining, into, weight=attended * tokens.size)

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
