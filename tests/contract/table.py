"""The contract table: one row per method, one row per form of model. Every row of one meets every row of the other.

What a method does (whether it drops tokens, decides per image, has soft sizes) is declared by its class; a row needs nothing
but a config. What a model cannot do is a flag of its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor, nn

import tokenmerge as tm
from tests import dino_hub
from tests import tiny_models as tiny

# One row per method.
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
    "bat": tm.BAT(0.6, layers=[2, 3]),
    "random": tm.RandomMerge(4),
    "dynamicvit": tm.DynamicViT(0.7, layers=[2, 3]),
    "iared2": tm.IARED2(threshold=0.9, layers=[2, 3]),
    "evovit": tm.EvoViT(0.5),
    "avit": tm.AViT(gamma=2.0, beta=2.0),
}
# Other configs of the same methods; they meet a few models only.
VARIANTS: dict[str, tm.Method] = {
    "atm-tokens": tm.ATM(thresholds=[0.6, 0.6, 0.5, 0.5], metric="tokens", batch="each"),
    "atm-no-prop": tm.ATM(thresholds=[0.5, 0.4, 0.3, 0.2], batch="each", prop_attn=False),
    "atm-weighted": tm.ATM(thresholds=[0.5, 0.3, 0.1, 0.0], batch="each", size_weight=0.5, split_layer=4),
    "atm-attended": tm.ATM(thresholds=[0.5, 0.3, 0.1, 0.0], batch="each", metric="tokens", attention_weight=0.5),
    "atm-counts": tm.ATM(counts=[5, 0, 4, 3]),
    "evit-drop": tm.EViT(0.6, fuse=False),
    "mctf-share": tm.MCTF(0.3, layers=[1, 2, 4]),
    "ats-mean": tm.ATS(12, layers=[1, 4], batch="mean"),
    "ats-prop": tm.ATS(21, layers=[1, 2], prop_attn=True),
    "ppt-prune": tm.PPT(5, threshold=0.0),
}


@dataclass(frozen=True)
class Model:
    """One form of model."""

    build: Callable[[], nn.Module]
    image: tuple[int, ...] = (3, 40, 40)
    prefix: int = 1
    prefix_head: bool = True  # whether the head reads only the prefix
    cls: bool = True  # whether it has a CLS token
    cls_alone: bool = True  # whether a head on the prefix reads nothing but the CLS token
    classes: int = tiny.CLASSES  # 0: returns features
    library: str = "timm"  # whose interface it has
    empty_batch: bool = True  # models that reshape with −1 cannot run an empty batch, merged or not
    checkpointing: bool = True
    pickles: bool = True
    tokens_first: bool = False  # blocks take [N,B,C]
    whole_blocks: bool = False  # every block returns the whole sequence
    half_precision: bool = True
    varied: bool = False  # meets the variants, too


HuggingFace = partial(Model, library="transformers", empty_batch=False)

MODELS: dict[str, Model] = {
    "cls": Model(tiny.vit, varied=True),
    "distilled": Model(tiny.distilled, prefix=2, cls_alone=False),
    "registers": Model(partial(tiny.vit, reg_tokens=4), prefix=5, varied=True),
    "registers-alone": Model(
        partial(tiny.vit, class_token=False, reg_tokens=4, global_pool="avg"), prefix=4, prefix_head=False, cls=False
    ),
    "no-class-avg": Model(partial(tiny.vit, class_token=False, global_pool="avg"), prefix=0, prefix_head=False, cls=False),
    "mae-avg": Model(partial(tiny.vit, global_pool="avg"), prefix_head=False, varied=True),
    "avgmax": Model(partial(tiny.vit, global_pool="avgmax"), prefix_head=False),
    "siglip-map": Model(
        partial(tiny.vit, class_token=False, global_pool="map"), prefix=0, prefix_head=False, cls=False, varied=True
    ),
    "features": Model(partial(tiny.vit, num_classes=0), classes=0),
    "unpooled": Model(partial(tiny.vit, num_classes=0, global_pool=""), prefix_head=False, classes=0),
    "layer-scale-qk-norm": Model(partial(tiny.vit, init_values=0.3, qk_norm=True)),
    "inner-norms": Model(partial(tiny.vit, scale_attn_norm=True, scale_mlp_norm=True)),
    "no-embed-class": Model(partial(tiny.vit, no_embed_class=True, init_values=0.3)),
    "clip-pre-norm": Model(partial(tiny.vit, pre_norm=True, norm_layer=nn.LayerNorm)),
    "dynamic-non-square": Model(partial(tiny.vit, dynamic_img_size=True), image=(3, 24, 56), empty_batch=False),
    "non-square": Model(partial(tiny.vit, img_size=(24, 56)), image=(3, 24, 56)),
    "lvvit": Model(tiny.lvvit, image=(3, 80, 80)),
    "lvvit-aux": Model(partial(tiny.lvvit, aux=True), image=(3, 80, 80), prefix_head=False),
    "t2t": Model(tiny.t2t, image=(3, 80, 80), empty_batch=False),
    "eva02": Model(
        partial(tiny.eva, qkv_fused=False, swiglu_mlp=True, scale_mlp=True, init_values=0.3), empty_batch=False, varied=True
    ),
    "eva-fused-avg": Model(
        partial(tiny.eva, global_pool="avg", use_abs_pos_emb=False), prefix_head=False, empty_batch=False
    ),
    "eva-qk-norm-registers": Model(
        partial(tiny.eva, num_reg_tokens=3, qk_norm=True, attn_type="rope"), prefix=4, empty_batch=False
    ),
    "dinov3": Model(
        partial(tiny.timm_named, "vit_small_patch16_dinov3"),
        image=(3, 80, 80),
        prefix=5,
        prefix_head=False,
        empty_batch=False,
    ),
    "eva-rope-mixed": Model(
        partial(tiny.timm_named, "vit_small_patch16_rope_mixed_224"),
        image=(3, 80, 80),
        empty_batch=False,
        half_precision=False,  # timm's mixed RoPE multiplies float32 by half precision, merged or not
    ),
    "hf-vit": HuggingFace(
        partial(tiny.hugging_face, hf.ViTForImageClassification, hf.ViTConfig, attn_implementation="sdpa"), varied=True
    ),
    "hf-vit-eager": HuggingFace(
        partial(tiny.hugging_face, hf.ViTForImageClassification, hf.ViTConfig, attn_implementation="eager")
    ),
    "hf-vit-model": HuggingFace(partial(tiny.hugging_face, hf.ViTModel, hf.ViTConfig), prefix_head=False, classes=0),
    "hf-deit": HuggingFace(partial(tiny.hugging_face, hf.DeiTForImageClassification, hf.DeiTConfig), prefix=2),
    "hf-deit-teacher": HuggingFace(
        partial(tiny.hugging_face, hf.DeiTForImageClassificationWithTeacher, hf.DeiTConfig), prefix=2, cls_alone=False
    ),
    "hf-dinov2": HuggingFace(
        partial(tiny.hugging_face, hf.Dinov2ForImageClassification, hf.Dinov2Config, use_swiglu_ffn=True), prefix_head=False
    ),
    "hf-dinov2-backbone": HuggingFace(
        partial(tiny.hugging_face, hf.Dinov2Backbone, hf.Dinov2Config),
        prefix_head=False,
        pickles=False,  # transformers' own hooks
        whole_blocks=True,
        classes=0,
    ),
    "hf-dinov2-registers": HuggingFace(
        partial(tiny.hugging_face, hf.Dinov2WithRegistersModel, hf.Dinov2WithRegistersConfig, num_register_tokens=3),
        prefix=4,
        prefix_head=False,
        classes=0,
    ),
    "hf-clip": HuggingFace(
        partial(tiny.hugging_face, hf.CLIPVisionModelWithProjection, hf.CLIPVisionConfig), prefix_head=False, classes=0
    ),
    "hf-clip-classes": HuggingFace(
        partial(tiny.hugging_face_tower, hf.CLIPForImageClassification, hf.CLIPConfig), prefix_head=False
    ),
    "hf-siglip": HuggingFace(
        partial(tiny.hugging_face, hf.SiglipVisionModel, hf.SiglipVisionConfig),
        prefix=0,
        prefix_head=False,
        cls=False,
        classes=0,
    ),
    "hf-siglip-classes": HuggingFace(
        partial(tiny.hugging_face_tower, hf.SiglipForImageClassification, hf.SiglipConfig),
        prefix=0,
        prefix_head=False,
        cls=False,
    ),
    "hf-msn": HuggingFace(partial(tiny.hugging_face, hf.ViTMSNForImageClassification, hf.ViTMSNConfig)),
    "hf-mae": HuggingFace(
        partial(tiny.hugging_face, tiny.OrderedViTMAE, hf.ViTMAEConfig, mask_ratio=0.0), prefix_head=False, classes=0
    ),
    "hf-ijepa": HuggingFace(
        partial(tiny.hugging_face, hf.IJepaForImageClassification, hf.IJepaConfig), prefix=0, prefix_head=False, cls=False
    ),
    "hf-ast": HuggingFace(
        partial(tiny.hugging_face, hf.ASTForAudioClassification, hf.ASTConfig, **tiny.AUDIO), image=(40, 40), prefix=2
    ),
    "hf-vitpose": HuggingFace(
        partial(tiny.hugging_face, hf.VitPoseBackbone, hf.VitPoseBackboneConfig, **tiny.POSE),
        image=(3, 40, 48),
        prefix=0,
        prefix_head=False,
        cls=False,
        pickles=False,  # transformers' own hooks
        whole_blocks=True,
        classes=0,
    ),
    "hf-yolos": HuggingFace(
        partial(tiny.hugging_face, hf.YolosForObjectDetection, hf.YolosConfig, **tiny.DETECTION),
        prefix=4,
        prefix_head=False,
        classes=0,
    ),
    "hf-videomae": HuggingFace(
        partial(tiny.hugging_face, hf.VideoMAEForVideoClassification, hf.VideoMAEConfig, num_frames=2),
        image=(2, 3, 40, 40),
        prefix=0,
        prefix_head=False,
        cls=False,
    ),
    "hf-dinov3": HuggingFace(
        partial(
            tiny.hugging_face, hf.DINOv3ViTModel, hf.DINOv3ViTConfig, use_gated_mlp=True, num_register_tokens=4, **tiny.ROPE
        ),
        prefix=5,
        prefix_head=False,
        varied=True,
        classes=0,
    ),
    "hf-dinov3-backbone": HuggingFace(
        partial(tiny.hugging_face, hf.DINOv3ViTBackbone, hf.DINOv3ViTConfig, num_register_tokens=2, **tiny.ROPE),
        prefix=3,
        prefix_head=False,
        pickles=False,  # transformers' own hooks
        whole_blocks=True,
        classes=0,
    ),
    "hf-beit": HuggingFace(
        partial(
            tiny.hugging_face,
            hf.BeitForImageClassification,
            hf.BeitConfig,
            use_relative_position_bias=True,
            drop_path_rate=0.0,
        ),
        prefix_head=False,
        varied=True,
    ),
    "hf-beit-shared": HuggingFace(
        partial(tiny.hugging_face, hf.BeitModel, hf.BeitConfig, use_shared_relative_position_bias=True, drop_path_rate=0.0),
        prefix_head=False,
        classes=0,
    ),
    "hf-data2vec": HuggingFace(
        partial(
            tiny.hugging_face,
            hf.Data2VecVisionForImageClassification,
            hf.Data2VecVisionConfig,
            use_relative_position_bias=True,
            use_shared_relative_position_bias=True,
            drop_path_rate=0.0,
        ),
        prefix_head=False,
    ),
    "hf-blip": HuggingFace(
        partial(tiny.hugging_face, hf.BlipVisionModel, hf.BlipVisionConfig),
        prefix_head=False,
        classes=0,
    ),
    "hf-blip2": HuggingFace(
        partial(tiny.hugging_face, hf.Blip2VisionModel, hf.Blip2VisionConfig),
        prefix_head=False,
        classes=0,
    ),
    "post-norm": Model(partial(tiny.vit, block_fn=ResPostBlock, init_values=0.5)),
    "eva-post-norm": Model(partial(tiny.eva, use_post_norm=True, qkv_fused=False), empty_batch=False),
    "timm-beit": Model(partial(tiny.beit, use_rel_pos_bias=True), prefix_head=False, empty_batch=False, varied=True),
    "timm-beit-shared": Model(
        partial(tiny.beit, use_shared_rel_pos_bias=True, use_rel_pos_bias=True, init_values=0.3, global_pool="token"),
        empty_batch=False,
    ),
    "naflex-map": Model(
        partial(tiny.naflex, global_pool="map"), prefix=0, prefix_head=False, cls=False, empty_batch=False, varied=True
    ),
    "naflex-token": Model(
        partial(tiny.naflex, global_pool="token", class_token=True, reg_tokens=2), prefix=3, empty_batch=False
    ),
    "naflex-rope": Model(
        partial(tiny.naflex, rope_type="axial", swiglu_mlp=True, class_token=True),
        prefix_head=False,
        empty_batch=False,
    ),
    "hf-siglip2": HuggingFace(
        partial(tiny.hugging_face, tiny.Siglip2OfImages, hf.Siglip2VisionConfig, num_patches=25),
        prefix=0,
        prefix_head=False,
        cls=False,
        classes=0,
    ),
    "open-clip": Model(tiny.open_clip_vit, library="open_clip", empty_batch=False, varied=True, classes=0),
    "open-clip-custom": Model(
        partial(tiny.open_clip_vit, ls_init_value=0.3, pool_type="avg", qk_norm=True, **tiny.SCALES),
        library="open_clip",
        prefix_head=False,
        empty_batch=False,
        classes=0,
    ),
    "open-clip-attn-pool": Model(
        partial(tiny.open_clip_vit, attentional_pool=True, attn_pooler_heads=2, attn_pooler_queries=4, output_tokens=True),
        library="open_clip",
        prefix_head=False,
        empty_batch=False,
        classes=0,
    ),
    "open-clip-lnd": Model(tiny.open_clip_lnd, library="open_clip", empty_batch=False, tokens_first=True, classes=0),
    "hub-dinov2": Model(
        dino_hub.dinov2,
        library="torch.hub",
        checkpointing=False,
        empty_batch=False,
        varied=True,
        classes=0,
    ),
    "hub-dinov2-chunks": Model(
        partial(dino_hub.dinov2, chunks=2, registers=3, ffn=dino_hub.SwiGLUFFN),
        library="torch.hub",
        prefix=4,
        checkpointing=False,
        empty_batch=False,
        classes=0,
    ),
    "hub-dinov3": Model(dino_hub.dinov3, library="torch.hub", prefix=5, checkpointing=False, empty_batch=False, classes=0),
    "torchvision": Model(tiny.torchvision_vit, library="torchvision", checkpointing=False, varied=True),
}

CONFIGS = METHODS | VARIANTS


def refusal(model: str, method: str) -> str | None:
    """Why `apply` refuses this pair, if it does."""
    row = MODELS[model]
    if method == "avit" and not (row.cls and row.prefix_head and row.cls_alone):
        return "the head must read the CLS token alone"
    return "this model has none" if method == "iared2" and not row.cls else None


_MEETING = [(model, method) for model in MODELS for method in CONFIGS if method in METHODS or MODELS[model].varied]
PAIRS = [pair for pair in _MEETING if refusal(*pair) is None]
REFUSED_PAIRS = [pair for pair in _MEETING if refusal(*pair) is not None]
BATCH_INVARIANT_PAIRS = [(model, method) for model, method in PAIRS if CONFIGS[method].batch_invariant]


def build(name: str, seed: int = 0) -> nn.Module:
    """A small model whose tokens differ: with timm's initial weights all keys are similar, and thresholds mean nothing."""
    torch.manual_seed(seed)
    model = MODELS[name].build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.6 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.1)
        if name.startswith(("lvvit", "t2t")):  # a random stem makes all patches similar
            for parameter in model.patch_embed.parameters():
                if parameter.ndim == 4:
                    parameter.normal_(std=(parameter[0].numel()) ** -0.5)
            model.pos_embed.normal_(std=1.0)
    return model


def batch(name: str, size: int = 3, seed: int = 1) -> torch.Tensor:
    """Images from plain to busy, so that adaptive methods keep different numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, *MODELS[name].image, generator=generator)
    weight = torch.linspace(0.05, 2, max(size, 1))[:size]
    shape = MODELS[name].image
    weight = weight.view(-1, *[1] * len(shape))
    return x * weight + torch.randn(size, *shape[:-2], 1, 1, generator=generator)


def output(out: Any) -> Tensor:
    """Logits or features in whatever a model returns."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, tuple):  # (pooled, tokens)
        return out[0]
    for name in ("logits", "image_embeds", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    return out.last_hidden_state if "last_hidden_state" in out else out.feature_maps[-1]
