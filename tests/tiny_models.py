"""Tiny models of every library for tests, in one place: depth 4, width 32, 25 patches of 8 × 8 pixels by default."""

from __future__ import annotations

from typing import Any

import timm
import torch
from open_clip.transformer import VisionTransformer as OpenClipViT
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionViT
from transformers import Siglip2VisionModel, ViTMAEModel
from transformers.models.beit.modeling_beit import BeitRelativePositionBias
from transformers.models.data2vec.modeling_data2vec_vision import Data2VecVisionRelativePositionBias

from tokenmerge.backbones.hf_library import as_patches
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
AUDIO: dict[str, Any] = dict(max_length=40, num_mel_bins=40, frequency_stride=8, time_stride=8)
ROPE: dict[str, Any] = dict(pos_embed_rescale=None)  # in training, DINOv3 rescales its positions at random
POSE: dict[str, Any] = dict(image_size=(40, 48), patch_size=(8, 8))
DETECTION: dict[str, Any] = dict(image_size=[40, 40], num_detection_tokens=3)
STEM: dict[str, Any] = dict(img_size=80, embed_dim=32, depth=DEPTH, num_heads=2, num_classes=CLASSES)  # patches of 16


# transformers keeps these for good. Made in inference mode, they could not be used in training, merged or not.
for bias in (BeitRelativePositionBias, Data2VecVisionRelativePositionBias):
    bias.generate_relative_position_index((5, 5))


def vit(**options: Any) -> VisionTransformer:
    return VisionTransformer(**(TIMM | options))


def distilled(**options: Any) -> nn.Module:
    return VisionTransformerDistilled(**(TIMM | options))


def eva(**options: Any) -> nn.Module:
    return Eva(**(TIMM | dict(use_rot_pos_emb=True, global_pool="token") | options))


def naflex(**options: Any) -> Any:
    base: dict[str, Any] = dict(
        patch_size=8, embed_dim=32, depth=DEPTH, num_heads=2, pos_embed_grid_size=(5, 5), class_token=False
    )
    return NaFlexVit(NaFlexVitCfg(**(base | options)), num_classes=CLASSES, img_size=40)


def beit(**options: Any) -> nn.Module:
    return Beit(**(TIMM | options))


SCALES: dict[str, bool] = dict(scale_heads=True, scale_attn_inner=True, scale_attn=True, scale_fc=True)


def open_clip_vit(**options: Any) -> Any:
    base = dict(image_size=40, patch_size=8, width=32, layers=DEPTH, heads=2, mlp_ratio=4.0, output_dim=16)
    return OpenClipViT(**(base | options))


def open_clip_lnd() -> nn.Module:
    """The layout of older releases: tokens first, then images."""
    model = open_clip_vit()
    model.transformer.batch_first = False
    for block in model.transformer.resblocks:
        block.attn.batch_first = False
    return model


def timm_named(name: str) -> nn.Module:
    """An architecture of timm's, made small."""
    return timm.create_model(name, embed_dim=64, depth=DEPTH, num_heads=2, num_classes=CLASSES, img_size=80)


def lvvit(aux: bool = False) -> nn.Module:
    return (LVViTWithAux if aux else LVViT)(skip_lam=2.0, **STEM)


def t2t() -> nn.Module:
    return T2TViT(**STEM)


def hugging_face(model: Any, config: Any, **options: Any) -> nn.Module:
    return model(config(**(HF | options), num_labels=CLASSES))


class OrderedViTMAE(ViTMAEModel):
    """With mask_ratio 0 the model drops no patch, but shuffles them unless it is given `noise`."""

    def forward(self, pixel_values: Tensor, **options: Any) -> Any:  # type: ignore[override]
        noise = torch.arange(25.0).expand(len(pixel_values), -1)
        return super().forward(pixel_values, noise=noise, **options)


class Siglip2OfImages(Siglip2VisionModel):
    """Takes images, too, as patches without padding."""

    def forward(self, pixel_values: Tensor, *masks: Any, **options: Any) -> Any:  # type: ignore[override]
        if pixel_values.ndim == 4:
            made: dict[str, Any] = dict(as_patches(pixel_values, self.config.patch_size))
            if pixel_values.is_meta:
                made["pixel_attention_mask"] = None
            return super().forward(**made, **options)
        return super().forward(pixel_values, *masks, **options)


def hugging_face_tower(model: Any, config: Any) -> nn.Module:
    """A model whose config has one for the vision tower inside."""
    return model(config(vision_config=HF, num_labels=CLASSES))


def torchvision_vit(**options: Any) -> nn.Module:
    base = dict(image_size=40, patch_size=8, num_layers=DEPTH, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=CLASSES)
    return TorchvisionViT(**(base | options))
