"""What a config changes on images that its calibration did not see, with bounds for the images to come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.load import Source, as_images
from ..deployment.model_file import Config
from ..engine.features import has_classes
from ..utils import statistics
from ..utils.progress import Progress, no_progress
from ..utils.rounding import percent_down
from .evaluate import Result, evaluate
from .measurement import PerImage
from .power import power_statement

THIS = "this config"
TOP1, NEIGHBOUR = "top-1 class", "nearest neighbour"
DISTANCE = (0.0, 2.0)  # where cosine distances are
RECALL = (1, 5, 10)


@dataclass(frozen=True)
class AccuracyLoss:
    """The loss of top-1 accuracy where labels are known. Only images that change count."""

    lost: int  # images that only the baseline has right
    gained: int  # images that only the config has right
    loss: float  # of accuracy, as a fraction
    bound: float  # the loss is at most this, with the confidence of the proof
    p_value: float  # of McNemar's exact test against "no loss": small where there is one


@dataclass(frozen=True)
class Recall:
    """How often the baseline's nearest neighbour in a gallery is among the k nearest."""

    k: int
    hits: int
    queries: int
    bound: float  # at least this fraction of all such queries is a hit, with the confidence of the proof


@dataclass(frozen=True)
class Proof:
    """The validation of one config, with the results of other methods on the same images."""

    kind: str  # of prediction: top-1 class, or nearest neighbour in a gallery of half of the images
    images: int  # that were predicted
    unchanged: int  # images with the baseline's prediction
    confidence: float
    bound: float  # at least this fraction of all such images keeps its prediction, with this confidence
    bounds: dict[str, float]  # the same for each config; all of them hold together with this confidence (Bonferroni)
    distance: dict[str, float]  # cosine distance of the pre-logits features: mean, median, 95 %, 99 %, max
    distance_bound: float  # the mean distance of all such images is at most this, with this confidence
    distance_95_bound: float | None  # 95 % of all such images have at most this distance; None: too few images
    accuracy: AccuracyLoss | None  # where labels are known
    recall: tuple[Recall, ...]  # of models without classes
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
        return (
            f"≥ {percent_down(self.bound)} of predictions ({self.kind}) unchanged, {self.confidence:.0%} confidence, "
            f"{self.images:,} images"
        )

    @property
    def power(self) -> str:
        """What this number of images can certify."""
        return power_statement(self.images, confidence=self.confidence)

    @property
    def distance_sentence(self) -> str:
        tail = "" if self.distance_95_bound is None else f"; 95 % of the images: ≤ {self.distance_95_bound:.4f}"
        return f"mean cosine distance {self.distance['mean']:.4f}, ≤ {self.distance_bound:.4f} for all such images{tail}"

    def verdict(self, keep: float, seen: tuple[int, int]) -> str:
        """Whether a fraction of predictions is kept, on the calibration images (unchanged, of how many) and on these."""
        start = f"keep {keep:g}: {'met' if seen[0] >= keep * seen[1] else 'not met'} on calibration ({seen[0]}/{seen[1]}), "
        start += f"{self.unchanged}/{self.images} on held-out images; {self.confidence:.0%} lower bound "
        start += percent_down(self.bound)
        if self.bound >= keep:
            return f"{start}: proven"
        if keep >= 1:
            return f"{start}: not proven, and no number of images can prove that nothing ever changes"
        more = statistics.trials_needed(keep, self.confidence, self.images - self.unchanged) - self.images
        return f"{start}: not proven; about {more:,} more images without a change would be needed"

    def to_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key not in ("results", "accuracy", "recall")}
        return plain | {
            "accuracy": None if self.accuracy is None else asdict(self.accuracy),
            "recall": [asdict(recall) for recall in self.recall],
            "sentence": self.sentence,
            "results": [result.row() | {"bound": self.bounds.get(result.name)} for result in self.results],
        }


def prove(
    model: nn.Module,
    images: Source,
    method: Config,
    *,
    others: Mapping[str, Config] | None = None,
    batch_size: int = 32,
    confidence: float = 0.95,
    worst: int = 10,
    progress: Progress = no_progress,
) -> Proof:
    """Run the baseline, the config or exported file, and any others on every batch. The model is not changed.

    `bound` is for a config that was chosen before these images were seen, whatever else runs beside it. To choose among
    several configs by what they show here, take `bounds`, which hold for all of them together."""
    images = as_images(images, model)
    results = evaluate(model, images, {THIS: method, **(others or {})}, batch_size=batch_size, progress=progress)
    baseline, ours = results[:2]
    each = per_image(ours)
    by_class = has_classes(model)
    outcomes = {result.name: unchanged(per_image(result), by_class) for result in results[1:]}
    kept = outcomes[THIS]
    if len(kept) == 0 or (not by_class and ours.images < 4):
        raise ValueError(f"{images.name}: nearest neighbours need at least four images")
    together = 1 - (1 - confidence) / len(outcomes)
    ratio = each.gmacs / baseline.gmacs
    farthest = each.distance.argsort(descending=True, stable=True)[:worst].tolist()
    quantiles = torch.quantile(each.distance, torch.tensor([0.5, 0.95, 0.99, 1.0], dtype=torch.float64)).tolist()
    shuffled = each.distance[torch.randperm(len(each.distance), generator=torch.Generator().manual_seed(0))].tolist()
    return Proof(
        kind=TOP1 if by_class else NEIGHBOUR,
        images=len(kept),
        unchanged=int(kept.sum()),
        confidence=confidence,
        bound=statistics.lower_bound(int(kept.sum()), len(kept), confidence),
        bounds={name: statistics.lower_bound(int(same.sum()), len(same), together) for name, same in outcomes.items()},
        distance=dict(zip(("mean", "median", "95 %", "99 %", "max"), (ours.distance, *quantiles), strict=True)),
        distance_bound=statistics.mean_upper_bound(shuffled, *DISTANCE, confidence),
        distance_95_bound=statistics.quantile_upper_bound(shuffled, 0.95, confidence),
        accuracy=_accuracy_loss(per_image(baseline), each, confidence),
        recall=() if each.rank is None else tuple(_recall(each.rank, k, confidence) for k in RECALL),
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


def per_image(result: Result) -> PerImage:
    assert result.per_image is not None
    return result.per_image


def unchanged(each: PerImage, by_class: bool) -> Tensor:
    """For each prediction, whether it is the baseline's, [n] bool. Without classes, half of the images are the gallery and
    the others ask: what one of them finds does not depend on the others, as the bound needs it."""
    if by_class or each.rank is None:
        return each.agrees
    return each.rank[each.rank >= 0] == 0


def _recall(rank: Tensor, k: int, confidence: float) -> Recall:
    asked = rank[rank >= 0]
    hits = int((asked < k).sum())
    return Recall(k, hits, len(asked), statistics.lower_bound(hits, len(asked), confidence))


def _accuracy_loss(baseline: PerImage, ours: PerImage, confidence: float) -> AccuracyLoss | None:
    if baseline.right is None or ours.right is None:
        return None
    before, after = baseline.right, ours.right
    order = torch.randperm(len(before), generator=torch.Generator().manual_seed(0))
    losses: Sequence[float] = (before.double() - after.double())[order].tolist()  # 1: lost, −1: gained
    lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
    return AccuracyLoss(
        lost,
        gained,
        math.fsum(losses) / len(losses),
        statistics.mean_upper_bound(losses, -1.0, 1.0, confidence),
        statistics.binomial_cdf(gained, lost + gained, 0.5),
    )
