"""What Hugging Face's vision transformers call their parts; see hf.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Parts:
    """What a layer calls its parts."""

    attention: str
    output: str  # of the attention: its output projection, number of heads, scale, probability of dropout
    heads: str
    scale: str
    dropout: str
    norms: tuple[str, str]
    after: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # what comes between attention or MLP and the residual


_VIT = Parts(
    attention="attention",
    output="o_proj",
    heads="num_attention_heads",
    scale="scaling",
    dropout="attention_dropout",
    norms=("layernorm_before", "layernorm_after"),
    after=(("dropout",), ("dropout",)),
)
_DINO = replace(_VIT, norms=("norm1", "norm2"), after=(("layer_scale1", "drop_path"), ("layer_scale2", "drop_path")))
_CLIP = Parts(
    attention="self_attn",
    output="out_proj",
    heads="num_heads",
    scale="scale",
    dropout="dropout",
    norms=("layer_norm1", "layer_norm2"),
)


@dataclass(frozen=True)
class Family:
    """One of transformers' model folders."""

    parts: Parts
    layer: str  # classes of a layer and of its attention
    attention: str
    layers: str  # where a tower keeps its layers
    towers: tuple[str, ...]  # classes that keep them
    headed: Mapping[str, str]  # classes around a tower → their name for it
    free: tuple[str, ...] = ()  # those whose head reads nothing but the prefix, and which give out nothing else
    prefix: int = 1


FAMILIES = {
    "vit": Family(
        _VIT,
        "ViTLayer",
        "ViTAttention",
        "layers",
        ("ViTModel",),
        {"ViTForImageClassification": "vit"},
        free=("ViTForImageClassification",),
    ),
    "deit": Family(
        _VIT,
        "DeiTLayer",
        "DeiTAttention",
        "layers",
        ("DeiTModel",),
        {"DeiTForImageClassification": "deit", "DeiTForImageClassificationWithTeacher": "deit"},
        free=("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        prefix=2,
    ),
    "dinov2": Family(
        _DINO,
        "Dinov2Layer",
        "Dinov2Attention",
        "encoder.layer",
        ("Dinov2Model", "Dinov2Backbone"),
        {"Dinov2ForImageClassification": "dinov2"},
    ),
    "dinov2_with_registers": Family(
        _DINO,
        "Dinov2WithRegistersLayer",
        "Dinov2WithRegistersAttention",
        "encoder.layer",
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"),
        {"Dinov2WithRegistersForImageClassification": "dinov2_with_registers"},
    ),
    "clip": Family(
        _CLIP,
        "CLIPEncoderLayer",
        "CLIPAttention",
        "encoder.layers",
        ("CLIPVisionModel",),
        {"CLIPForImageClassification": "vision_model", "CLIPVisionModelWithProjection": "vision_model"},
    ),
    "siglip": Family(
        _CLIP,
        "SiglipEncoderLayer",
        "SiglipAttention",
        "encoder.layers",
        ("SiglipVisionModel",),
        {"SiglipForImageClassification": "vision_model"},
        prefix=0,
    ),
}
