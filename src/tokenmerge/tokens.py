"""The state that travels through the blocks, and the one operation that changes it.

A merge is a *slot map*: `slot[b, i]` is the new place of token i of image b. Everything follows from it, with no special
case for the class token, safe in half precision (weigh first, then add), and undone by a gather.

Images of a batch may keep different numbers of tokens. Sizes and owners are then padded to the longest image; the tokens
themselves are *packed*, image after image in one long row, so that nothing is multiplied with padding. (In training they
are padded too, because stochastic depth wants images apart.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Tokens of a batch."""

    x: Tensor  # [B,N,C]; packed: [1,ΣN,C]
    size: Tensor  # [B,N] float32: how many original tokens each one stands for; 0 marks padding, at the end
    owner: Tensor  # [B,N0] int64: which token now holds each original token
    merged: bool = False  # whether any merge happened: until then, proportional attention is plain attention
    lengths: tuple[int, ...] | None = None  # tokens of each image, where they differ
    packed: bool = False

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

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each image begins in a packed row."""
        return tuple(accumulate((self.lengths or ())[:-1], initial=0))

    def with_x(self, x: Tensor) -> Tokens:
        return replace(self, x=x)

    def rows_of(self, place: Tensor) -> Tensor:
        """Rows of packed tokens: place [B,M] in its image → row."""
        return place + torch.tensor(self.starts, device=place.device).unsqueeze(1)

    def take(self, values: Tensor, place: Tensor) -> Tensor:
        """Values of tokens, laid out as x is, at the places [B,M] of each image → [B,M,D]."""
        if not self.packed:
            return values.gather(1, place.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
        b, m = place.shape
        return values[0].index_select(0, self.rows_of(place).reshape(-1)).reshape(b, m, -1)

    def spread(self, values: Tensor) -> Tensor:
        """Values of tokens, laid out as x is → [B,N,D]; what stands in the padding means nothing."""
        if not self.packed:
            return values
        b, n = self.size.shape
        last = torch.tensor(self.lengths, device=values.device).unsqueeze(1) - 1
        return self.take(values, torch.arange(n, device=values.device).expand(b, n).minimum(last))

    def pack(self, values: Tensor) -> Tensor:
        """The inverse of `spread`: [B,N,D] → as x is laid out."""
        if not self.packed:
            return values
        return values.reshape(-1, values.shape[-1]).index_select(0, self._grid_rows()).unsqueeze(0)

    def _grid_rows(self) -> Tensor:
        """Where packed tokens stand in a padded [B,N] grid, [ΣN]."""
        n = self.size.shape[1]
        lengths = self.lengths or ()
        shift = [b * n - start for b, start in enumerate(self.starts)]
        counts = torch.tensor(lengths, device=self.size.device)
        ahead = torch.tensor(shift, device=self.size.device).repeat_interleave(counts, output_size=sum(lengths))
        return ahead + torch.arange(sum(lengths), device=self.size.device)


@dataclass(frozen=True)
class Assignment:
    """What a method decides in one layer: where each token goes. Build it with `assign`."""

    slot: Tensor  # [B,N] int64; padding may point anywhere
    keep: Tensor  # [B,M] int64: the token that has each slot; the others of the slot join it
    join: Tensor  # [R] int64: the tokens that join another, as positions in the [B·N] grid
    length: int  # M, tokens after the merge, of the longest image
    lengths: tuple[int, ...] | None = None  # of each image, where they differ


def assign(slot: Tensor, joins: Tensor, join: Tensor, length: int, lengths: tuple[int, ...] | None = None) -> Assignment:
    """From where each token goes, slot [B,N], which ones keep no slot of their own, joins [B,N] bool (padding, too), and
    the positions [R] in the grid of those that join another."""
    b, n = slot.shape
    index = torch.arange(n, device=slot.device).expand(b, n)
    keep = slot.new_zeros(b, length + 1).scatter_(1, slot.masked_fill(joins, length), index)[:, :length]
    return Assignment(slot, keep, join, length, lengths)


def merge(tokens: Tokens, move: Assignment, *, pack: bool = True) -> Tokens:
    """Size-weighted mean of the tokens that share a slot: x_ij = (n_i x_i + n_j x_j) / (n_i + n_j).

    Most tokens stay alone. So those that keep a slot are copied, and only the few that join another are added."""
    b, n = move.slot.shape
    m, c = move.length, tokens.x.shape[-1]
    device = move.slot.device
    size = tokens.size.new_zeros(b, m).scatter_add_(1, move.slot, tokens.size)
    after = Tokens(tokens.x, size, move.slot.gather(1, tokens.owner), True, move.lengths, pack and move.lengths is not None)
    wide = torch.promote_types(tokens.x.dtype, torch.float32)  # half precision is weighed and added up in float32
    weight = tokens.size.to(wide) / size.gather(1, move.slot)  # [B,N]; exactly 1 for a token that stays alone

    first = torch.arange(b, device=device).unsqueeze(1)
    kept = (move.keep + n * first).reshape(-1)  # positions in the [B·N] grid
    target = (after.rows_of(move.slot) if after.packed else move.slot + m * first).reshape(-1)[move.join]
    if after.packed:
        kept = kept[after._grid_rows()]
    weight = weight.reshape(-1)
    weight_kept, weight_joined = weight[kept], weight[move.join]
    joined = move.join
    if tokens.packed:  # from positions in the grid to rows
        row = tokens.rows_of(torch.arange(n, device=device).expand(b, n)).reshape(-1)
        kept, joined = row[kept], row[joined]
    rows = tokens.x.reshape(-1, c)
    x = rows.index_select(0, kept).to(wide).mul_(weight_kept.unsqueeze(1))
    x = x.index_add_(0, target, rows.index_select(0, joined).to(wide).mul_(weight_joined.unsqueeze(1))).to(tokens.x.dtype)
    return after.with_x(x.reshape(1, -1, c) if after.packed else x.reshape(b, m, c))


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
