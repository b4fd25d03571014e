"""How our models enter timm's registry: their pretrained config, and how they are built."""

from __future__ import annotations

from typing import Any, TypeVar

from timm.models import build_model_with_cfg
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def config(crop: float, first_conv: str | None, licence: str, origin: str) -> dict[str, Any]:
    """ImageNet at 224 pixels, as all of them were trained; there are no weights to download."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "interpolation": "bicubic",
        "crop_pct": crop,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": first_conv,
        "classifier": "head",
        "license": licence,
        "origin_url": origin,
    }


def build(cls: type[Model], name: str, pretrained: bool, cfg: dict[str, Any], **options: Any) -> Model:
    options.pop("pretrained_cfg", None)
    options.pop("pretrained_cfg_overlay", None)
    model: Model = build_model_with_cfg(cls, name, pretrained, pretrained_cfg=cfg, **options)
    return model
