"""One forward pass: attend, let the method decide, merge, feed. The state lives in the call, never on the model."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .attention import attend_packed
from .backbones.base import Backbone, Call, Unsupported
from .matching import Pairs
from .methods.base import LastLayer, Ledger, Method, View
from .tokens import Assignment, Tokens, group_mean, merge, representatives, restore


class Listener(Protocol):
    """Somebody who watches the calls of one model; see tracing.py."""

    model: nn.Module
    detail: bool
    calls: list[CallRecord]


NOTHING = torch.empty(0)

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

    def open(self, model: nn.Module, x: Tensor, *, entry: str = "forward", restore_each: bool = False) -> Run:
        """Start the state of a call on images x. `entry` is the host's method that was called: behind any other than
        `forward`, more than the head may read what comes out, so that the last layer is computed in full."""
        listeners = () if torch.compiler.is_compiling() else LISTENERS.get()
        listeners = tuple(listener for listener in listeners if listener.model is model)
        run = Run(
            self,
            depth=len(self.backbone.blocks(model)),
            prefix=self.backbone.prefix(model),
            last_layer=self.last_layer(model) if entry == "forward" else "full",
            restore_each=restore_each,
            pack=not (model.training or torch.compiler.is_compiling()),
            checkpoint=bool(getattr(model, "grad_checkpointing", False)),
        )
        if listeners:
            detail = any(listener.detail for listener in listeners)
            run.record = CallRecord(self.backbone, run.prefix, tuple(x.shape[1:]), entry, run.last_layer, detail)
            for listener in listeners:
                listener.calls.append(run.record)
        return run


@dataclass(frozen=True)
class LayerRecord:
    """What one layer did to a batch; the tensors beyond the counts are None in a trace without detail."""

    layer: int
    tokens_in: Tensor  # [B] int64
    tokens_out: Tensor  # [B] int64, after the merge (after the last layer: those that went on)
    queries: int | None  # tokens that had a query, where not all did
    matching: Tensor  # [B] int64, multiply-accumulates spent on comparing tokens
    pairs: Pairs | None = None  # the pairs that were compared, merged or not
    chosen: Tensor | None = None  # [B,S] bool: those of them that merged
    size: Tensor | None = None  # [B,M] float32 after the merge
    owner: Tensor | None = None  # [B,N0] int64 after the merge


@dataclass
class CallRecord:
    """What a listener keeps of a call."""

    backbone: Backbone
    prefix: int
    image: tuple[int, ...]  # shape of one input image
    entry: str
    last_layer: LastLayer
    detail: bool
    seconds: float = 0.0  # spent on matching and merging; where the device works on its own, only on giving it the work
    layers: dict[int, LayerRecord] = field(default_factory=dict)


@dataclass
class Run(Call):
    """The state of one call, keyed by layer: a block that is recomputed reads what it read before, and decides the same."""

    plan: Plan
    depth: int
    prefix: int
    last_layer: LastLayer
    restore_each: bool = False  # every block returns the full sequence, for intermediate features
    pack: bool = True  # lay images of different lengths one after the other; else pad them
    checkpoint: bool = False
    before: dict[int, Tokens] = field(default_factory=dict)  # state that enters a layer; x left out
    moves: dict[int, Assignment | None] = field(default_factory=dict)
    record: CallRecord | None = None  # where somebody listens

    def step(self, block: nn.Module, layer: int, x: Tensor, place: Any) -> Tensor:
        """Run one block on x; this is what a patched block's forward calls."""
        if self.checkpoint and torch.is_grad_enabled():
            result: Tensor = checkpoint(self._step, block, layer, x, place, use_reentrant=False)
            return result
        return self._step(block, layer, x, place)

    def _step(self, block: nn.Module, layer: int, x: Tensor, place: Any) -> Tensor:
        tokens = self._enter(layer, x)
        last = layer == self.depth
        prefix_only = last and self.last_layer != "full"
        after = self._attend_and_merge(block, layer, tokens, place, prefix_only)
        self.before[layer + 1] = after.with_x(NOTHING)
        out = self.plan.backbone.feed(block, after.x)
        if after.merged and not prefix_only and (last or self.restore_each):
            return after.take(out, after.owner)
        return out

    def _attend_and_merge(self, block: nn.Module, layer: int, tokens: Tokens, place: Any, prefix_only: bool) -> Tokens:
        """The first half of a block and the merge. (A function of its own, so that its tensors are gone before the MLP.)"""
        backbone = self.plan.backbone
        pick = partial(self._prefix_of, tokens) if prefix_only and self.last_layer == "query" else None
        if place is not None and tokens.merged:
            place = self._merge_place(place, tokens)
        q, k, v, gate = backbone.project(block, tokens.x, pick)
        out = self._attend(block, tokens, q, k, v, place)
        after = tokens.with_x(backbone.mix(block, tokens.x if pick is None else pick(tokens.x), out, gate))
        if prefix_only:
            after = after if pick is not None else after.with_x(self._prefix_of(tokens, after.x))
            self._note(layer, tokens, after, Ledger(), pick is not None, prefix_only)
            return after

        began, ledger = time.perf_counter(), None if self.record is None else Ledger()
        if layer not in self.moves:
            self.moves[layer] = self.plan.method(View(layer, self.depth, self.prefix, after, k, ledger))
        move = self.moves[layer]
        if move is not None:
            after = merge(after, move, pack=self.pack)
        if self.record is not None and ledger is not None:
            self.record.seconds += time.perf_counter() - began
            self._note(layer, tokens, after, ledger, False, prefix_only)
        return after

    def _note(self, layer: int, before: Tokens, after: Tokens, ledger: Ledger, query: bool, prefix_only: bool) -> None:
        """Write the layer down where somebody listens; a recomputed layer was written down before."""
        if self.record is not None and layer not in self.record.layers:
            kept, queries = self.prefix if prefix_only else None, self.prefix if query else None
            self.record.layers[layer] = _layer_record(layer, before, after, ledger, queries, kept, self.record.detail)

    def _prefix_of(self, tokens: Tokens, values: Tensor) -> Tensor:
        """The prefix tokens of each image, [B,P,C]."""
        if not tokens.packed:
            return values[:, : self.prefix]
        return tokens.take(values, tokens.index[: self.prefix].expand(len(tokens.size), -1))

    def _enter(self, layer: int, x: Tensor) -> Tokens:
        if layer == 1:
            return Tokens.start(x)
        if layer not in self.before:
            raise RuntimeError(f"block {layer} was called before block {layer - 1}; a merged model runs its blocks in order")
        tokens = self.before[layer]
        if self.restore_each and tokens.merged:
            first = representatives(tokens.owner, tokens.size.shape[1])
            x = tokens.pack(restore(x, first))
        return tokens.with_x(x)

    def _attend(self, block: nn.Module, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, place: Any) -> Tensor:
        """Proportional attention, [B,H,Q,d]; of packed tokens, [1,H,ΣQ,d]."""
        backbone, options = self.plan.backbone, self.plan.backbone.attention_options(block)
        bias = self._bias(tokens, q)
        if not tokens.packed:
            if place is not None:
                q, k = backbone.rotate(block, q, place), backbone.rotate(block, k, place)
            return F.scaled_dot_product_attention(q, k, v, bias, **options)
        if place is not None:
            q, k = self._rotate_packed(block, tokens, q, place), self._rotate_packed(block, tokens, k, place)
        return attend_packed(q, k, v, bias, tokens.lengths or (), options)

    def _rotate_packed(self, block: nn.Module, tokens: Tokens, x: Tensor, place: Tensor) -> Tensor:
        """Each image by its own positions; queries of the prefix alone are not turned."""
        if len(x) > 1:
            return x
        parts = zip(tokens.starts, tokens.lengths or (), range(len(place)), strict=True)
        rotate = self.plan.backbone.rotate
        return torch.cat(
            [rotate(block, x[:, :, start : start + n], place[b : b + 1, :, : n - self.prefix]) for start, n, b in parts], 2
        )

    def _bias(self, tokens: Tokens, q: Tensor) -> Tensor | None:
        """log size for the keys, −inf for padding, [B,1,1,N]; nothing as long as every token is one token."""
        if not tokens.merged or not (self.plan.method.prop_attn or (tokens.lengths and not tokens.packed)):
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


def _layer_record(
    layer: int, before: Tokens, after: Tokens, ledger: Ledger, queries: int | None, kept: int | None, detail: bool
) -> LayerRecord:
    """`kept`: the number of tokens that go on, where only the prefix does."""
    count = before.count
    left = after.count if kept is None else torch.full_like(count, kept)
    matching = sum(ledger.macs, torch.zeros_like(count))
    if not detail:
        return LayerRecord(layer, count, left, queries, matching)
    chosen = None
    if ledger.pairs is not None:  # merged are those that now share a token with their target
        chosen = _together(before, after, ledger.pairs) & (ledger.pairs.score > -torch.inf)
    return LayerRecord(layer, count, left, queries, matching, ledger.pairs, chosen, after.size, after.owner)


def _together(before: Tokens, after: Tokens, pairs: Pairs) -> Tensor:
    """Whether source and target of each pair ended in one token, [B,S] bool."""
    first = representatives(before.owner, before.size.shape[1])  # an original token of each token that entered
    now = after.owner.gather(1, first)  # where it is afterwards
    return now.gather(1, pairs.source) == now.gather(1, pairs.target)
