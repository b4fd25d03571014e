"""Models of Hugging Face with more than a vision tower: CLIP, SigLIP, BLIP, LLaVA and similar ones. The vision tower merges,
the rest is untouched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .base import ADAPTERS, ModelAdapter, Preprocessing, register
from .hf_library import (
    create_hf,
    hf_preprocessing,
    image_features,
    square_preprocessing,
    transformers_class,
    transformers_folder,
)

# Class names → where the vision tower is.
TOWERS = {
    "CLIPModel": "vision_model",
    "SiglipModel": "vision_model",
    "Siglip2Model": "vision_model",
    "BlipModel": "vision_model",
    "BlipForConditionalGeneration": "vision_model",
    "BlipForQuestionAnswering": "vision_model",
    "BlipForImageTextRetrieval": "vision_model",
    "Blip2Model": "vision_model",
    "Blip2ForConditionalGeneration": "vision_model",
    "Blip2ForImageTextRetrieval": "vision_model",
    "Blip2VisionModelWithProjection": "vision_model",
    "VisionTextDualEncoderModel": "vision_model",
    "LlavaModel": "vision_tower",
    "LlavaForConditionalGeneration": "model.vision_tower",
}
# Those whose `get_image_features` returns one vector per image. Others are represented by the tower's own output.
WITH_FEATURES = ("CLIPModel", "SiglipModel", "BlipModel", "VisionTextDualEncoderModel")


def _adapter(tower: nn.Module) -> ModelAdapter:
    return next(adapter for adapter in ADAPTERS if adapter.matches(tower))


@register
class HFContainer(ModelAdapter):
    """Around a vision tower of transformers."""

    name = "Hugging Face models with a vision tower"
    name_form = ""  # loaded by HuggingFace

    def matches(self, model: nn.Module) -> bool:
        cls = transformers_class(type(model))
        return cls.__name__ in TOWERS and transformers_folder(cls) != ""

    def tower(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(TOWERS[transformers_class(type(model)).__name__])

    def classifier(self, model: nn.Module) -> nn.Module | None:
        return None

    def run(self, model: Any, images: Tensor) -> Tensor:
        if transformers_class(type(model)).__name__ in WITH_FEATURES:
            return image_features(model.get_image_features(images))
        tower = self.tower(model)
        return _adapter(tower).run(tower, images)

    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        return create_hf(self.name_prefix, name, pretrained, **options)

    def preprocessing(self, model: Any, crop: float | None, size: int | None) -> Preprocessing:
        tower = self.tower(model)
        found = hf_preprocessing(model, crop, size)
        adapter = _adapter(tower)
        return found if adapter.takes_images(tower) else square_preprocessing(found, adapter.input_size(tower))

    def input_size(self, model: nn.Module) -> tuple[int, ...]:
        tower = self.tower(model)
        return _adapter(tower).input_size(tower)

    def num_classes(self, model: Any) -> int:
        return 0

    def class_names(self, model: nn.Module) -> Sequence[str] | None:
        return None
