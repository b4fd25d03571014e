"""How a method decides: what it sees of a layer, which tokens are similar, and which pairs merge.

Tokens are split in two groups, each source is paired with its most similar target, and the best pairs, or those above a
threshold, merge. Decisions are made in float32, whatever the model computes in: bfloat16 cosines flip up to a third of the
decisions near θ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .attention import BlockAttention, without_autocast
from .graph import compiled_bmm, graph_each, graph_mean, graph_top
from .tokens import Assignment, Decision, Tokens, assign, flat_positions

MAX_COSINES = 2**20  # held at once (4 MB); more are computed in chunks, so that memory does not grow with N²

Batch = Literal["mean", "each"]
Metric = Literal["keys", "tokens"]


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


@dataclass
class Ledger:
    """What a trace records about the decision of a layer."""

    macs_q: int = 0  # of one query
    macs: list[Tensor] = field(default_factory=list)  # [B] per comparison of tokens
    pairs: Pairs | None = None  # of the last comparison


@dataclass(frozen=True)
class InputView:
    """What a method may see of layer `layer` (from 1) of `depth` before its block runs."""

    layer: int
    depth: int
    prefix: int  # number of CLS, distillation and register tokens: first in the sequence, never merged
    tokens: Tokens
    ledger: Ledger | None = field(default=None, kw_only=True)
    modules: nn.ModuleDict | None = field(default=None, kw_only=True)  # those of the method, where it has any
    training: bool = field(default=False, kw_only=True)
    notes: list[Any] | None = field(default=None, kw_only=True)  # what the method's loss will read, in training

    def module(self, name: str) -> nn.Module:
        """A module of the method."""
        assert self.modules is not None, "`apply` registers the modules of a method"
        return self.modules[name]

    def note(self, value: tuple[Any, ...]) -> None:
        """Hand something to the method's loss."""
        if self.notes is not None:
            self.notes.append(value)

    def record(self, pairs: Pairs | None = None, macs: Tensor | int = 0) -> None:
        """Tell the trace which pairs were compared, and the multiply-accumulates per image spent on the decision."""
        if self.ledger is not None:
            self.ledger.macs.append(macs + torch.zeros_like(self.tokens.num_tokens))
            if pairs is not None:
                self.ledger.pairs = pairs

    @property
    def num_patches(self) -> int:
        """Tokens after the prefix, of the longest image."""
        return self.tokens.size.shape[1] - self.prefix

    @property
    def prefix_index(self) -> Tensor:
        """Positions of the prefix tokens, [B,P]."""
        return self.tokens.positions[: self.prefix].expand(self.tokens.size.shape[0], -1)

    def keep(self, *positions: Tensor) -> Tensor:
        """The prefix, then these positions [B,M] of each image: the order after the merge."""
        return torch.cat((self.prefix_index, *positions), 1)


@dataclass(frozen=True)
class View(InputView):
    """The same at the stage that the method asked for, with keys and attention."""

    k: Tensor  # keys before RoPE, [B,H,N,d]; packed: [1,H,ΣN,d]
    attention: BlockAttention
    q: Tensor | None = None  # queries, like k; None if not computed yet
    v: Tensor | None = None  # values, like k; None if not computed yet
    map: Tensor | None = None  # attention map, [B,H,N,N] float32, softmax(QKᵀ·scale + log size), at the stages that have it
    project_q: Callable[[Tensor], Tensor] | None = None  # x → q, where q is not computed yet

    def metric(self, kind: Metric) -> Tensor:
        """Vectors to compare tokens by, [B,N,D] float32: keys averaged over heads, or the tokens themselves."""
        packed = self.tokens.packed
        values = self.tokens.x.detach() if kind == "tokens" else self.k.detach().float().mean(1)
        return (self.tokens.unpack(values) if packed else values).float()

    def cls_attention(self) -> Tensor:
        """Attention of the CLS token to all tokens, [B,H,N] float32, 0 for padding; in a model without a CLS token, the
        mean over the attention of all tokens."""
        row = self.attention.cls_row(self.q, self.k, self.project_q)
        self.record_cls_attention(row.shape[1])
        return row.detach()

    def record_cls_attention(self, heads: int) -> None:
        """Tell the trace what `cls_attention` costs."""
        if self.ledger is not None:
            count = self.tokens.num_tokens
            asking = 1 if self.attention.has_cls else count
            late = self.ledger.macs_q if self.q is None else 0
            self.record(macs=asking * (count * heads * self.k.shape[-1] + late))

    def value_norms(self) -> Tensor:
        """Norm of each token's value over all heads, [B,N] float32."""
        assert self.v is not None, "values are not known before they are merged"
        v = self.v.detach().float().transpose(1, 2).flatten(2)
        return self.tokens.unpack(torch.linalg.vector_norm(v, dim=-1, keepdim=True)).squeeze(-1)

    def significance(self) -> Tensor:
        """CLS attention, summed over heads, times the norm of the value: [B,patches], adding up to 1."""
        score = (self.cls_attention().sum(1) * self.value_norms())[:, self.prefix :]
        return score / score.sum(1, keepdim=True).clamp(min=1e-12)

    def pairs(
        self, kind: Metric, by_size: bool = False, size_weight: float = 0.0, attention_weight: float = 0.0
    ) -> Pairs | None:
        """Sources with their best targets; alternate groups, or the smaller half against the larger half. `size_weight`:
        see `best_pairs`. `attention_weight` q > 0: 1 − cos is multiplied by (a_i a_j)^(q/2), where a is the CLS attention
        with mean 1 over the patches."""
        tokens = self.tokens
        split = (split_by_size if by_size else split_alternate)(tokens, self.prefix)
        metric = self.metric(kind)
        factor = self.attention_factor(attention_weight) if attention_weight > 0 else None
        pairs = best_pairs(metric, split, tokens.size if tokens.merged else None, size_weight, factor)
        if self.ledger is not None:
            self.record(pairs, split.compared(metric.shape[0]) * metric.shape[-1])
        return pairs

    def attention_factor(self, weight: float) -> Tensor:
        attention = self.cls_attention().mean(1)
        count = (self.tokens.num_tokens - self.prefix).clamp(min=1).unsqueeze(1)
        mean = attention[:, self.prefix :].sum(1, keepdim=True) / count
        return (attention / mean.clamp(min=1e-12)).pow(weight / 2)

    def top(self, r: int, kind: Metric = "keys") -> Decision | None:
        """Every image merges its r most similar pairs, at most half of its patches."""
        return TopRule(kind, r=r)(self)


@dataclass(frozen=True)
class PairRule:
    """What decides in one layer, where it is known before any image is. The fields: see `View.pairs`."""

    kind: Metric = "keys"
    by_size: bool = False
    size_weight: float = 0.0
    attention_weight: float = 0.0

    def pairs(self, view: View) -> Pairs | None:
        return view.pairs(self.kind, self.by_size, self.size_weight, self.attention_weight)


@dataclass(frozen=True, kw_only=True)
class TopRule(PairRule):
    """Every image merges its r most similar pairs, at most half of its patches."""

    r: int

    def __call__(self, view: View) -> Decision | None:
        r = min(self.r, view.num_patches // 2)
        pairs = self.pairs(view) if r > 0 else None
        return None if pairs is None else assign_top(view.tokens, view.prefix, pairs, r)


@dataclass(frozen=True, kw_only=True)
class ThresholdRule(PairRule):
    """Pairs above θ < 1 merge: as many as the batch has on average, or each image its own."""

    theta: float
    batch: Batch = "mean"

    def __call__(self, view: View) -> Decision | None:
        pairs = self.pairs(view)
        if pairs is None:
            return None
        return (assign_mean if self.batch == "mean" else assign_each)(view.tokens, view.prefix, pairs, self.theta)


def split_alternate(tokens: Tokens, prefix: int) -> Split:
    """Even positions of the current sequence are sources, odd ones targets."""
    n = tokens.size.shape[1]
    device = tokens.size.device
    first = prefix + prefix % 2, prefix + 1 - prefix % 2
    if not torch.compiler.is_compiling():  # there may be no patches; graphs always have some
        first = min(first[0], n), min(first[1], n)
    source, target = (torch.arange(start, n, 2, device=device) for start in first)
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


def assign_top(tokens: Tokens, prefix: int, pairs: Pairs, r: int) -> Decision | None:
    """Every image merges its r most similar pairs, or half of its patches; ties go by position."""
    r = min(r, pairs.score.shape[1])
    if r <= 0:
        return None
    if torch.compiler.is_compiling():
        if tokens.ragged:
            raise ValueError("in a graph, a fixed number of merges needs images of equal length; decide per image")
        return graph_top(tokens, prefix, pairs, r)
    score = torch.where(pairs.score.isnan(), -torch.inf, pairs.score)
    best = score.argsort(dim=1, descending=True, stable=True)[:, :r]
    chosen = torch.zeros_like(score, dtype=torch.bool)
    if not tokens.ragged:
        return _assign_equal(tokens, prefix, pairs, chosen.scatter_(1, best, True), r)
    merged = ((tokens.num_tokens - prefix) // 2).clamp(max=r)
    first = torch.arange(r, device=best.device) < merged.unsqueeze(1)
    return _assign_ragged(tokens, prefix, pairs, chosen.scatter_(1, best, first), merged.tolist())


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
