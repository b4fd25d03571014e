"""What a family of hosts must answer, so that the engine can run its blocks. A backbone never sees a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional as F


class Unsupported(TypeError):
    """This model cannot be merged; the message names what was found, what is supported and what to do."""


class Call(ABC):
    """One call of a merged model, handed from block to block as an argument. The engine's `Run` is one."""

    @abstractmethod
    def step(self, block: nn.Module, layer: int, x: Tensor, place: Any) -> Tensor:
        """Run one block on x."""


class Projection(NamedTuple):
    """What a block's attention needs, [B,H,·,d] each, before any rotation by position."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None = None  # [B,·,A], multiplied onto the output of attention


@dataclass(frozen=True)
class BlockShape:
    """Multiply-accumulates per token of one block, and its widths."""

    query: int
    key_value: int
    output: int  # the output projection and a gate: spent on queries only
    mlp: int
    width: int  # C
    attention: int  # heads × head dimension: QKᵀ and AV cost this much each per pair of tokens
    head: int  # dimension of a head, that of the averaged keys
    norms_in: int  # elements of norms per token before the merge, per query, and per token after the merge
    norms_query: int
    norms_out: int


Pick = Callable[[Tensor], Tensor]


class Backbone(Protocol):
    """A few small functions for one family of hosts."""

    name: str
    model_mixin: type  # put before the host's class by `apply`: opens a Call each time the model is called
    block_mixin: type  # put before each block's class: hands its input to the Call

    def matches(self, model: nn.Module) -> bool:
        """Whether this family knows the model's class."""

    def check(self, model: nn.Module) -> None:
        """Raise Unsupported, with the reason, if anything in the model is not understood."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]: ...

    def prefix(self, model: nn.Module) -> int:
        """Number of class, distillation and register tokens at the front."""

    def head_reads_prefix_only(self, model: nn.Module) -> bool: ...

    def project(self, block: Any, x: Tensor, pick: Pick | None) -> Projection:
        """Norm and projections of x [B,N,C]; with `pick`, only the tokens that it takes out of x get a query."""

    def rotate(self, block: Any, x: Tensor, place: Any) -> Tensor:
        """Rotate queries or keys [B,H,N,d] by `place`: what the host hands to its blocks beside x, merged like the
        tokens. Hosts without such positions never come here."""

    def attention_options(self, block: Any) -> dict[str, Any]:
        """Keyword arguments for scaled_dot_product_attention: scale, dropout."""

    def mix(self, block: Any, x: Tensor, out: Tensor, gate: Tensor | None) -> Tensor:
        """Output projection and residual: x [B,Q,C] + what attention gave, out [B,H,Q,d]."""

    def feed(self, block: Any, x: Tensor) -> Tensor:
        """The MLP half, residual included."""

    def shape(self, block: Any) -> BlockShape: ...

    def bypass(self, model: nn.Module, exit_tokens: int | None) -> None:
        """Replace all blocks of a throw-away copy by one that passes the first `exit_tokens` tokens through."""


class Pass(nn.Module):
    """Stands for all blocks when the rest of the model is counted."""

    def __init__(self, exit_tokens: int | None) -> None:
        super().__init__()
        self.exit_tokens = exit_tokens

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return x if self.exit_tokens is None else x[:, : self.exit_tokens]


def linear_macs(*modules: nn.Module | None) -> int:
    """Multiply-accumulates per token of all linear layers inside, whatever class they have."""
    total = 0
    for module in modules:
        for m in () if module is None else module.modules():
            sizes: Any = getattr(m, "in_features", None), getattr(m, "out_features", None)
            if isinstance(sizes[0], int) and isinstance(sizes[1], int) and not list(m.children()):
                total += sizes[0] * sizes[1]
    return total


def heads(x: Tensor, count: int) -> Tensor:
    """[B,N,H·d] → [B,H,N,d]."""
    b, n, width = x.shape
    return x.reshape(b, n, count, width // count).transpose(1, 2)


def is_plain_linear(module: object) -> bool:
    """Whether rows of the weight may be used without calling the module: no adapter, no quantisation, no hook."""
    return type(module) is nn.Linear and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def norm_width(module: Any) -> int:
    """Elements that a norm normalises per token; 0 for none."""
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else 0


def split_linear(linear: nn.Linear, bias: Tensor | None, x: Tensor, first: int, pick: Pick) -> tuple[Tensor, Tensor]:
    """The first `first` outputs for the picked tokens only, the other outputs for all tokens."""
    bias_q, bias_rest = (None, None) if bias is None else (bias[:first], bias[first:])
    return F.linear(pick(x), linear.weight[:first], bias_q), F.linear(x, linear.weight[first:], bias_rest)
