"""Which token joins which: split the tokens in two, pair each source with its best target, choose the best pairs.

All decisions are taken in float32, whatever the model computes in: bfloat16 cosines flip up to a third of them near θ.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .tokens import Assignment, Tokens, assign

GRID = 2**22  # cosines held at once (16 MB); more are taken in parts, so that memory does not grow with N²


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
    score: Tensor  # [B,S] float32 cosine, at most 1; −inf where the source must not merge

    @property
    def source(self) -> Tensor:
        """Positions of the sources, [B,S]."""
        return self.split.source.expand(len(self.best), -1)

    @property
    def target(self) -> Tensor:
        """Positions of their best targets, [B,S]."""
        return self.split.target.expand(len(self.best), -1).gather(1, self.best)

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
    b, n = size.shape
    key = size + torch.arange(n, dtype=torch.float32, device=size.device) / (n + 1)
    if tokens.lengths is None:
        order = key.argsort(dim=1) + prefix
        return Split(order[:, : n // 2], order[:, n // 2 :])
    order = torch.where(size > 0, key, torch.inf).argsort(dim=1) + prefix  # padding last
    count = (size > 0).sum(1, keepdim=True)  # [B,1]
    half = count // 2
    index = torch.arange(n - n // 2, device=size.device).expand(b, -1)
    at = (half + index).clamp(max=max(n - 1, 0))
    sources = index[:, : n // 2]
    return Split(order[:, : n // 2], order.gather(1, at), sources < half, half + index < count)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B,N,D] at index [S] or [B,S]."""
    if index.ndim == 1:
        return x.index_select(1, index)
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast would take a product of float32 matrices in half precision."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def _best(source: Tensor, target: Tensor, target_ok: Tensor | None) -> tuple[Tensor, Tensor]:
    """Highest cosine of each source [B,S,D] with the targets [B,D,T], and which target has it, [B,S] each."""
    score = source @ target
    if target_ok is not None:
        score = score.masked_fill_(~target_ok.unsqueeze(1), -torch.inf)
    top, best = score.max(-1)
    return top, best


@torch.no_grad()
def best_pairs(metric: Tensor, split: Split) -> Pairs | None:
    """Pair each source with its most similar target by the cosine of `metric` [B,N,D]; None if there is no pair."""
    if split.source.shape[-1] == 0 or split.target.shape[-1] == 0 or metric.shape[0] == 0:
        return None
    with _without_autocast(metric.device.type):
        unit = F.normalize(metric.float(), dim=-1)
        source, target = _pick(unit, split.source), _pick(unit, split.target).transpose(1, 2)
        rows = max(1, GRID // (target.shape[0] * target.shape[2]))
        parts = [_best(part, target, split.target_ok) for part in torch.split(source, rows, 1)]
    top, best = parts[0] if len(parts) == 1 else (torch.cat(part, 1) for part in zip(*parts, strict=True))
    top = top.clamp(max=1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # a self-cosine may exceed 1
    if split.source_ok is not None:
        top = top.masked_fill(~split.source_ok, -torch.inf)
    return Pairs(split, best, top)


@torch.no_grad()
def _slots(tokens: Tokens, prefix: int, pairs: Pairs, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Where tokens go when the chosen pairs [B,S] merge: prefix, then the unmerged sources, then the targets, each in its
    order. Also which tokens keep no slot: the merged sources, and padding. Both [B,N]."""
    b, n = tokens.size.shape
    split = pairs.split
    source, target = split.source.expand(b, -1), split.target.expand(b, -1)
    stays = ~chosen if split.source_ok is None else ~chosen & split.source_ok
    first = prefix + stays.sum(1, keepdim=True)  # [B,1]: where the targets begin
    places = first + torch.arange(target.shape[1], device=source.device)
    slot = torch.zeros(b, n, dtype=torch.int64, device=source.device)
    slot[:, :prefix] = torch.arange(prefix, device=source.device)
    slot.scatter_(1, source, torch.where(chosen, first + pairs.best, (prefix + stays.cumsum(1) - 1) * stays))
    # Targets last: in a padded batch the masked end of the sources may name tokens that are targets.
    slot.scatter_(1, target, places if split.target_ok is None else places * split.target_ok)
    joins = torch.zeros(b, n, dtype=torch.bool, device=source.device).scatter_(1, source, chosen)
    return slot, joins


@torch.no_grad()
def join_top(tokens: Tokens, prefix: int, pairs: Pairs, r: int) -> Assignment | None:
    """Every image merges its r most similar pairs; ties go by position."""
    if tokens.lengths is not None:
        raise ValueError("join_top needs images of equal length; use join_each after a per-image merge")
    r = min(r, pairs.score.shape[1])
    if r <= 0:
        return None
    b, n = tokens.size.shape
    best = pairs.score.argsort(dim=1, descending=True, stable=True)[:, :r]
    chosen = torch.zeros_like(pairs.score, dtype=torch.bool).scatter_(1, best, True)
    slot, joins = _slots(tokens, prefix, pairs, chosen)
    join = pairs.source.gather(1, best) + n * torch.arange(b, device=slot.device).unsqueeze(1)
    return assign(slot, joins, join.reshape(-1), n - r)


def join_mean(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Assignment | None:
    """The paper's batch rule: r = ⌊mean over the batch of the pairs above θ⌋, then the r best pairs of every image."""
    r = int(pairs.above(theta).sum()) // pairs.score.shape[0]  # the one wait for the device in this layer
    return join_top(tokens, prefix, pairs, r)


@torch.no_grad()
def join_each(tokens: Tokens, prefix: int, pairs: Pairs, theta: float) -> Assignment | None:
    """Every image merges its own pairs above θ: what becomes of it does not depend on its neighbours.

    An image that merges nothing keeps its order, so that it goes on as it would alone."""
    b, n = tokens.size.shape
    chosen = pairs.above(theta)
    merged = chosen.sum(1).tolist()  # the one wait for the device in this layer
    if not any(merged):
        return None
    lengths = tuple(old - gone for old, gone in zip(tokens.lengths or (n,) * b, merged, strict=True))
    slot, joins = _slots(tokens, prefix, pairs, chosen)
    there = tokens.size > 0
    idle = ~chosen.any(1, keepdim=True)
    slot = torch.where(idle, torch.arange(n, device=slot.device) * there, slot)
    join = torch.nonzero_static(joins.reshape(-1), size=sum(merged))[:, 0]
    longest = max(lengths)
    return assign(slot, joins | ~there, join, longest, None if min(lengths) == longest else lengths)
