"""What a method sees of one layer, and the building blocks that most methods decide with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..core.assignment import Decision, assign_each, assign_mean, assign_top
from ..core.matching import Pairs, best_pairs, split_alternate, split_by_size
from ..core.tokens import Tokens

Batch = Literal["mean", "each"]
Metric = Literal["keys", "tokens"]


@dataclass
class Ledger:
    """What a trace records about the decision of a layer."""

    macs: list[Tensor] = field(default_factory=list)  # [B] per comparison of tokens
    pairs: Pairs | None = None  # of the last comparison


@dataclass(frozen=True)
class View:
    """What a method may see of layer `layer` (from 1) of `depth`, at the stage that it asked for."""

    layer: int
    depth: int
    prefix: int  # number of CLS, distillation and register tokens: first in the sequence, never merged
    tokens: Tokens
    k: Tensor  # keys before RoPE, [B,H,N,d]; packed: [1,H,ΣN,d]
    cls_row: Callable[[Tensor | None, Tensor], tuple[Tensor, Tensor]]  # (q, k) → see cls_attention
    q: Tensor | None = None  # queries, like k; None if not computed yet
    v: Tensor | None = None  # values, like k; None if not computed yet
    map: Tensor | None = None  # attention map, [B,H,N,N] float32, softmax(QKᵀ·scale + log size), at the stages that have it
    ledger: Ledger | None = None

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

    def metric(self, kind: Metric) -> Tensor:
        """Vectors to compare tokens by, [B,N,D] float32: keys averaged over heads, or the tokens themselves."""
        packed = self.tokens.packed
        values = self.tokens.x.detach() if kind == "tokens" else self.k.detach().float().mean(1)
        return (self.tokens.unpack(values) if packed else values).float()

    def cls_attention(self) -> Tensor:
        """Attention of the CLS token to all tokens, [B,H,N] float32, 0 for padding; in a model without a CLS token, the
        mean over the attention of all tokens."""
        row, macs = self.cls_row(self.q, self.k)
        self.record(macs=macs)
        return row.detach()

    def value_norms(self) -> Tensor:
        """Norm of each token's value over all heads, [B,N] float32."""
        assert self.v is not None, "values are not known before they are merged"
        v = self.v.detach().float().transpose(1, 2).flatten(2)
        return self.tokens.unpack(torch.linalg.vector_norm(v, dim=-1, keepdim=True)).squeeze(-1)

    def record(self, pairs: Pairs | None = None, macs: Tensor | int = 0) -> None:
        """Tell the trace which pairs were compared, and the multiply-accumulates per image spent on the decision."""
        if self.ledger is not None:
            self.ledger.macs.append(macs + torch.zeros_like(self.tokens.num_tokens))
            if pairs is not None:
                self.ledger.pairs = pairs

    def pairs(
        self, kind: Metric, by_size: bool = False, size_weight: float = 0.0, attention_weight: float = 0.0
    ) -> Pairs | None:
        """Sources with their best targets; alternate groups, or the smaller half against the larger half. `size_weight`:
        see `best_pairs`. `attention_weight` q > 0: 1 − cos is multiplied by (a_i a_j)^(q/2), where a is the CLS attention
        with mean 1 over the patches."""
        tokens = self.tokens
        split = (split_by_size if by_size else split_alternate)(tokens, self.prefix)
        metric = self.metric(kind)
        factor = self._attention_factor(attention_weight) if attention_weight > 0 else None
        pairs = best_pairs(metric, split, tokens.size if tokens.merged else None, size_weight, factor)
        if self.ledger is not None:
            self.record(pairs, split.compared(metric.shape[0]) * metric.shape[-1])
        return pairs

    def _attention_factor(self, weight: float) -> Tensor:
        attention = self.cls_attention().mean(1)
        count = (self.tokens.num_tokens - self.prefix).clamp(min=1).unsqueeze(1)
        mean = attention[:, self.prefix :].sum(1, keepdim=True) / count
        return (attention / mean.clamp(min=1e-12)).pow(weight / 2)

    def top(self, r: int, kind: Metric = "keys", by_size: bool = False, **weights: float) -> Decision | None:
        """Every image merges its r most similar pairs. `weights`: those of `pairs`."""
        pairs = self.pairs(kind, by_size, **weights) if r > 0 else None
        return None if pairs is None else assign_top(self.tokens, self.prefix, pairs, r)

    def above(
        self, theta: float, batch: Batch, kind: Metric = "keys", by_size: bool = False, **weights: float
    ) -> Decision | None:
        """Pairs above θ merge: as many as the batch has on average, or each image its own. `weights`: those of `pairs`."""
        pairs = self.pairs(kind, by_size, **weights) if theta < 1 else None  # no score exceeds 1: nothing to compute
        if pairs is None:
            return None
        return (assign_mean if batch == "mean" else assign_each)(self.tokens, self.prefix, pairs, theta)
