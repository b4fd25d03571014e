"""Names of the parts of Hugging Face's vision transformers; see hf.py. A family is a row of FAMILIES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Parts:
    """Attribute names of a layer's parts, with dots where they are inside of others."""

    attention: str  # the module that has the projections
    projections: tuple[str, ...]  # on it: of queries, keys and values, or one for all three
    heads: str  # on it: number of heads
    head_dim: str
    dropout: str  # on it: dropout probability of the attention, or its module
    output: str  # on the layer: the output projection
    norms: tuple[str, str]
    mlp: tuple[str, ...] = ("mlp",)  # run one after the other
    after: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # between attention or MLP and the residual: modules, factors
    scale: str | None = None  # on the attention; None: 1/√d
    position_bias: str | None = None  # on the layer: the module that computes its own relative position bias
    returns_tuple: bool = False  # layers return tuples


_VIT = Parts(
    attention="attention",
    projections=("q_proj", "k_proj", "v_proj"),
    heads="num_attention_heads",
    head_dim="head_dim",
    dropout="attention_dropout",
    output="attention.o_proj",
    norms=("layernorm_before", "layernorm_after"),
    after=(("dropout",), ("dropout",)),
    scale="scaling",
)
_DINO = replace(_VIT, norms=("norm1", "norm2"), after=(("layer_scale1", "drop_path"), ("layer_scale2", "drop_path")))
_DINOV3 = replace(_DINO, heads="num_heads", dropout="dropout")
_CLIP = Parts(
    attention="self_attn",
    projections=("q_proj", "k_proj", "v_proj"),
    heads="num_heads",
    head_dim="head_dim",
    dropout="dropout",
    output="self_attn.out_proj",
    norms=("layer_norm1", "layer_norm2"),
    scale="scale",
)
_BLIP = replace(_CLIP, projections=("qkv",), output="self_attn.projection")
# Layers in the layout of transformers 4.
_NESTED = Parts(
    attention="attention.attention",
    projections=("query", "key", "value"),
    heads="num_attention_heads",
    head_dim="attention_head_size",
    dropout="dropout_prob",
    output="attention.output.dense",
    norms=("layernorm_before", "layernorm_after"),
    mlp=("intermediate", "output.dense"),
    after=(("attention.output.dropout",), ("output.dropout",)),
    scale="scaling",
)
_BEIT = replace(
    _VIT,
    after=(("dropout", "lambda_1", "drop_path"), ("dropout", "lambda_2", "drop_path")),
    position_bias="relative_position_bias",
)
_DATA2VEC = replace(
    _NESTED,
    dropout="dropout",
    after=(("attention.output.dropout", "lambda_1", "drop_path"), ("output.dropout", "lambda_2", "drop_path")),
    scale=None,
    position_bias="attention.attention.relative_position_bias",
    returns_tuple=True,
)


@dataclass(frozen=True)
class Family:
    """One of transformers' model folders."""

    parts: Parts
    layer: str  # class names of a layer and of its attention
    attention: str | tuple[str, ...]
    layers: str  # where a tower has its layers
    towers: tuple[str, ...]  # classes that have them
    headed: Mapping[str, str] = field(default_factory=dict)  # classes around a tower → their attribute for it
    prefix_heads: tuple[str, ...] = ()  # classes whose head, and whose output, reads nothing but the prefix
    prefix: int = 1
    patches: str | None = None  # the mask that goes with patches, for models that take these instead of images
    carrier: str = "tokenmerge"  # the keyword that reaches every layer
    relays: Mapping[str, str] = field(default_factory=dict)  # where none does: modules on the way → the mixin that relays it
    required: Mapping[str, tuple[object, str]] = field(default_factory=dict)  # entries of the config, and why


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
    "vit_msn": Family(
        _VIT,
        "ViTMSNLayer",
        "ViTMSNAttention",
        "layers",
        ("ViTMSNModel",),
        {"ViTMSNForImageClassification": "vit"},
        prefix_heads=("ViTMSNForImageClassification",),
    ),
    # Patches are masked at random in every call unless mask_ratio is 0. The decoder reads them at full length.
    "vit_mae": Family(
        _VIT, "ViTMAELayer", "ViTMAEAttention", "layers", ("ViTMAEModel",), {"ViTMAEForPreTraining": "vit"}
    ),
    "ijepa": Family(
        _VIT,
        "IJepaLayer",
        "IJepaAttention",
        "layers",
        ("IJepaModel",),
        {"IJepaForImageClassification": "ijepa"},
        prefix=0,
    ),
    "audio_spectrogram_transformer": Family(
        _VIT,
        "ASTLayer",
        "ASTAttention",
        "layers",
        ("ASTModel",),
        {"ASTForAudioClassification": "audio_spectrogram_transformer"},
        prefix_heads=("ASTForAudioClassification",),
        prefix=2,
    ),
    "vitpose_backbone": Family(
        replace(_NESTED, mlp=("mlp",), after=(("attention.output.dropout",), ())),
        "VitPoseBackboneLayer",
        "VitPoseBackboneSelfAttention",
        "encoder.layer",
        ("VitPoseBackbone",),
        prefix=0,
        required={"num_experts": (1, "with more, the MLP reads a dataset index for each image")},
    ),
    "yolos": Family(
        _NESTED,
        "YolosLayer",
        "YolosSelfAttention",
        "encoder.layer",
        ("YolosModel",),
        {"YolosForObjectDetection": "vit"},
        relays={"embeddings": "RelayEmbeddings", "encoder": "YolosEncoder"},
    ),
    "videomae": Family(
        _NESTED,
        "VideoMAELayer",
        "VideoMAESelfAttention",
        "encoder.layer",
        ("VideoMAEModel",),
        {"VideoMAEForVideoClassification": "videomae"},
        prefix=0,
        relays={"embeddings": "RelayEmbeddings", "encoder": "RelayEncoder"},
        required={
            "use_mean_pooling": (True, "without it the head reads the first patch, which stands for others after a merge")
        },
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
    "dinov3_vit": Family(
        _DINOV3,
        "DINOv3ViTLayer",
        "DINOv3ViTAttention",
        "model.layer",
        ("DINOv3ViTModel", "DINOv3ViTBackbone"),
    ),
    "beit": Family(
        _BEIT,
        "BeitLayer",
        "BeitAttention",
        "layers",
        ("BeitModel",),
        {"BeitForImageClassification": "beit", "BeitBackbone": "beit"},
    ),
    "data2vec": Family(
        _DATA2VEC,
        "Data2VecVisionLayer",
        ("Data2VecVisionSelfAttention", "Data2VecVisionSdpaSelfAttention"),
        "encoder.layer",
        ("Data2VecVisionModel",),
        {"Data2VecVisionForImageClassification": "data2vec_vision"},
        carrier="interpolate_pos_encoding",
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
    "siglip2": Family(
        _CLIP,
        "Siglip2EncoderLayer",
        "Siglip2Attention",
        "encoder.layers",
        ("Siglip2VisionModel",),
        {"Siglip2ForImageClassification": "vision_model"},
        prefix=0,
        patches="pixel_attention_mask",
    ),
    "blip": Family(
        replace(_BLIP, dropout="dropout"),
        "BlipEncoderLayer",
        "BlipAttention",
        "encoder.layers",
        ("BlipVisionModel",),
    ),
    "blip_2": Family(
        replace(_BLIP, dropout="attention_dropout"),
        "Blip2EncoderLayer",
        "Blip2Attention",
        "encoder.layers",
        ("Blip2VisionModel",),
    ),
}  # fmt: skip
