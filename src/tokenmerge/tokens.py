"""The state that travels through the blocks, and the one operation that changes it.

A merge says which tokens keep a place and which join another's; the others are dropped. Everything follows from it, with no
special case for the class token, safe in half precision (weigh first, then add), and undone by a gather.

Images of a batch may keep different numbers of tokens. Sizes and owners are then padded to the longest image; the tokens
themselves are *packed*, image after image in one long row, so that nothing is multiplied with padding. (In training they
are padded too, because stochastic depth wants images apart.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from .slots import Slots, merge_slots

# How tokens become one: the weighed mean; the weighed sum, which scales those that stay alone, too; or the mean's direction
# with the norm of the longest.
Blend = Literal["mean", "sum", "longest"]

GONE = -1  # the owner of tokens that were dropped


@dataclass(frozen=True)
class Assignment:
    """What a method decides in one layer. Tokens are named by their position in the [B·N] grid of the batch, places by
    their row afterwards: image after image, B·M rows, or ΣM where images differ. Tokens that are not named are dropped."""

    order: Tensor  # [rows + R] int64: the token that has each place, then the tokens that join another
    into: Tensor  # [R] int64: the places that they join
    length: int  # M, tokens after the merge, of the longest image
    lengths: tuple[int, ...] | None = None  # of each image, where they differ
    weight: Tensor | None = None  # [rows + R]: what each token weighs where it meets others; None: its size
    gain: Tensor | None = None  # [rows + R]: the part of its size that each token brings to its place; None: all of it
    blend: Blend = "mean"

    @property
    def kept(self) -> Tensor:
        """The token that has each place."""
        return self.order[: self.order.shape[0] - self.into.shape[0]]

    def slots(self, count: int) -> Tensor:
        """The place of each of `count` tokens, [B·N]; GONE where it is dropped."""
        place = torch.arange(self.order.shape[0] - self.into.shape[0], device=self.order.device)
        return self.order.new_full((count,), GONE).index_copy_(0, self.order, torch.cat((place, self.into)))


# What a method decides: lists of tokens, which run fastest; in graphs, rows of one length for all images.
Move = Assignment | Slots


class Origin:
    """Where the original tokens are now. Most calls never ask, so it is worked out when somebody does."""

    def __init__(
        self,
        size: Tensor,
        index: Tensor,
        before: Origin | None = None,
        move: Move | None = None,
        drops: bool = False,  # whether any token was dropped on the way
    ) -> None:
        self.shape = size.shape  # [B,N]
        self.index, self.before, self.move, self.drops = index, before, move, drops
        self._owner: Tensor | None = None

    @property
    def owner(self) -> Tensor:
        """Which token now holds each original token, [B,N0] int64; GONE where it was dropped."""
        if self._owner is None:  # (a cached_property holds a lock, which compilers do not know)
            self._owner = self._trace_back()
        return self._owner

    def _trace_back(self) -> Tensor:
        b, n = self.shape
        if self.before is None or self.move is None:
            return self.index[:n].expand(b, n)
        if isinstance(self.move, Slots):
            return self.move.slots(self.before.shape[1]).gather(1, self.before.owner)
        place = self.index[:n].expand(b, n).reshape(-1)
        if self.move.lengths is not None:
            place = place.index_select(0, grid_rows(self.move.lengths, n, place.device))
        batch, old = self.before.shape
        rows, earlier = self.move.slots(batch * old), self.before.owner
        slot = torch.where(rows == GONE, GONE, place.index_select(0, rows.clamp(min=0))).reshape(batch, old)
        return torch.where(earlier == GONE, GONE, slot.gather(1, earlier.clamp(min=0)))


@dataclass(frozen=True)
class Tokens:
    """Tokens of a batch."""

    x: Tensor  # [B,N,C]; packed: [1,ΣN,C]
    size: Tensor  # [B,N] float32: how many original tokens each one stands for; 0 marks padding, at the end
    index: Tensor  # 0, 1, 2, … at least up to B and N0: lists of positions are slices of it
    origin: Origin
    # Tokens of each image, where they differ; () where they may, and only the graph knows.
    lengths: tuple[int, ...] | None = None
    packed: bool = False

    @classmethod
    def start(cls, x: Tensor, size: Tensor | None = None, lengths: tuple[int, ...] | None = None) -> Tokens:
        """Every token stands for itself, if not said otherwise."""
        b, n, _ = x.shape
        size = torch.ones(b, n, dtype=torch.float32, device=x.device) if size is None else size
        index = torch.arange(torch.sym_max(b, n), device=x.device)
        return cls(x, size, index, Origin(size, index), lengths)

    @property
    def owner(self) -> Tensor:
        """Which token now holds each original token, [B,N0] int64; GONE where it was dropped."""
        return self.origin.owner

    @property
    def original(self) -> int:
        """N0, the number of tokens before any merge."""
        origin = self.origin
        while origin.before is not None:
            origin = origin.before
        return origin.shape[1]

    @property
    def merged(self) -> bool:
        """Whether any merge happened: until then, proportional attention is plain attention."""
        return self.origin.before is not None

    @property
    def count(self) -> Tensor:
        """Tokens of each image, [B] int64."""
        return (self.size > 0).sum(1)

    @property
    def total(self) -> int:
        """Tokens of all images."""
        return self.size.numel() if self.lengths is None else sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each image begins in a packed row."""
        return tuple(accumulate((self.lengths or ())[:-1], initial=0))

    def with_x(self, x: Tensor) -> Tokens:
        return Tokens(x, self.size, self.index, self.origin, self.lengths, self.packed)

    def grid(self, place: Tensor) -> Tensor:
        """Places [B,M] or [M] in each image → positions in the [B·N] grid, [B·M]."""
        b, n = self.size.shape
        if b == 1:
            return place.reshape(-1)
        return (place + n * self.index[:b].unsqueeze(1)).reshape(-1)

    def rows(self, grid: Tensor) -> Tensor:
        """Positions in the [B·N] grid → rows of x, seen as one long row."""
        if not self.packed:
            return grid
        n = self.size.shape[1]
        back = torch.tensor([b * n - start for b, start in enumerate(self.starts)], device=grid.device)
        return grid - back.index_select(0, grid // n)

    def take(self, values: Tensor, place: Tensor) -> Tensor:
        """Values of tokens, laid out as x is, at the places [B,M] of each image → [B,M,D]."""
        if not self.packed:
            return values.gather(1, place.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
        return values[0].index_select(0, self.rows(self.grid(place))).reshape(*place.shape, -1)

    def spread(self, values: Tensor) -> Tensor:
        """Values of tokens, laid out as x is → [B,N,D]; what stands in the padding means nothing."""
        if not self.packed:
            return values
        b, n = self.size.shape
        last = torch.tensor(self.lengths, device=values.device).unsqueeze(1) - 1
        return self.take(values, self.index[:n].expand(b, n).minimum(last))

    def restore(self, values: Tensor, prefix: int) -> Tensor:
        """Values of tokens, laid out as x is → [B,N0,D]; see `restore` below."""
        if not self.origin.drops:
            return self.take(values, self.owner)
        return _fill(self.take(values, self.owner.clamp(min=0)), self.owner, prefix)

    def first(self) -> Tensor:
        """An original token of each token, [B,N]: the inverse of `restore`."""
        b, n = self.size.shape
        owner, index = self.owner, self.index[: self.original].expand(b, -1)
        if self.origin.drops:
            index = torch.where(owner == GONE, self.original - 1, index)
            owner = owner.clamp(min=0)
        return owner.new_full((b, n), self.original - 1).scatter_reduce(1, owner, index, reduce="amin")

    def pack(self, values: Tensor) -> Tensor:
        """The inverse of `spread`: [B,N,D] → as x is laid out."""
        if not self.packed or self.lengths is None:
            return values
        rows = grid_rows(self.lengths, values.shape[1], values.device)
        return values.reshape(-1, values.shape[-1]).index_select(0, rows).unsqueeze(0)


def grid_rows(lengths: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    """Where packed tokens stand in a padded grid of n columns, [ΣN]."""
    shift = [b * n - start for b, start in enumerate(accumulate(lengths[:-1], initial=0))]
    total = sum(lengths)
    counts = torch.tensor(lengths, device=device)
    ahead = torch.tensor(shift, device=device).repeat_interleave(counts, output_size=total)
    return ahead + torch.arange(total, device=device)


def merge(tokens: Tokens, move: Move, *, pack: bool = True, matmul: bool = False) -> Tokens:
    """Size-weighted mean of the tokens that share a place: x_ij = (n_i x_i + n_j x_j) / (n_i + n_j); or what the method
    asks for instead. `matmul`: see slots.py."""
    if isinstance(move, Slots):
        x, size = merge_slots(tokens.x, tokens.size, move, matmul)
        origin = Origin(size, tokens.index, tokens.origin, move, tokens.origin.drops)
        return Tokens(x, size, tokens.index, origin, None if move.there is None else ())
    b, c = tokens.size.shape[0], tokens.x.shape[-1]
    m, rows = move.length, move.kept.shape[0]
    size = tokens.size.reshape(-1).index_select(0, move.order)
    gained = size if move.gain is None else size * move.gain
    total = gained[:rows].index_add(0, move.into, gained[rows:])
    x = tokens.x.reshape(-1, c).index_select(0, tokens.rows(move.order))
    if move.weight is None:
        x = _blend(x, size, total if move.gain is None else None, move.into, move.blend)
    else:
        x = _blend(x, move.weight, None, move.into, move.blend)
    size = total

    packed = pack and move.lengths is not None
    if move.lengths is not None:
        at = grid_rows(move.lengths, m, x.device)
        size = size.new_zeros(b * m).index_copy_(0, at, size)
        if not packed:
            x = x.new_zeros(b * m, c).index_copy(0, at, x)
    size = size.reshape(b, m)
    x = x.reshape(1, -1, c) if packed else x.reshape(b, m, c)
    drops = tokens.origin.drops or move.order.shape[0] < tokens.total
    origin = Origin(size, tokens.index, tokens.origin, move, drops)
    return Tokens(x, size, tokens.index, origin, move.lengths, packed)


def _blend(x: Tensor, weight: Tensor, total: Tensor | None, into: Tensor, blend: Blend) -> Tensor:
    """x and weight [rows + R]: those that have a place, then those that join it → [rows]. `total`: the weights of each place
    added up, where they are known.

    Most tokens stay alone. So those that have a place are copied, and each that joins pulls its place towards itself by
    its share of the weight: x_i + n_j / (n_i + n_j) · (x_j − x_i)."""
    dtype, rows = x.dtype, x.shape[0] - into.shape[0]
    x = x.to(torch.promote_types(dtype, torch.float32))  # half precision is weighed and added up in float32
    weight = weight.to(x.dtype)
    if blend == "sum":
        x = x * weight.unsqueeze(1)
        return x[:rows].index_add(0, into, x[rows:]).to(dtype)
    norm = torch.linalg.vector_norm(x, dim=1) if blend == "longest" else None
    if total is None:
        total = weight[:rows].index_add(0, into, weight[rows:])
    share = weight[rows:].div(total.index_select(0, into)).unsqueeze(1)
    x, pull = x[:rows], x[rows:]
    pull = pull.sub(x.index_select(0, into)).mul_(share)
    x = x.index_add_(0, into, pull) if norm is None else x.index_add(0, into, pull)
    if norm is not None:
        longest = norm[:rows].scatter_reduce(0, into, norm[rows:], reduce="amax")
        x = x * (longest / torch.linalg.vector_norm(x, dim=1).clamp(min=1e-12)).unsqueeze(1)
    return x.to(dtype)


def restore(x: Tensor, owner: Tensor, prefix: int = 0) -> Tensor:
    """Give every original token the vector of the token that holds it, [B,M,C] → [B,N0,C].

    The mean over restored tokens is the size-weighted mean over merged ones, and attention over repeated keys is
    attention with + log size: heads that pool, attend or predict per patch need no change. Tokens that were dropped come
    back as the mean of the others behind the prefix, so that a pooled mean is that of the tokens that stayed.
    """
    restored = x.gather(1, owner.clamp(min=0).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return _fill(restored, owner, prefix) if (owner == GONE).any() else restored


def _fill(restored: Tensor, owner: Tensor, prefix: int) -> Tensor:
    """Put the mean of the patches that are left where others were dropped, [B,N0,C]."""
    there = (owner != GONE).unsqueeze(-1)
    weight = there[:, prefix:].float()
    weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
    mean = (restored[:, prefix:] * weight).sum(1, keepdim=True)  # in float32: half precision would overflow
    return torch.where(there, restored, mean.to(restored.dtype))


def group_mean(values: Tensor, owner: Tensor, length: int) -> Tensor:
    """Mean over the original tokens of each of `length` slots: values [B,H,N0,D], owner [B,N0] → [B,H,length,D]."""
    b, h, _, d = values.shape
    there = (owner >= 0).to(values.dtype)[:, None, :, None]
    index = owner.clamp(min=0)[:, None, :, None]
    total = values.new_zeros(b, h, length, d).scatter_add(2, index.expand(b, h, -1, d), values * there)
    count = values.new_zeros(b, 1, length, 1).scatter_add(2, index, there.expand(b, 1, -1, 1))
    return total / count.clamp(min=1)
