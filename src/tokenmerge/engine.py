"""One forward pass: attend, let the method decide, merge, feed. The state lives in the call, never on the model."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attending import Attending, fold_map
from .backbones.base import Backbone, Call, Unsupported
from .matching import Pairs
from .methods.base import LastLayer, Ledger, Method, View, as_lists
from .tokens import GONE, Move, Tokens, merge


class Listener(Protocol):
    """Somebody who watches the calls of one model; see tracing.py."""

    model: nn.Module
    detail: bool
    calls: list[CallRecord]


NOTHING = torch.empty(0)

# What a block computed after the others, for the tokens that go on only: queries, values, or nothing.
Apart = Literal["q", "v"] | None

# Who listens in this thread of execution: a trace sees its own thread's calls and no others.
LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("tokenmerge_listeners", default=())


@dataclass(frozen=True)
class Plan:
    """What `apply` writes on the model: configuration, nothing that changes from call to call."""

    method: Method
    backbone: Backbone
    matmul: bool = False  # in graphs, merge by a product instead of a scatter

    def last_layer(self, model: nn.Module) -> LastLayer:
        """Looked up at every call: a head may be exchanged after `apply`."""
        free, asked = self.backbone.head_reads_prefix_only(model), self.method.last_layer
        if asked in ("prefix", "query") and not free:
            raise Unsupported(
                f"last_layer={asked!r} needs a head that reads only prefix tokens; the head of this "
                f"{type(model).__name__} reads patches too. Leave last_layer out, or take 'full'"
            )
        return asked or ("query" if free else "full")

    def open(
        self, model: nn.Module, x: Tensor, *, entry: str = "forward", restore_each: bool = False, **options: Any
    ) -> Run:
        """Start the state of a call on images x. `entry` is the host's method that was called. Behind any other than
        `forward`, or where every block gives the whole sequence, more than the head may read what comes out, so that the
        last layer is computed in full. `options`: keywords of the call that change what is computed around the blocks."""
        listeners = () if torch.compiler.is_compiling() else LISTENERS.get()
        listeners = tuple(listener for listener in listeners if listener.model is model)
        run = Run(
            self,
            depth=len(self.backbone.blocks(model)),
            prefix=self.backbone.prefix(model),
            class_token=self.backbone.class_token(model),
            last_layer=self.last_layer(model) if entry == "forward" and not restore_each else "full",
            restore_each=restore_each,
            pack=not (model.training or torch.compiler.is_compiling()),
            checkpoint=bool(getattr(model, "grad_checkpointing", False)),
        )
        if listeners:
            detail = any(listener.detail for listener in listeners)
            run.record = CallRecord(
                self.backbone, run.prefix, tuple(x.shape[1:]), entry, run.last_layer, detail, tuple(options.items()),
                x[:4].detach().clone() if detail else None,
            )  # fmt: skip
            for listener in listeners:
                listener.calls.append(run.record)
        return run


@dataclass(frozen=True)
class LayerRecord:
    """What one layer did to a batch; the tensors beyond the counts are None in a trace without detail."""

    layer: int
    tokens_in: Tensor  # [B] int64
    tokens_out: Tensor  # [B] int64, after the merge (after the last layer: those that went on)
    apart: Apart
    matching: Tensor  # [B] int64, multiply-accumulates spent on comparing tokens
    pairs: Pairs | None = None  # the pairs that were compared, merged or not
    chosen: Tensor | None = None  # [B,S] bool: those of them that merged
    joined: Tensor | None = None  # [B] int64: tokens that went into others
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
    options: tuple[tuple[str, Any], ...] = ()  # keywords of the call
    pictures: Tensor | None = None  # [≤4,C,H,W], the first inputs, where detail is kept
    seconds: float = 0.0  # spent on matching and merging; where the device works on its own, only on giving it the work
    layers: dict[int, LayerRecord] = field(default_factory=dict)


@dataclass
class Run(Call):
    """The state of one call, keyed by layer: a block that is recomputed reads what it read before, and decides the same."""

    plan: Plan
    depth: int
    prefix: int
    class_token: bool
    last_layer: LastLayer
    restore_each: bool = False  # every block returns the full sequence, for intermediate features
    pack: bool = True  # lay images of different lengths one after the other; else pad them
    checkpoint: bool = False
    before: dict[int, Tokens] = field(default_factory=dict)  # state that enters a layer; x left out
    moves: dict[int, Move | None] = field(default_factory=dict)
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
            return after.restore(out, self.prefix)
        return out

    def _attend_and_merge(self, block: nn.Module, layer: int, tokens: Tokens, place: Any, prefix_only: bool) -> Tokens:
        """The first half of a block and the merge. (A function of its own, so that its tensors are gone before the MLP.)"""
        prop_attn = self.plan.method.prop_attn
        attending = Attending(self.plan.backbone, block, tokens, self.prefix, self.class_token, place, prop_attn)
        if prefix_only:
            return self._prefix_alone(layer, attending)
        stage = self.plan.method.stage(layer, self.depth)
        if stage in ("map", "values") and tokens.lengths is not None:
            raise ValueError(
                f"{type(self.plan.method).__name__}: the stage {stage!r} needs images of equal length; once they keep "
                "different numbers of tokens, decide at 'tokens' or 'queries'"
            )
        if stage == "queries":
            return self._merge_queries(layer, attending)
        if stage == "values":
            return self._merge_values(layer, attending)
        return self._merge_tokens(layer, attending, stage == "map")

    def _merge_tokens(self, layer: int, attending: Attending, with_map: bool) -> Tokens:
        """Attention as ever; what came out of it is merged."""
        q, k, v = attending.project("qkv")
        if with_map:
            weights = attending.map(q, k)
            out = attending.apply_map(weights, v)
        else:
            weights, out = None, attending(q, k, v)
        after = attending.tokens.with_x(attending.mix(attending.tokens.x, out))
        after, _, ledger = self._decide(layer, after, attending, q=q, k=k, v=v, map=weights)
        self._note(layer, attending.tokens, after, ledger)
        return after

    def _merge_queries(self, layer: int, attending: Attending) -> Tokens:
        """Merge what enters attention; only tokens that go on have a query, keys and values are those of all."""
        k, v = attending.project("kv")
        after, _, ledger = self._decide(layer, attending.tokens, attending, k=k, v=v)
        (q,) = attending.project("q", after.x)
        after = after.with_x(attending.mix(after.x, attending(q, k, v, after)))
        self._note(layer, attending.tokens, after, ledger, "q")
        return after

    def _merge_values(self, layer: int, attending: Attending) -> Tokens:
        """Merge after QKᵀ: the map of attention is merged with the tokens, values are those of the tokens that go on."""
        q, k = attending.project("qk")
        weights = attending.map(q, k)
        after, move, ledger = self._decide(layer, attending.tokens, attending, q=q, k=k, map=weights)
        if move is not None:
            weights = fold_map(weights, attending.tokens, as_lists(move))
        (v,) = attending.project("v", after.x)
        out = attending.apply_map(weights, v)
        after = after.with_x(attending.mix(after.x, out))
        self._note(layer, attending.tokens, after, ledger, "v")
        return after

    def _prefix_alone(self, layer: int, attending: Attending) -> Tokens:
        """The last layer, when nothing but the prefix is read: no merge, and the other tokens stay behind."""
        tokens = attending.tokens
        x = attending.first(tokens.x)
        apart: Apart = "q" if self.last_layer == "query" else None
        if apart:
            (q,), (k, v) = attending.project("q", x), attending.project("kv")
            after = attending.mix(x, attending(q, k, v))
        else:
            q, k, v = attending.project("qkv")
            after = attending.first(attending.mix(tokens.x, attending(q, k, v)))
        self._note(layer, tokens, tokens, Ledger(), apart, prefix_only=True)
        return tokens.with_x(after)

    def _decide(
        self, layer: int, tokens: Tokens, attending: Attending, k: Tensor, **seen: Tensor | None
    ) -> tuple[Tokens, Move | None, Ledger | None]:
        """Ask the method, once for a layer, and do what it says."""
        ledger = None if self.record is None else Ledger()
        began = 0.0 if self.record is None else time.perf_counter()
        if layer not in self.moves:
            row = partial(attending.row, seen.get("q"), k)
            view = View(layer, self.depth, self.prefix, tokens, k, row, ledger, **seen)
            with torch.no_grad():  # of an empty batch there is nothing to decide
                self.moves[layer] = self.plan.method(view) if tokens.size.shape[0] else None
        move = self.moves[layer]
        after = tokens if move is None else merge(tokens, move, pack=self.pack, matmul=self.plan.matmul)
        if self.record is not None:
            self.record.seconds += time.perf_counter() - began
        return after, move, ledger

    def _note(
        self,
        layer: int,
        before: Tokens,
        after: Tokens,
        ledger: Ledger | None,
        apart: Apart = None,
        prefix_only: bool = False,
    ) -> None:
        """Write the layer down where somebody listens; a recomputed layer was written down before."""
        if self.record is not None and ledger is not None and layer not in self.record.layers:
            kept = self.prefix if prefix_only else None
            self.record.layers[layer] = _layer_record(layer, before, after, ledger, apart, kept, self.record.detail)

    def _enter(self, layer: int, x: Tensor) -> Tokens:
        if layer == 1:
            return Tokens.start(x)
        if layer not in self.before:
            raise RuntimeError(f"block {layer} was called before block {layer - 1}; a merged model runs its blocks in order")
        tokens = self.before[layer]
        if self.restore_each and tokens.merged:
            first = tokens.first().unsqueeze(-1).expand(-1, -1, x.shape[-1])
            x = tokens.pack(x.gather(1, first))
        return tokens.with_x(x)


def _layer_record(
    layer: int, before: Tokens, after: Tokens, ledger: Ledger, apart: Apart, kept: int | None, detail: bool
) -> LayerRecord:
    """`kept`: the number of tokens that go on, where only the prefix does."""
    count = before.count
    left = after.count if kept is None else torch.full_like(count, kept)
    matching = sum(ledger.macs, torch.zeros_like(count))
    if not detail:
        return LayerRecord(layer, count, left, apart, matching)
    now = after.owner.gather(1, before.first())  # where each token that entered is afterwards, by one of its originals
    dropped = ((now == GONE) & (before.size > 0)).sum(1)
    chosen = None
    if ledger.pairs is not None:  # merged are those that now share a token with their target
        source = now.gather(1, ledger.pairs.source)
        together = (source == now.gather(1, ledger.pairs.target)) & (source != GONE)
        chosen = together & (ledger.pairs.score > -torch.inf)
    joined = count - after.count - dropped
    return LayerRecord(layer, count, left, apart, matching, ledger.pairs, chosen, joined, after.size, after.owner)
