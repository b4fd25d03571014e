"""What a setting loses, on images that its calibration did not see, with a bound that holds for the images to come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .evaluation import Result, evaluate
from .loading import Source, as_images
from .measuring import has_classes
from .methods import Method

OURS = "this setting"


@dataclass(frozen=True)
class Proof:
    """Evidence for one setting, with what else ran on the same images beside it."""

    kind: str  # what an answer is: the top-1 class, or the nearest neighbour
    images: int
    unchanged: int  # images whose answer is the unmerged model's
    confidence: float
    bound: float  # at least this share of all such images keeps its answer, with this confidence
    distance: dict[str, float]  # cosine distance of what the head reads: mean, median, 95 %, 99 %, max
    ratio: dict[str, float]  # GMACs against the unmerged model: mean, deviation, min, max
    speedup: float  # images/s against the unmerged model's, the two taking turns on the same batches
    changed_most: tuple[tuple[str, float, bool], ...]  # name, distance, same answer; the farthest first
    results: tuple[Result, ...]  # unmerged, this setting, and the others

    @property
    def sentence(self) -> str:
        """What may be claimed, with its bound."""
        share = math.floor(self.bound * 1000) / 10
        return (
            f"≥ {share:.1f} % of answers ({self.kind}) unchanged, {self.confidence:.0%} confidence, {self.images:,} images"
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
    progress: Callable[[int], object] = lambda images: None,
) -> Proof:
    """Run the unmerged model, the setting and any others on every batch in turn. The model is left as it was found."""
    images = as_images(images, model)
    results = evaluate(model, images, {OURS: method, **(others or {})}, batch_size=batch_size, progress=progress)
    unmerged, ours = results[:2]
    if ours.each is None or ours.agreement is None:
        raise ValueError(f"{images.name}: neighbours need at least three images")
    each, same = ours.each, int(ours.each.same.sum())
    ratio = each.gmacs / unmerged.gmacs
    far = each.distance.argsort(descending=True, stable=True)[:worst].tolist()
    quantiles = torch.quantile(each.distance, torch.tensor([0.5, 0.95, 0.99, 1.0], dtype=torch.float64)).tolist()
    return Proof(
        kind="top-1 class" if has_classes(model) else "nearest neighbour",
        images=len(each.same),
        unchanged=same,
        confidence=confidence,
        bound=lower_bound(same, len(each.same), confidence),
        distance=dict(zip(("mean", "median", "95 %", "99 %", "max"), (ours.distance, *quantiles), strict=True)),
        ratio={
            "mean": float(ratio.mean()),
            "deviation": float(ratio.std(correction=0)),
            "min": float(ratio.min()),
            "max": float(ratio.max()),
        },
        speedup=ours.images_per_second / unmerged.images_per_second,
        changed_most=tuple((each.names[i], float(each.distance[i]), bool(each.same[i])) for i in far),
        results=tuple(results),
    )


def lower_bound(successes: int, trials: int, confidence: float = 0.95) -> float:
    """The exact binomial bound (Clopper and Pearson), one-sided: the least p for which so many successes or more still
    have the probability 1 − confidence."""
    if successes == 0:
        return 0.0
    failures = torch.arange(trials - successes + 1, dtype=torch.float64)
    n = torch.tensor(float(trials), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(failures + 1) - torch.lgamma(n - failures + 1)

    def at_least(p: float) -> float:
        return float(torch.logsumexp(ways + (n - failures) * math.log(p) + failures * math.log1p(-p), 0).exp())

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_least(middle) < 1 - confidence else (low, middle)
    return low
