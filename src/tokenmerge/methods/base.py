"""What every method is: a frozen dataclass that looks at one layer and decides which token joins which.

A method declares its own facts. Registration puts it into comparisons, menus, help texts and the tables of the docs.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeVar

from torch import Tensor, nn

from ..core.matching import Batch, InputView, View
from ..core.schedule import quarters, r_for_strength
from ..core.state import Update
from ..core.tokens import Decision, Tokens
from .learning import ModelFacts, TrainingStep
from .validation import Validated

LastLayer = Literal["full", "prefix", "query"]
# When a method decides. "tokens": after attention, as in the paper. "map": the same, and it sees the attention map, which is
# then computed step by step, not by a fused kernel. "queries": before attention, so that removed tokens have no query.
# "values": after QKᵀ, with the map, so that merged tokens have one value.
Stage = Literal["tokens", "map", "queries", "values"]
Rule = Callable[[View], Decision | Update | None]
InputRule = Callable[[InputView], Decision | Update | None]  # decides before a block runs

# The allow-list by name: only these are ever built from a file or a command line.
METHODS: dict[str, type[Method]] = {}


MethodClass = TypeVar("MethodClass", bound="type[Method]")


def register(cls: MethodClass) -> MethodClass:
    """Make a method known by its name: to `load` and `parse`, to comparisons, to the web demo and to the docs."""
    METHODS[cls.__name__] = cls
    return cls


@dataclass(frozen=True, kw_only=True, repr=False)
class Method(Validated, ABC):
    """Fields are the config: `repr` evaluates back, `to_dict` is the JSON.

    `prop_attn`: proportional attention, softmax(QKᵀ/√d + log size); on for all models of the paper except MAE.
    `last_layer`: what the last block computes. "full": everything, as the model does. "prefix": only the prefix tokens are
    kept after the last attention, as in the paper. "query": the same, and only they have a query. The last two are exact
    for heads that read nothing but the prefix. None: "query" for such heads, "full" for the others.
    """

    version: ClassVar[int] = 1
    # Facts. Every list of methods elsewhere is derived from them.
    summary: ClassVar[str] = ""  # what it does, in a few words, for tables
    paper: ClassVar[str] = ""  # where it was published
    ablation: ClassVar[bool] = False  # a part of another method: not in comparisons and menus by default
    exports: ClassVar[bool] = False  # compiles and exports as one graph
    soft_sizes: ClassVar[bool] = False  # token sizes are not counts of original tokens
    parks: ClassVar[bool] = False  # tokens are set aside and come back
    trained: ClassVar[bool] = False  # does nothing useful without training: not in comparisons and menus by default
    learns: ClassVar[bool] = False  # gradients pass through its decisions
    needs_tokens: ClassVar[bool] = False  # its loss reads all tokens of the last block
    distils_tokens: ClassVar[bool] = False  # its loss compares logits and tokens with those of the model as it was

    prop_attn: bool = True
    last_layer: LastLayer | None = None

    def __post_init__(self) -> None:
        self._check_flag("prop_attn")
        self._check_choice("last_layer", (None, "full", "prefix", "query"))

    @abstractmethod
    def __call__(self, view: View) -> Decision | Update | None:
        """Where the tokens of this layer go; None leaves them as they are."""

    def rule(self, layer: int, depth: int) -> Rule | None:
        """What runs in this layer, asked once by `apply`; None: nothing ever merges there. Override it where that can be
        known before any image is."""
        return self

    def stage(self, layer: int, depth: int) -> Stage:
        """When it decides in this layer."""
        return "tokens"

    def input_rule(self, layer: int, depth: int) -> InputRule | None:
        """What decides before the block of this layer runs, so that removed tokens have neither queries nor keys."""
        return None

    def finish(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The output of the last block, [B,N0,C] or the prefix alone, [B,P,C], as the head will read it."""
        return x

    # Training. `done` is the fraction of the run.

    def modules(self, facts: ModelFacts) -> nn.ModuleDict | None:
        """What the method learns, new: `apply` registers it on the model, and loads the weights of the method."""
        return None

    def at(self, done: float) -> Self:
        """The config at this point of a training run."""
        return self

    @classmethod
    def from_released(cls, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights as the authors released them → those of the timm model, and those of the modules. Most are DeiT's."""
        return dict(state), {}

    def loss(self, step: TrainingStep) -> Tensor:
        """The loss of a micro-batch."""
        return step.task

    def companions(self) -> tuple[Method, ...]:
        """Configs that each training step also runs, without gradient, for the loss."""
        return ()

    def parameter_group(self, name: str) -> str:
        """The group of a parameter, by its name in the model; modules of the method are below `MODULES`."""
        return "all"

    def learning_rate_factor(self, group: str, done: float) -> float:
        """Of the recipe's learning rate, for a group."""
        return 1.0

    @property
    def drops_tokens(self) -> bool:
        """Whether tokens may be dropped without joining another."""
        return False

    @property
    def batch_invariant(self) -> bool:
        """Whether an image is merged the same way in any batch, and images may keep different numbers of tokens."""
        return getattr(self, "batch", "mean") == "each"

    def with_batch(self, batch: Batch) -> Self:
        """The same config with another batch rule, where the method has one."""
        return replace(self, batch=batch) if "batch" in self.__dataclass_fields__ else self  # type: ignore[call-arg]

    def scaled(self, fraction: float, depth: int) -> Self:
        """The same config with a fraction of its reduction, for a model with this many blocks: 1 is itself, 0 reduces
        nothing. Training schedules and the two-budget loss use it."""
        if "keep" not in self.__dataclass_fields__:
            raise ValueError(f"{type(self).__name__} has no reduction that could be scaled")
        return replace(self, keep=1 - fraction * (1 - self.keep))  # type: ignore[attr-defined, call-arg]

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        """The method from doing nothing (0) to its most (1), for a model with this many blocks and tokens. Comparisons at
        equal cost vary this one hyper-parameter. Cost falls, within a step, as strength grows."""
        raise ValueError(f"{cls.__name__} has no reduction strength to vary")

    @classmethod
    def has_strength(cls) -> bool:
        """Whether comparisons can solve it for a given cost."""
        return getattr(cls.at_strength, "__func__", None) is not Method.at_strength.__func__  # type: ignore[attr-defined]

    def check_depth(self, depth: int) -> None:
        """Raise if the config does not fit a model with this many blocks."""

    def check_model(self, facts: ModelFacts) -> None:
        """Raise if the method does not fit the model."""

    def __repr__(self) -> str:
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != _default(f))
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        config = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"type": type(self).__name__, "version": self.version, "config": config}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


@dataclass(frozen=True, kw_only=True, repr=False)
class SomeLayers(Method):
    """A method that acts in some layers only: `layers`, from 1; None: its default for the depth."""

    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            self._check_list("layers", 1, math.inf, int)

    def check_depth(self, depth: int) -> None:
        if self.layers is not None and max(self.layers) > depth:
            raise ValueError(f"{type(self).__name__}: layers {list(self.layers)} do not fit a model of {depth} blocks")

    def default_layers(self, depth: int) -> Collection[int]:
        """The layers, if none were given: after each quarter of the depth."""
        return quarters(depth)

    def acts(self, layer: int, depth: int) -> bool:
        return layer in (self.default_layers(depth) if self.layers is None else self.layers)

    def rule(self, layer: int, depth: int) -> Rule | None:
        return self if self.acts(layer, depth) else None


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainedMethod(Method):
    """A method that needs training. By default it decides only before blocks (`input_rule`)."""

    trained = True
    prop_attn: bool = False

    def __call__(self, view: View) -> Decision | Update | None:
        return None

    def rule(self, layer: int, depth: int) -> Rule | None:
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class WithModules(TrainedMethod):
    """A trained method with modules of its own. `weights`: a safetensors file with their weights, as `finetune` writes it;
    None: new modules."""

    weights: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None and not (isinstance(self.weights, str) and self.weights.endswith(".safetensors")):
            raise self._error(f"weights must name a .safetensors file, not {self.weights!r}")


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerRules(Method):
    """A method that is one rule per layer, known before any image is."""

    @abstractmethod
    def layer_rule(self, layer: int, depth: int) -> Rule | None:
        """What decides in this layer; None: nothing merges."""

    def rule(self, layer: int, depth: int) -> Rule | None:
        own_call = type(self).__call__ is not LayerRules.__call__  # a subclass that decides in its own way
        return self if own_call else self.layer_rule(layer, depth)

    def __call__(self, view: View) -> Decision | Update | None:
        rule = self.layer_rule(view.layer, view.depth)
        return None if rule is None else rule(view)


@dataclass(frozen=True, kw_only=True, repr=False)
class FixedR(LayerRules):
    """A method that removes r tokens in every layer; r may be a list, one number per layer."""

    r: int | Sequence[int] = field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.r, Sequence):
            self._check_list("r", 0, math.inf, int)
        else:
            self._check_count("r")

    def r_of(self, layer: int) -> int:
        """Tokens to remove in a layer, from 1."""
        return self.r[layer - 1] if isinstance(self.r, Sequence) else self.r

    @abstractmethod
    def select(self, view: View, r: int) -> Decision | None:
        """Remove r tokens, r > 0."""

    def rule_for(self, r: int) -> Rule:
        """The rule that removes r tokens, r > 0."""
        return partial(self.select, r=r)

    def layer_rule(self, layer: int, depth: int) -> Rule | None:
        r = self.r_of(layer)
        return self.rule_for(r) if r > 0 else None

    def check_depth(self, depth: int) -> None:
        if isinstance(self.r, Sequence):
            self._check_length("r", depth)

    def scaled(self, fraction: float, depth: int) -> Self:
        return replace(self, r=tuple(round(fraction * self.r_of(layer)) for layer in range(1, depth + 1)))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(r_for_strength(strength, depth, tokens))


def exporting_methods() -> list[str]:
    """Names of the methods that compile and export as one graph."""
    return [name for name, cls in METHODS.items() if cls.exports]


def compared_methods() -> list[str]:
    """Names of the methods that comparisons and menus offer by default."""
    return [name for name, cls in METHODS.items() if cls.has_strength() and not (cls.ablation or cls.trained)]


def find_method(name: object) -> type[Method]:
    """The class of a method by its name."""
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]


def _default(field: Any) -> object:
    return field.default if field.default is not MISSING else MISSING
