"""timm's NaFlexVit: images of any size and aspect ratio, as a tensor of images or as a batch of patches with padding.

The blocks are those of VisionTransformer or of Eva. Padding is removed before the first block: it never merges, is never
multiplied, and comes back at the end, where the heads mask it as before.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import Call, register
from .timm_eva import TimmEva
from .timm_vit import TimmBlock, TimmViT, refuse_mask

ENTRIES = ("patches", "patch_coord", "patch_valid", "attn_mask")


class NaFlexModel:
    """Put before the model's class: opens a call wherever timm's methods can be entered from outside."""

    def forward(self, x: Any, patch_coord: Any = None, patch_valid: Any = None, attn_mask: object = None) -> Any:
        model: Any = self
        given = _given(x, patch_coord, patch_valid, attn_mask)
        features = _features(model, super().forward_features, "forward", *given)  # type: ignore[misc]
        return model.forward_head(**features) if isinstance(features, dict) else model.forward_head(features)

    def forward_features(
        self, patches: Any, patch_coord: Any = None, patch_valid: Any = None, attn_mask: object = None
    ) -> Any:
        given = _given(patches, patch_coord, patch_valid, attn_mask)
        return _features(self, super().forward_features, "forward_features", *given)  # type: ignore[misc]

    def forward_intermediates(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        names = ENTRIES[1:]
        patches, coord, valid, mask = _given(x, *(kwargs.pop(name, None) for name in names))
        call = _open(self, patches, valid, mask, entry="forward_features", restore_each=True, grid=True)
        given = dict(zip(names, (coord, valid, call), strict=True))
        if isinstance(x, dict):
            return super().forward_intermediates({**x, "attn_mask": call}, *args, **kwargs)  # type: ignore[misc]
        return super().forward_intermediates(patches, *args, **kwargs, **given)  # type: ignore[misc]


def _given(x: Any, *others: Any) -> tuple[Any, ...]:
    """Patches or images, coordinates, validity and mask; a batch in a dict comes first, as in timm."""
    if not isinstance(x, dict):
        return x, *others
    found = dict(zip(ENTRIES[1:], others, strict=True)) | x
    return tuple(found.get(name) for name in ENTRIES)


def _features(model: Any, forward: Any, entry: str, patches: Any, coord: Any, valid: Any, mask: object) -> Any:
    call = _open(model, patches, valid, mask, entry=entry)
    return forward(patches, patch_coord=coord, patch_valid=valid, attn_mask=call)


def _open(model: Any, patches: Tensor, valid: Tensor | None, mask: object, **options: Any) -> Call:
    refuse_mask(mask, causal=False)
    if isinstance(mask, Call):
        return mask
    if valid is not None:
        if model.training and model.patch_drop is not None:
            raise ValueError("patch dropout in training with padded patches is not supported; give images of equal size")
        prefix = valid.new_ones(len(valid), model.num_prefix_tokens, dtype=torch.bool)
        valid = torch.cat((prefix, valid.bool()), 1)
    return model._tokenmerge.open(model, patches, valid=valid, **options)


class NaFlex:
    """What the two backbones below share: all that NaFlexVit has of its own."""

    name_form = "a timm name"
    model_mixin: ClassVar[type] = NaFlexModel
    block_mixin: ClassVar[type] = TimmBlock

    def has_cls_token(self, model: Any) -> bool:
        return model.embeds.cls_token is not None

    def head_reads_prefix_only(self, model: Any) -> bool:
        from timm.models.naflexvit import NaFlexVit

        own = getattr(type(model), "_tokenmerge_base", type(model))
        path = ("forward", "forward_features", "forward_head", "_pool")
        known = all(getattr(own, name) is getattr(NaFlexVit, name) for name in path)
        untouched = not any(name in model.__dict__ for name in path)
        token = model.global_pool == "token" and model.attn_pool is None
        return known and untouched and token and self.has_cls_token(model)

    def resize(self, model: Any, size: int) -> None:
        """The model takes images of any size."""

    def counting_inputs(self, model: Any, image: tuple[int, ...]) -> dict[str, Any]:
        if len(image) == 3:  # an image, not patches
            return {}
        rows = torch.arange(image[0])
        coord = torch.stack((rows, torch.zeros_like(rows)), 1).unsqueeze(0)
        return {"patch_coord": coord, "patch_valid": torch.ones(1, image[0], dtype=torch.bool, device="meta")}

    def checkpoints_blocks(self, model: Any) -> bool:
        return False  # its own loop does


def _is_naflex(model: nn.Module, eva: bool) -> bool:
    from timm.models.eva import EvaBlock
    from timm.models.naflexvit import NaFlexVit

    return isinstance(model, NaFlexVit) and isinstance(model.blocks[0], EvaBlock) == eva


@register
class TimmNaFlex(NaFlex, TimmViT):
    """NaFlexVit with plain blocks."""

    name = "timm NaFlexVit"

    def matches(self, model: nn.Module) -> bool:
        return _is_naflex(model, eva=False)


@register
class TimmNaFlexEva(NaFlex, TimmEva):
    """NaFlexVit with RoPE, SwiGLU or grouped queries."""

    name = "timm NaFlexVit with Eva blocks"

    def matches(self, model: nn.Module) -> bool:
        return _is_naflex(model, eva=True)
