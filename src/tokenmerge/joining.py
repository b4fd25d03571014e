"""Which pairs merge, and where every token goes: as lists, which run fastest; in graphs, as rows of one length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .matching import Pairs
from .slots import Slots, known, rank
from .tokens import Assignment, Blend, Move, Tokens


def join_top(tokens: Tokens, prefix: int, pairs: Pairs, r: int) -> Move | None:
    """Every image merges its r most similar pairs; ties go by position."""
    if tokens.lengths is not None:
        raise ValueError("join_top needs images of equal length; use join_each after a per-image merge")
    r = min(r, pairs.score.shape[1])
    if r <= 0:
        return None
    if torch.compiler.is_compiling():
        return slots_top(tokens, prefix, pairs, r)
    score = pairs.score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    best = score.argsort(dim=1, descending=True, stable=True)[:, :r]
    return _join_same(tokens, prefix, pairs, torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True), r)


def join_mean(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Move | None:
    """The paper's batch rule: r = ⌊mean over the batch of the pairs above θ⌋, then the r best pairs of every image."""
    if torch.compiler.is_compiling():
        return slots_mean(tokens, prefix, pairs, theta)
    chosen = pairs.above(theta)
    images = chosen.shape[0]
    r = int(chosen.count_nonzero()) // images  # the one wait for the device in this layer
    if images > 1:
        return join_top(tokens, prefix, pairs, r)
    return _join_same(tokens, prefix, pairs, chosen, r) if r else None


def join_each(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Move | None:
    """Every image merges its own pairs above θ: what becomes of it does not depend on its neighbours.

    An image that merges nothing keeps its order, so that it goes on as it would alone."""
    if torch.compiler.is_compiling():
        return slots_each(tokens, prefix, pairs, theta)
    chosen = pairs.above(theta)
    merged: list[int] = chosen.sum(1).tolist()  # the one wait for the device in this layer
    if not any(merged):
        return None
    if tokens.lengths is None and min(merged) == max(merged):
        return _join_same(tokens, prefix, pairs, chosen, merged[0])
    return _join_ragged(tokens, prefix, pairs, chosen, merged)


def _join_same(tokens: Tokens, prefix: int, pairs: Pairs, chosen: Tensor, r: int) -> Assignment:
    """The chosen pairs [B,S] merge, r of them in every image. Afterwards the tokens stand so: prefix, the sources that
    stay, the targets, each in its order."""
    order = chosen.argsort(dim=1, stable=True)  # the sources that stay, then those that join their targets
    b, stay = order.shape[0], order.shape[1] - r
    source = pairs.source.gather(1, order)
    first, target = tokens.index[:prefix].expand(b, -1), pairs.split.target.expand(b, -1)
    into = pairs.best.gather(1, order[:, stay:]) + (prefix + stay)
    return arrange(tokens, torch.cat((first, source[:, :stay], target), 1), source[:, stay:], into)


def arrange(
    tokens: Tokens,
    keep: Tensor,
    join: Tensor | None = None,
    into: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    gain: Tensor | None = None,
    blend: Blend = "mean",
) -> Assignment:
    """Positions in each image become one Assignment: `keep` [B,M] stay, in this order, `join` [B,R] go where `into` [B,R]
    says, an index into `keep`; what is named in neither is dropped. `weight` and `gain` [B,N]: see Assignment."""
    b, m = keep.shape
    order = tokens.grid(keep)
    if join is None or into is None:
        place = order.new_zeros(0)
    else:
        order = torch.cat((order, tokens.grid(join)))
        place = (into if b == 1 else into + m * tokens.index[:b].unsqueeze(1)).reshape(-1)
    weight, gain = (None if t is None else t.reshape(-1).index_select(0, order) for t in (weight, gain))
    return Assignment(order, place, m, weight=weight, gain=gain, blend=blend)


def keep_each(tokens: Tokens, keep: Tensor) -> Assignment | None:
    """Tokens that stay, [B,N] bool, where images may differ; the others are dropped."""
    lengths = tuple(keep.sum(1).tolist())  # the one wait for the device in this layer
    if sum(lengths) == tokens.total:
        return None
    order = torch.nonzero_static(keep.reshape(-1), size=sum(lengths))[:, 0]
    same = min(lengths) == max(lengths)
    return Assignment(order, order.new_zeros(0), max(lengths), None if same else lengths)


def _join_ragged(tokens: Tokens, prefix: int, pairs: Pairs, chosen: Tensor, merged: list[int]) -> Assignment:
    """The chosen pairs [B,S] merge, merged[b] of them in image b. The order is that of `_join_same`."""
    b, n = tokens.size.shape
    split = pairs.split
    lengths = tuple(old - gone for old, gone in zip(tokens.lengths or (n,) * b, merged, strict=True))
    first, source, target = tokens.index[:prefix].expand(b, -1), pairs.source, split.target.expand(b, -1)
    stays = ~chosen if split.source_ok is None else split.source_ok & ~chosen
    there = torch.ones_like(target, dtype=torch.bool) if split.target_ok is None else split.target_ok
    alive = torch.cat((torch.ones_like(first, dtype=torch.bool), stays, there), 1)
    place = alive.reshape(-1).cumsum(0).reshape(b, -1)[:, -target.shape[1] :] - 1  # rows of the targets
    # An image that merges nothing keeps its tokens as they stand.
    idle, index = ~chosen.any(1, keepdim=True), tokens.index[: alive.shape[1]]
    whole = torch.where(idle, index, torch.cat((first, source, target), 1))
    alive = torch.where(idle, index < tokens.count.unsqueeze(1), alive)
    keep = tokens.grid(whole).index_select(0, torch.nonzero_static(alive.reshape(-1), size=sum(lengths))[:, 0])
    gone = torch.nonzero_static(chosen.reshape(-1), size=sum(merged))[:, 0]
    order = torch.cat((keep, tokens.grid(source).index_select(0, gone)))
    into = place.gather(1, pairs.best).reshape(-1).index_select(0, gone)
    return Assignment(order, into, max(lengths), None if min(lengths) == max(lengths) else lengths)


# The same in a graph: the order is that of `_join_same`.


def slots_top(tokens: Tokens, prefix: int, pairs: Pairs, r: int | Tensor) -> Slots:
    """Every image merges its r most similar pairs; a tensor r is known when the graph runs."""
    chosen = rank(pairs.score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)) < r
    n, count = tokens.size.shape[1], pairs.split.target.shape[-1]
    left = known(n - r, prefix, n) if isinstance(r, Tensor) else n - r
    gone = chosen.long().cumsum(1)
    stay = torch.arange(chosen.shape[1], device=gone.device) - gone + prefix
    target = torch.arange(count, device=gone.device).expand(gone.shape[0], -1) + (left - count)
    order = _listed(prefix, pairs, torch.where(chosen, gone - 1 + left, stay), target, n)
    if isinstance(r, Tensor):  # without a merge, the tokens stay as they stand
        order = torch.where(r > 0, order, torch.arange(n, device=order.device))
    return Slots(order, _joined(pairs, chosen, gone, target, n - left), left)


def slots_mean(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Slots:
    """The paper's batch rule, r = ⌊mean over the batch of the pairs above θ⌋."""
    chosen = pairs.above(theta)
    r = torch.div(chosen.sum(), chosen.shape[0], rounding_mode="floor")
    return slots_top(tokens, prefix, pairs, r)


def slots_each(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Slots:
    """Every image merges its own pairs above θ; the others are padded to the longest. An image that merges nothing keeps its
    tokens as they stand."""
    chosen, split, count = pairs.above(theta), pairs.split, tokens.count.unsqueeze(1)
    gone = chosen.long().cumsum(1)
    merged, most = chosen.sum(1, keepdim=True), chosen.shape[1]
    left = known((count - merged).max(), prefix, tokens.size.shape[1])
    rows = left + most  # and one more, for the padding
    stays = ~chosen if split.source_ok is None else split.source_ok & ~chosen
    stay = torch.where(stays, stays.long().cumsum(1) - 1 + prefix, rows)
    target = prefix + stays.sum(1, keepdim=True) + torch.arange(split.target.shape[-1], device=gone.device)
    there = target if split.target_ok is None else torch.where(split.target_ok, target, rows)
    order = _listed(prefix, pairs, torch.where(chosen, gone - 1 + left, stay), there, rows + 1)[:, :rows]
    row = torch.arange(rows, device=order.device)
    order = torch.where((merged == 0) & (row < count), row, order)
    filled = (row < count - merged) | ((row >= left) & (row < left + merged))
    return Slots(order, _joined(pairs, chosen, gone, target, most), left, filled)


def _listed(prefix: int, pairs: Pairs, source: Tensor, target: Tensor, rows: Any) -> Tensor:
    """The token in each of the rows, [B,rows], if sources and targets go to these; 0 where none does."""
    b = source.shape[0]
    first = torch.arange(prefix, device=source.device).expand(b, -1)
    who = torch.cat((first, pairs.split.source.expand(b, -1), pairs.split.target.expand(b, -1)), 1)
    return source.new_zeros(b, rows).scatter(1, torch.cat((first, source, target), 1), who)


def _joined(pairs: Pairs, chosen: Tensor, gone: Tensor, target: Tensor, most: Any) -> Tensor:
    """The places that the chosen sources join, one after the other, [B,most]."""
    into = target.gather(1, pairs.best)
    return into.new_zeros(into.shape[0], most + 1).scatter(1, torch.where(chosen, gone - 1, most), into)[:, :most]
