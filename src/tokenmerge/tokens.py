"""The state that travels through the blocks, and the one operation that changes it.

A merge says which tokens keep a place and which join another's. Everything follows from it, with no special case for the
class token, safe in half precision (weigh first, then add), and undone by a gather.

Images of a batch may keep different numbers of tokens. Sizes and owners are then padded to the longest image; the tokens
themselves are *packed*, image after image in one long row, so that nothing is multiplied with padding. (In training they
are padded too, because stochastic depth wants images apart.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Assignment:
    """What a method decides in one layer. Tokens are named by their position in the [B·N] grid of the batch, places by
    their row afterwards: image after image, B·M rows, or ΣM where images differ."""

    order: Tensor  # [rows + R] int64: the token that has each place, then the tokens that join another
    into: Tensor  # [R] int64: the places that they join
    length: int  # M, tokens after the merge, of the longest image
    lengths: tuple[int, ...] | None = None  # of each image, where they differ


class Origin:
    """Where the original tokens are now. Most calls never ask, so it is worked out when somebody does."""

    def __init__(self, size: Tensor, index: Tensor, before: Origin | None = None, move: Assignment | None = None) -> None:
        self.shape = size.shape  # [B,N]
        self.index, self.before, self.move = index, before, move

    @cached_property
    def owner(self) -> Tensor:
        """Which token now holds each original token, [B,N0] int64."""
        b, n = self.shape
        if self.before is None or self.move is None:
            return self.index[:n].expand(b, n)
        place = self.index[:n].expand(b, n).reshape(-1)
        if self.move.lengths is not None:
            place = place.index_select(0, grid_rows(self.move.lengths, n, place.device))
        batch, old = self.before.shape
        place = torch.cat((place, place.index_select(0, self.move.into)))
        slot = place.new_zeros(batch * old).index_copy_(0, self.move.order, place)
        return slot.reshape(batch, old).gather(1, self.before.owner)


@dataclass(frozen=True)
class Tokens:
    """Tokens of a batch."""

    x: Tensor  # [B,N,C]; packed: [1,ΣN,C]
    size: Tensor  # [B,N] float32: how many original tokens each one stands for; 0 marks padding, at the end
    index: Tensor  # 0, 1, 2, … at least up to B and N0: lists of positions are slices of it
    origin: Origin
    lengths: tuple[int, ...] | None = None  # tokens of each image, where they differ
    packed: bool = False

    @classmethod
    def start(cls, x: Tensor, size: Tensor | None = None, lengths: tuple[int, ...] | None = None) -> Tokens:
        """Every token stands for itself, if not said otherwise."""
        b, n, _ = x.shape
        size = torch.ones(b, n, dtype=torch.float32, device=x.device) if size is None else size
        index = torch.arange(max(b, n), device=x.device)
        return cls(x, size, index, Origin(size, index), lengths)

    @property
    def owner(self) -> Tensor:
        """Which token now holds each original token, [B,N0] int64."""
        return self.origin.owner

    @property
    def merged(self) -> bool:
        """Whether any merge happened: until then, proportional attention is plain attention."""
        return self.origin.before is not None

    @property
    def count(self) -> Tensor:
        """Tokens of each image, [B] int64."""
        return (self.size > 0).sum(1)

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


def merge(tokens: Tokens, move: Assignment, *, pack: bool = True) -> Tokens:
    """Size-weighted mean of the tokens that share a place: x_ij = (n_i x_i + n_j x_j) / (n_i + n_j).

    Most tokens stay alone. So those that keep a place are copied, and each that joins pulls its place towards itself by
    its share of the new size: x_i + n_j / (n_i + n_j) · (x_j − x_i)."""
    b, c = tokens.size.shape[0], tokens.x.shape[-1]
    m, into = move.length, move.into
    rows = len(move.order) - len(into)
    size = tokens.size.reshape(-1).index_select(0, move.order)
    size, joined = size[:rows], size[rows:]
    size.index_add_(0, into, joined)
    wide = torch.promote_types(tokens.x.dtype, torch.float32)  # half precision is weighed and added up in float32
    share = joined.to(wide).div_(size.index_select(0, into)).unsqueeze(1)
    x = tokens.x.reshape(-1, c).index_select(0, tokens.rows(move.order)).to(wide)
    x, pull = x[:rows], x[rows:]
    x = x.index_add_(0, into, pull.sub(x.index_select(0, into)).mul_(share)).to(tokens.x.dtype)

    packed = pack and move.lengths is not None
    if move.lengths is not None:
        at = grid_rows(move.lengths, m, x.device)
        size = size.new_zeros(b * m).index_copy_(0, at, size)
        if not packed:
            x = x.new_zeros(b * m, c).index_copy(0, at, x)
    size = size.reshape(b, m)
    x = x.reshape(1, -1, c) if packed else x.reshape(b, m, c)
    return Tokens(x, size, tokens.index, Origin(size, tokens.index, tokens.origin, move), move.lengths, packed)


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
