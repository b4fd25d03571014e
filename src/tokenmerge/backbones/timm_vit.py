"""timm's VisionTransformer with plain blocks: DeiT, DeiT-III, AugReg, DINOv2, CLIP, SigLIP, MAE and their like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .base import (
    BlockShape,
    Pass,
    Unsupported,
    heads,
    is_plain_linear,
    linear_macs,
    norm_width,
    some_of,
)
from .timm_common import TimmBlock, TimmModel, check_host, only_token_pooling


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

        check_host(model, Block, (Attention,))

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def prefix(self, model: Any) -> int:
        return int(model.num_prefix_tokens)

    def class_token(self, model: Any) -> bool:
        return model.cls_token is not None

    def head_reads_prefix_only(self, model: Any) -> bool:
        from timm.models.deit import VisionTransformerDistilled
        from timm.models.vision_transformer import VisionTransformer

        return only_token_pooling(model, (VisionTransformerDistilled, VisionTransformer))

    def classifier(self, model: Any) -> nn.Module | None:
        found: Any = model.get_classifier()
        return found[0] if isinstance(found, tuple) else found

    def answer(self, out: Any) -> Tensor:
        return out

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        attn = block.attn
        x = block.norm1(x)
        if parts != "qkv" and is_plain_linear(attn.qkv):
            made = some_of(attn.qkv.weight, attn.qkv.bias, x, parts)
        else:
            made = dict(zip("qkv", attn.qkv(x).chunk(3, -1), strict=True))
        return in_heads(attn, {part: made[part] for part in parts}, attn.num_heads)

    def rotate(self, block: Any, x: Tensor, place: Any) -> Tensor:
        raise Unsupported("a timm VisionTransformer handed its blocks rotary positions, which it has none of")

    def attention_options(self, block: Any) -> dict[str, Any]:
        return {"dropout_p": block.attn.attn_drop.p if block.attn.training else 0.0}

    def mix(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        return x + block.drop_path1(block.ls1(finish(block, x, out)))

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def shape(self, block: Any) -> BlockShape:
        return attention_shape(block, block.attn.attn_dim, block.attn.attn_dim)

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        model.blocks = nn.Sequential(Pass(exit_tokens))


def in_heads(attn: Any, made: dict[str, Tensor], kv_heads: int) -> tuple[Tensor, ...]:
    """Projections [B,N,H·d] of timm's attentions → [B,H,N,d], with their query-key norms."""
    norms = {"q": attn.q_norm, "k": attn.k_norm}
    split = {part: heads(x, attn.num_heads if part == "q" else kv_heads) for part, x in made.items()}
    return tuple(norms[part](x) if part in norms else x for part, x in split.items())


def finish(block: Any, x: Tensor, out: Tensor) -> Tensor:
    """Inner norm, gate and output projection of timm's attentions: [B,H,Q,d] → [B,Q,C]. Releases of timm before 1.0.28
    have no gate."""
    attn = block.attn
    out = attn.norm(out.transpose(1, 2).flatten(2))
    gate = getattr(attn, "gate", None)
    if gate is not None:
        out = out * gate(block.norm1(x)).sigmoid()
    return attn.proj_drop(attn.proj(out))


def attention_shape(block: Any, width: int, kv_width: int) -> BlockShape:
    """The counts of a timm block whose attention is `width` wide, its keys and values `kv_width`."""
    attn = block.attn
    gate = getattr(attn, "gate", None)
    if attn.qkv is not None:
        query = key = value = linear_macs(attn.qkv) // 3
    else:
        query, key, value = (linear_macs(part) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
    return BlockShape(
        query=query,
        key=key,
        value=value,
        output=linear_macs(attn.proj, gate),
        mlp=linear_macs(block.mlp),
        width=attn.proj.out_features,
        attention=width,
        head=width // attn.num_heads,
        norm_in=norm_width(block.norm1),
        norm_query=width if norm_width(attn.q_norm) else 0,
        norm_key=kv_width if norm_width(attn.k_norm) else 0,
        norm_inner=norm_width(attn.norm) + (0 if gate is None else norm_width(block.norm1)),
        norm_out=norm_width(block.norm2) + norm_width(getattr(block.mlp, "norm", None)),
    )
