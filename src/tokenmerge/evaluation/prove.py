"""What a config changes on images that its calibration did not see, with a confidence bound for the images to come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.load import Source, as_images
from ..engine.features import has_classes
from ..methods.base import Method
from ..utils.progress import Progress, no_progress
from ..utils.statistics import lower_bound
from .evaluate import Result, evaluate

THIS = "this config"


@dataclass(frozen=True)
class Proof:
    """The validation of one config, with the results of other methods on the same images."""

    kind: str  # of prediction: top-1 class, or nearest neighbour
    images: int
    unchanged: int  # images with the baseline's prediction
    confidence: float
    bound: float  # at least this fraction of all such images keeps its prediction, with this confidence
    distance: dict[str, float]  # cosine distance of the pre-logits features: mean, median, 95 %, 99 %, max
    ratio: dict[str, float]  # GMACs relative to the baseline: mean, deviation, min, max
    speedup: float  # images/s relative to the baseline's, interleaved on the same batches
    changed_most: tuple[tuple[str, float, bool], ...]  # name, distance, whether the prediction agrees; the farthest first
    results: tuple[Result, ...]  # baseline, this config, and the others

    @property
    def baseline(self) -> Result:
        return self.results[0]

    @property
    def this(self) -> Result:
        return self.results[1]

    @property
    def sentence(self) -> str:
        """What may be claimed, with its bound."""
        percent = math.floor(self.bound * 1000) / 10
        return (
            f"≥ {percent:.1f} % of predictions ({self.kind}) unchanged, {self.confidence:.0%} confidence, "
            f"{self.images:,} images"
        )

    def to_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key != "results"}
        return plain | {"sentence": self.sentence, "results": [result.row() for result in self.results]}


def prove(
    model: nn.Module,
    images: Source,
    method: Method,
    *,
    others: Mapping[str, Method] | None = None,
    batch_size: int = 32,
    confidence: float = 0.95,
    worst: int = 10,
    progress: Progress = no_progress,
) -> Proof:
    """Run the baseline, the config and any others on every batch. The model is not changed."""
    images = as_images(images, model)
    results = evaluate(model, images, {THIS: method, **(others or {})}, batch_size=batch_size, progress=progress)
    baseline, ours = results[:2]
    each = ours.per_image
    if each is None or ours.agreement is None:
        raise ValueError(f"{images.name}: nearest neighbours need at least three images")
    unchanged = int(each.agrees.sum())
    ratio = each.gmacs / baseline.gmacs
    farthest = each.distance.argsort(descending=True, stable=True)[:worst].tolist()
    quantiles = torch.quantile(each.distance, torch.tensor([0.5, 0.95, 0.99, 1.0], dtype=torch.float64)).tolist()
    return Proof(
        kind="top-1 class" if has_classes(model) else "nearest neighbour",
        images=ours.images,
        unchanged=unchanged,
        confidence=confidence,
        bound=lower_bound(unchanged, ours.images, confidence),
        distance=dict(zip(("mean", "median", "95 %", "99 %", "max"), (ours.distance, *quantiles), strict=True)),
        ratio={
            "mean": float(ratio.mean()),
            "deviation": float(ratio.std(correction=0)),
            "min": float(ratio.min()),
            "max": float(ratio.max()),
        },
        speedup=ours.images_per_second / baseline.images_per_second,
        changed_most=tuple((each.names[i], float(each.distance[i]), bool(each.agrees[i])) for i in farthest),
        results=tuple(results),
    )
