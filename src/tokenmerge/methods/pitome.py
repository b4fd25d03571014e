"""PiToMe: tokens in crowds have high energy and merge, tokens that are alone are protected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn import functional as F

from ..joining import arrange, join_top
from ..matching import Pairs, Split, cosines
from ..tokens import Move
from .base import Method, View


@dataclass(frozen=True, repr=False)
class PiToMe(Method):
    """Protect Informative Tokens before Merging (NeurIPS 2024). Of the patches a share `keep` stays in every layer. The
    energy of a patch is the mean over all patches of ELU(cos − margin), its margin falling from `margin` in the first layer
    towards 0. By energy, patches go in turn to two groups; in the first half of the depth, the r most similar pairs of all
    merge; from then on, those of the 2r patches with the highest energy, and the others are protected."""

    keep: float
    margin: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("keep", 0.5, 1.0)
        self._check_range("margin", -1.0, 1.0)

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(1 - strength / 2)

    def __call__(self, view: View) -> Move | None:
        tokens, prefix, patches = view.tokens, view.prefix, view.patches
        r = min(math.floor(patches - patches * self.keep), patches // 2)
        if r == 0:
            return None
        every = torch.arange(prefix, prefix + patches, device=tokens.size.device)
        alike = cosines(view.metric("keys"), every, every)  # [B,patches,patches]
        view.spend(patches * patches * view.k.shape[-1])
        margin = self.margin * (1 - (view.layer - 1) / view.depth)
        order = F.elu(alike - margin).mean(2).argsort(dim=1, descending=True, stable=True)
        late = view.layer > math.ceil(view.depth / 2)
        crowd = order[:, : 2 * r] if late else order
        source, target = crowd[:, ::2], crowd[:, 1::2]
        score, best = (
            alike.gather(1, source.unsqueeze(2).expand(-1, -1, patches))
            .gather(2, target.unsqueeze(1).expand(-1, source.shape[1], -1))
            .max(2)
        )
        pairs = Pairs(Split(source + prefix, target + prefix), best, score.clamp(max=1))
        if view.ledger is not None:
            view.ledger.pairs = pairs
        if not late:
            return join_top(tokens, prefix, pairs, r)
        first, alone = tokens.index[:prefix].expand(order.shape[0], -1), order[:, 2 * r :] + prefix
        keep = torch.cat((first, alone, target + prefix), 1)
        return arrange(tokens, keep, source + prefix, best + (keep.shape[1] - r))
