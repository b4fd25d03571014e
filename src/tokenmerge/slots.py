"""Merging for compilers and exports: every shape but the number of tokens that are left is known before, nothing is sorted,
and ties go by position on every back-end.

A slot map says for each token its place afterwards. New sizes and tokens follow by adding up what has the same place, with a
scatter or, where that is unsafe or slow, with a product by a matrix of zeros and ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .matching import Pairs
    from .tokens import Tokens


@dataclass(frozen=True)
class Slots:
    """What a method decides in one layer, in a graph."""

    slot: Tensor  # [B,N] int64: the place of each token; `length` where it is padding
    length: Any  # M, tokens after the merge, of the longest image; known when the graph runs
    differ: bool  # whether images may have different numbers of tokens


def slots_top(tokens: Tokens, prefix: int, pairs: Pairs, r: int | Tensor) -> Slots:
    """Every image merges its r most similar pairs; a tensor r is known when the graph runs."""
    score = pairs.score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    chosen = rank(score) < r
    n = tokens.size.shape[1]
    left = known(n - r, prefix, n) if isinstance(r, Tensor) else n - r
    return Slots(_slots(tokens, prefix, pairs, chosen), left, False)


def slots_mean(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Slots:
    """The paper's batch rule, r = ⌊mean over the batch of the pairs above θ⌋."""
    chosen = pairs.above(theta)
    r = torch.div(chosen.sum(), chosen.shape[0], rounding_mode="floor")
    return slots_top(tokens, prefix, pairs, r)


def slots_each(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Slots:
    """Every image merges its own pairs above θ; the others are padded to the longest."""
    chosen = pairs.above(theta)
    left = (tokens.count - chosen.sum(1)).max()
    longest = known(left, prefix, tokens.size.shape[1])
    slot = _slots(tokens, prefix, pairs, chosen)
    return Slots(torch.where(tokens.size > 0, slot, longest), longest, True)


def known(value: Tensor, least: int, most: Any) -> Any:
    """A number that the graph reads off when it runs, above `least` and at most `most`. (Each length is read off anew: of
    sums of earlier ones, compilers take long to reason, and exporters round them in their own way.)"""
    number = value.item()
    torch._check(number > least)
    torch._check(number <= most)
    return number


def rank(score: Tensor) -> Tensor:
    """How many scores of the same row come first, [B,S]: the larger ones, and of equal ones those before it."""
    a, b = score.unsqueeze(2), score.unsqueeze(1)  # of the token itself, of the others
    index = torch.arange(score.shape[1], device=score.device)
    before = (b > a) | ((b == a) & (index < index.unsqueeze(1)))
    return before.sum(2)


def _slots(tokens: Tokens, prefix: int, pairs: Pairs, chosen: Tensor) -> Tensor:
    """The order of `matching._join_same`: prefix, the sources that stay, the targets. An image that merges nothing keeps its
    tokens as they stand."""
    b, n = tokens.size.shape
    split = pairs.split
    stays = ~chosen if split.source_ok is None else split.source_ok & ~chosen
    place = stays.long().cumsum(1) - 1 + prefix  # of the sources that stay
    after = prefix + stays.sum(1, keepdim=True)
    target = after + torch.arange(split.target.shape[-1], device=after.device)  # [B,T]: those that are there come first
    source = torch.where(chosen, target.gather(1, pairs.best), place)
    same = torch.arange(n, device=source.device).expand(b, n)
    slot = same.scatter(1, split.source.expand(b, -1), source).scatter(1, split.target.expand(b, -1), target)
    return torch.where(chosen.any(1, keepdim=True), slot, same)


def merge_slots(tokens: Tokens, move: Slots, matmul: bool) -> tuple[Tensor, Tensor]:
    """Tokens [B,M,C] and their sizes [B,M]: x_ij = (n_i x_i + n_j x_j) / (n_i + n_j), weighed in float32."""
    b, _, c = tokens.x.shape
    m, extra = move.length, int(move.differ)  # one more row, for the padding
    x = tokens.x.to(torch.promote_types(tokens.x.dtype, torch.float32))
    if matmul:
        there = (move.slot.unsqueeze(1) == torch.arange(m, device=x.device).unsqueeze(1)).to(x.dtype)  # [B,M,N]
        weight = there * tokens.size.to(x.dtype).unsqueeze(1)
        size = weight.sum(2)
        return (weight / size.clamp(min=1).unsqueeze(2) @ x).to(tokens.x.dtype), size.to(tokens.size.dtype)
    size = tokens.size.new_zeros(b, m + extra).scatter_add(1, move.slot, tokens.size)
    weight = (tokens.size / size.gather(1, move.slot).clamp(min=1)).to(x.dtype).unsqueeze(-1)
    merged = x.new_zeros(b, m + extra, c).scatter_add(1, move.slot.unsqueeze(-1).expand(-1, -1, c), x * weight)
    if move.differ:
        merged, size = merged[:, :m], size[:, :m]
    return merged.to(tokens.x.dtype), size
