"""What a family of models must define, so that the engine can run its blocks. A backbone never sees a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from ..core.attention import AttentionConfig


class Unsupported(TypeError):
    """This model cannot be merged; the message names what was found, what is supported and what to do."""


class UnknownModel(ValueError):
    """The library has no model of this name."""


class CannotLoad(ValueError):
    """The model cannot be loaded as asked; the message says what to do."""


class Call(ABC):
    """One call of a merged model, handed from block to block as an argument. The engine's `Run` is one."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of blocks."""

    @abstractmethod
    def step(
        self,
        block: nn.Module,
        layer: int,
        x: Tensor,
        rope: Any = None,
        plain: Callable[[Tensor], Tensor] | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """Run one block on x. `rope`: embeddings of the original patches. `plain`: the block's own forward, if it computes
        exactly what the backbone's parts do; it runs while nothing merges. `position_bias` [1 or B,H,N0,N0]: what the block
        adds to QKᵀ·scale, for the original tokens."""

    @abstractmethod
    def add_between(self, layer: int, x: Tensor, values: Tensor) -> Tensor:
        """What the model adds to its tokens after this layer, given for the original tokens [1,N0,C]: a merged token gets
        the mean over its group."""


@dataclass(frozen=True)
class BlockCost:
    """What the cost model knows about a block. MACs are per token."""

    macs_q: int
    macs_k: int
    macs_v: int
    macs_out: int  # output projection and gate: only for tokens that leave attention
    macs_mlp: int
    width: int  # C
    attn_width: int  # heads × head_dim: QKᵀ and AV cost this much each per pair of tokens
    head_dim: int
    norm_in: int  # elements of norms: before the projections, on queries, on keys, after attention, around the MLP
    norm_out: int
    norm_q: int = 0
    norm_k: int = 0
    norm_attn: int = 0


@dataclass(frozen=True)
class Preprocessing:
    """How images become what a model takes."""

    transform: Callable[[Any], Tensor]  # a PIL image → [C,H,W]
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    mode: str = "RGB"  # Pillow's mode
    size: tuple[int, ...] | None = None  # (C,H,W), where it is known
    description: str = ""  # of the transform, stable over runs


class ModelAdapter(ABC):
    """What is known of a family of models as a whole: how to make one, what it takes, what it returns."""

    name: ClassVar[str]
    name_prefix: ClassVar[str] = ""  # of model names in `load_model`
    name_form: ClassVar[str]  # how to write such a name, for help texts and errors

    @abstractmethod
    def matches(self, model: nn.Module) -> bool:
        """Whether this family knows the model's class."""

    def tower(self, model: nn.Module) -> nn.Module:
        """The part that `apply` changes: of a model with more than one tower the vision tower, else the model itself."""
        return model

    @abstractmethod
    def classifier(self, model: nn.Module) -> nn.Module | None:
        """The module that reads the pre-logits features; None where the model returns features."""

    def has_classifier(self, model: nn.Module) -> bool:
        return not isinstance(self.classifier(model), nn.Identity | None)

    def takes_images(self, model: nn.Module) -> bool:
        """Whether `forward` takes a batch of images as its only argument; else `run` prepares what it takes."""
        return True

    def output(self, out: Any) -> Tensor:
        """Logits or features [B,K] in what the model's `forward` returns."""
        result: Tensor = out
        return result

    def run(self, model: nn.Module, images: Tensor) -> Tensor:
        """Logits or features [B,K] of images."""
        return self.output(model(images))

    @abstractmethod
    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        """Build a model by its name in the library, without `name_prefix`."""

    @abstractmethod
    def preprocessing(self, model: nn.Module, crop: float | None, size: int | None) -> Preprocessing:
        """As the model's config says; `crop` (fraction) and `size` (pixels) override it."""

    def input_size(self, model: nn.Module) -> tuple[int, ...]:
        """(C,H,W) of an image."""
        size = self.preprocessing(model, None, None).size
        if size is None:
            raise ValueError(f"the input size of this {type(model).__name__} is not known")
        return size

    def resize(self, model: nn.Module, size: int) -> None:
        """Change the model to images of size × size pixels."""
        raise ValueError(f"this {type(model).__name__} has a fixed input size, as its library has no way to change it")

    def num_classes(self, model: Any) -> int:
        return int(getattr(model, "num_classes", 0) or 0)

    def class_names(self, model: nn.Module) -> Sequence[str] | None:
        """Names of the classes; None where they are not known."""
        return imagenet_names() if self.num_classes(model) == 1000 else None


class Backbone(ModelAdapter):
    """One family of models whose blocks the engine can run. All functions take the model or a block of it; a backbone has no
    state."""

    drop_path_names: ClassVar[tuple[str, ...]] = ()  # a block's modules for stochastic depth, where the library has any
    model_mixin: ClassVar[type]  # put before the model's class by `apply`: opens a Call each time the model is called
    block_mixin: ClassVar[type]  # put before each block's class: hands its input to the Call

    # Finding and checking.

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Raise Unsupported, with the reason, if anything in the model is not understood."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]: ...

    def relays(self, model: nn.Module) -> Mapping[nn.Module, type]:
        """Modules on the way to the blocks, and what is put before their classes, where the model hands nothing but hidden
        states on; see relay.py."""
        return {}

    @abstractmethod
    def attention(self, block: Any) -> nn.Module:
        """The attention module of a block."""

    @abstractmethod
    def prefix(self, model: nn.Module) -> int:
        """Number of CLS, distillation and register tokens at the front."""

    def time_steps(self, model: nn.Module) -> int:
        """Into how many steps the patches of a video are cut; of an image, one."""
        return 1

    @abstractmethod
    def has_cls_token(self, model: nn.Module) -> bool:
        """Whether the first of them is a CLS token: some models have registers only."""

    @abstractmethod
    def head_reads_prefix_only(self, model: nn.Module) -> bool: ...

    def head_reads_cls_only(self, model: nn.Module) -> bool:
        """The same, and no distillation token either."""
        return self.has_cls_token(model) and self.head_reads_prefix_only(model)

    def sequence(self, model: nn.Module, images: Tensor, layer: int | None) -> Tensor:
        """All tokens that the model returns, [B,N,C]: after the final norm, or the hidden states after a layer, from 1."""
        raise ValueError(f"this {type(model).__name__} returns no sequence of tokens that is known")

    def final_norm(self, model: Any) -> nn.Module:
        """The norm after the last block."""
        raise Unsupported(
            f"the norm after the last block of this {type(model).__name__} is not known, and the method distils the tokens "
            "behind it; train a timm model"
        )

    def ignores_hook(self, hook: Callable[..., Any]) -> bool:
        """Whether a hook on an attention module need not fire."""
        return False

    # One block. x is [B,N,C], or [1,ΣN,C] for packed tokens.

    @abstractmethod
    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        """Norm and projections: of queries, keys and values those that are asked for, [B,H,N,d] each, before RoPE."""

    def apply_rope(self, block: Any, x: Tensor, rope: Any) -> Tensor:
        """Apply RoPE to queries or keys [B,H,N,d]. `rope`: the embeddings that the model hands to its blocks, merged like
        the tokens. Never called for models without RoPE."""
        raise Unsupported(f"{type(block).__name__} has no RoPE, but its model handed RoPE embeddings to it")

    @abstractmethod
    def attention_config(self, block: Any) -> AttentionConfig: ...

    @abstractmethod
    def add_attention(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        """Output projection and residual: x [B,Q,C] plus the attention's output [B,H,Q,d]."""

    @abstractmethod
    def add_mlp(self, block: Any, x: Tensor) -> Tensor:
        """The MLP half, residual included."""

    # Cost.

    @abstractmethod
    def cost(self, block: Any) -> BlockCost: ...

    def counting_inputs(self, model: nn.Module, image: tuple[int, ...]) -> dict[str, Any]:
        """What the model takes besides one input of this shape, to count what surrounds its blocks."""
        return {}

    @abstractmethod
    def bypass(self, model: nn.Module, exit_tokens: int | None) -> None:
        """Replace all blocks of a throw-away copy by one that passes the first `exit_tokens` tokens through."""

    # Gradient checkpointing.

    def checkpoints_blocks(self, model: nn.Module) -> bool:
        """Whether gradient checkpointing is on and the engine must do it, because the library's own loop does not."""
        return False

    def enable_checkpointing(self, model: nn.Module) -> None:
        """Turn on gradient checkpointing."""
        raise ValueError(f"this {type(model).__name__} has no gradient checkpointing")


ADAPTERS: list[ModelAdapter] = []

AdapterClass = TypeVar("AdapterClass", bound="type[ModelAdapter]")


def register(cls: AdapterClass) -> AdapterClass:
    """Make a family known to `apply`, `load_model` and everything else."""
    ADAPTERS.append(cls())
    return cls


def imagenet_names() -> list[str]:
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return [info.index_to_description(i) for i in range(info.num_classes())]
