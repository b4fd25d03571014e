"""Fig. 2 for any model: what merging in one layer alone does to the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .loading import Source, as_images
from .measuring import Reference
from .methods import ATM
from .methods.base import Batch, Metric


@dataclass(frozen=True)
class Impact:
    """Merging in one layer only, with one threshold."""

    layer: int  # from 1
    theta: float
    merged: float  # pairs, mean over the images
    distance: float  # mean cosine distance of what the head reads to the unmerged model's


def analyze(
    model: nn.Module,
    images: Source,
    *,
    thetas: Sequence[float] = (0.80, 0.85, 0.90, 0.95),
    metric: Metric = "keys",
    batch: Batch = "mean",
    sample: int = 64,
    batch_size: int = 32,
    seed: int = 0,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Impact]:
    """One row per layer and threshold, with alternate matching in every layer: before any merge all sizes are the same. The
    last layer is left out where its merges have no effect."""
    reference = Reference(model, as_images(images, model).split(sample, seed)[0], batch_size=batch_size)
    rows = []
    for layer in range(1, reference.merging_layers + 1):
        for theta in thetas:
            only = [theta if at == layer else 1.0 for at in range(1, reference.depth + 1)]
            seen = reference.measure(ATM(thresholds=only, metric=metric, batch=batch, split_layer=reference.depth))
            merged = reference.tokens - seen.tokens[layer - 1]
            rows.append(Impact(layer, theta, merged, float(seen.distance.mean())))
            progress(1)
    return rows


def impact_figure(rows: Sequence[Impact]) -> Any:
    """A line per threshold, their mean as bars."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 3.4))
    layers = sorted({row.layer for row in rows})
    means = [sum(r.distance for r in rows if r.layer == layer) / sum(r.layer == layer for r in rows) for layer in layers]
    axis.bar(layers, means, color="lightgrey", label="mean")
    for theta, marker in zip(sorted({row.theta for row in rows}), "os^Dv<>" * len(rows), strict=False):
        line = [row.distance for row in rows if row.theta == theta]
        axis.plot(layers, line, marker=marker, markersize=4, label=f"θ = {theta:.2f}")
    axis.set(xlabel="layer", ylabel="cosine distance", title="merging in one layer only")
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure
