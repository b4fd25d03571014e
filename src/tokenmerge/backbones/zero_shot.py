"""A zero-shot classifier: the image tower of a two-tower model, and text embeddings that were computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import ModelAdapter, Preprocessing, register

SCALE = 100.0  # of the cosines, as in CLIP; the predicted class does not depend on it


class TextHead(nn.Module):
    """Image features [B,C] → cosines with the text embeddings, times a scale: [B,classes]."""

    def __init__(self, text: Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("text", F.normalize(text, dim=-1))
        self.scale = scale

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * F.normalize(features, dim=-1) @ self.text.T  # type: ignore[operator]


class ZeroShotClassifier(nn.Module):
    """Calls itself a classifier with one class per text, so that calibration, validation and evaluation work as for any
    other classifier: predictions are the texts with the highest cosine.

    `model`: a two-tower model or its image tower, of transformers or open_clip. `text` [classes,C]: text embeddings; several
    prompts of a class are averaged beforehand. `names`: of the classes."""

    def __init__(self, model: nn.Module, text: Tensor, *, names: Sequence[str] | None = None, scale: float = SCALE) -> None:
        super().__init__()
        if text.ndim != 2 or not text.is_floating_point() or not text.isfinite().all():
            raise ValueError(f"text embeddings are finite numbers [classes, width], not {text.dtype} {list(text.shape)}")
        if names is not None and len(names) != len(text):
            raise ValueError(f"{len(names)} names for {len(text)} text embeddings")
        like = next(model.parameters())
        self.model = model
        self.head = TextHead(text.detach().to(like.device, like.dtype), scale)
        self.names = None if names is None else tuple(names)
        self.train(model.training)

    def forward(self, images: Tensor) -> Tensor:
        from . import match_adapter

        adapter = match_adapter(self.model)
        assert adapter is not None
        features = adapter.run(self.model, images)
        text: Any = self.head.text
        width = text.shape[1]
        if features.shape[-1] != width:
            raise ValueError(
                f"text embeddings of width {width} do not fit the image features of this {type(self.model).__name__}, "
                f"which have width {features.shape[-1]}"
            )
        out: Tensor = self.head(features)
        return out


@register
class ZeroShot(ModelAdapter):
    """A ZeroShotClassifier around a model of any library."""

    name = "zero-shot classifiers"
    name_form = ""

    def _inner(self, model: Any) -> ModelAdapter:
        from . import match_adapter

        found = match_adapter(model.model)
        if found is None:
            raise ValueError(f"a zero-shot classifier needs an image model, not {type(model.model).__name__}")
        return found

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, ZeroShotClassifier)

    def tower(self, model: Any) -> nn.Module:
        inside: nn.Module = model.model
        return inside

    def classifier(self, model: Any) -> nn.Module | None:
        head: nn.Module = model.head
        return head

    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        raise ValueError("a zero-shot classifier has no name: load its model and wrap it, ZeroShotClassifier(model, text)")

    def preprocessing(self, model: Any, crop: float | None, size: int | None) -> Preprocessing:
        return self._inner(model).preprocessing(model.model, crop, size)

    def input_size(self, model: Any) -> tuple[int, ...]:
        return self._inner(model).input_size(model.model)

    def resize(self, model: Any, size: int) -> None:
        self._inner(model).resize(model.model, size)

    def num_classes(self, model: Any) -> int:
        return len(model.head.text)

    def class_names(self, model: Any) -> Sequence[str] | None:
        names: Sequence[str] | None = model.names
        return names


def read_text_embeddings(state: Mapping[str, Tensor]) -> Tensor:
    """The only tensor of a file."""
    if len(state) != 1:
        raise ValueError(
            f"a file of text embeddings holds one tensor [classes, width], not {len(state)}: {', '.join(state)}"
        )
    return torch.as_tensor(next(iter(state.values()))).float()
