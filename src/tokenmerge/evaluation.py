"""Compare methods with the unmerged model on the same images, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .cost import Convention, Cost
from .loading import Source, as_images
from .measuring import answers, distances, has_classes, observe
from .methods import Method, NoMerge
from .surgery import apply, remove, twin

UNMERGED = "unmerged"
TIMED_BATCHES = 8  # how many batches are run once more to measure the time, without a trace


@dataclass(frozen=True)
class Each:
    """One entry an image."""

    names: tuple[str, ...]
    distance: Tensor  # [n] float64
    same: Tensor  # [n] bool: whether the answer is the unmerged model's
    gmacs: Tensor  # [n] float64


@dataclass(frozen=True)
class Result:
    """One line of the table. Agreement and distance are measured against the unmerged model."""

    name: str
    method: str  # evaluates back
    images: int
    top1: float | None  # share, where labels are known
    agreement: float | None  # share with the same answer: top-1 class, or nearest neighbour (None for fewer than 3 images)
    distance: float  # mean cosine distance of what the head reads (the class token, or the pooled tokens)
    gmacs: float  # mean per image
    gmacs_min: float
    gmacs_max: float
    gmacs_ratio: float  # of the unmerged model's
    images_per_second: float  # median over batches, the methods taking turns on each
    tokens: tuple[float, ...] = ()  # mean tokens after each layer
    each: Each | None = field(default=None, repr=False, compare=False)

    def row(self) -> dict[str, Any]:
        row = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "each"}
        row["tokens"] = " ".join(f"{n:.1f}" for n in self.tokens)
        return row


@dataclass
class _Tally:
    """What has been seen of one method; None is the unmerged model."""

    name: str
    method: Method | None
    top: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)  # kept only where there are no classes
    distances: list[Tensor] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    tokens: list[list[Tensor]] = field(default_factory=list)


def evaluate(
    model: nn.Module,
    images: Source,
    methods: Sequence[Method] | Mapping[str, Method],
    *,
    batch_size: int = 32,
    convention: Convention = "paper",
    progress: Callable[[int], object] = lambda images: None,
) -> list[Result]:
    """Run the unmerged model and each method, by name if names are given, on every batch in turn. The model is left as
    it was found."""
    images = as_images(images, model)
    named = methods.items() if isinstance(methods, Mapping) else ((repr(method), method) for method in methods)
    tallies = [_Tally(UNMERGED, None), *(_Tally(name, method) for name, method in named)]
    like = next(model.parameters())
    model = twin(model)
    classes = has_classes(model)
    memo: dict[Any, float] = {}
    names: list[str] = []
    labels: list[Tensor] = []
    with torch.inference_mode():
        for number, batch in enumerate(images.batches(batch_size)):
            x = batch.images.to(like.device, like.dtype)
            reference: Tensor | None = None
            for tally in tallies:
                seen = observe(model, tally.method, x)
                reference = seen.features if reference is None else reference
                tally.top.append(seen.logits.argmax(1).cpu())
                tally.distances.append(distances(seen.features, reference))
                tally.features.append(seen.features[:, : 0 if classes else None].cpu())
                tally.costs.append(seen.trace.cost(convention, memo))
                tally.tokens.append(seen.trace.tokens)
            if number < TIMED_BATCHES:
                for tally in tallies:
                    tally.speeds.append(len(x) / _seconds(model, tally.method, x))
            names += batch.names
            labels += [] if batch.labels is None else [batch.labels]
            progress(len(x))
    if not names:
        raise ValueError(f"{images.name}: no image to evaluate on")
    known = torch.cat(labels) if labels else None
    return [_result(tally, tallies[0], tuple(names), known, classes) for tally in tallies]


def _seconds(model: nn.Module, method: Method | None, x: Tensor) -> float:
    remove(model)
    if method is not None:
        apply(model, method)
    if x.device.type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    model(x)
    if x.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _result(tally: _Tally, unmerged: _Tally, names: tuple[str, ...], labels: Tensor | None, classes: bool) -> Result:
    gallery = torch.cat(unmerged.features)
    answer = answers(torch.cat(tally.top), torch.cat(tally.features), gallery, classes)
    same = answer == answers(torch.cat(unmerged.top), gallery, gallery, classes)
    gmacs = torch.cat([cost.per_image for cost in tally.costs])
    each = Each(names, torch.cat(tally.distances), same, gmacs)
    comparable = classes or len(names) > 2  # of two images each is the other's neighbour
    return Result(
        name=tally.name,
        method=repr(tally.method or NoMerge(last_layer="full")),
        images=len(names),
        top1=float((answer == labels).double().mean()) if labels is not None and classes else None,
        agreement=float(same.double().mean()) if comparable else None,
        distance=float(each.distance.mean()),
        gmacs=float(gmacs.mean()),
        gmacs_min=float(gmacs.min()),
        gmacs_max=float(gmacs.max()),
        gmacs_ratio=float(gmacs.mean() / torch.cat([cost.per_image for cost in unmerged.costs]).mean()),
        images_per_second=median(tally.speeds),
        tokens=tuple(float(torch.cat(layer).double().mean()) for layer in zip(*tally.tokens, strict=True)),
        each=each,
    )
