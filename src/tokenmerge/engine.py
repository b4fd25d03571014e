"""One forward pass: attend, let the method decide, merge, feed. The state lives in the call, never on the model."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .backbones.base import Backbone, Call, Unsupported
from .methods.base import LastLayer, Method, View
from .tokens import Assignment, Tokens, group_mean, merge, representatives, restore


class Listener(Protocol):
    """Somebody who watches the calls of one model; see tracing.py."""

    model: nn.Module
    detail: bool
    calls: list[Run]


# Who listens in this thread of execution: a trace sees its own thread's calls and no others.
LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("tokenmerge_listeners", default=())


@dataclass(frozen=True)
class Plan:
    """What `apply` writes on the model: configuration, nothing that changes from call to call."""

    method: Method
    backbone: Backbone

    def last_layer(self, model: nn.Module) -> LastLayer:
        """Looked up at every call: a head may be exchanged after `apply`."""
        free, asked = self.backbone.head_reads_prefix_only(model), self.method.last_layer
        if asked in ("prefix", "query") and not free:
            raise Unsupported(
                f"last_layer={asked!r} needs a head that reads only prefix tokens; the head of this "
                f"{type(model).__name__} reads patches too. Leave last_layer out, or take 'full'"
            )
        return asked or ("query" if free else "full")

    def open(self, model: nn.Module, x: Tensor, *, whole: bool = False, restore_each: bool = False) -> Run:
        """Start the state of a call on images x; `whole` if more than the head will read what comes out."""
        listeners = () if torch.compiler.is_compiling() else LISTENERS.get()
        listeners = tuple(listener for listener in listeners if listener.model is model)
        run = Run(
            self,
            depth=len(self.backbone.blocks(model)),
            prefix=self.backbone.prefix(model),
            image=tuple(x.shape[1:]),
            last_layer="full" if whole else self.last_layer(model),
            restore_each=restore_each,
            checkpoint=bool(getattr(model, "grad_checkpointing", False)),
            detail=max((listener.detail for listener in listeners), default=None),
        )
        for listener in listeners:
            listener.calls.append(run)
        return run


@dataclass(frozen=True)
class LayerRecord:
    """What one layer did to a batch; the tensors beyond the counts are None in a trace without detail."""

    layer: int
    tokens_in: Tensor  # [B] int64
    tokens_out: Tensor  # [B] int64, after the merge (after the last layer: those that went on)
    queries: int | None  # tokens that had a query, where not all did
    matching: Tensor  # [B] int64, multiply-accumulates spent on comparing tokens
    move: Assignment | None = None
    size: Tensor | None = None  # [B,M] float32 after the merge
    owner: Tensor | None = None  # [B,N0] int64 after the merge


@dataclass
class Run(Call):
    """The state of one call, keyed by layer: a block that is recomputed reads what it read before, and decides the same."""

    plan: Plan
    depth: int
    prefix: int
    image: tuple[int, ...]  # shape of one input image
    last_layer: LastLayer
    restore_each: bool = False  # every block returns the full sequence, for intermediate features
    checkpoint: bool = False
    detail: bool | None = None  # None: no records are kept
    before: dict[int, Tokens] = field(default_factory=dict)  # state that enters a layer; x left out
    moves: dict[int, Assignment | None] = field(default_factory=dict)
    matching: dict[int, list[Tensor]] = field(default_factory=dict)
    records: dict[int, LayerRecord] = field(default_factory=dict)

    def step(self, block: nn.Module, layer: int, x: Tensor, place: Any) -> Tensor:
        """Run one block on x; this is what a patched block's forward calls."""
        if self.checkpoint and torch.is_grad_enabled():
            result: Tensor = checkpoint(self._step, block, layer, x, place, use_reentrant=False)
            return result
        return self._step(block, layer, x, place)

    def _step(self, block: nn.Module, layer: int, x: Tensor, place: Any) -> Tensor:
        tokens = self._enter(layer, x)
        backbone, method = self.plan.backbone, self.plan.method
        last = layer == self.depth
        prefix_only = last and self.last_layer != "full"
        queries = self.prefix if last and self.last_layer == "query" else None

        if place is not None and tokens.merged:
            place = self._merge_place(place, tokens)
        q, k, v, keys, gate = backbone.project(block, tokens.x, place, queries)
        out = F.scaled_dot_product_attention(q, k, v, self._bias(tokens, q), **backbone.attention_options(block))
        residual = tokens.x if queries is None else tokens.x[:, :queries]
        after = tokens.with_x(backbone.mix(block, residual, out, gate))

        move = None
        if not prefix_only:
            if layer not in self.moves:
                spent: list[Tensor] | None = None if self.detail is None else []
                self.moves[layer] = method(View(layer, self.depth, self.prefix, after, keys.detach(), spent))
                self.matching[layer] = spent or []
            move = self.moves[layer]
            if move is not None:
                after = merge(after, move)
        if self.detail is not None:
            self._record(layer, tokens, after, move, queries, prefix_only)
        self.before[layer + 1] = after.with_x(x.new_empty(0))
        out_x = backbone.feed(block, after.x[:, : self.prefix] if prefix_only else after.x)
        if after.merged and not prefix_only and (last or self.restore_each):
            out_x = restore(out_x, after.owner)
        return out_x

    def _enter(self, layer: int, x: Tensor) -> Tokens:
        if layer == 1:
            return Tokens.start(x)
        if layer not in self.before:
            raise RuntimeError(f"block {layer} was called before block {layer - 1}; a merged model runs its blocks in order")
        tokens = self.before[layer]
        if self.restore_each and tokens.merged:
            first = representatives(tokens.owner, tokens.size.shape[1])
            x = x.gather(1, first.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return tokens.with_x(x)

    def _bias(self, tokens: Tokens, q: Tensor) -> Tensor | None:
        """log size for the keys, −inf for padding, [B,1,1,N]; nothing as long as every token is one token."""
        if not tokens.merged or not (self.plan.method.prop_attn or tokens.padded):
            return None
        bias = tokens.size.log()
        if not self.plan.method.prop_attn:
            bias = bias.clamp(max=0)
        return bias[:, None, None, :].to(q.dtype)

    def _merge_place(self, place: Tensor, tokens: Tokens) -> Tensor:
        """Rotary embeddings of the patches [.., N0, D] → those of the merged tokens, the mean over each group.

        The mean of rotated keys of equal content is the key under the mean rotation, so that a merged token sits in the
        middle of its group, and is the less bound to a place the wider the group is spread."""
        b = tokens.size.shape[0]
        while place.ndim < 4:  # [N,D] and [H,N,D] are shared by the batch
            place = place.unsqueeze(0)
        owner = tokens.owner[:, self.prefix :] - self.prefix
        return group_mean(place.expand(b, -1, -1, -1), owner, tokens.size[:, self.prefix :])

    def _record(
        self,
        layer: int,
        before: Tokens,
        after: Tokens,
        move: Assignment | None,
        queries: int | None,
        prefix_only: bool,
    ) -> None:
        count = before.count
        left = torch.full_like(count, self.prefix) if prefix_only else after.count
        matching = sum(self.matching.get(layer, []), torch.zeros_like(count))
        more = (move, after.size, after.owner) if self.detail else (None, None, None)
        self.records[layer] = LayerRecord(layer, count, left, queries, matching, *more)
