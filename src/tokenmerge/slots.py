"""Merging for compilers and exports: every shape but the number of tokens that are left is known before, nothing is sorted,
and ties go by position on every back-end.

A slot map says for each token its place afterwards. New sizes and tokens follow by adding up what has the same place, with a
scatter or, where that is unsafe or slow, with a product by a matrix that is zero but where a token goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """What a method decides in one layer, in a graph."""

    slot: Tensor  # [B,N] int64: the place of each token; `length` where it is padding
    row: Tensor  # [B,N] int64: the same, but those that join another come after all places, then the padding
    length: Any  # M, tokens after the merge, of the longest image; known when the graph runs
    joining: Any  # R, at least as many as join another in any image
    differ: bool  # whether images may have different numbers of tokens


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
    b, n, c = tokens.shape
    m, rows = move.length, move.length + move.joining
    x = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    if matmul:
        there = (move.slot.unsqueeze(1) == torch.arange(m, device=x.device).unsqueeze(1)).to(x.dtype)  # [B,M,N]
        weight = there * sizes.to(x.dtype).unsqueeze(1)
        size = weight.sum(2)
        return (weight / size.clamp(min=1).unsqueeze(2) @ x).to(tokens.dtype), size.to(sizes.dtype)

    def listed(values: Tensor) -> Tensor:
        """[B,N] → [B,M+R], in the order of the rows; 0 where an image has fewer."""
        return values.new_zeros(b, rows + int(move.differ)).scatter(1, move.row, values)[:, :rows]

    order, size = listed(torch.arange(n, device=x.device).expand(b, n)), listed(sizes)
    into = move.slot.gather(1, order[:, m:])
    total = size[:, :m].scatter_add(1, into, size[:, m:])
    image = torch.arange(b, device=x.device).unsqueeze(1)

    def of(values: Tensor, place: Tensor) -> Tensor:
        """Whole tokens [B,N,C] at places [B,K] → [B,K,C]."""
        flat = (place + values.shape[1] * image).reshape(-1)
        return values.reshape(-1, c).index_select(0, flat).reshape(b, -1, c)

    kept = of(x, order[:, :m])
    share = (size[:, m:] / total.gather(1, into)).to(x.dtype).unsqueeze(-1)
    pull = (of(x, order[:, m:]) - of(kept, into)) * share
    return kept.scatter_add(1, into.unsqueeze(-1).expand(-1, -1, c), pull).to(tokens.dtype), total
