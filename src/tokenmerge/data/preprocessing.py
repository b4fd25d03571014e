"""How image files become what a model takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..backbones import match_adapter
from ..backbones.base import Preprocessing
from ..backbones.helpers import timm_preprocessing


def preprocessing_for(model: nn.Module, crop: float | None = None, size: int | None = None) -> Preprocessing:
    """As the model's library says; timm's data config for models that no backbone knows."""
    adapter = match_adapter(model)
    return timm_preprocessing(model, crop, size) if adapter is None else adapter.preprocessing(model, crop, size)


# What is decoded, whatever a file is called: Pillow goes by content, and others of its formats start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


def open_image(file: Any, mode: str = "RGB") -> Any:
    """An image in this mode, from a path or an open file. 16-bit grey is scaled to 8 bits: Pillow alone would clip it."""
    from PIL import Image

    with Image.open(file, formats=FORMATS) as found:
        image: Any = found.point(lambda v: v / 256).convert("L") if found.mode.startswith("I") else found
        return image.convert(mode)
