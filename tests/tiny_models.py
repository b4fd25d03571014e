"""Tiny models of every library for tests, in one place: depth 4, width 32, 25 patches of 8 × 8 pixels by default."""

from __future__ import annotations

from typing import Any

import timm
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionViT

from tokenmerge.models import LVViT, LVViTWithAux, T2TViT

DEPTH = 4
CLASSES = 7
TIMM: dict[str, Any] = dict(img_size=40, patch_size=8, embed_dim=32, depth=DEPTH, num_heads=2, num_classes=CLASSES)
HF: dict[str, Any] = dict(
    image_size=40,
    patch_size=8,
    hidden_size=32,
    num_hidden_layers=DEPTH,
    num_attention_heads=2,
    intermediate_size=64,
)
STEM: dict[str, Any] = dict(img_size=80, embed_dim=32, depth=DEPTH, num_heads=2, num_classes=CLASSES)  # patches of 16


def vit(**options: Any) -> VisionTransformer:
    return VisionTransformer(**(TIMM | options))


def distilled(**options: Any) -> nn.Module:
    return VisionTransformerDistilled(**(TIMM | options))


def eva(**options: Any) -> nn.Module:
    return Eva(**(TIMM | dict(use_rot_pos_emb=True, global_pool="token") | options))


def timm_named(name: str) -> nn.Module:
    """An architecture of timm's, made small."""
    return timm.create_model(name, embed_dim=64, depth=DEPTH, num_heads=2, num_classes=CLASSES, img_size=80)


def lvvit(aux: bool = False) -> nn.Module:
    return (LVViTWithAux if aux else LVViT)(skip_lam=2.0, **STEM)


def t2t() -> nn.Module:
    return T2TViT(**STEM)


def hugging_face(model: Any, config: Any, **options: Any) -> nn.Module:
    return model(config(**(HF | options), num_labels=CLASSES))


def hugging_face_tower(model: Any, config: Any) -> nn.Module:
    """A model whose config has one for the vision tower inside."""
    return model(config(vision_config=HF, num_labels=CLASSES))


def torchvision_vit(**options: Any) -> nn.Module:
    base = dict(image_size=40, patch_size=8, num_layers=DEPTH, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=CLASSES)
    return TorchvisionViT(**(base | options))
