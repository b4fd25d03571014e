"""Merging for compilers and exports: every shape but the number of tokens that are left is known before, nothing is sorted,
and ties go by position on every back-end.

The tokens that have a place of their own and those that join another are listed one after the other. The latter pull their
places towards themselves, with a scatter or, where that is unsafe or slow, with a product by a matrix of zeros and ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """What a method decides in one layer, in a graph."""

    order: Tensor  # [B,M+R] int64: the token that has each place, then the tokens that join another
    into: Tensor  # [B,R] int64: the places that they join
    length: Any  # M, tokens after the merge, of the longest image; known when the graph runs
    there: Tensor | None = None  # [B,M+R] bool: which of `order` there are, where images may differ; the others say 0

    def slots(self, count: Any) -> Tensor:
        """The place of each of `count` tokens, [B,N]; `length` where it is padding."""
        b, m = self.order.shape[0], self.length
        place = torch.cat((torch.arange(m, device=self.into.device).expand(b, m), self.into), 1)
        order = self.order if self.there is None else torch.where(self.there, self.order, count)
        return self.order.new_full((b, count + 1), m).scatter(1, order, place)[:, :count]


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


def merge_slots(tokens: Tensor, sizes: Tensor, move: Slots, matmul: bool) -> tuple[Tensor, Tensor]:
    """Tokens [B,N,C] and their sizes [B,N] → [B,M,C] and [B,M]: x_ij = (n_i x_i + n_j x_j) / (n_i + n_j), weighed in
    float32. Without `matmul`, in the very steps of tokens.merge, so that both round alike."""
    b, _, c = tokens.shape
    m, into = move.length, move.into
    x = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    size = sizes.gather(1, move.order)
    if move.there is not None:
        size = size * move.there
    image = torch.arange(b, device=x.device).unsqueeze(1)

    def of(values: Tensor, place: Tensor) -> Tensor:
        """Whole tokens [B,N,C] at places [B,K] → [B,K,C]."""
        flat = (place + values.shape[1] * image).reshape(-1)
        return values.reshape(-1, c).index_select(0, flat).reshape(b, -1, c)

    joined = None
    if matmul:
        joined = (into.unsqueeze(1) == torch.arange(m, device=x.device).unsqueeze(1)).to(x.dtype)  # [B,M,R]
        total = size[:, :m] + (joined.to(size.dtype) @ size[:, m:].unsqueeze(2)).squeeze(2)
    else:
        total = size[:, :m].scatter_add(1, into, size[:, m:])
    kept = of(x, move.order[:, :m])
    share = (size[:, m:] / total.gather(1, into)).to(x.dtype).unsqueeze(-1)
    pull = (of(x, move.order[:, m:]) - of(kept, into)) * share
    if joined is not None:
        return (kept + joined @ pull).to(tokens.dtype), total
    return kept.scatter_add(1, into.unsqueeze(-1).expand(-1, -1, c), pull).to(tokens.dtype), total
