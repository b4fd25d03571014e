"""A small real model and real images inside the package, so that everything runs with no download.

A ViT with 197 tokens (28×28 pixels, patch 2, depth 12), trained on Fashion-MNIST by `experiments/train_embedded.py`, and
2,000 test and 500 training images of that set (MIT licence, see NOTICE in this folder).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from ..loading import Batch, Images

NAME = "embedded"  # in place of a model's name or a folder
MEAN, STD = 0.2860, 0.3530  # of the 60,000 training images, in [0, 1]
CONFIG: dict[str, Any] = dict(
    img_size=28, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=12, num_heads=2, class_token=True
)
INPUT = (1, 28, 28)
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def build_model(**overrides: Any) -> VisionTransformer:
    return VisionTransformer(**(CONFIG | overrides))


def _read(name: str) -> dict[str, torch.Tensor]:
    with as_file(files(__name__).joinpath(name)) as path:
        return load_file(path)


def load_model() -> VisionTransformer:
    """The trained model, ready for inference."""
    model = build_model()
    model.load_state_dict(_read("vit.safetensors"))
    model.pretrained_cfg = {"input_size": INPUT, "mean": (MEAN,), "std": (STD,), "interpolation": "bicubic", "crop_pct": 1.0}
    return model.eval()


def load_images(split: Literal["test", "train"] = "test", limit: int | None = None) -> Images:
    """2,000 test or 500 training images with their labels."""
    data = _read("images.safetensors")
    pixels, labels = data[f"{split}_images"][:limit], data[f"{split}_labels"][:limit].long()

    names = [f"{split}-{i}" for i in range(len(pixels))]

    def read(parts: Sequence[Sequence[int]]) -> Iterator[Batch]:
        for part in map(list, parts):
            x = (pixels[part].unsqueeze(1).float() / 255 - MEAN) / STD
            yield Batch(x, labels[part], tuple(names[i] for i in part))

    return Images(f"embedded {split}", range(len(pixels)), read, (MEAN,), (STD,), names, lambda: f"embedded {split}")
