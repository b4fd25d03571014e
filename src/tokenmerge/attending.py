"""The attention of one block in one call: positions, merging sizes and packing are dealt with here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import attend_packed, per_head, softmax_map
from .backbones.base import Backbone
from .tokens import Assignment, Tokens, group_mean


@dataclass(frozen=True)
class Attending:
    backbone: Backbone
    block: nn.Module
    tokens: Tokens  # that enter the block: all of them are keys
    prefix: int
    class_token: bool
    place: Any  # what the host hands to its blocks beside x: positions of the original tokens
    proportional: bool
    _places: Any = field(init=False)  # those of the tokens

    def __post_init__(self) -> None:
        # At once, and not first when a method decides: positions may be learnt, and decisions have no gradient.
        object.__setattr__(self, "_places", self._place(self.tokens))

    def project(self, parts: str, x: Tensor | None = None) -> tuple[Tensor, ...]:
        """Queries, keys, values: those of all tokens, if not said otherwise."""
        return self.backbone.project(self.block, self.tokens.x if x is None else x, parts)

    def mix(self, x: Tensor, out: Tensor) -> Tensor:
        return self.backbone.mix(self.block, x, out)

    def first(self, values: Tensor) -> Tensor:
        """The prefix tokens of each image, [B,P,C]."""
        tokens = self.tokens
        if not tokens.packed:
            return values[:, : self.prefix]
        return tokens.take(values, tokens.index[: self.prefix].expand(tokens.size.shape[0], -1))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, queries: Tokens | None = None) -> Tensor:
        """Proportional attention, [B,H,Q,d]; of packed tokens, [1,H,ΣQ,d]. `queries`: the tokens that have one, if not all
        do; where they are the prefix alone they are laid out [B,H,P,d] and stay unturned."""
        tokens = self.tokens
        asking = tokens if queries is None else queries
        q, k = self._turn(q, asking), self._turn(k, tokens)
        if not tokens.packed and not asking.packed:
            return F.scaled_dot_product_attention(q, k, v, self._bias(q.dtype), **self._options)
        if not tokens.packed:  # from here on images differ: keys lie one after the other, too
            k, v = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (k, v))
        lengths = tokens.lengths or (tokens.size.shape[1],) * tokens.size.shape[0]
        return attend_packed(q, k, v, self._bias(q.dtype), lengths, self._options, asking.lengths or lengths)

    def map(self, q: Tensor, k: Tensor) -> Tensor:
        """softmax(QKᵀ·scale + log size), [B,H,N,N]."""
        q, k = self._turn(q, self.tokens), self._turn(k, self.tokens)
        return softmax_map(q, k, self._bias(q.dtype), self._options)

    def apply_map(self, weights: Tensor, v: Tensor) -> Tensor:
        """weights · V, as attention does it."""
        weights = F.dropout(weights, self._options.get("dropout_p", 0.0)).to(v.dtype)
        return weights @ per_head(v, weights.shape[1])

    def row(self, q: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
        """How the class token looks at all tokens, [B,H,N] float32; in a host without one, how all tokens do on average.
        And the multiply-accumulates that this took, [B]."""
        tokens, shape = self.tokens, self.backbone.shape(self.block)
        count, cost = tokens.count, torch.zeros_like(tokens.count)
        if q is None:
            (q,) = self.project("q", self.first(tokens.x)[:, :1] if self.class_token else tokens.x)
            cost = cost + (1 if self.class_token else count) * shape.query
        elif self.class_token and tokens.packed:
            q = q[0, :, list(tokens.starts)].transpose(0, 1).unsqueeze(2)  # [B,H,1,d]
        if self.class_token:
            q = q[:, :, :1]
            cost = cost + count * shape.attention
        else:
            q = self._dense(self._turn(q, tokens))
            cost = cost + count**2 * shape.attention
        weights = softmax_map(q, self._dense(self._turn(k, tokens)), self._bias(q.dtype, dense=True), self._options)
        if self.class_token:
            return weights[:, :, 0], cost
        there = (tokens.size > 0).float()[:, None, :, None]
        return (weights * there).sum(2) / count[:, None, None].clamp(min=1), cost

    def _dense(self, x: Tensor) -> Tensor:
        """[1,H,ΣN,d] → [B,H,N,d] where tokens are packed."""
        if not self.tokens.packed or x.shape[0] > 1:
            return x
        _, h, _, d = x.shape
        spread = self.tokens.spread(x.transpose(1, 2).flatten(2))
        return spread.reshape(*spread.shape[:2], h, d).transpose(1, 2)

    def _turn(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Rotate queries or keys by position. Queries of the prefix alone, [B,H,P,d], are not turned."""
        if self.place is None:
            return x
        place = self._places if tokens is self.tokens else self._place(tokens)
        rotate = self.backbone.rotate
        if not tokens.packed:
            return rotate(self.block, x, place)
        if x.shape[0] > 1:
            return x
        parts = zip(tokens.starts, tokens.lengths or (), range(len(place)), strict=True)
        turned = [
            rotate(self.block, x[:, :, start : start + n], place[b : b + 1, :, : n - self.prefix]) for start, n, b in parts
        ]
        return torch.cat(turned, 2)

    def _place(self, tokens: Tokens) -> Any:
        """Rotary embeddings of the patches [.., N0, D] → those of the merged tokens, the mean over each group.

        The mean of rotated keys of equal content is the key under the mean rotation, so that a merged token sits in the
        middle of its group, and is the less bound to a place the wider the group is spread."""
        if self.place is None or not tokens.merged:
            return self.place
        place = self.place
        while place.ndim < 4:  # [N,D] and [H,N,D] are shared by the batch
            place = place.unsqueeze(0)
        owner = tokens.owner[:, self.prefix :] - self.prefix  # dropped tokens stay below 0
        return group_mean(place.expand(owner.shape[0], -1, -1, -1), owner, tokens.size.shape[1] - self.prefix)

    def _bias(self, dtype: torch.dtype, dense: bool = False) -> Tensor | None:
        """log size for the keys, −inf for padding, [B,1,1,N]; nothing as long as every token is one token. `dense`: also
        where packed tokens have been spread."""
        tokens = self.tokens
        padded = tokens.lengths is not None and (dense or not tokens.packed)
        if not tokens.merged or not (self.proportional or padded):
            return None
        bias = tokens.size.log()
        if not self.proportional:
            bias = bias.clamp(max=0)
        return bias[:, None, None, :].to(dtype)

    @property
    def _options(self) -> dict[str, Any]:
        return self.backbone.attention_options(self.block)


def fold_map(weights: Tensor, tokens: Tokens, move: Assignment) -> Tensor:
    """Merge a map of attention with its tokens, [B,H,N,N] → [B,H,M,M]: keys that become one are looked at as much as all of
    them were, queries that become one look as they did on average, weighed as the move weighs them. No token may be
    dropped, and all images keep as many."""
    b, h, n, _ = weights.shape
    m = move.length
    place = move.slots(b * n).reshape(b, n) - m * torch.arange(b, device=weights.device).unsqueeze(1)
    weight = tokens.size.reshape(-1).index_select(0, move.order) if move.weight is None else move.weight
    weight = weight.new_zeros(b * n).index_copy(0, move.order, weight).reshape(b, n)
    total = weight.new_zeros(b, m).scatter_add(1, place, weight)
    columns = place[:, None, None, :].expand(b, h, n, n)
    weights = weights.new_zeros(b, h, n, m).scatter_add(3, columns, weights) * weight[:, None, :, None]
    rows = place[:, None, :, None].expand(b, h, n, m)
    return weights.new_zeros(b, h, m, m).scatter_add(2, rows, weights) / total[:, None, :, None]
