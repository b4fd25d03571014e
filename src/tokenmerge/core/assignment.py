"""Which pairs merge, and the merge itself.

An `Assignment` says which tokens keep a position and which join another token; the others are dropped. Everything follows
from it: no special case for the CLS token, safe in half precision (weight first, then add), undone by a gather. In graphs
(torch.compile, torch.export) the same decisions are made by graph.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .graph import GraphAssignment, graph_each, graph_mean, graph_merge, graph_top
from .matching import Pairs
from .tokens import DROPPED, Origin, Tokens, padded_rows

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
        position = after.positions[:n].expand(b, n).reshape(-1)  # of each row in its image
        if self.lengths is not None:
            position = position.index_select(0, padded_rows(self.lengths, n, position.device))
        batch, old = before.shape
        rows = self.rows(batch * old)
        return torch.where(rows == DROPPED, DROPPED, position.index_select(0, rows.clamp(min=0))).reshape(batch, old)


# What a method decides: lists of tokens, which run fastest; in graphs, rows of one length for all images.
Decision = Assignment | GraphAssignment


def assign_top(tokens: Tokens, prefix: int, pairs: Pairs, r: int) -> Decision | None:
    """Every image merges its r most similar pairs; ties go by position."""
    if tokens.ragged:
        raise ValueError("assign_top needs images of equal length; use assign_each after a per-image merge")
    r = min(r, pairs.score.shape[1])
    if r <= 0:
        return None
    if torch.compiler.is_compiling():
        return graph_top(tokens, prefix, pairs, r)
    score = pairs.score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    best = score.argsort(dim=1, descending=True, stable=True)[:, :r]
    return _assign_equal(tokens, prefix, pairs, torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True), r)


def assign_mean(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Decision | None:
    """The paper's batch rule: r = ⌊mean over the batch of the pairs above θ⌋, then the r best pairs of every image."""
    if torch.compiler.is_compiling():
        return graph_mean(tokens, prefix, pairs, theta)
    chosen = pairs.above(theta)
    images = chosen.shape[0]
    r = int(chosen.count_nonzero()) // images  # the only host–device sync in this layer
    if images > 1:
        return assign_top(tokens, prefix, pairs, r)
    return _assign_equal(tokens, prefix, pairs, chosen, r) if r else None


def assign_each(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Decision | None:
    """Every image merges its own pairs above θ: the result is batch-invariant.

    An image that merges nothing keeps the order of its tokens, as it would alone."""
    if torch.compiler.is_compiling():
        return graph_each(tokens, prefix, pairs, theta)
    chosen = pairs.above(theta)
    merged: list[int] = chosen.sum(1).tolist()  # the only host–device sync in this layer
    if not any(merged):
        return None
    if not tokens.ragged and min(merged) == max(merged):
        return _assign_equal(tokens, prefix, pairs, chosen, merged[0])
    return _assign_ragged(tokens, prefix, pairs, chosen, merged)


def _assign_equal(tokens: Tokens, prefix: int, pairs: Pairs, chosen: Tensor, r: int) -> Assignment:
    """The chosen pairs [B,S] merge, r of them in every image. The new order is: prefix, the sources that stay, the
    targets, each in its order."""
    order = chosen.argsort(dim=1, stable=True)  # the sources that stay, then those that join their targets
    b = order.shape[0]
    stay = order.shape[1] - r
    source = pairs.split.source.expand(b, -1).gather(1, order)
    target = pairs.split.target.expand(b, -1)
    into = pairs.best.gather(1, order[:, stay:]) + (prefix + stay)
    keep = torch.cat((tokens.positions[:prefix].expand(b, -1), source[:, :stay], target), 1)
    return assign(tokens, keep, source[:, stay:], into)


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


def _assign_ragged(tokens: Tokens, prefix: int, pairs: Pairs, chosen: Tensor, merged: list[int]) -> Assignment:
    """The chosen pairs [B,S] merge, merged[b] of them in image b. The order is that of `_assign_equal`."""
    b, n = tokens.size.shape
    split = pairs.split
    lengths = tuple(old - r for old, r in zip(tokens.lengths or (n,) * b, merged, strict=True))
    first = tokens.positions[:prefix].expand(b, -1)
    source = pairs.source
    target = split.target.expand(b, -1)
    stays = ~chosen if split.source_valid is None else split.source_valid & ~chosen
    target_valid = torch.ones_like(target, dtype=torch.bool) if split.target_valid is None else split.target_valid
    alive = torch.cat((torch.ones_like(first, dtype=torch.bool), stays, target_valid), 1)
    target_row = alive.reshape(-1).cumsum(0).reshape(b, -1)[:, -target.shape[1] :] - 1
    # An image that merges nothing keeps the order of its tokens.
    idle = ~chosen.any(1, keepdim=True)
    index = tokens.positions[: alive.shape[1]]
    whole = torch.where(idle, index, torch.cat((first, source, target), 1))
    alive = torch.where(idle, index < tokens.num_tokens.unsqueeze(1), alive)
    rows = torch.nonzero_static(alive.reshape(-1), size=sum(lengths))[:, 0]
    joining = torch.nonzero_static(chosen.reshape(-1), size=sum(merged))[:, 0]
    keep = flat_positions(whole, n, tokens.positions).index_select(0, rows)
    join = flat_positions(source, n, tokens.positions).index_select(0, joining)
    into = target_row.gather(1, pairs.best).reshape(-1).index_select(0, joining)
    same = min(lengths) == max(lengths)
    return Assignment(torch.cat((keep, join)), into, max(lengths), None if same else lengths)


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
