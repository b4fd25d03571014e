"""Trace a merged model: tokens, pairs, owners and cost, per layer and image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..backbones import tower_of
from .cost import Convention, Cost, count_cost
from .patch import plan_of
from .records import COUNTER, OBSERVERS, CallRecord, LayerRecord, TokenCounter


class Trace:
    """Everything the model did inside `with trace(model)`, by this thread; several calls are concatenated to one long batch.

    Layers are numbered from 1."""

    def __init__(self, model: nn.Module, detail: bool) -> None:
        self.model = model
        self.detail = detail
        self.calls: list[CallRecord] = []

    @property
    def depth(self) -> int:
        """Layers that ran."""
        return max(max(call.layers) for call in self._done())

    @property
    def tokens(self) -> list[Tensor]:
        """Per layer, [B] tokens after the merge; after the last layer, those that the head gets."""
        return [torch.cat([r.tokens_out for r in self._layer(layer)]) for layer in self._layers()]

    @property
    def tokens_in(self) -> list[Tensor]:
        """Per layer, [B] tokens that entered."""
        return [torch.cat([r.tokens_in for r in self._layer(layer)]) for layer in self._layers()]

    @property
    def merged(self) -> list[Tensor]:
        """Per layer, [B] tokens that merged into others; dropped tokens do not count."""
        return [torch.cat([r.joined for r in self._detailed(i) if r.joined is not None]) for i in self._layers()]

    @property
    def owner(self) -> Tensor:
        """[B,N0]: which token, after the last merge, holds each original token; −1 where it was dropped."""
        return self.owner_after(self.depth)

    def owner_after(self, layer: int) -> Tensor:
        """[B,N0]: which token holds each original token after the merge of this layer."""
        owners = [r.owner for r in self._detailed(layer) if r.owner is not None]
        lengths = {owner.shape[1] for owner in owners}
        if len(lengths) > 1:
            raise ValueError(
                f"the calls of this trace had images of different sizes ({sorted(lengths)} tokens); trace them separately"
            )
        return torch.cat(owners)

    def sizes(self, layer: int) -> list[Tensor]:
        """Token sizes after this layer, one [n] per image."""
        return [row[row > 0] for r in self._detailed(layer) if r.size is not None for row in r.size]

    def pairs(self, layer: int) -> list[Tensor]:
        """Merged pairs of this layer, of those that the method compared, one [n,2] per image: positions of source and
        target as they entered it. (EViT compares none; MCTF's second half goes from targets to sources.)"""
        pairs: list[Tensor] = []
        for r in self._detailed(layer):
            if r.pairs is None or r.chosen is None:
                pairs += [torch.zeros(0, 2, dtype=torch.int64, device=r.tokens_in.device)] * len(r.tokens_in)
            else:
                both = torch.stack((r.pairs.source, r.pairs.target), -1)
                pairs += [rows[keep] for rows, keep in zip(both, r.chosen, strict=True)]
        return pairs

    def similarities(self, layer: int) -> list[Tensor]:
        """Score of each source with its best target, merged or not (the cosine, possibly weighted by size), one [n] per
        image; empty where nothing was compared."""
        scores: list[Tensor] = []
        for r in self._detailed(layer):
            if r.pairs is None:
                scores += [torch.zeros(0, device=r.tokens_in.device)] * len(r.tokens_in)
            else:
                scores += [row[row > -torch.inf] for row in r.pairs.score]
        return scores

    def cost(self, convention: Convention = "macs", memo: dict[Any, float] | None = None) -> Cost:
        """GMACs of what ran, per layer and image; `.gmacs` is the mean per image. To count the same model many times, pass
        the same `memo` again."""
        return count_cost(self.model, self._done(), convention, memo)

    def _repr_html_(self) -> str:
        """For notebooks: a strip of merge maps for the first images."""
        from ..visualization.merge_maps import trace_html  # the one import against the order of the packages

        return trace_html(self)

    def _done(self) -> list[CallRecord]:
        done = [call for call in self.calls if call.layers]
        if not done:
            raise ValueError("the trace is empty: call the model inside `with tokenmerge.trace(model) as t:` first")
        return done

    def _layers(self) -> range:
        return range(1, self.depth + 1)

    def _layer(self, layer: int) -> list[LayerRecord]:
        if layer not in self._layers():
            raise ValueError(f"layers are numbered from 1 to {self.depth}; there is no layer {layer}")
        return [call.layers[layer] for call in self._done() if layer in call.layers]

    def _detailed(self, layer: int) -> list[LayerRecord]:
        if not self.detail:
            raise ValueError("this trace keeps token counts only; use trace(model, detail=True)")
        return self._layer(layer)


@contextmanager
def trace(model: nn.Module, detail: bool = True) -> Iterator[Trace]:
    """Record the calls of a merged model. `detail=False` keeps counts only, enough for tokens and costs."""
    plan_of(model)
    observer = Trace(tower_of(model), detail)
    token = OBSERVERS.set((*OBSERVERS.get(), observer))
    try:
        yield observer
    finally:
        OBSERVERS.reset(token)


@contextmanager
def count_tokens(model: nn.Module) -> Iterator[TokenCounter]:
    """Count the tokens that enter the last layer, for each image that the model is called with: next to nothing, where a
    trace takes time in every layer."""
    plan_of(model)
    counter = TokenCounter(tower_of(model))
    token = COUNTER.set(counter)
    try:
        yield counter
    finally:
        COUNTER.reset(token)
