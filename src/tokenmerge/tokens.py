"""The state that travels through the blocks, and the one operation that changes it.

A merge is a *slot map*: `slot[b, i]` is the new place of token i of image b. Everything follows from it, with no special
case for the class token, safe in half precision (weigh first, then add), and undone by a gather.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Tokens of a batch. Images may hold different numbers of them: short ones are padded at the end."""

    x: Tensor  # [B,N,C]
    size: Tensor  # [B,N] float32: how many original tokens each one stands for; 0 marks padding
    owner: Tensor  # [B,N0] int64: which token now holds each original token
    merged: bool = False  # whether any merge happened: until then, proportional attention is plain attention
    padded: bool = False  # whether any image is shorter than N

    @classmethod
    def start(cls, x: Tensor) -> Tokens:
        """Every token stands for itself."""
        b, n, _ = x.shape
        size = torch.ones(b, n, dtype=torch.float32, device=x.device)
        return cls(x, size, torch.arange(n, device=x.device).expand(b, n))

    @property
    def count(self) -> Tensor:
        """Tokens of each image, [B] int64."""
        return (self.size > 0).sum(1)

    def with_x(self, x: Tensor) -> Tokens:
        return replace(self, x=x)


@dataclass(frozen=True)
class Assignment:
    """What a method decides in one layer: where each token goes."""

    slot: Tensor  # [B,N] int64; padding may point anywhere
    length: int  # tokens after the merge, of the longest image
    padded: bool = False  # whether some image is shorter than `length`


def merge(tokens: Tokens, move: Assignment) -> Tokens:
    """Size-weighted mean of the tokens that share a slot: x_ij = (n_i x_i + n_j x_j) / (n_i + n_j)."""
    b, _, c = tokens.x.shape
    m = move.length
    size = tokens.size.new_zeros(b, m).scatter_add_(1, move.slot, tokens.size)
    wide = torch.promote_types(tokens.x.dtype, torch.float32)
    weight = tokens.size.to(wide) / size.gather(1, move.slot)  # [B,N]; 1 for a token that stays alone, 0 for padding
    weighted = tokens.x.to(wide) * weight.unsqueeze(-1)  # half precision is added up in float32, and rounded once
    flat = (move.slot + m * torch.arange(b, device=move.slot.device).unsqueeze(1)).reshape(-1)
    x = weighted.new_zeros(b * m, c).index_add(0, flat, weighted.reshape(-1, c)).reshape(b, m, c).to(tokens.x.dtype)
    return Tokens(x, size, move.slot.gather(1, tokens.owner), merged=True, padded=move.padded)


def restore(x: Tensor, owner: Tensor) -> Tensor:
    """Give every original token the vector of the token that holds it, [B,M,C] → [B,N0,C].

    The mean over restored tokens is the size-weighted mean over merged ones, and attention over repeated keys is
    attention with + log size: heads that pool, attend or predict per patch need no change.
    """
    return x.gather(1, owner.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def representatives(owner: Tensor, length: int) -> Tensor:
    """The first original token of each slot, [B,N0] → [B,M]: the inverse of `restore` on tokens that are equal."""
    b, n = owner.shape
    first = owner.new_full((b, length), n - 1)
    index = torch.arange(n, device=owner.device).expand(b, n)
    return first.scatter_reduce(1, owner, index, reduce="amin")


def group_mean(values: Tensor, owner: Tensor, size: Tensor) -> Tensor:
    """Mean over the original tokens of each slot: values [B,H,N0,D], owner [B,N0], size [B,M] → [B,H,M,D]."""
    b, h, _, d = values.shape
    index = owner[:, None, :, None].expand(b, h, -1, d)
    total = values.new_zeros(b, h, size.shape[1], d).scatter_add(2, index, values)
    return total / size.clamp(min=1)[:, None, :, None].to(values.dtype)
