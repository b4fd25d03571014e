"""The tokens of a batch while they travel through the blocks.

Images of a batch may keep different numbers of tokens. Sizes and owners are then padded to the longest image. The tokens
themselves are *packed*, image after image in one long row, so that nothing is multiplied with padding. (In training they
are padded, too, because stochastic depth needs one row per image.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

DROPPED = -1  # the owner of tokens that were dropped


class Mapping(Protocol):
    """Where the tokens of one layer went; an Assignment or a GraphAssignment."""

    def owners(self, before: Origin, after: Origin) -> Tensor:
        """Which token now holds each token that entered the layer, [B,N]; DROPPED where it was dropped."""


@dataclass
class Origin:
    """Which token holds each original token. Most calls never ask, so it is computed on demand."""

    shape: torch.Size  # [B,N]
    positions: Tensor  # those of Tokens
    before: Origin | None = None
    mapping: Mapping | None = None
    drops: bool = False  # whether any token has been dropped so far
    _owner: Tensor | None = None

    @property
    def owner(self) -> Tensor:
        """Which token now holds each original token, [B,N0] int64; DROPPED where it was dropped."""
        if self._owner is None:  # (a cached_property holds a lock, which compilers do not know)
            self._owner = self._compute_owner()
        return self._owner

    def _compute_owner(self) -> Tensor:
        b, n = self.shape
        if self.before is None or self.mapping is None:
            return self.positions[:n].expand(b, n)
        owner = self.mapping.owners(self.before, self)
        earlier = self.before.owner
        if not self.drops:
            return owner.gather(1, earlier)
        return torch.where(earlier == DROPPED, DROPPED, owner.gather(1, earlier.clamp(min=0)))


class Tokens(NamedTuple):
    """Tokens of a batch. `tokens._replace(x=…)` changes the vectors alone."""

    x: Tensor  # [B,N,C]; packed: [1,ΣN,C]
    size: Tensor  # [B,N] float32: how many original tokens each one stands for; 0 marks padding, at the end
    positions: Tensor  # 0, 1, 2, … at least up to B and N0: lists of positions are slices of it
    origin: Origin
    merged: bool = False  # whether any merge happened: until then, proportional attention is plain attention
    ragged: bool = False  # whether images may have different numbers of tokens
    lengths: tuple[int, ...] | None = None  # per image of a ragged batch; None in graphs, where they are data-dependent
    packed: bool = False

    @classmethod
    def start(cls, x: Tensor, size: Tensor | None = None, lengths: tuple[int, ...] | None = None) -> Tokens:
        """By default, every token stands for itself."""
        b, n, _ = x.shape
        if size is None:
            size = torch.ones(b, n, dtype=torch.float32, device=x.device)
        positions = torch.arange(torch.sym_max(b, n), device=x.device)
        return cls(x, size, positions, Origin(size.shape, positions), ragged=lengths is not None, lengths=lengths)

    @property
    def owner(self) -> Tensor:
        """Which token now holds each original token, [B,N0] int64; DROPPED where it was dropped."""
        return self.origin.owner

    @property
    def original(self) -> int:
        """N0, the number of tokens before any merge."""
        origin = self.origin
        while origin.before is not None:
            origin = origin.before
        return origin.shape[1]

    @property
    def num_tokens(self) -> Tensor:
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

    def rows(self, flat: Tensor) -> Tensor:
        """Flat positions in the [B·N] grid → rows of x, seen as one long row."""
        if not self.packed:
            return flat
        n = self.size.shape[1]
        shift = torch.tensor([b * n - start for b, start in enumerate(self.starts)], device=flat.device)
        return flat - shift.index_select(0, flat // n)

    def take(self, values: Tensor, position: Tensor) -> Tensor:
        """Values of tokens, laid out as x is, at positions [B,M] of each image → [B,M,D]."""
        if not self.packed:
            return values.gather(1, position.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
        b, n = self.size.shape
        flat = (position + n * self.positions[:b].unsqueeze(1)).reshape(-1)
        return values[0].index_select(0, self.rows(flat)).reshape(*position.shape, -1)

    def unpack(self, values: Tensor) -> Tensor:
        """Values of tokens, laid out as x is → [B,N,D]; values in the padding are undefined."""
        if not self.packed:
            return values
        b, n = self.size.shape
        last = torch.tensor(self.lengths, device=values.device).unsqueeze(1) - 1
        return self.take(values, self.positions[:n].expand(b, n).minimum(last))

    def pack(self, values: Tensor) -> Tensor:
        """The inverse of `unpack`: [B,N,D] → laid out as x is."""
        if not self.packed or self.lengths is None:
            return values
        rows = padded_rows(self.lengths, values.shape[1], values.device)
        return values.reshape(-1, values.shape[-1]).index_select(0, rows).unsqueeze(0)

    def restore(self, values: Tensor, prefix: int) -> Tensor:
        """Values of tokens, laid out as x is → [B,N0,D]; see `restore` below."""
        if not self.origin.drops:
            return self.take(values, self.owner)
        return _fill_dropped(self.take(values, self.owner.clamp(min=0)), self.owner, prefix)

    def representative(self) -> Tensor:
        """An original token of each token, [B,N]: the inverse of `restore`."""
        b, n = self.size.shape
        owner = self.owner
        index = self.positions[: self.original].expand(b, -1)
        if self.origin.drops:
            index = torch.where(owner == DROPPED, self.original - 1, index)
            owner = owner.clamp(min=0)
        return owner.new_full((b, n), self.original - 1).scatter_reduce(1, owner, index, reduce="amin")


def padded_rows(lengths: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    """Where packed tokens are in a padded grid of n columns, [ΣN]."""
    shift = [b * n - start for b, start in enumerate(accumulate(lengths[:-1], initial=0))]
    total = sum(lengths)
    counts = torch.tensor(lengths, device=device)
    ahead = torch.tensor(shift, device=device).repeat_interleave(counts, output_size=total)
    return ahead + torch.arange(total, device=device)


def restore(x: Tensor, owner: Tensor, prefix: int = 0) -> Tensor:
    """Give every original token the vector of the token that holds it, [B,M,C] → [B,N0,C].

    The mean over restored tokens is the size-weighted mean over merged ones, and attention over repeated keys is
    attention with + log size: heads that pool, attend or predict per patch need no change. Dropped tokens are restored as
    the mean of the remaining patches, so that a pooled mean is that of the tokens that were kept.
    """
    restored = x.gather(1, owner.clamp(min=0).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return _fill_dropped(restored, owner, prefix) if (owner == DROPPED).any() else restored


def _fill_dropped(restored: Tensor, owner: Tensor, prefix: int) -> Tensor:
    """Replace dropped tokens by the mean of the remaining patches, [B,N0,C]."""
    kept = (owner != DROPPED).unsqueeze(-1)
    weight = kept[:, prefix:].float()
    weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
    mean = (restored[:, prefix:] * weight).sum(1, keepdim=True)  # in float32: half precision would overflow
    return torch.where(kept, restored, mean.to(restored.dtype))


def group_mean(values: Tensor, owner: Tensor, length: int) -> Tensor:
    """Mean over the original tokens of each of `length` tokens: values [B,H,N0,D], owner [B,N0] → [B,H,length,D]."""
    b, h, _, d = values.shape
    kept = (owner >= 0).to(values.dtype)[:, None, :, None]
    index = owner.clamp(min=0)[:, None, :, None]
    total = values.new_zeros(b, h, length, d).scatter_add(2, index.expand(b, h, -1, d), values * kept)
    count = values.new_zeros(b, 1, length, 1).scatter_add(2, index, kept.expand(b, 1, -1, 1))
    return total / count.clamp(min=1)
