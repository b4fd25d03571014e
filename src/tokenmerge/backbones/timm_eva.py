"""timm's Eva: EVA-02, DINOv3 and other ViTs with RoPE."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.attention import AttentionConfig, is_plain_linear, partial_qkv
from .base import BlockCost, register
from .timm_vit import TimmViT, check_timm, pools_prefix_only, project_out, split_and_norm, timm_block_cost


@register
class TimmEva(TimmViT):
    """Like TimmViT, with RoPE on queries and keys, and LayerScale as a parameter of the block."""

    name = "timm Eva"
    layer_scale = "gamma_1"

    def matches(self, model: nn.Module) -> bool:
        from timm.models.eva import Eva

        return isinstance(model, Eva)

    def check(self, model: nn.Module) -> None:
        from timm.layers import AttentionRope
        from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm

        check_timm(self, model, (EvaBlock, EvaBlockPostNorm), (EvaAttention, AttentionRope))

    def head_reads_prefix_only(self, model: Any) -> bool:
        from timm.models.eva import Eva

        return pools_prefix_only(model, (Eva,))

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        attn = block.attn
        made = self._linear(attn, self._attention_input(block, x), parts)
        return split_and_norm(attn, {part: made[part] for part in parts}, self._kv_heads(attn))

    @staticmethod
    def _kv_heads(attn: Any) -> int:
        return getattr(attn, "num_kv_heads", attn.num_heads)

    @staticmethod
    def _linear(attn: Any, x: Tensor, parts: str) -> dict[str, Tensor]:
        """One fused weight or three, the bias separate or inside."""
        if attn.qkv is None:
            return {part: getattr(attn, f"{part}_proj")(x) for part in parts}
        extra = None
        if getattr(attn, "q_bias", None) is not None:
            extra = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
        if parts != "qkv" and is_plain_linear(attn.qkv):
            return partial_qkv(attn.qkv.weight, attn.qkv.bias if extra is None else extra, x, parts)
        if extra is not None and not attn.qkv_bias_separate and is_plain_linear(attn.qkv):
            qkv = nn.functional.linear(x, attn.qkv.weight, extra)
        else:
            qkv = attn.qkv(x) if extra is None else attn.qkv(x) + extra
        return dict(zip("qkv", qkv.chunk(3, -1), strict=True))

    def apply_rope(self, block: Any, x: Tensor, rope: Any) -> Tensor:
        from timm.layers import apply_rot_embed_cat

        attn = block.attn
        prefix = attn.num_prefix_tokens
        patches = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(attn, "rotate_half", False))
        return torch.cat((x[:, :, :prefix], patches), dim=2).type_as(x)

    def attention_config(self, block: Any) -> AttentionConfig:
        grouped = self._kv_heads(block.attn) != block.attn.num_heads
        return super().attention_config(block)._replace(enable_gqa=grouped)

    def add_attention(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        out = project_out(block.attn, partial(self._attention_input, block, x), out)
        if self._post_norm(block):
            return x + block.drop_path1(block.norm1(out))
        return x + block.drop_path1(out if block.gamma_1 is None else block.gamma_1 * out)

    def add_mlp(self, block: Any, x: Tensor) -> Tensor:
        if self._post_norm(block):
            return x + block.drop_path2(block.norm2(block.mlp(x)))
        out = block.mlp(block.norm2(x))
        return x + block.drop_path2(out if block.gamma_2 is None else block.gamma_2 * out)

    def cost(self, block: Any) -> BlockCost:
        width = block.attn.proj.in_features
        kv_width = width * self._kv_heads(block.attn) // block.attn.num_heads
        return timm_block_cost(block, width, kv_width, self._post_norm(block))
