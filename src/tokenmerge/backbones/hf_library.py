"""Hugging Face's transformers as a library: classes, loading, image processors, outputs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..utils.optional import require_package
from .base import CannotLoad, Preprocessing

OUTPUTS = ("logits", "image_embeds", "pooler_output")
# What `load_model` makes of a folder with two towers.
_VISION_TOWERS = {
    "CLIPModel": "CLIPVisionModelWithProjection",
    "SiglipModel": "SiglipVisionModel",
    "BlipForConditionalGeneration": "BlipVisionModel",
    "Blip2ForConditionalGeneration": "Blip2VisionModel",
}


def transformers_class(cls: Any) -> type:
    """The nearest class of transformers' own."""
    return _nearest(cls)


@functools.cache
def _nearest(cls: Any) -> type:
    base: Any = getattr(cls, "_tokenmerge_base", cls)
    return next((c for c in base.__mro__ if c.__module__.startswith("transformers.models.")), base)


def transformers_folder(cls: type) -> str:
    """transformers.models.<folder>.modeling_<folder>; empty for classes from elsewhere."""
    _, _, path = cls.__module__.partition("transformers.models.")
    return path.partition(".")[0]


def create_hf(prefix: str, name: str, pretrained: bool, **options: Any) -> nn.Module:
    if not pretrained or options:
        raise CannotLoad(
            f"{prefix}{name}: the folder has its own weights and classes; leave out --weights and --num-classes"
        )
    require_package("transformers", "models of Hugging Face")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name)
        kind = (config.architectures or ["AutoModel"])[0]
        cls: Any = getattr(transformers, _VISION_TOWERS.get(kind, kind), transformers.AutoModel)
        return cls.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CannotLoad(f"{name}: not a folder or name that transformers can load ({reason})") from error


def hf_preprocessing(model: Any, crop: float | None, size: int | None) -> Preprocessing:
    if crop is not None or size is not None:
        raise ValueError("a model of Hugging Face's has its image processor; leave out crop and size, or give a transform")
    from transformers import AutoImageProcessor

    load: Any = AutoImageProcessor.from_pretrained
    try:
        processor = load(model.config.name_or_path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no image processor was found next to the weights of this {type(model).__name__} "
            f"({str(error).splitlines()[0]}); give load_images a transform, or a tensor or loader instead of the folder"
        ) from None
    return Preprocessing(
        lambda image: processor(image, return_tensors="pt")["pixel_values"][0],
        tuple(processor.image_mean),
        tuple(processor.image_std),
        description=str(processor),
    )


def square_preprocessing(found: Preprocessing, size: tuple[int, ...]) -> Preprocessing:
    """For models that take patches of images in any aspect ratio: all images at one square size, as one tensor."""
    from timm.data import create_transform

    transform = create_transform(
        size, mean=found.mean, std=found.std, crop_mode="squash", crop_pct=1.0, interpolation="bilinear"
    )
    return replace(found, transform=transform, size=size, description=repr(transform))


def as_patches(images: Tensor, patch: int) -> dict[str, Tensor]:
    """Images [B,C,H,W] of equal size as SigLIP 2 takes them: rows of patches, all of them valid."""
    b, c, *sides = images.shape
    height, width = (side // patch for side in sides)
    rows = images.reshape(b, c, height, patch, width, patch).permute(0, 2, 4, 3, 5, 1).reshape(b, height * width, -1)
    return {
        "pixel_values": rows,
        "pixel_attention_mask": torch.ones(b, height * width, dtype=torch.int32, device=images.device),
        "spatial_shapes": torch.tensor([[height, width]]).expand(b, 2),
    }


def image_features(out: Any) -> Tensor:
    """Logits or features [B,K] in what a model of transformers returns."""
    if isinstance(out, Tensor):
        return out
    for name in OUTPUTS:
        found = getattr(out, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(getattr(out, "feature_maps", None), tuple):  # of a Backbone class: the mean of the last map
        last: Tensor = out.feature_maps[-1]
        return last.mean((2, 3)) if last.ndim == 4 else last.mean(1)
    if isinstance(getattr(out, "last_hidden_state", None), Tensor):
        mean: Tensor = out.last_hidden_state.mean(1)
        return mean
    raise ValueError(f"found none of {', '.join(OUTPUTS)} in {type(out).__name__}; leave return_dict out")
