"""What a family of hosts must answer, so that the engine can run its blocks. A backbone never sees a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional as F


class Unsupported(TypeError):
    """This model cannot be merged; the message names what was found, what is supported and what to do."""


class Call(ABC):
    """One call of a merged model, handed from block to block as an argument. The engine's `Run` is one."""

    @abstractmethod
    def step(self, block: nn.Module, layer: int, x: Tensor, place: Any) -> Tensor:
        """Run one block on x."""


@dataclass(frozen=True)
class BlockShape:
    """Multiply-accumulates per token of one block, and its widths."""

    query: int
    key: int
    value: int
    output: int  # the output projection and a gate: spent on tokens that leave attention only
    mlp: int
    width: int  # C
    attention: int  # heads × head dimension: QKᵀ and AV cost this much each per pair of tokens
    head: int  # dimension of a head, that of the averaged keys
    norm_in: int  # elements of norms: before the projections, on queries, on keys, on what leaves attention, in the MLP
    norm_query: int
    norm_key: int
    norm_inner: int
    norm_out: int


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

    def class_token(self, model: nn.Module) -> bool:
        """Whether the first of them is a class token: some hosts have registers alone."""

    def head_reads_prefix_only(self, model: nn.Module) -> bool: ...

    def classifier(self, model: nn.Module) -> nn.Module | None:
        """What reads the features of an image; None where the host gives these themselves."""

    def answer(self, out: Any) -> Tensor:
        """Logits or features [B,K] in what the host's `forward` gives."""

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        """Norm and projections of x [B,N,C]: of queries, keys and values those that are asked for, [B,H,N,d] each, before
        any rotation by position."""

    def rotate(self, block: Any, x: Tensor, place: Any) -> Tensor:
        """Rotate queries or keys [B,H,N,d] by `place`: what the host hands to its blocks beside x, merged like the
        tokens. Hosts without such positions never come here."""

    def attention_options(self, block: Any) -> dict[str, Any]:
        """Keyword arguments for scaled_dot_product_attention: scale, dropout."""

    def mix(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
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


def is_plain_linear(module: Any) -> bool:
    """Whether rows of the weight may be used without calling the module: no adapter, no quantisation, no hook."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not has_hooks(module)


Hook = Callable[..., Any]


def has_hooks(module: nn.Module, but: Callable[[Hook], bool] = lambda hook: False) -> bool:
    """Whether any hook would fire, but for those that need not."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(not but(hook) for kind in kinds for hook in kind.values())


def refuse_hooks(attention: nn.Module, layer: int, but: Callable[[Hook], bool] = lambda hook: False) -> None:
    if has_hooks(attention, but):
        raise Unsupported(
            f"the attention of block {layer - 1} has hooks, which would not fire: its parts are called one by one. "
            "Put them on the block or on the attention's projections"
        )


def called_alone(layer: int) -> RuntimeError:
    return RuntimeError(
        f"block {layer} of a merged model was called on its own, without the state that the model hands to its blocks. "
        "Call the model, or tokenmerge.remove(model) first"
    )


def check_blocks(
    host: str,
    blocks: Sequence[nn.Module],
    block_classes: Sequence[type],
    attention: Callable[[Any], nn.Module],
    attention_classes: Sequence[type],
) -> None:
    """Refuse what is not understood: other blocks, other attentions, blocks that come twice."""
    if len(blocks) == 0:
        raise Unsupported(f"{host} has no blocks to merge between")
    if len({id(block) for block in blocks}) < len(blocks):
        raise Unsupported(f"{host} uses one block more than once; each layer needs a block of its own")
    for i, block in enumerate(blocks):
        if type(block) not in block_classes:
            raise Unsupported(
                f"{host}: block {i} is a {type(block).__name__}; supported is {_names(block_classes)}, because merging "
                "happens between its attention and its MLP, and other blocks compute these in another way or order"
            )
        if type(attention(block)) not in attention_classes:
            raise Unsupported(
                f"{host}: the attention of block {i} is a {type(attention(block)).__name__}; supported is "
                f"{_names(attention_classes)}, because keys and merging sizes go through its softmax, which others replace "
                "or bias by position"
            )


def _names(classes: Sequence[type]) -> str:
    return " or ".join(cls.__name__ for cls in classes)


def require(package: str, floor: tuple[int, ...]) -> None:
    """Refuse releases of a host library that name or compute things in another way."""
    found = version(package)
    if tuple(int("".join(filter(str.isdigit, part)) or 0) for part in found.split(".")[: len(floor)]) < floor:
        least = ".".join(map(str, floor))
        raise Unsupported(f"{package} {found} is installed; supported is {package} ≥ {least}: pip install -U {package}")


def norm_width(module: Any) -> int:
    """Elements that a norm normalises per token; 0 for none."""
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else 0


def some_of(weight: Tensor, bias: Tensor | None, x: Tensor, parts: str) -> dict[str, Tensor]:
    """Some of the three equal parts q, k, v that a linear layer makes at once, by those rows of its weight alone. The parts
    must be neighbours, so that the rows are."""
    width = weight.shape[0] // 3
    first = width * "qkv".index(parts)
    rows = slice(first, first + width * len(parts))
    out = F.linear(x, weight[rows], None if bias is None else bias[rows])
    return dict(zip(parts, out.chunk(len(parts), -1), strict=True))
