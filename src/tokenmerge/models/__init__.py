"""Backbones of the paper that timm does not have. Importing this module registers them: `timm.create_model("lvvit_s")`."""

from __future__ import annotations

from .lvvit import LVViT, LVViTWithAux, lvvit_m, lvvit_s, lvvit_t
from .mae import mae_vit_base_patch16, mae_vit_huge_patch14, mae_vit_large_patch16
from .t2t import T2TViT, t2t_vit_t_14, t2t_vit_t_19, t2t_vit_t_24

__all__ = [
    "LVViT",
    "LVViTWithAux",
    "T2TViT",
    "lvvit_m",
    "lvvit_s",
    "lvvit_t",
    "mae_vit_base_patch16",
    "mae_vit_huge_patch14",
    "mae_vit_large_patch16",
    "t2t_vit_t_14",
    "t2t_vit_t_19",
    "t2t_vit_t_24",
]
