"""Compare methods with the unmerged model on the same images, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cost import Convention, Cost
from .loading import Images
from .methods import Method, NoMerge
from .surgery import apply, is_applied, plan_of, remove
from .tracing import Trace, trace

UNMERGED = "unmerged"
TIMED_BATCHES = 8  # how many batches are run once more to measure the time, without a trace


@dataclass(frozen=True)
class Result:
    """One line of the table. Agreement and distance are measured against the unmerged model."""

    name: str
    method: str  # evaluates back
    images: int
    top1: float | None  # share, where labels are known
    agreement: float | None  # share of images with the same top-1 class; None for models without classes
    distance: float  # mean cosine distance of what the head reads (the class token, or the pooled tokens)
    gmacs: float  # mean per image
    gmacs_min: float
    gmacs_max: float
    gmacs_ratio: float  # of the unmerged model's
    images_per_second: float  # median over batches, the methods taking turns on each
    tokens: tuple[float, ...] = ()  # mean tokens after each layer

    def row(self) -> dict[str, Any]:
        row = asdict(self)
        row["tokens"] = " ".join(f"{n:.1f}" for n in self.tokens)
        return row


@dataclass
class _Tally:
    """What has been seen of one method; None is the unmerged model."""

    name: str
    method: Method | None
    hits: int = 0
    labelled: int = 0
    agreeing: int = 0
    distances: list[Tensor] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    tokens: list[list[Tensor]] = field(default_factory=list)


def evaluate(
    model: nn.Module,
    images: Images,
    methods: Sequence[Method] | Mapping[str, Method],
    *,
    batch_size: int = 32,
    convention: Convention = "paper",
    progress: Callable[[int], object] = lambda images: None,
) -> list[Result]:
    """Run the unmerged model and each method, by name if names are given, on every batch in turn. The model is left as
    it was found."""
    before = plan_of(model).method if is_applied(model) else None
    named = methods.items() if isinstance(methods, Mapping) else ((repr(method), method) for method in methods)
    tallies = [_Tally(UNMERGED, None), *(_Tally(name, method) for name, method in named)]
    like = next(model.parameters())
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), _classifier_inputs(model) as seen:
            for number, batch in enumerate(images.batches(batch_size)):
                x = batch.images.to(like.device, like.dtype)
                reference: tuple[Tensor, Tensor] | None = None
                for tally in tallies:
                    # The unmerged host is counted as NoMerge, which computes the same, bit for bit.
                    apply(model, tally.method or NoMerge(last_layer="full"))
                    with trace(model, detail=False) as t:
                        logits = model(x)
                    features = seen[-1].flatten(1)
                    reference = reference or (logits, features)
                    _add(tally, logits, features, reference, batch.labels, t, convention)
                if number < TIMED_BATCHES:
                    for tally in tallies:
                        tally.speeds.append(len(x) / _seconds(model, tally.method, x))
                seen.clear()
                progress(len(x))
    finally:
        remove(model)
        if before is not None:
            apply(model, before)
        model.train(training)
    if not tallies[0].distances:
        raise ValueError(f"{images.name}: no image to evaluate on")
    classes = getattr(model, "num_classes", None) != 0
    return [_result(tally, tallies[0], classes) for tally in tallies]


@contextmanager
def _classifier_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what the classifier reads while the model runs: one [B,C] per call."""
    classifier: Any = model.get_classifier()  # type: ignore[operator]
    classifier = classifier[0] if isinstance(classifier, tuple) else classifier
    seen: list[Tensor] = []
    handle = classifier.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


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


def _add(
    tally: _Tally,
    logits: Tensor,
    features: Tensor,
    reference: tuple[Tensor, Tensor],
    labels: Tensor | None,
    t: Trace,
    convention: Convention,
) -> None:
    top = logits.argmax(1)
    tally.agreeing += int((top == reference[0].argmax(1)).sum())
    tally.distances.append((1 - F.cosine_similarity(features.double(), reference[1].double())).clamp(min=0).cpu())
    tally.costs.append(t.cost(convention))
    tally.tokens.append(t.tokens)
    if labels is not None:
        tally.hits += int((top.cpu() == labels).sum())
        tally.labelled += len(labels)


def _result(tally: _Tally, unmerged: _Tally, classes: bool) -> Result:
    distances = torch.cat(tally.distances)
    gmacs = torch.cat([cost.per_image for cost in tally.costs])
    full = torch.cat([cost.per_image for cost in unmerged.costs])
    return Result(
        name=tally.name,
        method=repr(tally.method or NoMerge(last_layer="full")),
        images=len(distances),
        top1=tally.hits / tally.labelled if tally.labelled and classes else None,
        agreement=tally.agreeing / len(distances) if classes else None,
        distance=float(distances.mean()),
        gmacs=float(gmacs.mean()),
        gmacs_min=float(gmacs.min()),
        gmacs_max=float(gmacs.max()),
        gmacs_ratio=float(gmacs.mean() / full.mean()),
        images_per_second=median(tally.speeds),
        tokens=tuple(float(torch.cat(layer).double().mean()) for layer in zip(*tally.tokens, strict=True)),
    )
