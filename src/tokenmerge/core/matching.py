"""Which tokens are similar: split the tokens in two groups, and pair each source with its most similar target.

Decisions are made in float32, whatever the model computes in: bfloat16 cosines flip up to a third of the decisions near θ.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .graph import compiled_bmm
from .tokens import Tokens

MAX_COSINES = 2**20  # held at once (4 MB); more are computed in chunks, so that memory does not grow with N²


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast would compute a product of float32 matrices in half precision."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


@dataclass(frozen=True)
class Split:
    """Two disjoint groups of positions; prefix tokens are in neither. Without padding the masks are None."""

    source: Tensor  # [S], or [B,S] where images differ
    target: Tensor  # [D] or [B,D]
    source_valid: Tensor | None = None  # [B,S] bool
    target_valid: Tensor | None = None  # [B,D] bool

    def compared(self, batch: int) -> Tensor:
        """Number of comparisons per image, [B] int64."""
        if self.source_valid is None or self.target_valid is None:
            return torch.full((batch,), self.source.shape[-1] * self.target.shape[-1], device=self.source.device)
        return self.source_valid.sum(1) * self.target_valid.sum(1)


@dataclass(frozen=True)
class Pairs:
    """The best target of each source."""

    split: Split
    best: Tensor  # [B,S] index into the targets
    # [B,S] float32, at most 1: the cosine, possibly weighted by size; −inf where the source must not merge; NaN never does
    score: Tensor

    @property
    def source(self) -> Tensor:
        """Positions of the sources, [B,S]."""
        return self.split.source.expand(self.best.shape[0], -1)

    @property
    def target(self) -> Tensor:
        """Positions of their best targets, [B,S]."""
        return self.split.target.expand(self.best.shape[0], -1).gather(1, self.best)

    def above(self, theta: float) -> Tensor:
        """Pairs that count, [B,S] bool: strictly above the threshold. NaN never is."""
        return self.score > theta


def split_alternate(tokens: Tokens, prefix: int) -> Split:
    """Even positions of the current sequence are sources, odd ones targets."""
    n = tokens.size.shape[1]
    device = tokens.size.device
    source = torch.arange(prefix + prefix % 2, n, 2, device=device)
    target = torch.arange(prefix + 1 - prefix % 2, n, 2, device=device)
    if not tokens.ragged:
        return Split(source, target)
    valid = tokens.size > 0
    return Split(source, target, valid[:, source], valid[:, target])


def split_by_size(tokens: Tokens, prefix: int) -> Split:
    """The smaller half of the patch tokens are sources, the larger half targets; ties go by position.

    Most tokens have size 1, so ties decide a lot: the key size + i/(n+1) breaks them the same way on every back-end.
    """
    size = tokens.size[:, prefix:]
    n = size.shape[1]
    # Compilers can prove that ⌈n/2⌉ is at least 1; of n − ⌊n/2⌋ they cannot.
    first = torch.arange(n // 2, device=size.device)
    rest = torch.arange((n + 1) // 2, device=size.device)
    key = size + torch.arange(n, dtype=torch.float32, device=size.device) / (n + 1)
    if not tokens.ragged:
        order = key.argsort(dim=1) + prefix
        return Split(order.index_select(1, first), order.index_select(1, rest + n // 2))
    order = torch.where(size > 0, key, torch.inf).argsort(dim=1) + prefix  # padding last
    count = (size > 0).sum(1, keepdim=True)  # [B,1]
    half = count // 2
    at = (half + rest).clamp(max=torch.sym_max(n - 1, 0))
    return Split(order.index_select(1, first), order.gather(1, at), first < half, half + rest < count)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B,N,D] at index [S] or [B,S]."""
    if index.ndim == 1:
        return x.index_select(1, index)
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _unit(metric: Tensor) -> Tensor:
    unit = metric.detach().float()
    return unit / torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp_(min=1e-12)


def cosines(metric: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Cosines of all pairs, [B,S,T], for methods that need more than the best target of each source."""
    with without_autocast(metric.device.type):
        unit = _unit(metric)
        return torch.bmm(_pick(unit, source), _pick(unit, target).transpose(1, 2))


def _most_similar(
    source: Tensor, target: Tensor, target_valid: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Highest score of each source [B,S,D] with the targets [B,D,T], and which target has it, [B,S] each."""
    plain = not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
    score = torch.bmm(source, target) if plain else compiled_bmm(source, target)
    if weight is not None:
        score = score.sub_(1).mul_(weight).add_(1)
    if target_valid is not None:
        score = score.masked_fill_(~target_valid.unsqueeze(1), -torch.inf)
    top, best = score.max(-1)
    return top, best


def best_pairs(
    metric: Tensor, split: Split, size: Tensor | None = None, size_weight: float = 0.0, factor: Tensor | None = None
) -> Pairs | None:
    """Pair each source with its most similar target by the cosine of `metric` [B,N,D]; None if there is no pair.

    With token sizes [B,N] and a weight p > 0 the score is 1 − (2 n_i n_j / (n_i + n_j))^p · (1 − cos): at p = 1, one minus
    the bound of the merging error (Theorem 1), so that large tokens must be more similar to merge. With a `factor` f [B,N]
    per token, 1 − cos is multiplied by f_i f_j, too."""
    compiling = torch.compiler.is_compiling()  # in a graph, the empty set needs no special case
    if not compiling and (split.source.shape[-1] == 0 or split.target.shape[-1] == 0 or metric.shape[0] == 0):
        return None
    with without_autocast(metric.device.type):
        unit = _unit(metric)
        source = _pick(unit, split.source)
        target = _pick(unit, split.target).transpose(1, 2)
        half = None  # 1/2n, and 2nm/(n+m) is 1/(1/2n + 1/2m)
        if size is not None and size_weight > 0:
            inverse = (0.5 / size.clamp(min=1)).unsqueeze(-1)
            half = _pick(inverse, split.source), _pick(inverse, split.target).transpose(1, 2)
        pair = None
        if factor is not None:
            factor = factor.unsqueeze(-1)
            pair = _pick(factor, split.source), _pick(factor, split.target).transpose(1, 2)
        rows = None if compiling else max(1, MAX_COSINES // (target.shape[0] * target.shape[2]))
        parts = []
        for part in (slice(None),) if rows is None else (slice(i, i + rows) for i in range(0, source.shape[1], rows)):
            weight = None if half is None else _size_weight(half[0][:, part], half[1], size_weight)
            if pair is not None:
                both = pair[0][:, part] * pair[1]
                weight = both if weight is None else weight.mul_(both)
            parts.append(_most_similar(source[:, part], target, split.target_valid, weight))
    top, best = parts[0] if len(parts) == 1 else (torch.cat(part, 1) for part in zip(*parts, strict=True))
    top = top.clamp_(max=1)  # rounding may exceed 1, and a threshold of 1 means never
    if split.source_valid is not None:
        top = top.masked_fill_(~split.source_valid, -torch.inf)
    return Pairs(split, best, top)


def _size_weight(source: Tensor, target: Tensor, power: float) -> Tensor:
    """(1/2n + 1/2m)^−p for all pairs, [B,S,T]."""
    both = source + target
    return both.rsqrt_() if power == 0.5 else both.pow_(-power)
