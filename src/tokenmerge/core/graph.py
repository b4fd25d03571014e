"""Everything for torch.compile and torch.export: selection (matching.py) and merge (tokens.py) with static shapes.

Every shape except the number of remaining tokens is known beforehand, nothing is sorted, and ties go by position on every
back-end. Tokens that keep a position and tokens that join another are listed one after the other. The latter pull their
target towards themselves with a scatter or, where that is unsafe or slow, with a product by a matrix of zeros and ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from .matching import Pairs
    from .tokens import Origin, Tokens


@dataclass(frozen=True)
class GraphAssignment:
    """What a method decides in one layer, in a graph. Positions are those in each image."""

    order: Tensor  # [B,M+R] int64: the token that takes each position, then the tokens that join another
    into: Tensor  # [B,R] int64: the positions that they join
    length: Any  # M, tokens after the merge, of the longest image; data-dependent (unbacked)
    valid: Tensor | None = None  # [B,M+R] bool: which entries of `order` count in a ragged batch; the others are 0

    def owners(self, before: Origin, after: Origin) -> Tensor:
        """The new position of each token, [B,N]; `length` where it is padding."""
        count = before.shape[1]
        b = self.order.shape[0]
        m = self.length
        position = torch.cat((torch.arange(m, device=self.into.device).expand(b, m), self.into), 1)
        order = self.order if self.valid is None else torch.where(self.valid, self.order, count)
        return self.order.new_full((b, count + 1), m).scatter(1, order, position)[:, :count]


def bounded_item(value: Tensor, low: int, high: Any) -> Any:
    """A data-dependent (unbacked) integer in (low, high]. (Each length is read off anew: compilers take long to reason
    about sums of earlier ones, and exporters round them in their own way.)"""
    number = value.item()
    torch._check(number > low)
    torch._check(number <= high)
    return number


def rank(score: Tensor) -> Tensor:
    """How many scores of the same row come first, [B,S]: the larger ones, and of equal ones those before it."""
    own = score.unsqueeze(2)
    other = score.unsqueeze(1)
    index = torch.arange(score.shape[1], device=score.device)
    before = (other > own) | ((other == own) & (index < index.unsqueeze(1)))
    return before.sum(2)


def graph_top(tokens: Tokens, prefix: int, pairs: Pairs, r: int | Tensor) -> GraphAssignment:
    """Every image merges its r most similar pairs; a tensor r is data-dependent."""
    chosen = rank(torch.where(pairs.score.isnan(), -torch.inf, pairs.score)) < r  # (nan_to_num is nine operators in ONNX)
    n = tokens.size.shape[1]
    count = pairs.split.target.shape[-1]
    left = bounded_item(n - r, prefix, n) if isinstance(r, Tensor) else n - r
    joined = chosen.long().cumsum(1)
    stay = torch.arange(chosen.shape[1], device=joined.device) - joined + prefix
    target = torch.arange(count, device=joined.device).expand(joined.shape[0], -1) + (left - count)
    order = _order(prefix, pairs, torch.where(chosen, joined - 1 + left, stay), target, n)
    if isinstance(r, Tensor):  # without a merge, the tokens keep their order
        order = torch.where(r > 0, order, torch.arange(n, device=order.device))
    return GraphAssignment(order, _into(pairs, chosen, joined, target, n - left), left)


def graph_mean(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> GraphAssignment:
    """The paper's batch rule, r = ⌊mean over the batch of the pairs above θ⌋."""
    chosen = pairs.above(theta)
    r = torch.div(chosen.sum(), chosen.shape[0], rounding_mode="floor")
    return graph_top(tokens, prefix, pairs, r)


def graph_each(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> GraphAssignment:
    """Every image merges its own pairs above θ and is padded to the longest. An image that merges nothing keeps the order
    of its tokens."""
    chosen = pairs.above(theta)
    split = pairs.split
    count = tokens.num_tokens.unsqueeze(1)
    joined = chosen.long().cumsum(1)
    merged = chosen.sum(1, keepdim=True)
    most = chosen.shape[1]
    left = bounded_item((count - merged).max(), prefix, tokens.size.shape[1])
    rows = left + most  # and one more, for the padding
    stays = ~chosen if split.source_valid is None else split.source_valid & ~chosen
    stay = torch.where(stays, stays.long().cumsum(1) - 1 + prefix, rows)
    target = prefix + stays.sum(1, keepdim=True) + torch.arange(split.target.shape[-1], device=joined.device)
    valid_target = target if split.target_valid is None else torch.where(split.target_valid, target, rows)
    order = _order(prefix, pairs, torch.where(chosen, joined - 1 + left, stay), valid_target, rows + 1)[:, :rows]
    row = torch.arange(rows, device=order.device)
    order = torch.where((merged == 0) & (row < count), row, order)
    valid = (row < count - merged) | ((row >= left) & (row < left + merged))
    return GraphAssignment(order, _into(pairs, chosen, joined, target, most), left, valid)


def _order(prefix: int, pairs: Pairs, source: Tensor, target: Tensor, rows: Any) -> Tensor:
    """The token in each row, [B,rows], if sources and targets go to these rows; 0 in rows without a token."""
    b = source.shape[0]
    first = torch.arange(prefix, device=source.device).expand(b, -1)
    token = torch.cat((first, pairs.split.source.expand(b, -1), pairs.split.target.expand(b, -1)), 1)
    return source.new_zeros(b, rows).scatter(1, torch.cat((first, source, target), 1), token)


def _into(pairs: Pairs, chosen: Tensor, joined: Tensor, target: Tensor, most: Any) -> Tensor:
    """The positions that the chosen sources join, one after the other, [B,most]."""
    into = target.gather(1, pairs.best)
    return into.new_zeros(into.shape[0], most + 1).scatter(1, torch.where(chosen, joined - 1, most), into)[:, :most]


def graph_merge(x: Tensor, sizes: Tensor, decision: GraphAssignment, matmul: bool) -> tuple[Tensor, Tensor]:
    """Tokens [B,N,C] and their sizes [B,N] → [B,M,C] and [B,M]: x_ij = (n_i x_i + n_j x_j) / (n_i + n_j), weighted in
    float32. Without `matmul`, in exactly the steps of tokens.merge, so that both round the same."""
    b, _, c = x.shape
    m = decision.length
    into = decision.into
    dtype = x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))
    size = sizes.gather(1, decision.order)
    if decision.valid is not None:
        size = size * decision.valid
    image = torch.arange(b, device=x.device).unsqueeze(1)

    def rows(values: Tensor, position: Tensor) -> Tensor:
        """Tokens [B,N,C] at positions [B,K] → [B,K,C]."""
        flat = (position + values.shape[1] * image).reshape(-1)
        return values.reshape(-1, c).index_select(0, flat).reshape(b, -1, c)

    one_hot = None
    if matmul:
        one_hot = (into.unsqueeze(1) == torch.arange(m, device=x.device).unsqueeze(1)).to(x.dtype)  # [B,M,R]
        total = size[:, :m] + (one_hot.to(size.dtype) @ size[:, m:].unsqueeze(2)).squeeze(2)
    else:
        total = size[:, :m].scatter_add(1, into, size[:, m:])
    kept = rows(x, decision.order[:, :m])
    fraction = (size[:, m:] / total.gather(1, into)).to(x.dtype).unsqueeze(-1)
    pull = (rows(x, decision.order[:, m:]) - rows(kept, into)) * fraction
    if one_hot is not None:
        return (kept + one_hot @ pull).to(dtype), total
    return kept.scatter_add(1, into.unsqueeze(-1).expand(-1, -1, c), pull).to(dtype), total


def compiled_bmm(a: Tensor, b: Tensor) -> Tensor:
    """[B,S,D] · [B,D,T]. Inductor must know that there is more than one row and column: it gets two more of each."""
    both = torch.bmm(F.pad(a, (0, 0, 0, 2)), F.pad(b, (0, 2)))
    return both[:, : a.shape[1], : b.shape[2]]
