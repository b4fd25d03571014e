"""A small real model and real images inside the package, so that everything runs without a download.

A ViT with 197 tokens (28×28 pixels, patch 2, depth 12), trained on Fashion-MNIST by `experiments/train_embedded.py`, and
2,000 test and 500 training images of that data set (MIT licence, see NOTICE in this folder).
"""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from ..images import Images, TensorSource

NAME = "embedded"  # instead of a model's name or a folder
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
    model.pretrained_cfg = {
        "input_size": INPUT,
        "mean": (MEAN,),
        "std": (STD,),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "label_names": CLASSES,
    }
    return model.eval()


def load_images(split: Literal["test", "train"] = "test", limit: int | None = None) -> Images:
    """2,000 test or 500 training images with their labels."""
    data = _read("images.safetensors")
    pixels = data[f"{split}_images"][:limit].unsqueeze(1)
    labels = data[f"{split}_labels"][:limit].long()
    names = [f"{split}-{i}" for i in range(len(pixels))]
    source = TensorSource(pixels, labels, names, _normalise, ((MEAN,), (STD,)), f"embedded {split}")
    return Images(f"embedded {split}", source, range(len(pixels)))


def _normalise(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels.float() / 255 - MEAN) / STD
