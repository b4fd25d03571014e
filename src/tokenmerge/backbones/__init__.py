"""Backbones: one file per family of models, one row in the contract table of the tests. Files register themselves."""

from __future__ import annotations

import sys

from torch import nn

from ..utils.registry import import_submodules
from .base import BACKBONES, Backbone, Preprocessing, Unsupported, register

__all__ = [
    "BACKBONES",
    "Backbone",
    "Preprocessing",
    "Unsupported",
    "find_backbone",
    "match_backbone",
    "model_name_forms",
    "register",
]

import_submodules(sys.modules[__name__])


def match_backbone(model: nn.Module) -> Backbone | None:
    """The family that knows the model's class, whether or not this model can be merged."""
    return next((backbone for backbone in BACKBONES if backbone.matches(model)), None)


def find_backbone(model: nn.Module) -> Backbone:
    """The family that knows this model, checked; Unsupported with the reason otherwise."""
    backbone = match_backbone(model)
    if backbone is not None:
        backbone.check(model)
        return backbone
    families = ", ".join(backbone.name for backbone in BACKBONES)
    inner = [
        name.replace(".module", "") for name, module in model.named_modules() if name and match_backbone(module) is not None
    ]
    advice = f"It contains one at .{inner[0]}: apply there" if inner else "No part of it is one of these either"
    raise Unsupported(
        f"{type(model).__name__} is not supported; supported families: {families}. Merging needs plain blocks: attention of "
        f"all tokens of one sequence to each other, then an MLP. {advice}"
    )


def model_name_forms() -> list[str]:
    """How models of each library are named in `load_model` and on the command line."""
    return list(dict.fromkeys(backbone.name_form for backbone in BACKBONES))
