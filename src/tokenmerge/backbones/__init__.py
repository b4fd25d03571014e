"""Backbones: one file per family of models, one row in the contract table of the tests. Files register themselves."""

from __future__ import annotations

import sys

from torch import nn

from ..utils.registry import import_submodules
from .base import ADAPTERS, Backbone, ModelAdapter, Preprocessing, Unsupported, register

__all__ = [
    "ADAPTERS",
    "Backbone",
    "ModelAdapter",
    "Preprocessing",
    "Unsupported",
    "backbones",
    "find_backbone",
    "match_adapter",
    "model_name_forms",
    "register",
    "tower_of",
]

import_submodules(sys.modules[__name__])


def match_adapter(model: nn.Module) -> ModelAdapter | None:
    """The family that knows the model's class, whether or not this model can be merged."""
    return next((adapter for adapter in ADAPTERS if adapter.matches(model)), None)


def backbones() -> list[Backbone]:
    """The families whose blocks can be merged."""
    return [adapter for adapter in ADAPTERS if isinstance(adapter, Backbone)]


def tower_of(model: nn.Module) -> nn.Module:
    """The part of a model that `apply` changes: the vision tower of a larger model, or the model itself."""
    while (adapter := match_adapter(model)) is not None and (tower := adapter.tower(model)) is not model:
        model = tower
    return model


def find_backbone(model: nn.Module) -> Backbone:
    """The family that knows this model, checked; Unsupported with the reason otherwise."""
    adapter = match_adapter(model)
    if isinstance(adapter, Backbone):
        adapter.check(model)
        return adapter
    families = ", ".join(backbone.name for backbone in backbones())
    inner = [
        name.replace(".module", "") for name, module in model.named_modules() if name and match_adapter(module) is not None
    ]
    advice = (
        f"It contains one at .{inner[0]}: apply there"
        if inner
        else ("No part of it is one of these either: use a model that docs/supported_models.md lists")
    )
    raise Unsupported(
        f"{type(model).__name__} is not supported; supported families: {families}. Merging needs plain blocks: attention of "
        f"all tokens of one sequence to each other, then an MLP. {advice}"
    )


def model_name_forms() -> list[str]:
    """How models of each library are named in `load_model` and on the command line."""
    return list(dict.fromkeys(adapter.name_form for adapter in ADAPTERS if adapter.name_form))
