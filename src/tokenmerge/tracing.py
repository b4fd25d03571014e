"""Watch what a merged model does: tokens, pairs, owners and cost, per layer and image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .cost import Convention, Cost, count_cost
from .engine import LISTENERS, LayerRecord, Run
from .surgery import plan_of


class Trace:
    """Everything the model did inside `with trace(model)`, by this thread; several calls add up to one long batch."""

    def __init__(self, model: nn.Module, detail: bool) -> None:
        self.model = model
        self.detail = detail
        self.calls: list[Run] = []

    def _layer(self, layer: int) -> list[LayerRecord]:
        return [run.records[layer] for run in self._done() if layer in run.records]

    def _done(self) -> list[Run]:
        done = [run for run in self.calls if run.records]
        if not done:
            raise ValueError("the trace is empty: call the model inside `with tokenmerge.trace(model) as t:` first")
        return done

    @property
    def depth(self) -> int:
        return max(max(run.records) for run in self._done())

    @property
    def layers(self) -> list[list[LayerRecord]]:
        """All records: a list per layer, in it one per call. A record's `move` has the pairs and their similarities."""
        return [self._layer(layer) for layer in range(1, self.depth + 1)]

    @property
    def tokens(self) -> list[Tensor]:
        """Per layer, [B] tokens after the merge; after the last layer, those that went on to the head."""
        return [torch.cat([record.tokens_out for record in records]) for records in self.layers]

    @property
    def tokens_in(self) -> list[Tensor]:
        """Per layer, [B] tokens that entered."""
        return [torch.cat([record.tokens_in for record in records]) for records in self.layers]

    @property
    def merged(self) -> list[Tensor]:
        """Per layer, [B] pairs that merged."""
        zero = torch.zeros_like
        return [
            torch.cat([zero(r.tokens_in) if r.move is None else r.move.chosen.sum(1) for r in self._detailed(layer)])
            for layer in range(1, self.depth + 1)
        ]

    @property
    def owner(self) -> Tensor:
        """[B,N0]: which token, after the last merge, holds each original token."""
        return self.owner_after(self.depth)

    def owner_after(self, layer: int) -> Tensor:
        """[B,N0]: which token holds each original token after the merge of this layer."""
        owners = [r.owner for r in self._detailed(layer) if r.owner is not None]
        lengths = {owner.shape[1] for owner in owners}
        if len(lengths) > 1:
            raise ValueError(
                f"the calls of this trace had images of different sizes ({sorted(lengths)} tokens); trace them apart"
            )
        return torch.cat(owners)

    def size_after(self, layer: int) -> list[Tensor]:
        """Merging sizes after this layer, one [n] per image, without padding."""
        return [row[row > 0] for r in self._detailed(layer) if r.size is not None for row in r.size]

    def _detailed(self, layer: int) -> list[LayerRecord]:
        if not self.detail:
            raise ValueError("this trace keeps token counts only; use trace(model, detail=True)")
        return self._layer(layer)

    def cost(self, convention: Convention = "macs") -> Cost:
        """GMACs of what ran, per layer and image; `.gmacs` is the mean per image."""
        return count_cost(self.model, self._done(), convention)


@contextmanager
def trace(model: nn.Module, detail: bool = True) -> Iterator[Trace]:
    """Record the calls of a merged model. `detail=False` keeps counts only, enough for tokens and costs."""
    plan_of(model)
    watcher = Trace(model, detail)
    token = LISTENERS.set((*LISTENERS.get(), watcher))
    try:
        yield watcher
    finally:
        LISTENERS.reset(token)
