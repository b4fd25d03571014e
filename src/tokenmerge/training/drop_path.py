"""Stochastic depth for the time of a training run."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ..backbones.base import Backbone


class StochasticDepth:
    """Stochastic depth while a model trains, growing linearly from 0 to `rate`; its own is restored after it."""

    def __init__(self, backbone: Backbone, model: nn.Module, rate: float) -> None:
        from timm.layers import DropPath, calculate_drop_path_rates

        blocks: Any = backbone.blocks(model)
        self.own = [(block, name, getattr(block, name)) for block in blocks for name in backbone.drop_path_names]
        if rate and not self.own:
            warnings.warn(f"this {type(model).__name__} has no stochastic depth: it trains without drop path", stacklevel=4)
        for block, own in zip(blocks, calculate_drop_path_rates(rate, len(blocks)), strict=True):
            for name in backbone.drop_path_names:
                setattr(block, name, DropPath(own) if own else nn.Identity())

    def restore(self) -> None:
        for block, name, module in self.own:
            setattr(block, name, module)
