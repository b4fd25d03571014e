"""The tokens of a batch while they travel through the blocks, and how they merge.

An `Assignment` says which tokens keep a position and which join another token; the others are dropped. Everything follows
from it: no special case for the CLS token, safe in half precision (weight first, then add), undone by a gather. In graphs
(torch.compile, torch.export) the same is done by graph.py.

Images of a batch may keep different numbers of tokens. Sizes and owners are then padded to the longest image. The tokens
themselves are *packed*, image after image in one long row, so that nothing is multiplied with padding. (In training they
are padded, too, because stochastic depth needs one row per image.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from .graph import GraphAssignment, graph_merge

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


class KeyMask(NamedTuple):
    """Tokens that are masked instead of dropped, so that gradients reach the decision. A masked token attends to itself
    only, and no other token attends to it: A_ij = (e_ij m_ij + ε/N) / (Σ_j e_ij m_ij + ε), m_ij = m_j, but m_ii = 1."""

    weight: Tensor  # [B,N] float32: 1 for tokens that stay, 0 for masked ones
    epsilon: float = 0.0


class Parked(NamedTuple):
    """Tokens that are set aside and come back unchanged, the same number in every image. In `owner` they follow the
    others: the first of them has the position M."""

    x: Tensor  # [B,P,C]
    size: Tensor  # [B,P]
    extra: Tensor | None  # [B,P,E]


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
    # What some trained methods need; see state.py.
    extra: Tensor | None = None  # [B,N,E] float32: values of the method that travel with the tokens
    memory: Tensor | None = None  # [B,…]: values of the method per image
    mask: KeyMask | None = None
    parked: Parked | None = None
    offset: Tensor | None = None  # [B,N0,C]: by how much each original token differed from its group when they merged

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
        if not self.packed or self.lengths is None:
            return values
        return unpack_rows(values[0], self.lengths)

    def pack(self, values: Tensor) -> Tensor:
        """The inverse of `unpack`: [B,N,D] → laid out as x is."""
        if not self.packed or self.lengths is None:
            return values
        rows = padded_rows(self.lengths, values.shape[1], values.device)
        return values.reshape(-1, values.shape[-1]).index_select(0, rows).unsqueeze(0)

    def restore(self, values: Tensor, prefix: int) -> Tensor:
        """Values of tokens, laid out as x is → [B,N0,D]; see `restore` below. Parked tokens are as they were; masked ones
        are restored like dropped ones. With an offset, a token gets what its group has changed since they merged."""
        if self.mask is not None:
            kept = self.mask.weight > 0
            if self.offset is not None:
                return torch.where(kept.unsqueeze(-1), values, self.offset)
            return _fill_dropped(values, kept, prefix)
        if self.offset is not None:
            return self._spread(values) + self.offset
        if self.parked is not None:
            values = torch.cat((values, self.parked.x), 1)
        if not self.origin.drops:
            return self.take(values, self.owner)
        return _fill_dropped(self.take(values, self.owner.clamp(min=0)), self.owner != DROPPED, prefix)

    def _spread(self, values: Tensor) -> Tensor:
        """Every original token gets the vector of its group, a dropped one 0: [B,N0,D]."""
        if self.parked is not None:
            values = torch.cat((values, self.parked.x), 1)
        if not self.origin.drops:
            return self.take(values, self.owner)
        found = self.take(values, self.owner.clamp(min=0))
        return torch.where((self.owner == DROPPED).unsqueeze(-1), 0, found)

    def with_offset(self, before: Tokens) -> Tokens:
        """These tokens, merged from `before`, with what the merge took from each original token. A dropped token keeps the
        vector that it had, and so does a masked one."""
        if self.mask is not None:  # nothing merges, every token is in its place
            alive = before.size > 0 if before.mask is None else before.mask.weight > 0
            masked = (alive & (self.mask.weight == 0)).unsqueeze(-1)
            return self._replace(offset=torch.where(masked, before.x, 0 if before.offset is None else before.offset))
        change = before._spread(before.x) - self._spread(self.x)
        return self._replace(offset=change if before.offset is None else before.offset + change)

    def representative(self) -> Tensor:
        """An original token of each token, [B,N]: the inverse of `restore`."""
        b, n = self.origin.shape  # with parked tokens
        owner = self.owner
        index = self.positions[: self.original].expand(b, -1)
        if self.origin.drops:
            index = torch.where(owner == DROPPED, self.original - 1, index)
            owner = owner.clamp(min=0)
        found = owner.new_full((b, n), self.original - 1).scatter_reduce(1, owner, index, reduce="amin")
        return found if self.parked is None else found[:, : self.size.shape[1]]


# How tokens become one: the weighted mean; the weighted sum, which scales tokens that stay alone, too; or the direction of
# the mean with the norm of the longest token.
Blend = Literal["mean", "sum", "longest"]


@dataclass(frozen=True)
class Assignment:
    """What a method decides in one layer. Tokens are named by their flat position in the [B·N] grid of the batch. Rows are
    their new positions: image after image, B·M rows, or ΣM in a ragged batch. Tokens that are not named are dropped."""

    order: Tensor  # [rows + R] int64: the token that takes each row, then the tokens that join another
    into: Tensor  # [R] int64: the rows that they join
    length: int  # M, tokens after the merge, of the longest image
    lengths: tuple[int, ...] | None = None  # of each image, where they differ
    weight: Tensor | None = None  # [rows + R]: weight of each token in its group; None: its size
    gain: Tensor | None = None  # [rows + R]: the fraction of its size that each token brings to its group; None: all of it
    blend: Blend = "mean"
    parked: Tensor | None = None  # [B·P] int64: tokens that are set aside, P of each image

    @property
    def kept(self) -> Tensor:
        """The token that takes each row."""
        return self.order[: self.order.shape[0] - self.into.shape[0]]

    def rows(self, count: int) -> Tensor:
        """The row of each of `count` tokens, [B·N]; DROPPED where it is dropped."""
        kept = torch.arange(self.order.shape[0] - self.into.shape[0], device=self.order.device)
        return self.order.new_full((count,), DROPPED).index_copy_(0, self.order, torch.cat((kept, self.into)))

    def owners(self, before: Origin, after: Origin) -> Tensor:
        """Which token now holds each token that entered the layer, [B,N]; DROPPED where it was dropped."""
        b, n = after.shape
        if self.parked is not None:
            return self._owners_with_parked(after)
        position = after.positions[:n].expand(b, n).reshape(-1)  # of each row in its image
        if self.lengths is not None:
            position = position.index_select(0, padded_rows(self.lengths, n, position.device))
        batch, old = before.shape
        rows = self.rows(batch * old)
        return torch.where(rows == DROPPED, DROPPED, position.index_select(0, rows.clamp(min=0))).reshape(batch, old)

    def _owners_with_parked(self, after: Origin) -> Tensor:
        """Parked tokens come after the M others. Nothing joins, and nothing is dropped."""
        assert self.parked is not None
        b, n = after.shape
        both = torch.cat((self.kept.reshape(b, -1), self.parked.reshape(b, -1)), 1).reshape(-1)
        return self.order.new_empty(b * n).index_copy_(0, both, after.positions[:n].repeat(b)).reshape(b, n)


# What a method decides: lists of tokens, which run fastest; in graphs, rows of one length for all images.
Decision = Assignment | GraphAssignment


@overload
def as_lists(decision: Decision) -> Assignment: ...


@overload
def as_lists(decision: Decision | None) -> Assignment | None: ...


def as_lists(decision: Decision | None) -> Assignment | None:
    """For methods that build on an assignment of lists; a graph has none."""
    if isinstance(decision, GraphAssignment):
        raise ValueError(
            "this method needs lists of merged tokens, which graphs do not have; methods that declare `exports`, such as "
            "ATM and ToMe, compile and export"
        )
    return decision


def assign(
    tokens: Tokens,
    keep: Tensor,
    join: Tensor | None = None,
    into: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    gain: Tensor | None = None,
    blend: Blend = "mean",
) -> Assignment:
    """Positions in each image become one Assignment: `keep` [B,M] stay, in this order; `join` [B,R] merge into the token
    that `into` [B,R] names, an index into `keep`; tokens in neither are dropped. `weight` and `gain` [B,N]: see
    Assignment."""
    m = keep.shape[1]
    n = tokens.size.shape[1]
    order = flat_positions(keep, n, tokens.positions)
    if join is None or into is None:
        rows = order.new_zeros(0)
    else:
        order = torch.cat((order, flat_positions(join, n, tokens.positions)))
        rows = flat_positions(into, m, tokens.positions)
    weight, gain = (None if t is None else t.reshape(-1).index_select(0, order) for t in (weight, gain))
    return Assignment(order, rows, m, weight=weight, gain=gain, blend=blend)


def flat_positions(position: Tensor, n: int, positions: Tensor) -> Tensor:
    """Positions [B,M] in images of n tokens → flat positions in the [B·n] grid, [B·M]."""
    b = position.shape[0]
    if b == 1:
        return position.reshape(-1)
    return (position + n * positions[:b].unsqueeze(1)).reshape(-1)


def assign_kept(tokens: Tokens, keep: Tensor) -> Assignment | None:
    """Tokens that stay, [B,N] bool, where images may differ; the others are dropped."""
    lengths = tuple(keep.sum(1).tolist())  # the only host–device sync in this layer
    if sum(lengths) == tokens.total:
        return None
    order = torch.nonzero_static(keep.reshape(-1), size=sum(lengths))[:, 0]
    same = min(lengths) == max(lengths)
    return Assignment(order, order.new_zeros(0), max(lengths), None if same else lengths)


def merge(tokens: Tokens, decision: Decision, *, pack: bool = True, matmul: bool = False) -> Tokens:
    """Size-weighted mean of the tokens of each group: x_ij = (n_i x_i + n_j x_j) / (n_i + n_j); or what the method asks
    for instead. `pack`: lay out a ragged batch packed, else padded. `matmul`: see graph.py."""
    if isinstance(decision, GraphAssignment):
        x, size = graph_merge(tokens.x, tokens.size, decision, matmul)
        origin = Origin(size.shape, tokens.positions, tokens.origin, decision, tokens.origin.drops)
        return Tokens(x, size, tokens.positions, origin, True, decision.valid is not None)
    b = tokens.size.shape[0]
    c = tokens.x.shape[-1]
    m = decision.length
    rows = decision.order.shape[0] - decision.into.shape[0]
    size = tokens.size.reshape(-1).index_select(0, decision.order)
    gained = size if decision.gain is None else size * decision.gain
    total = gained[:rows].index_add(0, decision.into, gained[rows:])
    order = tokens.rows(decision.order) if tokens.packed else decision.order
    x = tokens.x.reshape(-1, c).index_select(0, order)
    if decision.weight is None:
        x = _blend(x, size, total if decision.gain is None else None, decision.into, decision.blend)
    else:
        x = _blend(x, decision.weight, None, decision.into, decision.blend)
    size = total

    ragged = decision.lengths is not None
    packed = pack and ragged
    if decision.lengths is not None:
        at = padded_rows(decision.lengths, m, x.device)
        size = size.new_zeros(b * m).index_copy_(0, at, size)
        if not packed:
            x = x.new_zeros(b * m, c).index_copy(0, at, x)
    size = size.reshape(b, m)
    x = x.reshape(1, -1, c) if packed else x.reshape(b, m, c)
    # (Written out: `tokens.total` would be one more call per layer.)
    entering = tokens.size.numel() if tokens.lengths is None else sum(tokens.lengths)
    drops = tokens.origin.drops or decision.order.shape[0] < entering
    origin = Origin(size.shape, tokens.positions, tokens.origin, decision, drops)
    return Tokens(x, size, tokens.positions, origin, True, ragged, decision.lengths, packed)


def empty_merge(tokens: Tokens, counts: Sequence[int], dtype: torch.dtype) -> tuple[Tokens, Assignment]:
    """Where images merge `counts` pairs each: the tokens after the merge and the assignment, for a kernel to fill."""
    (b, n), c, device = tokens.size.shape, tokens.x.shape[-1], tokens.x.device
    left = tuple(before - gone for before, gone in zip(tokens.lengths or (n,) * b, counts, strict=True))
    m, rows, joining = max(left), sum(left), sum(counts)
    ragged = min(left) < m
    order = torch.empty(rows + joining, dtype=torch.int64, device=device)
    into = torch.empty(joining, dtype=torch.int64, device=device)
    decision = Assignment(order, into, m, left if ragged else None)
    x = torch.empty((1, rows, c) if ragged else (b, m, c), dtype=dtype, device=device)
    size = torch.empty((b, m), dtype=torch.float32, device=device)
    origin = Origin(size.shape, tokens.positions, tokens.origin, decision, tokens.origin.drops)
    return Tokens(x, size, tokens.positions, origin, True, ragged, decision.lengths, ragged), decision


def _blend(x: Tensor, weight: Tensor, total: Tensor | None, into: Tensor, blend: Blend) -> Tensor:
    """x and weight [rows + R]: the tokens that take a row, then those that join one → [rows]. `total`: the sum of the
    weights in each row, where it is known.

    Most tokens stay alone. So the tokens that take a row are copied, and each token that joins pulls its row towards itself
    by its fraction of the weight: x_i + n_j / (n_i + n_j) · (x_j − x_i)."""
    dtype = x.dtype
    rows = x.shape[0] - into.shape[0]
    x = x.to(torch.promote_types(dtype, torch.float32))  # half precision is weighted and added up in float32
    weight = weight.to(x.dtype)
    if blend == "sum":
        x = x * weight.unsqueeze(1)
        return x[:rows].index_add(0, into, x[rows:]).to(dtype)
    norm = torch.linalg.vector_norm(x, dim=1) if blend == "longest" else None
    if total is None:
        total = weight[:rows].index_add(0, into, weight[rows:])
    fraction = weight[rows:].div(total.index_select(0, into)).unsqueeze(1)
    x, pull = x[:rows], x[rows:]
    pull = pull.sub(x.index_select(0, into)).mul_(fraction)
    if norm is None:
        return x.index_add_(0, into, pull).to(dtype)
    x = x.index_add(0, into, pull)
    longest = norm[:rows].scatter_reduce(0, into, norm[rows:], reduce="amax")
    x = x * (longest / torch.linalg.vector_norm(x, dim=1).clamp(min=1e-12)).unsqueeze(1)
    return x.to(dtype)


def unpack_rows(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Rows of packed images [ΣN,…] → [B,N,…]; the padding repeats the last row of each image."""
    ends = torch.tensor([*accumulate(lengths)], device=rows.device).unsqueeze(1)
    counts = torch.tensor(lengths, device=rows.device).unsqueeze(1)
    at = (ends - counts + torch.arange(max(lengths), device=rows.device)).minimum(ends - 1)
    return rows.index_select(0, at.flatten()).reshape(*at.shape, *rows.shape[1:])


def padded_rows(lengths: Sequence[int], n: int, device: torch.device) -> Tensor:
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
    return _fill_dropped(restored, owner != DROPPED, prefix) if (owner == DROPPED).any() else restored


def _fill_dropped(restored: Tensor, kept: Tensor, prefix: int) -> Tensor:
    """Replace tokens that are not kept [B,N0] by the mean of the remaining patches, [B,N0,C]."""
    kept = kept.unsqueeze(-1)
    weight = kept[:, prefix:].float()
    weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
    mean = (restored[:, prefix:] * weight).sum(1, keepdim=True)  # in float32: half precision would overflow
    return torch.where(kept, restored, mean.to(restored.dtype))
