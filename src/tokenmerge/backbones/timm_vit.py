"""timm's VisionTransformer with plain blocks: DeiT, DeiT-III, AugReg, DINOv2, CLIP, SigLIP, MAE and their like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .base import (
    BlockShape,
    Pass,
    Pick,
    Projection,
    Unsupported,
    heads,
    is_plain_linear,
    linear_macs,
    norm_width,
    split_linear,
)
from .timm_common import TimmBlock, TimmModel, check_blocks, only_token_pooling


class TimmViT:
    """Blocks x + attn(norm1 x), x + mlp(norm2 x), with LayerScale, query-key norm, gate and inner norms where present."""

    name = "timm VisionTransformer"
    model_mixin: type = TimmModel
    block_mixin: type = TimmBlock

    def matches(self, model: nn.Module) -> bool:
        from timm.models.vision_transformer import VisionTransformer

        return isinstance(model, VisionTransformer)

    def check(self, model: Any) -> None:
        from timm.layers import Attention
        from timm.models.vision_transformer import Block

        check_blocks(model, Block, (Attention,))

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def prefix(self, model: Any) -> int:
        return int(model.num_prefix_tokens)

    def head_reads_prefix_only(self, model: Any) -> bool:
        from timm.models.deit import VisionTransformerDistilled
        from timm.models.vision_transformer import VisionTransformer

        return only_token_pooling(model, (VisionTransformerDistilled, VisionTransformer))

    def project(self, block: Any, x: Tensor, pick: Pick | None) -> Projection:
        attn = block.attn
        x = block.norm1(x)
        if pick is not None and is_plain_linear(attn.qkv):
            q, kv = split_linear(attn.qkv, attn.qkv.bias, x, attn.attn_dim, pick)
            k, v = kv.chunk(2, -1)
        else:
            q, k, v = attn.qkv(x).chunk(3, -1)
            q = q if pick is None else pick(q)
        gate = open_gate(attn, x if pick is None else pick(x))
        q, k = attn.q_norm(heads(q, attn.num_heads)), attn.k_norm(heads(k, attn.num_heads))
        return Projection(q, k, heads(v, attn.num_heads), gate)

    def rotate(self, block: Any, x: Tensor, place: Any) -> Tensor:
        raise Unsupported("a timm VisionTransformer handed its blocks rotary positions, which it has none of")

    def attention_options(self, block: Any) -> dict[str, Any]:
        return {"dropout_p": block.attn.attn_drop.p if block.attn.training else 0.0}

    def mix(self, block: Any, x: Tensor, out: Tensor, gate: Tensor | None) -> Tensor:
        return x + block.drop_path1(block.ls1(finish(block.attn, out, gate)))

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def shape(self, block: Any) -> BlockShape:
        return attention_shape(block, block.attn.attn_dim)

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        model.blocks = nn.Sequential(Pass(exit_tokens))


def open_gate(attn: Any, x: Tensor) -> Tensor | None:
    """timm's gate on the output of attention; releases before 1.0.28 have none."""
    gate = getattr(attn, "gate", None)
    return None if gate is None else gate(x).sigmoid()


def finish(attn: Any, out: Tensor, gate: Tensor | None) -> Tensor:
    """Inner norm, gate and output projection of timm's attentions: [B,H,Q,d] → [B,Q,C]."""
    out = attn.norm(out.transpose(1, 2).flatten(2))
    return attn.proj_drop(attn.proj(out if gate is None else out * gate))


def attention_shape(block: Any, width: int) -> BlockShape:
    """The counts of a timm block whose attention is `width` wide."""
    attn = block.attn
    if attn.qkv is not None:
        query = linear_macs(attn.qkv) // 3
        key_value = 2 * query
    else:
        query, key_value = linear_macs(attn.q_proj), linear_macs(attn.k_proj, attn.v_proj)
    return BlockShape(
        query=query,
        key_value=key_value,
        output=linear_macs(attn.proj, getattr(attn, "gate", None)),
        mlp=linear_macs(block.mlp),
        width=attn.proj.out_features,
        attention=width,
        head=width // attn.num_heads,
        norms_in=norm_width(block.norm1) + (width if norm_width(attn.k_norm) else 0),
        norms_query=(width if norm_width(attn.q_norm) else 0) + norm_width(attn.norm),
        norms_out=norm_width(block.norm2) + norm_width(getattr(block.mlp, "norm", None)),
    )
