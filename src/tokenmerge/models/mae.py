"""MAE fine-tuned (He et al., CVPR 2022): timm's ViT that pools the mean of its patches, in the layout of the official
files `mae_finetuned_vit_{base,large,huge}.pth`."""

from __future__ import annotations

from typing import Any

from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer

from .registry import build, config

_CONFIG = config(224 / 256, "patch_embed.proj", "cc-by-nc-4.0", "https://github.com/facebookresearch/mae")


def _build(name: str, pretrained: bool, **options: Any) -> VisionTransformer:
    return build(VisionTransformer, name, pretrained, _CONFIG, **({"global_pool": "avg"} | options))


@register_model
def mae_vit_base_patch16(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """86 M parameters."""
    return _build("mae_vit_base_patch16", pretrained, **({"embed_dim": 768, "depth": 12, "num_heads": 12} | options))


@register_model
def mae_vit_large_patch16(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """304 M parameters."""
    return _build("mae_vit_large_patch16", pretrained, **({"embed_dim": 1024, "depth": 24, "num_heads": 16} | options))


@register_model
def mae_vit_huge_patch14(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """632 M parameters."""
    shape = {"patch_size": 14, "embed_dim": 1280, "depth": 32, "num_heads": 16}
    return _build("mae_vit_huge_patch14", pretrained, **(shape | options))
