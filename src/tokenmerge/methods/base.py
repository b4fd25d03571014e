"""What every method is: a frozen dataclass that looks at one layer and says which token joins which."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, overload

import torch
from torch import Tensor

from ..joining import join_each, join_mean, join_top
from ..matching import Pairs, best_pairs, split_alternate, split_by_size
from ..schedule import by_strength, quarters
from ..slots import Slots
from ..tokens import Assignment, Move, Tokens

LastLayer = Literal["full", "prefix", "query"]
Batch = Literal["mean", "each"]
Metric = Literal["keys", "tokens"]
# When a method decides. "tokens": after attention, as the paper. "map": the same, and it sees the map of attention, which is
# then computed step by step, not by a fused kernel. "queries": before attention, so that tokens which do not go on have no
# query. "values": after QKᵀ, with the map, so that tokens which become one have one value.
Stage = Literal["tokens", "map", "queries", "values"]


@dataclass
class Ledger:
    """What a trace wants to know of a layer, written down by the view while the method looks."""

    macs: list[Tensor] = field(default_factory=list)  # [B] per comparison of tokens
    pairs: Pairs | None = None  # of the last comparison


@dataclass(frozen=True)
class View:
    """What a method may see of layer `layer` (from 1) of `depth`, at the stage that it asked for."""

    layer: int
    depth: int
    prefix: int  # class, distillation and register tokens: first in the sequence, never merged
    tokens: Tokens
    # What attention has, before any rotation by position: [B,H,N,d] each; packed: [1,H,ΣN,d]. None if not computed yet.
    k: Tensor
    row: Callable[[], tuple[Tensor, Tensor]]  # see class_attention
    ledger: Ledger | None = None
    q: Tensor | None = None
    v: Tensor | None = None
    map: Tensor | None = None  # [B,H,N,N] float32, softmax(QKᵀ·scale + log size), at the stages that have it

    @property
    def patches(self) -> int:
        """Tokens behind the prefix, of the longest image."""
        return self.tokens.size.shape[1] - self.prefix

    def metric(self, kind: Metric) -> Tensor:
        """Vectors to compare tokens by, [B,N,D] float32: keys averaged over heads, or the tokens themselves."""
        if kind == "tokens":
            return self.tokens.spread(self.tokens.x.detach()).float()
        return self.tokens.spread(self.k.detach().float().mean(1))

    def class_attention(self) -> Tensor:
        """How the class token looks at all tokens, [B,H,N] float32, 0 for padding; in a host without one, how all tokens
        do on average."""
        row, macs = self.row()
        self.spend(macs)
        return row.detach()

    def value_norms(self) -> Tensor:
        """Length of each token's value over all heads, [B,N] float32."""
        assert self.v is not None, "values are not known before they are merged"
        v = self.v.detach().float().transpose(1, 2).flatten(2)
        return self.tokens.spread(torch.linalg.vector_norm(v, dim=-1, keepdim=True)).squeeze(-1)

    def spend(self, macs: Tensor | int) -> None:
        """Multiply-accumulates of each image, spent on deciding."""
        if self.ledger is not None:
            self.ledger.macs.append(macs + torch.zeros_like(self.tokens.count))

    def pairs(
        self, kind: Metric, by_size: bool = False, size_weight: float = 0.0, attention_weight: float = 0.0
    ) -> Pairs | None:
        """Sources with their best targets; alternate groups, or the smaller half against the larger. `size_weight`: see
        `best_pairs`. `attention_weight` q > 0: 1 − cos is multiplied by (a_i a_j)^(q/2), where a is the class token's
        attention with mean 1 over the patches."""
        split = (split_by_size if by_size else split_alternate)(self.tokens, self.prefix)
        metric, factor = self.metric(kind), None
        if attention_weight > 0:
            attention = self.class_attention().mean(1)
            mean = attention[:, self.prefix :].sum(1, keepdim=True) / (self.tokens.count - self.prefix).clamp(
                min=1
            ).unsqueeze(1)
            factor = (attention / mean.clamp(min=1e-12)).pow(attention_weight / 2)
        pairs = best_pairs(metric, split, self.tokens.size if self.tokens.merged else None, size_weight, factor)
        if self.ledger is not None:
            self.spend(split.compared(metric.shape[0]) * metric.shape[-1])
            self.ledger.pairs = pairs
        return pairs

    def top(self, r: int, kind: Metric = "keys", by_size: bool = False, **weights: float) -> Move | None:
        """Every image merges its r most similar pairs. `weights`: those of `pairs`."""
        pairs = self.pairs(kind, by_size, **weights) if r > 0 else None
        return None if pairs is None else join_top(self.tokens, self.prefix, pairs, r)

    def above(
        self, theta: float, batch: Batch, kind: Metric = "keys", by_size: bool = False, **weights: float
    ) -> Move | None:
        """Pairs above θ merge: as many as the batch has on average, or each image its own. `weights`: those of `pairs`."""
        pairs = self.pairs(kind, by_size, **weights) if theta < 1 else None  # no score exceeds 1: nothing to compute
        if pairs is None:
            return None
        return (join_mean if batch == "mean" else join_each)(self.tokens, self.prefix, pairs, theta)


@overload
def as_lists(move: Move) -> Assignment: ...


@overload
def as_lists(move: Move | None) -> Assignment | None: ...


def as_lists(move: Move | None) -> Assignment | None:
    """For those who go on from what was merged; in a graph there are no lists of tokens."""
    if isinstance(move, Slots):
        raise ValueError("this method goes on from lists of merged tokens, which graphs do not have; ATM and ToMe compile")
    return move


@dataclass(frozen=True, kw_only=True, repr=False)
class Method(ABC):
    """Fields are the configuration: `repr` evaluates back, `to_dict` is the JSON.

    `prop_attn`: softmax(QKᵀ/√d + log size), on for all models of the paper except MAE.
    `last_layer`: what the last block computes. "full": all of it, as the host does. "prefix": only the prefix tokens go on
    after the last attention, as in the paper. "query": the same, and only they have a query. The last two are exact for
    heads that read nothing but the prefix. None: "query" for such heads, "full" for the others.
    """

    version: ClassVar[int] = 1
    prop_attn: bool = True
    last_layer: LastLayer | None = None

    def __post_init__(self) -> None:
        self._check_flag("prop_attn")
        self._check_choice("last_layer", (None, "full", "prefix", "query"))

    @abstractmethod
    def __call__(self, view: View) -> Move | None:
        """Where the tokens of this layer go; None leaves them as they are."""

    def stage(self, layer: int, depth: int) -> Stage:
        """When it decides in this layer."""
        return "tokens"

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        """The method from doing nothing (0) to its most (1), for a host of so many blocks and tokens: the one knob that
        comparisons at equal cost turn. Cost falls, within a step, as strength grows."""
        raise ValueError(f"{cls.__name__} has no knob to turn")

    def check_depth(self, depth: int) -> None:  # noqa: B027 – most methods fit any depth
        """Raise if the configuration does not fit a model of this many blocks."""

    def __repr__(self) -> str:
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != _default(f))
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        config = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"type": type(self).__name__, "version": self.version, "config": config}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    # Checks of the fields, used by the methods' __post_init__.

    def _check_flag(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise ValueError(f"{type(self).__name__}: {name} must be True or False, not {getattr(self, name)!r}")

    def _check_choice(self, name: str, allowed: Sequence[object]) -> None:
        value = getattr(self, name)
        if value not in allowed or isinstance(value, bool):
            raise ValueError(f"{type(self).__name__}: {name} must be one of {list(allowed)}, not {value!r}")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{type(self).__name__}: {name} must be a number in [{low}, {_bound(high)}], not {value!r}")
        object.__setattr__(self, name, float(value))

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{type(self).__name__}: {name} must be a whole number, 0 or more, not {value!r}")

    def _check_list(self, name: str, low: float, high: float, kind: type) -> None:
        """Turn a list with one entry a layer into a tuple of `kind`."""
        value = getattr(self, name)
        fits = not isinstance(value, str) and isinstance(value, Sequence) and len(value) > 0
        if not fits or not all(
            isinstance(v, int if kind is int else int | float) and not isinstance(v, bool) and low <= v <= high
            for v in value
        ):
            what = "whole numbers" if kind is int else "numbers"
            raise ValueError(
                f"{type(self).__name__}: {name} must be a list of {what} in [{low}, {_bound(high)}], "
                f"one a layer, not {value!r}"
            )
        object.__setattr__(self, name, tuple(kind(v) for v in value))

    def _check_length(self, name: str, depth: int) -> None:
        value = getattr(self, name)
        if value is not None and len(value) != depth:
            raise ValueError(
                f"{type(self).__name__}: {name} has {len(value)} entries, but the model has {depth} blocks; give one a block"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class Placed(Method):
    """A method that acts in some layers only: `layers`, from 1; None: its own choice for the depth."""

    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            self._check_list("layers", 1, math.inf, int)

    def check_depth(self, depth: int) -> None:
        if self.layers is not None and max(self.layers) > depth:
            raise ValueError(f"{type(self).__name__}: layers {list(self.layers)} do not fit a model of {depth} blocks")

    def usual(self, depth: int) -> Collection[int]:
        """The layers, if none were given: after each quarter of the depth."""
        return quarters(depth)

    def acts(self, layer: int, depth: int) -> bool:
        return layer in (self.usual(depth) if self.layers is None else self.layers)


@dataclass(frozen=True, kw_only=True, repr=False)
class Counted(Method):
    """A method that takes r tokens away in every layer; r may be a list, one number a layer."""

    r: int | Sequence[int] = field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.r, Sequence):
            self._check_list("r", 0, math.inf, int)
        else:
            self._check_count("r")

    def count(self, layer: int) -> int:
        """Tokens to take away in a layer, from 1."""
        return self.r[layer - 1] if isinstance(self.r, Sequence) else self.r

    def check_depth(self, depth: int) -> None:
        if isinstance(self.r, Sequence):
            self._check_length("r", depth)

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(by_strength(strength, depth, tokens))


def _default(field: Any) -> object:
    return field.default if field.default is not MISSING else MISSING


def _bound(high: float) -> str:
    return "∞" if math.isinf(high) else str(high)
