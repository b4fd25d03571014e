"""timm's Beit: BEiT and BEiT v2, with relative position biases.

Its loop hands nothing but the shared position bias to the blocks, so the few lines of the loop are repeated here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.attention import AttentionConfig
from .base import BlockCost, Call, ModelAdapter, Unsupported, register
from .helpers import called_alone, check_blocks, linear_macs, norm_width, require_version, split_heads
from .timm_eva import TimmEva


class BeitModel:
    """Put before the model's class: opens a call wherever timm's methods can be entered from outside."""

    def forward(self, x: Tensor) -> Tensor:
        model: Any = self
        out: Tensor = model.forward_head(_features(model, x, model._tokenmerge.open(model, x))[-1])
        return out

    def forward_features(self, x: Tensor) -> Tensor:
        model: Any = self
        return _features(model, x, model._tokenmerge.open(model, x, entry="forward_features"))[-1]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        from timm.models._features import feature_take_indices

        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt is 'NCHW' or 'NLC', not {output_fmt!r}")
        model: Any = self
        take, last = feature_take_indices(len(model.blocks), indices)
        call = model._tokenmerge.open(model, x, entry="forward_features", restore_each=True, grid=True)
        outs = _features(model, x, call, last + 1 if stop_early else None)
        found = [model.norm(outs[i]) if norm else outs[i] for i in take]
        prefix, found = [out[:, :1] for out in found], [out[:, 1:] for out in found]
        if output_fmt == "NCHW":
            height, width = model.patch_embed.dynamic_feat_size(tuple(x.shape[2:]))
            found = [out.reshape(x.shape[0], height, width, -1).permute(0, 3, 1, 2).contiguous() for out in found]
        taken: list[Any] = list(zip(found, prefix, strict=True)) if return_prefix_tokens else found
        return taken if intermediates_only else (outs[-1], taken)


def _features(model: Any, x: Tensor, call: Call, most: int | None = None) -> list[Tensor]:
    """What each of the first `most` blocks returns, and the last of these after the final norm."""
    x = model.patch_embed(x)
    x = torch.cat((model.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
    if model.pos_embed is not None:
        x = x + model.pos_embed
    x = model.pos_drop(x)
    shared = None if model.rel_pos_bias is None else model.rel_pos_bias()
    outs = []
    for block in model.blocks[:most]:
        x = block(x, shared_rel_pos_bias=(call, shared))
        outs.append(x)
    return [*outs, model.norm(x)]


class BeitBlock:
    """Put before a block's class: hands the input to the call that came with the shared position bias."""

    _tokenmerge: int  # layer, from 1

    def forward(self, x: Tensor, shared_rel_pos_bias: Any = None) -> Tensor:
        if not isinstance(shared_rel_pos_bias, tuple):
            raise called_alone(self._tokenmerge)
        block: Any = self
        call, bias = shared_rel_pos_bias
        if bias is not None:
            bias = bias.unsqueeze(0)
        if block.attn.relative_position_bias_table is not None:
            own = block.attn._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        out: Tensor = call.step(block, self._tokenmerge, x, position_bias=bias)
        return out


@register
class TimmBeit(TimmEva):
    """Blocks like Eva's, with a relative position bias instead of RoPE."""

    name = "timm Beit"
    model_mixin = BeitModel
    block_mixin = BeitBlock

    def matches(self, model: nn.Module) -> bool:
        from timm.models.beit import Beit

        return isinstance(model, Beit)

    def check(self, model: nn.Module) -> None:
        from timm.models.beit import Attention, Beit, Block

        require_version("timm", "1.0.26")
        check_blocks(self, model, (Block,), (Attention,))
        for name in ("forward", "forward_features", "forward_intermediates"):
            if getattr(type(model), name) is not getattr(Beit, name):
                raise Unsupported(
                    f"{type(model).__name__} has a {name} of its own; supported is that of timm's Beit, because its loop is "
                    "run step by step"
                )

    def head_reads_prefix_only(self, model: Any) -> bool:
        from timm.models.beit import Beit

        own = getattr(type(model), "_tokenmerge_base", type(model))
        known = own.forward_head is Beit.forward_head and "forward_head" not in model.__dict__
        return known and model.global_pool not in ("", "avg")

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        made = self._linear(block.attn, block.norm1(x), parts)
        return tuple(split_heads(made[part], block.attn.num_heads) for part in parts)

    def attention_config(self, block: Any) -> AttentionConfig:
        return AttentionConfig(None, block.attn.attn_drop.p if block.attn.training else 0.0)

    def add_attention(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        out = block.attn.proj_drop(block.attn.proj(out.transpose(1, 2).flatten(2)))
        return x + block.drop_path1(out if block.gamma_1 is None else block.gamma_1 * out)

    def cost(self, block: Any) -> BlockCost:
        attn = block.attn
        macs = linear_macs(attn.qkv) // 3
        return BlockCost(
            macs_q=macs,
            macs_k=macs,
            macs_v=macs,
            macs_out=linear_macs(attn.proj),
            macs_mlp=linear_macs(block.mlp),
            width=attn.proj.out_features,
            attn_width=attn.proj.in_features,
            head_dim=attn.proj.in_features // attn.num_heads,
            norm_in=norm_width(block.norm1),
            norm_out=norm_width(block.norm2) + norm_width(getattr(block.mlp, "norm", None)),
        )

    def resize(self, model: Any, size: int) -> None:
        ModelAdapter.resize(self, model, size)
