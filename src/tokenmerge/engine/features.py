"""Logits and pre-logits features of a model, whatever its library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..backbones import tower_of
from .patch import adapter_of


@dataclass(frozen=True)
class Outputs:
    """What a model returned for a batch."""

    logits: Tensor  # [B,K]
    features: Tensor  # [B,C], pre-logits: the input of the classifier


def has_classes(model: nn.Module) -> bool:
    """Whether the model has a classifier; others return features."""
    return adapter_of(model).has_classifier(model)


def counted_part(model: nn.Module) -> str:
    """What GMACs are counted of, where that is not the whole model: ", GMACs of the vision tower (…)"."""
    tower = tower_of(model)
    return "" if tower is model else f", GMACs of the vision tower ({type(tower).__name__})"


def image_function(model: nn.Module) -> Callable[[Tensor], Any]:
    """The model as a function of images: the model itself where it is one, else its image features."""
    adapter = adapter_of(model)
    whole = tower_of(model) is model and adapter.takes_images(model)
    return model if whole else partial(adapter.run, model)


def run_model(model: nn.Module, x: Tensor) -> Outputs:
    """Run a model, merged or not, on images x."""
    adapter = adapter_of(model)
    with _record_inputs(adapter.classifier(model)) as inputs:
        logits = adapter.run(model, x)
    return Outputs(logits, (inputs[-1] if inputs else logits).flatten(1))


@contextmanager
def _record_inputs(classifier: nn.Module | None) -> Iterator[list[Tensor]]:
    """Collect the inputs of the classifier while the model runs: one [B,C] per call."""
    inputs: list[Tensor] = []
    if classifier is None:
        yield inputs
        return
    handle = classifier.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        yield inputs
    finally:
        handle.remove()


def cosine_distances(features: Tensor, reference: Tensor) -> Tensor:
    """Cosine distance of each row, [B] float64."""
    return (1 - F.cosine_similarity(features.double(), reference.double())).clamp(min=0).cpu()


def neighbour_ranks(features: Tensor, gallery: Tensor) -> Tensor:
    """Half of the images, drawn at random, are a gallery, with the features in `gallery`; the others ask. How many images of
    the gallery are nearer to a query than the one that is nearest by the query's own features in `gallery`: 0 where the
    nearest is the same; −1 for images of the gallery. [n] int64."""
    count = len(features)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(features.device)
    inside, asking = order[: (count + 1) // 2], order[(count + 1) // 2 :]
    known = F.normalize(gallery[inside].float(), dim=1)
    ranks = torch.full((count,), -1, dtype=torch.int64)
    for part in torch.split(asking, 1024):
        expected = (F.normalize(gallery[part].float(), dim=1) @ known.T).argmax(1, keepdim=True)
        score = F.normalize(features[part].float(), dim=1) @ known.T
        ranks[part.cpu()] = (score > score.gather(1, expected)).sum(1).cpu()
    return ranks


def nearest_neighbours(features: Tensor, gallery: Tensor) -> Tensor:
    """The nearest neighbour of each image among the other images of the gallery, by cosine, [n] int64."""
    unit = F.normalize(features.float(), dim=1)
    known = F.normalize(gallery.float(), dim=1)
    nearest = []
    for start in range(0, len(unit), 1024):
        score = unit[start : start + 1024] @ known.T
        score[torch.arange(len(score)), start + torch.arange(len(score))] = -torch.inf
        nearest.append(score.argmax(1).cpu())
    return torch.cat(nearest)
