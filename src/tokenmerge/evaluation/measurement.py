"""One type for what a config costs and changes: every result of this library holds one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import Tensor

from ..engine.features import nearest_neighbours, neighbour_ranks
from ..utils.rounding import not_below


@dataclass(frozen=True)
class PerImage:
    """One entry per image."""

    names: tuple[str, ...]
    distance: Tensor  # [n] float64
    agrees: Tensor  # [n] bool: whether the prediction is the baseline's
    gmacs: Tensor  # [n] float64
    prediction: Tensor  # [n] int64
    tokens: Tensor  # [n, layers] float64: after each layer
    right: Tensor | None = None  # [n] bool: whether the class is the label, where labels are known
    rank: Tensor | None = None  # [n] int64, of models without classes: see `neighbour_ranks`


@dataclass(frozen=True)
class Measurement:
    """A config on a set of images, compared with the baseline on the same images. Means over the images."""

    images: int
    gmacs: float
    ratio: float  # GMACs as a fraction of the baseline's
    distance: float  # cosine distance of the pre-logits features
    agreement: float | None  # fraction with the baseline's prediction: top-1 class, or nearest neighbour (needs 3 images)
    top1: float | None = None  # where labels are known
    top5: float | None = None  # where labels are known and there are at least five classes
    tokens: tuple[float, ...] = ()  # after each layer
    per_image: PerImage | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        *,
        names: Sequence[str],
        top: Tensor,  # [n,k]: the k best classes
        features: Tensor | None,  # [n,C]: for models without classes, whose prediction is the nearest neighbour
        gallery: Tensor | None,  # [n,C]: the baseline's features
        baseline: Tensor | None,  # [n]: the baseline's predictions; None: this is the baseline
        distance: Tensor,  # [n]
        gmacs: Tensor,  # [n]
        baseline_gmacs: float | None,  # None: this is the baseline
        tokens: Sequence[Tensor],  # per layer, [n]
        labels: Tensor | None,  # [n]
    ) -> Self:
        by_class = features is None or gallery is None
        prediction = top[:, 0].cpu() if features is None or gallery is None else nearest_neighbours(features, gallery)
        agrees = torch.ones_like(prediction, dtype=torch.bool) if baseline is None else prediction == baseline
        right = None if labels is None or not by_class else top.cpu() == labels.cpu().unsqueeze(1)
        mean_gmacs = float(gmacs.mean())
        rank = None if features is None or gallery is None else neighbour_ranks(features, gallery)
        return cls(
            images=len(names),
            gmacs=mean_gmacs,
            ratio=mean_gmacs / (mean_gmacs if baseline_gmacs is None else baseline_gmacs),
            distance=float(distance.mean()),
            agreement=float(agrees.double().mean()) if by_class or len(names) > 2 else None,
            top1=None if right is None else float(right[:, 0].double().mean()),
            top5=None if right is None or top.shape[1] < 5 else float(right.any(1).double().mean()),
            tokens=tuple(float(layer.double().mean()) for layer in tokens),
            per_image=PerImage(
                tuple(names),
                distance,
                agrees,
                gmacs,
                prediction,
                torch.stack([*tokens], 1).double(),
                None if right is None else right[:, 0],
                rank,
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it: without the entries per image."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "per_image"}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(**(data | {"tokens": tuple(data["tokens"])}))


class Measured:
    """A result that holds a measurement, whose figures can be read from the result itself."""

    measurement: Measurement

    @property
    def images(self) -> int:
        return self.measurement.images

    @property
    def gmacs(self) -> float:
        return self.measurement.gmacs

    @property
    def ratio(self) -> float:
        return self.measurement.ratio

    @property
    def distance(self) -> float:
        return self.measurement.distance

    @property
    def agreement(self) -> float | None:
        return self.measurement.agreement

    @property
    def top1(self) -> float | None:
        return self.measurement.top1

    @property
    def top5(self) -> float | None:
        return self.measurement.top5

    @property
    def tokens(self) -> tuple[float, ...]:
        return self.measurement.tokens

    @property
    def per_image(self) -> PerImage | None:
        return self.measurement.per_image


def without_loss(found: Measured, baseline: Measured, tolerance: float, min_agreement: float) -> bool:
    """Top-1, rounded to multiples of `tolerance` points, is not below the baseline's; without labels, at least this
    fraction of the predictions is the baseline's."""
    if found.top1 is None or baseline.top1 is None:
        return (found.agreement or 0.0) >= min_agreement
    return not_below(100 * found.top1, 100 * baseline.top1, tolerance)


def percent(value: float | None, digits: int = 1, missing: str = "–") -> str:
    """A fraction as per cent."""
    return missing if value is None else f"{value:.{digits}%}"
