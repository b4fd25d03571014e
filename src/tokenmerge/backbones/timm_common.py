"""What timm's families share: how a call is opened, how a block is entered, and what is refused.

timm hands `attn_mask` from `forward` down to every block as it is. A merged model takes no mask of its own, so this
argument carries the state of the call: nothing is kept on the model, no loop of timm is copied, hooks fire as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .base import Call, Unsupported, called_alone, check_blocks, refuse_hooks, require


class TimmModel:
    """Put before the host's class: opens a call wherever timm's methods can be entered from outside."""

    def forward(self, x: Tensor, attn_mask: object = None, is_causal: bool = False) -> Any:
        return super().forward(x, attn_mask=_open(self, x, attn_mask, is_causal))  # type: ignore[misc]

    def forward_features(self, x: Tensor, attn_mask: object = None, is_causal: bool = False) -> Any:
        call = _open(self, x, attn_mask, is_causal, entry="forward_features")
        return super().forward_features(x, attn_mask=call)  # type: ignore[misc]

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mask, causal = kwargs.pop("attn_mask", None), kwargs.pop("is_causal", False)
        call = _open(self, x, mask, causal, entry="forward_features", restore_each=True)
        return super().forward_intermediates(x, *args, attn_mask=call, **kwargs)  # type: ignore[misc]


class TimmBlock:
    """Put before a block's class: hands the input to the call that came as `attn_mask`."""

    _tokenmerge: int  # layer, from 1

    def forward(self, x: Tensor, rope: Any = None, attn_mask: object = None, is_causal: bool = False) -> Tensor:
        if not isinstance(attn_mask, Call):
            raise called_alone(self._tokenmerge)
        block: Any = self
        refuse_hooks(block.attn, self._tokenmerge)
        return attn_mask.step(block, self._tokenmerge, x, rope)


def _open(model: Any, x: Tensor, mask: object, causal: bool, **options: Any) -> Call:
    if isinstance(mask, Call):
        return mask
    if mask is not None or causal:
        raise ValueError(
            f"a merged model takes no {'attn_mask' if mask is not None else 'is_causal'}: a mask would have to merge with "
            "the tokens. Call it without, or tokenmerge.remove(model) first"
        )
    return model._tokenmerge.open(model, x, **options)


def check_host(model: Any, block_class: type[nn.Module], attention_classes: Sequence[type[nn.Module]]) -> None:
    """Refuse what is not understood: other blocks, other attentions, overridden loops, hooks that would not fire."""
    host = type(model).__name__
    require("timm", (1, 0, 26))
    check_blocks(host, model.blocks, (block_class,), lambda block: block.attn, attention_classes)
    for layer, block in enumerate(model.blocks, 1):
        refuse_hooks(block.attn, layer)
    for method in ("forward", "forward_features"):
        if "attn_mask" not in inspect.signature(getattr(type(model), method)).parameters:
            raise Unsupported(
                f"{host}.{method} takes no attn_mask, so the state of a call cannot reach the blocks; supported are timm's "
                "own methods, or overrides that hand attn_mask on"
            )


def only_token_pooling(model: Any, classes: Sequence[type]) -> bool:
    """Whether the head reads nothing but prefix tokens; who overrides a method on the way is not trusted to."""
    own = getattr(type(model), "_tokenmerge_host", type(model))
    path = ("forward", "forward_features", "forward_head", "pool")
    known = all(any(getattr(own, name) is getattr(cls, name) for cls in classes) for name in path)
    untouched = not any(name in model.__dict__ for name in path)
    return known and untouched and model.global_pool == "token" and model.attn_pool is None and model.num_prefix_tokens > 0
