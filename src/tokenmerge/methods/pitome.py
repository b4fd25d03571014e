"""PiToMe: tokens in dense clusters have high energy and merge; outliers are protected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn import functional as F

from ..core.matching import Pairs, Split, View, assign_top, cosines
from ..core.tokens import Decision, assign
from .base import Method, register


@register
@dataclass(frozen=True, repr=False)
class PiToMe(Method):
    """Protect Informative Tokens before Merging (NeurIPS 2024). A fraction `keep` of the patches stays in every layer. The
    energy of a patch is the mean over all patches of ELU(cos − margin); the margin falls from `margin` in the first layer
    towards 0. Patches, sorted by energy, go alternately to two groups. In the first half of the depth, the r most similar
    pairs of all merge. After that, those of the 2r patches with the highest energy merge, and the others are protected."""

    summary = "merges dense clusters, protects outliers"
    paper = "NeurIPS 2024"

    keep: float
    margin: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("keep", 0.5, 1.0)
        self._check_range("margin", -1.0, 1.0)

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(1 - strength / 2)

    def __call__(self, view: View) -> Decision | None:
        tokens = view.tokens
        prefix = view.prefix
        patches = view.num_patches
        r = min(math.floor(patches - patches * self.keep), patches // 2)
        if r == 0:
            return None
        every = torch.arange(prefix, prefix + patches, device=tokens.size.device)
        similarity = cosines(view.metric("keys"), every, every)  # [B,patches,patches]
        margin = self.margin * (1 - (view.layer - 1) / view.depth)
        order = F.elu(similarity - margin).mean(2).argsort(dim=1, descending=True, stable=True)
        late = view.layer > math.ceil(view.depth / 2)
        candidates = order[:, : 2 * r] if late else order
        source = candidates[:, ::2]
        target = candidates[:, 1::2]
        score, best = (
            similarity.gather(1, source.unsqueeze(2).expand(-1, -1, patches))
            .gather(2, target.unsqueeze(1).expand(-1, source.shape[1], -1))
            .max(2)
        )
        pairs = Pairs(Split(source + prefix, target + prefix), best, score.clamp(max=1))
        view.record(pairs, patches * patches * view.k.shape[-1])
        if not late:
            return assign_top(tokens, prefix, pairs, r)
        keep = view.keep(order[:, 2 * r :] + prefix, target + prefix)
        return assign(tokens, keep, source + prefix, best + (keep.shape[1] - r))
