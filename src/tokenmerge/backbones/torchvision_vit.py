"""torchvision's VisionTransformer: vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14.

Its blocks take one tensor and nothing else, so that the state of a call has no way through its loop: the few lines from
patches to blocks are run here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .base import (
    BlockShape,
    Call,
    Pass,
    Unsupported,
    called_alone,
    check_blocks,
    has_hooks,
    heads,
    linear_macs,
    norm_width,
    refuse_hooks,
    require,
    some_of,
)


class TorchvisionModel:
    """Put before the host's class: its `forward`, with the state of the call handed to the blocks."""

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
        refuse_hooks(block.self_attention, self._tokenmerge)
        return call.step(block, self._tokenmerge, x, None)


class TorchvisionViT:
    """Blocks x + attention(ln_1 x), x + mlp(ln_2 x), with nn.MultiheadAttention."""

    name = "torchvision VisionTransformer"
    model_mixin: type = TorchvisionModel
    block_mixin: type = TorchvisionBlock

    def matches(self, model: nn.Module) -> bool:
        known: Any = sys.modules.get("torchvision.models.vision_transformer")
        return known is not None and isinstance(model, known.VisionTransformer)

    def check(self, model: Any) -> None:
        from torchvision.models.vision_transformer import Encoder, EncoderBlock, VisionTransformer

        host = type(model).__name__
        require("torchvision", (0, 20))
        check_blocks(
            host, model.encoder.layers, (EncoderBlock,), lambda block: block.self_attention, (nn.MultiheadAttention,)
        )
        for layer, block in enumerate(model.encoder.layers, 1):
            refuse_hooks(block.self_attention, layer)
        if type(model).forward is not VisionTransformer.forward or type(model.encoder) is not Encoder:
            raise Unsupported(
                f"{host} has a forward pass or an encoder of its own, which would not run; supported is torchvision's"
            )

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.encoder.layers

    def prefix(self, model: Any) -> int:
        return 1

    def class_token(self, model: Any) -> bool:
        return True

    def head_reads_prefix_only(self, model: Any) -> bool:
        return True

    def classifier(self, model: Any) -> nn.Module | None:
        return model.heads

    def answer(self, out: Any) -> Tensor:
        return out

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        attn = block.self_attention
        made = some_of(attn.in_proj_weight, attn.in_proj_bias, block.ln_1(x), parts)
        return tuple(heads(made[part], attn.num_heads) for part in parts)

    def rotate(self, block: Any, x: Tensor, place: Any) -> Tensor:
        raise Unsupported("torchvision's VisionTransformer has no rotary positions")

    def attention_options(self, block: Any) -> dict[str, Any]:
        return {"dropout_p": block.self_attention.dropout if block.training else 0.0}

    def mix(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        return x + block.dropout(block.self_attention.out_proj(out.transpose(1, 2).flatten(2)))

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + block.mlp(block.ln_2(x))

    def shape(self, block: Any) -> BlockShape:
        attn = block.self_attention
        width = attn.embed_dim
        return BlockShape(
            query=width * width,
            key=width * width,
            value=width * width,
            output=linear_macs(attn.out_proj),
            mlp=linear_macs(block.mlp),
            width=width,
            attention=width,
            head=attn.head_dim,
            norm_in=norm_width(block.ln_1),
            norm_query=0,
            norm_key=0,
            norm_inner=0,
            norm_out=norm_width(block.ln_2),
        )

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        model.encoder.layers = nn.Sequential(Pass(exit_tokens))
