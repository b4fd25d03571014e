"""Names of the parts of Hugging Face's vision transformers; see hf.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Parts:
    """Attribute names of a layer's parts."""

    attention: str
    output: str  # on the attention: output projection, number of heads, scale, dropout probability
    heads: str
    scale: str
    dropout: str
    norms: tuple[str, str]
    after: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # between attention or MLP and the residual


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
    layer: str  # class names of a layer and of its attention
    attention: str
    layers: str  # where a tower has its layers
    towers: tuple[str, ...]  # classes that have them
    headed: Mapping[str, str]  # classes around a tower → their attribute for it
    prefix_heads: tuple[str, ...] = ()  # classes whose head, and whose output, reads nothing but the prefix
    prefix: int = 1


FAMILIES = {
    "vit": Family(
        _VIT,
        "ViTLayer",
        "ViTAttention",
        "layers",
        ("ViTModel",),
        {"ViTForImageClassification": "vit"},
        prefix_heads=("ViTForImageClassification",),
    ),
    "deit": Family(
        _VIT,
        "DeiTLayer",
        "DeiTAttention",
        "layers",
        ("DeiTModel",),
        {"DeiTForImageClassification": "deit", "DeiTForImageClassificationWithTeacher": "deit"},
        prefix_heads=("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
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
