"""EViT: keep the tokens with the highest CLS attention, fuse the others into one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import torch

from ..core.matching import View
from ..core.tokens import Decision, assign
from .base import SomeLayers, register


@register
@dataclass(frozen=True, repr=False)
class EViT(SomeLayers):
    """Not All Patches Are What You Need (ICLR 2022). In three layers the ⌈keep · patches⌉ with the highest CLS attention are
    kept. `fuse` makes one token of the others, Σ attention · x, which is a token like any other from then on.

    `layers`, from 1; None: after each quarter of the depth."""

    summary = "keeps the tokens with high CLS attention, fuses the others into one"
    paper = "ICLR 2022"

    keep: float
    fuse: bool = True
    prop_attn: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("keep", 0.0, 1.0)
        self._check_flag("fuse")

    @property
    def drops_tokens(self) -> bool:
        return not self.fuse

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(1 - strength)

    def __call__(self, view: View) -> Decision | None:
        patches = view.num_patches
        prefix = view.prefix
        left = max(math.ceil(self.keep * patches), 1)
        if left >= patches:
            return None
        attention = view.cls_attention().mean(1)[:, prefix:]  # [B,patches]
        order = attention.argsort(dim=1, descending=True, stable=True) + prefix
        kept = order[:, :left].sort(dim=1).values
        rest = order[:, left:]
        if not self.fuse:
            return assign(view.tokens, view.keep(kept))
        # All of the rest join the first of them.
        weight = torch.ones_like(view.tokens.size).scatter(1, rest, attention.gather(1, rest - prefix))
        others = rest[:, 1:]
        into = torch.full_like(others, prefix + left)
        return assign(view.tokens, view.keep(kept, rest[:, :1]), others, into, weight=weight, blend="sum")
