"""Which token is like which: split the tokens in two, and pair each source with its best target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .precision import without_autocast
from .tokens import Tokens

GRID = 2**20  # cosines held at once (4 MB); more are taken in parts, so that memory does not grow with N²


@dataclass(frozen=True)
class Split:
    """Two disjoint groups of positions; prefix tokens are in neither. Without padding the masks are None."""

    source: Tensor  # [S], or [B,S] where images differ
    target: Tensor  # [D] or [B,D]
    source_ok: Tensor | None = None  # [B,S] bool
    target_ok: Tensor | None = None  # [B,D] bool

    def compared(self, batch: int) -> Tensor:
        """Number of comparisons per image, [B] int64."""
        if self.source_ok is None or self.target_ok is None:
            return torch.full((batch,), self.source.shape[-1] * self.target.shape[-1], device=self.source.device)
        return self.source_ok.sum(1) * self.target_ok.sum(1)


@dataclass(frozen=True)
class Pairs:
    """The best target of each source."""

    split: Split
    best: Tensor  # [B,S] index into the targets
    # [B,S] float32, at most 1: the cosine, maybe weighed by size; −inf where the source must not merge; NaN never does
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
    """Even positions are sources, odd ones targets, over the sequence as it stands."""
    n, device = tokens.size.shape[1], tokens.size.device
    source = torch.arange(prefix + prefix % 2, n, 2, device=device)
    target = torch.arange(prefix + 1 - prefix % 2, n, 2, device=device)
    if tokens.lengths is None:
        return Split(source, target)
    there = tokens.size > 0
    return Split(source, target, there[:, source], there[:, target])


def split_by_size(tokens: Tokens, prefix: int) -> Split:
    """The smaller half of the patch tokens are sources, the larger half targets; ties go by position.

    Most tokens have size 1, so ties decide a lot: the key size + i/(n+1) breaks them the same way on every back-end.
    """
    size = tokens.size[:, prefix:]
    n = size.shape[1]
    # Both halves in a form that compilers can tell to be there: ⌈n/2⌉ is at least 1, of n − ⌊n/2⌋ they do not know it.
    first, rest = (torch.arange(count, device=size.device) for count in (n // 2, (n + 1) // 2))
    key = size + torch.arange(n, dtype=torch.float32, device=size.device) / (n + 1)
    if tokens.lengths is None:
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
    """Of all pairs, [B,S,T], for methods that need more than the best target of each source."""
    with without_autocast(metric.device.type):
        unit = _unit(metric)
        return torch.bmm(_pick(unit, source), _pick(unit, target).transpose(1, 2))


def _best(source: Tensor, target: Tensor, target_ok: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Highest score of each source [B,S,D] with the targets [B,D,T], and which target has it, [B,S] each."""
    score = _product(source, target)
    if weight is not None:
        score = score.sub_(1).mul_(weight).add_(1)
    if target_ok is not None:
        score = score.masked_fill_(~target_ok.unsqueeze(1), -torch.inf)
    top, best = score.max(-1)
    return top, best


def _product(source: Tensor, target: Tensor) -> Tensor:
    """[B,S,D] · [B,D,T]. Inductor must know that there is more than one row and column: it gets two more of each."""
    if not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return torch.bmm(source, target)
    both = torch.bmm(F.pad(source, (0, 0, 0, 2)), F.pad(target, (0, 2)))
    return both[:, : source.shape[1], : target.shape[2]]


def best_pairs(
    metric: Tensor, split: Split, size: Tensor | None = None, size_weight: float = 0.0, factor: Tensor | None = None
) -> Pairs | None:
    """Pair each source with its most similar target by the cosine of `metric` [B,N,D]; None if there is no pair.

    With merging sizes [B,N] and a weight p > 0 the score is 1 − (2 n_i n_j / (n_i + n_j))^p · (1 − cos): at p = 1, one
    minus the bound of the merging error (Theorem 1), so that large tokens must be more alike to merge. With a `factor`
    f [B,N] of each token, 1 − cos is multiplied by f_i f_j, too."""
    compiling = torch.compiler.is_compiling()  # a graph takes the empty set as it takes any other
    if not compiling and (split.source.shape[-1] == 0 or split.target.shape[-1] == 0 or metric.shape[0] == 0):
        return None
    with without_autocast(metric.device.type):
        unit = _unit(metric)
        source, target = _pick(unit, split.source), _pick(unit, split.target).transpose(1, 2)
        half = None  # 1/2n, and 2nm/(n+m) is 1/(1/2n + 1/2m)
        if size is not None and size_weight > 0:
            inverse = (0.5 / size.clamp(min=1)).unsqueeze(-1)
            half = _pick(inverse, split.source), _pick(inverse, split.target).transpose(1, 2)
        pair = None
        if factor is not None:
            factor = factor.unsqueeze(-1)
            pair = _pick(factor, split.source), _pick(factor, split.target).transpose(1, 2)
        rows = None if compiling else max(1, GRID // (target.shape[0] * target.shape[2]))
        parts = []
        for part in (slice(None),) if rows is None else (slice(i, i + rows) for i in range(0, source.shape[1], rows)):
            weight = None if half is None else _weight(half[0][:, part], half[1], size_weight)
            if pair is not None:
                both = pair[0][:, part] * pair[1]
                weight = both if weight is None else weight.mul_(both)
            parts.append(_best(source[:, part], target, split.target_ok, weight))
    top, best = parts[0] if len(parts) == 1 else (torch.cat(part, 1) for part in zip(*parts, strict=True))
    top = top.clamp_(max=1)  # rounding may exceed it, and a threshold of 1 means never
    if split.source_ok is not None:
        top = top.masked_fill_(~split.source_ok, -torch.inf)
    return Pairs(split, best, top)


def _weight(source: Tensor, target: Tensor, power: float) -> Tensor:
    """(1/2n + 1/2m)^−p for all pairs, [B,S,T]."""
    both = source + target
    return both.rsqrt_() if power == 0.5 else both.pow_(-power)
