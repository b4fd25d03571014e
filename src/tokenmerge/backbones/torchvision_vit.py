"""torchvision's VisionTransformer: vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14.

Its blocks take one tensor and nothing else, so the state of a call has no way through its loop: the few lines from patches
to blocks are run here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.attention import AttentionConfig, partial_qkv
from .base import Backbone, BlockCost, Call, Preprocessing, UnknownModel, Unsupported, register
from .helpers import (
    Passthrough,
    called_alone,
    check_blocks,
    has_hooks,
    linear_macs,
    norm_width,
    require_version,
    split_heads,
    timm_preprocessing,
)


class TorchvisionModel:
    """Put before the model's class: its `forward`, with the state of the call handed to the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        model: Any = self
        call = model._tokenmerge.open(model, x)
        tokens = model._process_input(x)
        tokens = torch.cat((model.class_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
        encoder = model.encoder
        if has_hooks(encoder) or has_hooks(encoder.layers):
            raise Unsupported("the encoder has hooks, which would not fire; put them on its blocks, or on encoder.ln")
        tokens = encoder.dropout(tokens + encoder.pos_embedding)
        for block in encoder.layers:
            tokens = block(tokens, call)
        return model.heads(encoder.ln(tokens)[:, 0])


class TorchvisionBlock:
    _tokenmerge: int  # layer, from 1

    def forward(self, x: Tensor, call: object = None) -> Tensor:
        if not isinstance(call, Call):
            raise called_alone(self._tokenmerge)
        block: Any = self
        return call.step(block, self._tokenmerge, x, None)


@register
class TorchvisionViT(Backbone):
    """Blocks x + attention(ln_1 x), x + mlp(ln_2 x), with nn.MultiheadAttention."""

    name = "torchvision VisionTransformer"
    name_prefix = "torchvision:"
    name_form = "torchvision:vit_b_16"
    model_mixin = TorchvisionModel
    block_mixin = TorchvisionBlock

    def matches(self, model: nn.Module) -> bool:
        known: Any = sys.modules.get("torchvision.models.vision_transformer")
        return known is not None and isinstance(model, known.VisionTransformer)

    def check(self, model: Any) -> None:
        from torchvision.models.vision_transformer import Encoder, EncoderBlock, VisionTransformer

        require_version("torchvision", "0.20")
        check_blocks(self, model, (EncoderBlock,), (nn.MultiheadAttention,))
        if type(model).forward is not VisionTransformer.forward or type(model.encoder) is not Encoder:
            raise Unsupported(
                f"{type(model).__name__} has a forward pass or an encoder of its own, which would not run; supported is "
                "torchvision's"
            )

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.encoder.layers

    def attention(self, block: Any) -> nn.Module:
        return block.self_attention

    def prefix(self, model: Any) -> int:
        return 1

    def has_cls_token(self, model: Any) -> bool:
        return True

    def head_reads_prefix_only(self, model: Any) -> bool:
        return True

    def classifier(self, model: Any) -> nn.Module | None:
        return model.heads

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        attn = block.self_attention
        made = partial_qkv(attn.in_proj_weight, attn.in_proj_bias, block.ln_1(x), parts)
        return tuple(split_heads(made[part], attn.num_heads) for part in parts)

    def attention_config(self, block: Any) -> AttentionConfig:
        return AttentionConfig(None, block.self_attention.dropout if block.training else 0.0)

    def add_attention(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        return x + block.dropout(block.self_attention.out_proj(out.transpose(1, 2).flatten(2)))

    def add_mlp(self, block: Any, x: Tensor) -> Tensor:
        return x + block.mlp(block.ln_2(x))

    def cost(self, block: Any) -> BlockCost:
        attn = block.self_attention
        width = attn.embed_dim
        return BlockCost(
            macs_q=width * width,
            macs_k=width * width,
            macs_v=width * width,
            macs_out=linear_macs(attn.out_proj),
            macs_mlp=linear_macs(block.mlp),
            width=width,
            attn_width=width,
            head_dim=attn.head_dim,
            norm_in=norm_width(block.ln_1),
            norm_out=norm_width(block.ln_2),
        )

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        model.encoder.layers = nn.Sequential(Passthrough(exit_tokens))

    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        from torchvision.models import get_model, list_models

        known = list_models(include="vit_*")
        if name not in known:
            raise UnknownModel(f"unknown model {self.name_prefix}{name}; torchvision has {', '.join(known)}")
        return get_model(name, **({"weights": "DEFAULT"} if pretrained else {}), **options)

    def preprocessing(self, model: Any, crop: float | None, size: int | None) -> Preprocessing:
        return timm_preprocessing(model, crop, size or model.image_size)
