"""EViT: keep the tokens that the class token looks at, fuse the others into one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import torch

from ..joining import arrange
from ..tokens import Move
from .base import Placed, View


@dataclass(frozen=True, repr=False)
class EViT(Placed):
    """Not All Patches Are What You Need (ICLR 2022). In three layers the ⌈keep · patches⌉ that the class token attends to
    most stay; of the others, `fuse` makes one token, Σ attention · x, which is like any other from then on.

    `layers`, from 1; None: after each quarter of the depth."""

    keep: float
    fuse: bool = True
    prop_attn: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("keep", 0.0, 1.0)
        self._check_flag("fuse")

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(1 - strength)

    def __call__(self, view: View) -> Move | None:
        patches, prefix = view.patches, view.prefix
        left = max(math.ceil(self.keep * patches), 1)
        if not self.acts(view.layer, view.depth) or left >= patches:
            return None
        attention = view.class_attention().mean(1)[:, prefix:]  # [B,patches]
        order = attention.argsort(dim=1, descending=True, stable=True) + prefix
        keep, gone = order[:, :left].sort(dim=1).values, order[:, left:]
        first = view.tokens.index[:prefix].expand(order.shape[0], -1)
        if not self.fuse:
            return arrange(view.tokens, torch.cat((first, keep), 1))
        # The first of those that go gives its place to all of them.
        weight = torch.ones_like(view.tokens.size).scatter(1, gone, attention.gather(1, gone - prefix))
        others = gone[:, 1:]
        into = torch.full_like(others, prefix + left)
        return arrange(view.tokens, torch.cat((first, keep, gone[:, :1]), 1), others, into, weight=weight, blend="sum")
