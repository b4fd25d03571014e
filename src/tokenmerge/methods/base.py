"""What every method is: a frozen dataclass that looks at one layer and says which token joins which."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..matching import Pairs, best_pairs, join_each, join_mean, join_top, split_alternate, split_by_size
from ..tokens import Assignment, Tokens

LastLayer = Literal["full", "prefix", "query"]
Batch = Literal["mean", "each"]
Metric = Literal["keys", "tokens"]


@dataclass
class Ledger:
    """What a trace wants to know of a layer, written down by the view while the method looks."""

    macs: list[Tensor] = field(default_factory=list)  # [B] per comparison of tokens
    pairs: Pairs | None = None  # of the last comparison


@dataclass(frozen=True)
class View:
    """What a method may see of layer `layer` (from 1) of `depth`, after attention and before the MLP."""

    layer: int
    depth: int
    prefix: int  # class, distillation and register tokens: first in the sequence, never merged
    tokens: Tokens
    keys: Tensor  # [B,H,N,d] of this block's attention, before any rotation by position; packed: [1,H,ΣN,d]
    ledger: Ledger | None = None

    def metric(self, kind: Metric) -> Tensor:
        """Vectors to compare tokens by, [B,N,D] float32: keys averaged over heads, or the tokens themselves."""
        return self.tokens.spread(self.keys.detach().float().mean(1) if kind == "keys" else self.tokens.x.detach())

    def pairs(self, kind: Metric, by_size: bool = False, size_weight: float = 0.0) -> Pairs | None:
        """Sources with their best targets; alternate groups, or the smaller half against the larger. `size_weight`: see
        `best_pairs`."""
        split = (split_by_size if by_size else split_alternate)(self.tokens, self.prefix)
        metric = self.metric(kind)
        pairs = best_pairs(metric, split, self.tokens.size if self.tokens.merged else None, size_weight)
        if self.ledger is not None:
            self.ledger.macs.append(split.compared(len(metric)) * metric.shape[-1])
            self.ledger.pairs = pairs
        return pairs

    def top(self, r: int, kind: Metric = "keys", by_size: bool = False, size_weight: float = 0.0) -> Assignment | None:
        """Every image merges its r most similar pairs."""
        pairs = self.pairs(kind, by_size, size_weight) if r > 0 else None
        return None if pairs is None else join_top(self.tokens, self.prefix, pairs, r)

    def above(
        self, theta: float, batch: Batch, kind: Metric = "keys", by_size: bool = False, size_weight: float = 0.0
    ) -> Assignment | None:
        """Pairs above θ merge: as many as the batch has on average, or each image its own."""
        pairs = self.pairs(kind, by_size, size_weight) if theta < 1 else None  # no score exceeds 1: nothing to compute
        if pairs is None:
            return None
        return (join_mean if batch == "mean" else join_each)(self.tokens, self.prefix, pairs, theta)


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
        _check_type(self, "prop_attn", bool, "True or False")
        self._check_choice("last_layer", (None, "full", "prefix", "query"))

    @abstractmethod
    def __call__(self, view: View) -> Assignment | None:
        """Where the tokens of this layer go; None leaves them as they are."""

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


def _check_type(method: Method, name: str, kind: type, what: str) -> None:
    if not isinstance(getattr(method, name), kind):
        raise ValueError(f"{type(method).__name__}: {name} must be {what}, not {getattr(method, name)!r}")


def _default(field: Any) -> object:
    return field.default if field.default is not MISSING else MISSING


def _bound(high: float) -> str:
    return "∞" if math.isinf(high) else str(high)
