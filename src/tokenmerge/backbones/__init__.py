"""Backbones: one file per family of hosts, one line here, one row in the contract table of the tests."""

from __future__ import annotations

from torch import nn

from .base import Backbone, Unsupported
from .hf import HuggingFace
from .timm_eva import TimmEva
from .timm_vit import TimmViT
from .torchvision_vit import TorchvisionViT

__all__ = ["BACKBONES", "Backbone", "Unsupported", "find_backbone"]

BACKBONES: tuple[Backbone, ...] = (TimmViT(), TimmEva(), HuggingFace(), TorchvisionViT())


def find_backbone(model: nn.Module) -> Backbone:
    """The family that knows this model, checked; Unsupported with the reason otherwise."""
    for backbone in BACKBONES:
        if backbone.matches(model):
            backbone.check(model)
            return backbone
    families = ", ".join(backbone.name for backbone in BACKBONES)
    inner = [
        name.replace(".module", "")
        for name, module in model.named_modules()
        if name and any(backbone.matches(module) for backbone in BACKBONES)
    ]
    advice = f"It contains one at .{inner[0]}: apply there" if inner else "No part of it is one of these either"
    raise Unsupported(
        f"{type(model).__name__} is not supported; supported families: {families}. Merging needs plain blocks: attention of "
        f"all tokens of one sequence to each other, then an MLP. {advice}"
    )
