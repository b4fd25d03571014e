"""What timm's families share: how a call is opened, how a block is entered, and what is refused.

timm hands `attn_mask` from `forward` down to every block as it is. A merged model takes no mask of its own, so this
argument carries the state of the call: nothing is kept on the model, no loop of timm is copied, hooks fire as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .base import Call, Unsupported, has_hooks


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
            raise RuntimeError(
                f"block {self._tokenmerge} of a merged model was called on its own, without the state that the model "
                "hands to its blocks. Call the model, or tokenmerge.remove(model) first"
            )
        refuse_hooks(self, self._tokenmerge - 1)
        return attn_mask.step(self, self._tokenmerge, x, rope)  # type: ignore[arg-type]


def _open(model: Any, x: Tensor, mask: object, causal: bool, **options: Any) -> Call:
    if isinstance(mask, Call):
        return mask
    if mask is not None or causal:
        raise ValueError(
            f"a merged model takes no {'attn_mask' if mask is not None else 'is_causal'}: a mask would have to merge with "
            "the tokens. Call it without, or tokenmerge.remove(model) first"
        )
    return model._tokenmerge.open(model, x, **options)


def refuse_hooks(block: Any, index: int) -> None:
    if has_hooks(block.attn):
        raise Unsupported(
            f"the attention of block {index} has hooks, which would not fire: its parts are called one by one. "
            "Put them on the block or on the attention's projections"
        )


def check_blocks(model: Any, block_class: type[nn.Module], attention_classes: Sequence[type[nn.Module]]) -> None:
    """Refuse what is not understood: other blocks, other attentions, overridden loops, hooks that would not fire."""
    host = type(model).__name__
    if len(model.blocks) == 0:
        raise Unsupported(f"{host} has no blocks to merge between")
    if len({id(block) for block in model.blocks}) < len(model.blocks):
        raise Unsupported(f"{host} uses one block more than once; each layer needs a block of its own")
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
        refuse_hooks(block, i)
    for method in ("forward", "forward_features"):
        if "attn_mask" not in inspect.signature(getattr(type(model), method)).parameters:
            raise Unsupported(
                f"{host}.{method} takes no attn_mask, so the state of a call cannot reach the blocks; supported are timm's "
                "own methods (timm ≥ 1.0.26), or overrides that hand attn_mask on"
            )


def only_token_pooling(model: Any, classes: Sequence[type]) -> bool:
    """Whether the head reads nothing but prefix tokens; who overrides a method on the way is not trusted to."""
    own = getattr(type(model), "_tokenmerge_host", type(model))
    path = ("forward", "forward_features", "forward_head", "pool")
    known = all(any(getattr(own, name) is getattr(cls, name) for cls in classes) for name in path)
    untouched = not any(name in model.__dict__ for name in path)
    return known and untouched and model.global_pool == "token" and model.attn_pool is None and model.num_prefix_tokens > 0
