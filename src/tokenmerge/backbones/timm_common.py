"""What timm's families share: how a call is opened, how a block is entered, and what is refused.

timm hands `attn_mask` from `forward` down to every block as it is. A merged model takes no mask of its own, so this
argument carries the state of the call: nothing is kept on the model, no loop of timm is copied, hooks fire as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .base import Call, Unsupported


class TimmModel:
    """Put before the host's class: opens a call wherever timm's methods can be entered from outside."""

    def forward(self, x: Tensor, attn_mask: object = None, is_causal: bool = False) -> Any:
        return super().forward(x, attn_mask=_open(self, x, attn_mask, is_causal))  # type: ignore[misc]

    def forward_features(self, x: Tensor, attn_mask: object = None, is_causal: bool = False) -> Any:
        call = _open(self, x, attn_mask, is_causal, whole=True)
        return super().forward_features(x, attn_mask=call)  # type: ignore[misc]

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mask, causal = kwargs.pop("attn_mask", None), kwargs.pop("is_causal", False)
        call = _open(self, x, mask, causal, whole=True, restore_each=True)
        return super().forward_intermediates(x, *args, attn_mask=call, **kwargs)  # type: ignore[misc]


class TimmBlock:
    """Put before a block's class: hands the input to the call that came as `attn_mask`."""

    _tokenmerge: int  # layer, from 1

    def forward(self, x: Tensor, rope: Any = None, attn_mask: object = None, is_causal: bool = False) -> Tensor:
        if not isinstance(attn_mask, Call):
            raise RuntimeError(
                f"block {self._tokenmerge} of a merged model was called on its own, without the state that the model "
                "hands to its blocks. Call the model, or tokenmerge.remove(model) first"
            )
        return attn_mask.step(self, self._tokenmerge, x, rope)  # type: ignore[arg-type]


def _open(model: Any, x: Tensor, mask: object, causal: bool, **options: bool) -> Call:
    if isinstance(mask, Call):
        return mask
    if mask is not None or causal:
        raise ValueError(
            f"a merged model takes no {'attn_mask' if mask is not None else 'is_causal'}: a mask would have to merge with "
            "the tokens. Call it without, or tokenmerge.remove(model) first"
        )
    return model._tokenmerge.open(model, x, **options)


def check_blocks(model: Any, block_class: type[nn.Module], attention_classes: Sequence[type[nn.Module]]) -> None:
    """Refuse what is not understood: other blocks, other attentions, overridden loops, hooks that would not fire."""
    host = type(model).__name__
    if len(model.blocks) == 0:
        raise Unsupported(f"{host} has no blocks to merge between")
    for i, block in enumerate(model.blocks):
        if type(block) is not block_class:
            raise Unsupported(
                f"{host}: block {i} is a {type(block).__name__}; supported is {block_class.__name__}, because merging "
                "happens between its attention and its MLP, and other blocks compute these in another way or order"
            )
        attn: Any = block.attn
        if type(attn) not in attention_classes:
            names = " or ".join(cls.__name__ for cls in attention_classes)
            raise Unsupported(
                f"{host}: the attention of block {i} is a {type(attn).__name__}; supported is {names}, because keys and "
                "merging sizes go through its softmax, which other attentions replace or bias by position"
            )
        if attn._forward_hooks or attn._forward_pre_hooks:
            raise Unsupported(
                f"{host}: the attention of block {i} has hooks, which would not fire: its parts are called one by one. "
                "Put them on the block or on the attention's projections"
            )
    for method in ("forward", "forward_features"):
        if "attn_mask" not in inspect.signature(getattr(type(model), method)).parameters:
            raise Unsupported(
                f"{host}.{method} takes no attn_mask, so the state of a call cannot reach the blocks; supported are timm's "
                "own methods (timm ≥ 1.0.26), or overrides that hand attn_mask on"
            )


def only_token_pooling(model: Any, classes: Sequence[type]) -> bool:
    """Whether the head reads nothing but prefix tokens; an overridden head or pooling is not trusted to."""
    own = type(model)
    known = any(own.forward_head is cls.forward_head for cls in classes) and any(  # type: ignore[attr-defined]
        own.pool is cls.pool  # type: ignore[attr-defined]
        for cls in classes
    )
    return known and model.global_pool == "token" and model.attn_pool is None and model.num_prefix_tokens > 0


def norm_width(module: Any) -> int:
    """Elements that a norm normalises per token; 0 for none."""
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else 0
