"""The attention of one block in one call, for tokens that may be merged, packed or padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..backbones.base import Backbone
from ..core.assignment import Assignment
from ..core.attention import attend_packed, attention_map, repeat_kv
from ..core.tokens import Tokens, group_mean


class BlockAttention:
    """Proportional attention over `tokens`, the tokens that enter the block: all of them are keys."""

    __slots__ = ("backbone", "block", "config", "has_cls", "merged_rope", "prefix", "proportional", "rope", "tokens")

    def __init__(
        self, backbone: Backbone, block: nn.Module, tokens: Tokens, rope: Any, prefix: int, has_cls: bool, proportional: bool
    ) -> None:
        self.backbone = backbone
        self.block = block
        self.tokens = tokens
        self.rope = rope  # RoPE embeddings of the original patches, which the model hands to its blocks
        self.prefix = prefix
        self.has_cls = has_cls
        self.proportional = proportional
        self.config = backbone.attention_config(block)
        # Now, and not when a method decides: RoPE may be learnt, and decisions have no gradient.
        self.merged_rope = None if rope is None else self._merge_rope(tokens)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, queries: Tokens | None = None) -> Tensor:
        """Proportional attention, [B,H,Q,d]; of packed tokens, [1,H,ΣQ,d]. `queries`: the tokens that have a query, if not
        all do; where they are the prefix alone, q is [B,H,P,d] and gets no RoPE."""
        tokens = self.tokens
        asking = tokens if queries is None else queries
        if self.rope is not None:
            q = self._apply_rope(q, asking)
            k = self._apply_rope(k, tokens)
        config = self.config
        bias = self._bias(q.dtype) if tokens.merged else None
        if not tokens.packed and not asking.packed:
            return F.scaled_dot_product_attention(
                q, k, v, bias, dropout_p=config.dropout_p, scale=config.scale, enable_gqa=config.enable_gqa
            )
        if not tokens.packed:  # queries of a ragged batch: keys are packed, too
            k, v = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (k, v))
        lengths = tokens.lengths or (tokens.size.shape[1],) * tokens.size.shape[0]
        return attend_packed(q, k, v, bias, lengths, config, asking.lengths or lengths)

    def prefix_tokens(self, values: Tensor) -> Tensor:
        """The prefix tokens of each image, [B,P,C]."""
        tokens = self.tokens
        if not tokens.packed:
            return values[:, : self.prefix]
        return tokens.take(values, tokens.positions[: self.prefix].expand(tokens.size.shape[0], -1))

    def map(self, q: Tensor, k: Tensor) -> Tensor:
        """The attention map, softmax(QKᵀ·scale + log size), [B,H,N,N]."""
        if self.rope is not None:
            q = self._apply_rope(q, self.tokens)
            k = self._apply_rope(k, self.tokens)
        return attention_map(q, k, self._bias(q.dtype), self.config)

    def apply_map(self, weights: Tensor, v: Tensor) -> Tensor:
        """weights · V, as attention does it."""
        weights = F.dropout(weights, self.config.dropout_p).to(v.dtype)
        return weights @ repeat_kv(v, weights.shape[1])

    def cls_row(self, q: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of the CLS token to all tokens, [B,H,N] float32; in a model without one, the mean over the attention of
        all tokens. And the multiply-accumulates that this took, [B]."""
        tokens = self.tokens
        cost = self.backbone.cost(self.block)
        count = tokens.num_tokens
        macs = torch.zeros_like(count)
        if q is None:
            x = self.prefix_tokens(tokens.x)[:, :1] if self.has_cls else tokens.x
            (q,) = self.backbone.project(self.block, x, "q")
            macs = macs + (1 if self.has_cls else count) * cost.macs_q
        elif self.has_cls and tokens.packed:
            q = q[0, :, list(tokens.starts)].transpose(0, 1).unsqueeze(2)  # [B,H,1,d]
        if self.has_cls:
            q = q[:, :, :1]
            macs = macs + count * cost.attn_width
        else:
            q = self._unpack(self._apply_rope(q, tokens))
            macs = macs + count**2 * cost.attn_width
        keys = self._unpack(self._apply_rope(k, tokens))
        weights = attention_map(q, keys, self._bias(q.dtype, unpacked=True), self.config)
        if self.has_cls:
            return weights[:, :, 0], macs
        valid = (tokens.size > 0).float()[:, None, :, None]
        return (weights * valid).sum(2) / count[:, None, None].clamp(min=1), macs

    def _unpack(self, x: Tensor) -> Tensor:
        """[1,H,ΣN,d] → [B,H,N,d] where tokens are packed."""
        if not self.tokens.packed or x.shape[0] > 1:
            return x
        _, h, _, d = x.shape
        values = self.tokens.unpack(x.transpose(1, 2).flatten(2))
        return values.reshape(*values.shape[:2], h, d).transpose(1, 2)

    def _apply_rope(self, x: Tensor, tokens: Tokens) -> Tensor:
        """RoPE on queries or keys. Queries of the prefix alone, [B,H,P,d], get none."""
        if self.rope is None:
            return x
        rope: Any = self.merged_rope if tokens is self.tokens else self._merge_rope(tokens)
        if not tokens.packed:
            return self.backbone.apply_rope(self.block, x, rope)
        if x.shape[0] > 1:
            return x
        parts = zip(tokens.starts, tokens.lengths or (), range(len(rope)), strict=True)
        return torch.cat(
            [
                self.backbone.apply_rope(self.block, x[:, :, start : start + n], rope[b : b + 1, :, : n - self.prefix])
                for start, n, b in parts
            ],
            2,
        )

    def _merge_rope(self, tokens: Tokens) -> Any:
        """RoPE embeddings of the patches [.., N0, D] → those of the merged tokens, the mean over each group.

        The mean of rotated keys of equal content is the key under the mean rotation: a merged token is in the middle of its
        group, and the wider the group, the weaker its position."""
        rope = self.rope
        if not tokens.merged:
            return rope
        while rope.ndim < 4:  # [N,D] and [H,N,D] are shared by the batch
            rope = rope.unsqueeze(0)
        owner = tokens.owner[:, self.prefix :] - self.prefix  # dropped tokens stay below 0
        return group_mean(rope.expand(owner.shape[0], -1, -1, -1), owner, tokens.size.shape[1] - self.prefix)

    def _bias(self, dtype: torch.dtype, unpacked: bool = False) -> Tensor | None:
        """log size for the keys, −inf for padding, [B,1,1,N]; None while every token has size 1. `unpacked`: also where
        packed tokens have been unpacked."""
        tokens = self.tokens
        padded = tokens.ragged and (unpacked or not tokens.packed)
        if not tokens.merged or not (self.proportional or padded):
            return None
        bias = tokens.size.log()
        if not self.proportional:
            bias = bias.clamp(max=0)
        return bias[:, None, None, :].to(dtype)


def merge_map(weights: Tensor, tokens: Tokens, decision: Assignment) -> Tensor:
    """Merge an attention map with its tokens, [B,H,N,N] → [B,H,M,M]: keys that become one receive the sum of the attention,
    queries that become one get the mean of theirs, weighted like the tokens. No token may be dropped, and all images must
    keep the same number."""
    b, h, n, _ = weights.shape
    m = decision.length
    position = decision.rows(b * n).reshape(b, n) - m * torch.arange(b, device=weights.device).unsqueeze(1)
    weight = tokens.size.reshape(-1).index_select(0, decision.order) if decision.weight is None else decision.weight
    weight = weight.new_zeros(b * n).index_copy(0, decision.order, weight).reshape(b, n)
    total = weight.new_zeros(b, m).scatter_add(1, position, weight)
    columns = position[:, None, None, :].expand(b, h, n, n)
    weights = weights.new_zeros(b, h, n, m).scatter_add(3, columns, weights) * weight[:, None, :, None]
    rows = position[:, None, :, None].expand(b, h, n, m)
    return weights.new_zeros(b, h, m, m).scatter_add(2, rows, weights) / total[:, None, :, None]
