"""What backbones share: checks of blocks, hooks and versions, parts of projections, counts, timm's preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from ..core.attention import HOOK_KINDS
from .base import Backbone, Preprocessing, Unsupported


class Passthrough(nn.Module):
    """Stands in for all blocks when the rest of the model is counted."""

    def __init__(self, exit_tokens: int | None, returns_tuple: bool = False) -> None:
        super().__init__()
        self.exit_tokens = exit_tokens
        self.returns_tuple = returns_tuple

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Any:
        x = x if self.exit_tokens is None else x[:, : self.exit_tokens]
        return (x,) if self.returns_tuple else x


def linear_macs(*modules: nn.Module | None) -> int:
    """Multiply-accumulates per token of all linear layers inside, whatever class they have."""
    total = 0
    for module in modules:
        for m in () if module is None else module.modules():
            inputs: Any = getattr(m, "in_features", None)
            outputs: Any = getattr(m, "out_features", None)
            if isinstance(inputs, int) and isinstance(outputs, int) and not list(m.children()):
                total += inputs * outputs
    return total


def norm_width(module: Any) -> int:
    """Elements that a norm normalises per token; 0 for none."""
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else 0


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the patches, at the end of queries or keys x [B,H,N,d]. cos and sin: [..,P,d]."""
    prefix = x.shape[2] - cos.shape[-2]
    first, patches = x[:, :, :prefix], x[:, :, prefix:].to(cos.dtype)
    a, b = patches.chunk(2, -1)
    return torch.cat((first, (patches * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)), 2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B,N,H·d] → [B,H,N,d]."""
    b, n, width = x.shape
    return x.reshape(b, n, heads, width // heads).transpose(1, 2)


Hook = Callable[..., Any]


def has_hooks(module: nn.Module, ignore: Callable[[Hook], bool] = lambda hook: False) -> bool:
    """Whether any hook would fire, except for those to ignore."""
    return any(not ignore(hook) for kind in HOOK_KINDS for hook in getattr(module, kind).values())


def check_hooks(backbone: Backbone, block: nn.Module, layer: int) -> None:
    if has_hooks(backbone.attention(block), backbone.ignores_hook):
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
    backbone: Backbone, model: nn.Module, block_classes: Sequence[type], attention_classes: Sequence[type]
) -> None:
    """Refuse what is not understood: other blocks, other attentions, repeated blocks, hooks that would not fire."""
    name = type(model).__name__
    blocks = backbone.blocks(model)
    if len(blocks) == 0:
        raise Unsupported(f"{name} has no blocks to merge between")
    if len({id(block) for block in blocks}) < len(blocks):
        raise Unsupported(f"{name} uses one block more than once; each layer needs a block of its own")
    for i, block in enumerate(blocks):
        if type(block) not in block_classes:
            raise Unsupported(
                f"{name}: block {i} is a {type(block).__name__}; supported is {_names(block_classes)}, because merging "
                "happens between its attention and its MLP, and other blocks compute these in another way or order. "
                "Use a model that docs/supported_models.md lists"
            )
        attention = backbone.attention(block)
        if type(attention) not in attention_classes:
            raise Unsupported(
                f"{name}: the attention of block {i} is a {type(attention).__name__}; supported is "
                f"{_names(attention_classes)}, because keys and token sizes go through its softmax, which others replace "
                "or bias by position. Use a model that docs/supported_models.md lists"
            )
        check_hooks(backbone, block, i + 1)


def _names(classes: Sequence[type]) -> str:
    return " or ".join(cls.__name__ for cls in classes)


def require_version(package: str, minimum: str) -> None:
    """Refuse releases of a library that name or compute things in another way."""
    found = version(package)
    if Version(found) < Version(minimum):
        raise Unsupported(f"{package} {found} is installed; supported is {package} ≥ {minimum}: pip install -U {package}")


def timm_preprocessing(model: nn.Module, crop: float | None, size: int | None) -> Preprocessing:
    """What timm's data config says; for models without one, timm's defaults at their size."""
    from timm.data import create_transform, resolve_data_config

    given = {"crop_pct": crop, "img_size": size}
    config = resolve_data_config({key: value for key, value in given.items() if value is not None}, model=model)
    wanted = tuple(config["input_size"])
    transform = create_transform(**config, is_training=False)
    mode = "L" if wanted[0] == 1 else "RGB"
    return Preprocessing(transform, config["mean"], config["std"], mode, wanted, repr(transform))
