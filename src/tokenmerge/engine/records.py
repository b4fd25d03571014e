"""What a trace keeps of a call, layer by layer."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..backbones.base import Backbone
from ..core.matching import Ledger, Pairs
from ..core.tokens import DROPPED, Tokens
from ..methods.base import LastLayer

# Queries or values that a block projects after the merge, for the remaining tokens only; None: neither.
LateProjection = Literal["q", "v"] | None


@dataclass(frozen=True)
class LayerRecord:
    """What one layer did to a batch; the tensors beyond the counts are None in a trace without detail."""

    layer: int
    tokens_in: Tensor  # [B] int64
    tokens_out: Tensor  # [B] int64, after the merge (in the last layer: the tokens that the head gets)
    late: LateProjection
    matching: Tensor  # [B] int64, multiply-accumulates spent on comparing tokens
    attending: Tensor  # [B] int64: those of tokens_in that an input rule left to the block
    pairs: Pairs | None = None  # the pairs that were compared, merged or not
    chosen: Tensor | None = None  # [B,S] bool: those of them that merged
    joined: Tensor | None = None  # [B] int64: tokens that merged into others
    size: Tensor | None = None  # [B,M] float32 after the merge; parked tokens at the end
    owner: Tensor | None = None  # [B,N0] int64 after the merge


@dataclass
class CallRecord:
    """What an observer keeps of a call."""

    backbone: Backbone
    prefix: int
    image: tuple[int, ...]  # shape of one input image
    entry: str  # the method of the model that was called
    last_layer: LastLayer
    detail: bool
    options: tuple[tuple[str, Any], ...] = ()  # keywords of the call
    inputs: Tensor | None = None  # [≤4,C,H,W], the first images, where detail is kept
    seconds: float = 0.0  # spent on matching and merging; on an accelerator, only on launching the work
    layers: dict[int, LayerRecord] = field(default_factory=dict)

    def add(
        self,
        layer: int,
        before: Tokens,
        after: Tokens,
        ledger: Ledger,
        late: LateProjection = None,
        kept: int | None = None,
        attending: Tokens | None = None,
    ) -> None:
        """Record a layer; a layer that gradient checkpointing recomputes was recorded before. `kept`: the number of tokens
        that remain, where only the prefix does. `attending`: the tokens that the block got, where an input rule decided."""
        if layer in self.layers:
            return
        count = before.num_tokens
        left = after.num_tokens if kept is None else torch.full_like(count, kept)
        matching = sum(ledger.macs, torch.zeros_like(count))
        entered = count if attending is None else attending.num_tokens
        if not self.detail:
            self.layers[layer] = LayerRecord(layer, count, left, late, matching, entered)
            return
        now = after.owner.gather(1, before.representative())  # the new position of each token that entered
        dropped = ((now == DROPPED) & (before.size > 0)).sum(1)
        chosen = None
        if ledger.pairs is not None:  # a pair merged if both now are one token
            source = now.gather(1, ledger.pairs.source)
            together = (source == now.gather(1, ledger.pairs.target)) & (source != DROPPED)
            chosen = together & (ledger.pairs.score > -torch.inf)
        joined = count - after.num_tokens - dropped
        size = after.size
        if before.parked is not None or after.parked is not None:  # nothing joins
            joined = torch.zeros_like(count)
            size = size if after.parked is None else torch.cat((size, after.parked.size), 1)
        self.layers[layer] = LayerRecord(
            layer, count, left, late, matching, entered, ledger.pairs, chosen, joined, size, after.owner
        )


class Observer(Protocol):
    """Gets a record of every call of one model; see trace.py."""

    model: nn.Module
    detail: bool
    calls: list[CallRecord]


# The observers of this thread of execution: a trace sees the calls of its own thread and no others.
OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("tokenmerge_observers", default=())


@dataclass
class Lesson:
    """What a training step keeps of the calls of one model, for the loss of the method."""

    model: nn.Module
    notes: list[Any] = field(default_factory=list)
    tokens: Tensor | None = None  # the output of the last block


LESSON: ContextVar[Lesson | None] = ContextVar("tokenmerge_lesson", default=None)


@dataclass
class TokenCounter:
    """Keeps how many tokens of each image enter the last layer, in the calls of one model."""

    model: nn.Module
    calls: list[Tensor] = field(default_factory=list)  # [B] int64 each


COUNTER: ContextVar[TokenCounter | None] = ContextVar("tokenmerge_counter", default=None)
