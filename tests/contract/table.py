"""The contract table: one row per method, one row per form of host. Every row of one meets every row of the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import timm
import torch
import transformers as hf
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionViT

import tokenmerge as tm
from tokenmerge.models import LVViT, LVViTWithAux, T2TViT

DEPTH = 4

# One row a method.
METHODS: dict[str, tm.Method] = {
    "atm-mean": tm.ATM(thresholds=[0.5, 0.4, 0.3, 0.2]),
    "atm-each": tm.ATM(thresholds=[0.5, 0.4, 0.3, 0.2], batch="each"),
    "tome": tm.ToMe(5),
    "topr": tm.TopR(2, "increasing"),
    "constant": tm.ConstantThreshold(0.4),
    "none": tm.NoMerge(),
    "evit": tm.EViT(0.7, layers=[2, 3]),
    "mctf": tm.MCTF(5),
    "zero-tprune": tm.ZeroTPrune(0.7),
    "ats": tm.ATS(21, layers=[2, 3]),
    "tofu": tm.ToFu(4),
    "ppt": tm.PPT(5, threshold=2e-4),
    "diffrate": tm.DiffRate([24, 20, 14, 11], [21, 17, 12, 9]),
    "pitome": tm.PiToMe(0.8),
    "random": tm.RandomMerge(4),
}
# Other settings of the same methods; they meet a few hosts only.
VARIANTS: dict[str, tm.Method] = {
    "atm-tokens": tm.ATM(thresholds=[0.6, 0.6, 0.5, 0.5], metric="tokens", batch="each"),
    "atm-no-prop": tm.ATM(thresholds=[0.5, 0.4, 0.3, 0.2], batch="each", prop_attn=False),
    "atm-weighed": tm.ATM(thresholds=[0.5, 0.3, 0.1, 0.0], batch="each", size_weight=0.5, split_layer=4),
    "atm-attended": tm.ATM(thresholds=[0.5, 0.3, 0.1, 0.0], batch="each", metric="tokens", attention_weight=0.5),
    "atm-counts": tm.ATM(counts=[5, 0, 4, 3]),
    "evit-drop": tm.EViT(0.6, fuse=False),
    "mctf-share": tm.MCTF(0.3, layers=[1, 2, 4]),
    "ats-mean": tm.ATS(12, layers=[1, 4], batch="mean"),
    "ats-prop": tm.ATS(21, layers=[1, 2], prop_attn=True),
    "ppt-prune": tm.PPT(5, threshold=0.0),
}
VARIED_HOSTS = ("cls", "registers", "mae-avg", "siglip-map", "eva02", "hf-vit", "torchvision")
PER_IMAGE = ("atm-each", "atm-tokens", "atm-no-prop", "atm-weighed", "atm-attended", "ats", "ats-prop")
DROPS = ("ats", "ats-mean", "ats-prop", "evit-drop", "zero-tprune", "tofu", "ppt", "ppt-prune", "diffrate")
SOFT = ("diffrate",)  # sizes that are no counts


@dataclass(frozen=True)
class Host:
    build: Callable[[], nn.Module]
    image: tuple[int, int, int] = (3, 40, 40)
    prefix: int = 1
    free: bool = True  # whether the head reads only the prefix
    library: str = "timm"  # whose interface it has


def _vit(**options: object) -> Callable[[], nn.Module]:
    base = dict(img_size=40, patch_size=8, embed_dim=32, depth=DEPTH, num_heads=2, num_classes=7)
    return lambda: VisionTransformer(**(base | options))


def _eva(**options: object) -> Callable[[], nn.Module]:
    base = dict(
        img_size=40,
        patch_size=8,
        embed_dim=32,
        depth=DEPTH,
        num_heads=2,
        num_classes=7,
        use_rot_pos_emb=True,
        global_pool="token",
    )
    return lambda: Eva(**(base | options))


_HF = dict(
    image_size=40,
    patch_size=8,
    hidden_size=32,
    num_hidden_layers=DEPTH,
    num_attention_heads=2,
    intermediate_size=64,
)


def _hf(model: type, config: type, **options: object) -> Callable[[], nn.Module]:
    return lambda: model(config(**(_HF | options), num_labels=7))


def _hf_tower(model: type, whole: type, part: str) -> Callable[[], nn.Module]:
    """A model whose configuration has one for the vision tower inside."""
    return lambda: model(whole(**{part: _HF}, num_labels=7))


_SMALL = dict(img_size=80, embed_dim=32, depth=DEPTH, num_heads=2, num_classes=7)

HOSTS: dict[str, Host] = {
    "cls": Host(_vit()),
    "distilled": Host(
        lambda: VisionTransformerDistilled(img_size=40, patch_size=8, embed_dim=32, depth=DEPTH, num_heads=2, num_classes=7),
        prefix=2,
    ),
    "registers": Host(_vit(reg_tokens=4), prefix=5),
    "registers-alone": Host(_vit(class_token=False, reg_tokens=4, global_pool="avg"), prefix=4, free=False),
    "no-class-avg": Host(_vit(class_token=False, global_pool="avg"), prefix=0, free=False),
    "mae-avg": Host(_vit(global_pool="avg"), free=False),
    "avgmax": Host(_vit(global_pool="avgmax"), free=False),
    "siglip-map": Host(_vit(class_token=False, global_pool="map"), prefix=0, free=False),
    "features": Host(_vit(num_classes=0)),
    "unpooled": Host(_vit(num_classes=0, global_pool=""), free=False),
    "layer-scale-qk-norm": Host(_vit(init_values=0.3, qk_norm=True)),
    "inner-norms": Host(_vit(scale_attn_norm=True, scale_mlp_norm=True)),
    "no-embed-class": Host(_vit(no_embed_class=True, init_values=0.3)),
    "clip-pre-norm": Host(_vit(pre_norm=True, norm_layer=nn.LayerNorm)),
    "dynamic-non-square": Host(_vit(dynamic_img_size=True), image=(3, 24, 56)),
    "non-square": Host(_vit(img_size=(24, 56)), image=(3, 24, 56)),
    "lvvit": Host(lambda: LVViT(skip_lam=2.0, **_SMALL), image=(3, 80, 80)),
    "lvvit-aux": Host(lambda: LVViTWithAux(skip_lam=2.0, **_SMALL), image=(3, 80, 80), free=False),
    "t2t": Host(lambda: T2TViT(**_SMALL), image=(3, 80, 80)),
    "eva02": Host(_eva(qkv_fused=False, swiglu_mlp=True, scale_mlp=True, init_values=0.3)),
    "eva-fused-avg": Host(_eva(global_pool="avg", use_abs_pos_emb=False), free=False),
    "eva-qk-norm-registers": Host(_eva(num_reg_tokens=3, qk_norm=True, attn_type="rope"), prefix=4),
    "dinov3": Host(
        lambda: timm.create_model(
            "vit_small_patch16_dinov3", embed_dim=64, depth=DEPTH, num_heads=2, num_classes=7, img_size=80
        ),
        image=(3, 80, 80),
        prefix=5,
        free=False,
    ),
    "eva-rope-mixed": Host(
        lambda: timm.create_model(
            "vit_small_patch16_rope_mixed_224", embed_dim=64, depth=DEPTH, num_heads=2, num_classes=7, img_size=80
        ),
        image=(3, 80, 80),
    ),
    **{
        name: replace(host, library="transformers")
        for name, host in {
            "hf-vit": Host(_hf(hf.ViTForImageClassification, hf.ViTConfig, attn_implementation="sdpa")),
            "hf-vit-eager": Host(_hf(hf.ViTForImageClassification, hf.ViTConfig, attn_implementation="eager")),
            "hf-vit-model": Host(_hf(hf.ViTModel, hf.ViTConfig), free=False),
            "hf-deit": Host(_hf(hf.DeiTForImageClassification, hf.DeiTConfig), prefix=2),
            "hf-deit-teacher": Host(_hf(hf.DeiTForImageClassificationWithTeacher, hf.DeiTConfig), prefix=2),
            "hf-dinov2": Host(_hf(hf.Dinov2ForImageClassification, hf.Dinov2Config, use_swiglu_ffn=True), free=False),
            "hf-dinov2-backbone": Host(_hf(hf.Dinov2Backbone, hf.Dinov2Config), free=False),
            "hf-dinov2-registers": Host(
                _hf(hf.Dinov2WithRegistersModel, hf.Dinov2WithRegistersConfig, num_register_tokens=3), prefix=4, free=False
            ),
            "hf-clip": Host(_hf(hf.CLIPVisionModelWithProjection, hf.CLIPVisionConfig), free=False),
            "hf-clip-classes": Host(_hf_tower(hf.CLIPForImageClassification, hf.CLIPConfig, "vision_config"), free=False),
            "hf-siglip": Host(_hf(hf.SiglipVisionModel, hf.SiglipVisionConfig), prefix=0, free=False),
            "hf-siglip-classes": Host(
                _hf_tower(hf.SiglipForImageClassification, hf.SiglipConfig, "vision_config"), prefix=0, free=False
            ),
        }.items()
    },
    "torchvision": Host(
        lambda: TorchvisionViT(
            image_size=40, patch_size=8, num_layers=DEPTH, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=7
        ),
        library="torchvision",
    ),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A small host whose tokens differ: with timm's initial weights all keys are alike, and thresholds mean nothing."""
    torch.manual_seed(seed)
    model = HOSTS[name].build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.6 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.1)
        if name.startswith(("lvvit", "t2t")):  # a random stem makes all patches alike
            for parameter in model.patch_embed.parameters():
                if parameter.ndim == 4:
                    parameter.normal_(std=(parameter[0].numel()) ** -0.5)
            model.pos_embed.normal_(std=1.0)
    return model


def batch(name: str, size: int = 3, seed: int = 1) -> torch.Tensor:
    """Images from plain to busy, so that adaptive methods keep different numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, *HOSTS[name].image, generator=generator)
    weight = torch.linspace(0.05, 2, max(size, 1))[:size].view(-1, 1, 1, 1)
    return x * weight + torch.randn(size, 3, 1, 1, generator=generator)


def answer(out: Any) -> Tensor:
    """Logits or features of whatever a host gives."""
    if isinstance(out, Tensor):
        return out
    for name in ("logits", "image_embeds", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    return out.feature_maps[-1]
