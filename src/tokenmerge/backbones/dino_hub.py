"""DINOv2 and DINOv3 as torch.hub makes them from facebookresearch's repositories, and copies of these classes in other
projects: known by the names of their classes.

Their loops hand nothing but the hidden states (and RoPE) from block to block, one tensor or a list of tensors of different
sizes. The state of a call travels with each tensor (relay.py), and the last block hands on the tensor alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.attention import AttentionConfig, fused_projection
from .base import Backbone, BlockCost, CannotLoad, ModelAdapter, Preprocessing, Unsupported, register
from .helpers import (
    Passthrough,
    called_alone,
    check_hooks,
    linear_macs,
    norm_width,
    rotate_half,
    split_heads,
    timm_preprocessing,
)
from .relay import Carried

MODEL = "DinoVisionTransformer"
BLOCKS = ("Block", "NestedTensorBlock", "SelfAttentionBlock")
ATTENTIONS = ("Attention", "MemEffAttention", "SelfAttention")
CLASSIFIER = "_LinearClassifierWrapper"
METHODS = ("forward_features_list", "prepare_tokens_with_masks", "get_intermediate_layers")


class DinoModel:
    """Put before the model's class: opens a call for every batch of images."""

    def forward(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        model: Any = self
        if is_training:
            return model.forward_features(*args, **kwargs)
        found = _features(model, super().forward_features_list, "forward", *args, **kwargs)  # type: ignore[misc]
        return model.head(found["x_norm_clstoken"])

    def forward_features(self, x: Any, masks: Any = None) -> Any:
        return _features(self, super().forward_features_list, "forward_features", x, masks)  # type: ignore[misc]

    def prepare_tokens_with_masks(self, x: Any, masks: Any = None) -> Any:
        model: Any = self
        if not isinstance(x, Carried):  # called by get_intermediate_layers
            x = Carried(x, model._tokenmerge.open(model, x, entry="forward_features", restore_each=True, grid=True))
        made = super().prepare_tokens_with_masks(x.x, masks)  # type: ignore[misc]
        return (Carried(made[0], x.call), *made[1:]) if isinstance(made, tuple) else Carried(made, x.call)

    def _get_intermediate_layers_not_chunked(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [_bare(out) for out in super()._get_intermediate_layers_not_chunked(*args, **kwargs)]  # type: ignore[misc]

    def _get_intermediate_layers_chunked(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [_bare(out) for out in super()._get_intermediate_layers_chunked(*args, **kwargs)]  # type: ignore[misc]


def _features(model: Any, run: Any, entry: str, x: Any, masks: Any = None) -> Any:
    """Features of a tensor, or of a list of tensors, each with a call of its own."""
    alone = isinstance(x, Tensor)
    given = [x] if alone else x
    masks = [masks] if alone or masks is None else masks
    calls = [Carried(part, model._tokenmerge.open(model, part, entry=entry)) for part in given]
    found = run(calls, masks if len(masks) == len(calls) else masks * len(calls))
    return found[0] if alone else found


def _bare(x: Any) -> Any:
    return x.x if isinstance(x, Carried) else x


class DinoBlock:
    """Put before a block's class: hands each tensor to the call that travels with it."""

    _tokenmerge: int  # layer, from 1

    def forward(self, x: Any, rope: Any = None) -> Any:
        if isinstance(x, list):
            ropes = rope if isinstance(rope, list) else [rope] * len(x)
            return [self._one(part, own) for part, own in zip(x, ropes, strict=True)]
        return self._one(x, rope)

    def _one(self, x: Any, rope: Any) -> Any:
        if not isinstance(x, Carried):
            raise called_alone(self._tokenmerge)
        block: Any = self
        angles = None if rope is None else torch.cat((rope[1], rope[0]), -1)  # theirs: sin, cos
        out = x.call.step(block, self._tokenmerge, x.x, angles)
        return out if self._tokenmerge == x.call.depth else Carried(out, x.call)


class DinoPassthrough(Passthrough):
    """For lists of tensors, too."""

    def forward(self, x: Any, *args: object, **kwargs: object) -> Any:
        return [super(DinoPassthrough, self).forward(part) for part in x] if isinstance(x, list) else super().forward(x)


class DinoHub(ModelAdapter):
    """What models from these repositories have in common."""

    name_form = ""

    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        raise CannotLoad("models of facebookresearch/dinov2 and dinov3 come from torch.hub.load")

    def preprocessing(self, model: nn.Module, crop: float | None, size: int | None) -> Preprocessing:
        return timm_preprocessing(model, crop, size or self.input_size(model)[-1])


@register
class DinoClassifier(DinoHub):
    """A DINOv2 with a linear classifier on the CLS token and the mean patch."""

    name = "torch.hub's DINO classifiers"

    def matches(self, model: nn.Module) -> bool:
        return type(model).__name__ == CLASSIFIER and DINO.matches(self.tower(model))

    def tower(self, model: Any) -> nn.Module:
        return model.backbone

    def classifier(self, model: Any) -> nn.Module | None:
        return model.linear_head

    def input_size(self, model: nn.Module) -> tuple[int, ...]:
        return DINO.input_size(self.tower(model))

    def num_classes(self, model: Any) -> int:
        return int(model.linear_head.out_features)


@register
class DinoViT(DinoHub, Backbone):
    """Blocks x + ls1(attn(norm1 x)), x + ls2(mlp(norm2 x)), with RoPE in DINOv3."""

    name = "torch.hub's DINOv2 and DINOv3"
    model_mixin = DinoModel
    block_mixin = DinoBlock

    def matches(self, model: nn.Module) -> bool:
        return any(cls.__name__ == MODEL for cls in type(model).__mro__)

    def check(self, model: Any) -> None:
        name = type(model).__name__
        absent = [method for method in METHODS if not hasattr(type(model), method)]
        if absent:
            raise Unsupported(f"{name} has no {', '.join(absent)}; supported are the classes of dinov2 and dinov3")
        blocks: Sequence[Any] = self.blocks(model)
        for i, block in enumerate(blocks):
            if type(block).__name__ not in BLOCKS or type(block.attn).__name__ not in ATTENTIONS:
                raise Unsupported(
                    f"{name}: block {i} is a {type(block).__name__} with a {type(block.attn).__name__}; supported are "
                    f"{', '.join(BLOCKS)} with {', '.join(ATTENTIONS)}"
                )
            if block.sample_drop_ratio > 0:
                raise Unsupported(
                    f"{name}: block {i} skips {block.sample_drop_ratio:.0%} of the images in training, by a way of its own; "
                    "supported is drop_path_rate=0. For inference, set block.sample_drop_ratio = 0 in all blocks"
                )
            check_hooks(self, block, i + 1)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        chunks = (chunk if isinstance(chunk, nn.ModuleList) else [chunk] for chunk in model.blocks)
        return [block for chunk in chunks for block in chunk if not isinstance(block, nn.Identity)]

    def attention(self, block: Any) -> nn.Module:
        return block.attn

    def prefix(self, model: Any) -> int:
        return 1 + int(getattr(model, "num_register_tokens", 0) or getattr(model, "n_storage_tokens", 0))

    def has_cls_token(self, model: Any) -> bool:
        return True

    def head_reads_prefix_only(self, model: Any) -> bool:
        own = getattr(type(model), "_tokenmerge_base", type(model))
        return own.__name__ == MODEL and "forward" not in model.__dict__

    def classifier(self, model: Any) -> nn.Module | None:
        return model.head

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        made = fused_projection(block.attn.qkv, block.norm1(x), parts)
        return tuple(split_heads(made[part], block.attn.num_heads) for part in parts)

    def apply_rope(self, block: Any, x: Tensor, rope: Any) -> Tensor:
        """DINOv3 rounds queries and keys to the type of its RoPE, bfloat16 by default, those of the prefix, too."""
        cos, sin = rope.chunk(2, -1)
        return rotate_half(x.to(cos.dtype), cos, sin).to(x.dtype)

    def attention_config(self, block: Any) -> AttentionConfig:
        attn = block.attn
        dropout = getattr(attn.attn_drop, "p", attn.attn_drop)
        return AttentionConfig(None, dropout if attn.training else 0.0)

    def add_attention(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        attn = block.attn
        return x + block.ls1(attn.proj_drop(attn.proj(out.transpose(1, 2).flatten(2))))

    def add_mlp(self, block: Any, x: Tensor) -> Tensor:
        return x + block.ls2(block.mlp(block.norm2(x)))

    def cost(self, block: Any) -> BlockCost:
        attn = block.attn
        macs = linear_macs(attn.qkv) // 3
        width = attn.proj.in_features
        return BlockCost(
            macs_q=macs,
            macs_k=macs,
            macs_v=macs,
            macs_out=linear_macs(attn.proj),
            macs_mlp=linear_macs(block.mlp),
            width=attn.proj.out_features,
            attn_width=width,
            head_dim=width // attn.num_heads,
            norm_in=norm_width(block.norm1),
            norm_out=norm_width(block.norm2),
        )

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        model.blocks = nn.ModuleList([DinoPassthrough(exit_tokens)])

    def input_size(self, model: Any) -> tuple[int, ...]:
        size = model.patch_embed.img_size
        height, width = size if isinstance(size, tuple) else (size, size)
        return int(model.patch_embed.in_chans), height, width


DINO = DinoViT()
