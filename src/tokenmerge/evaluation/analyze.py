"""Fig. 2 for any model: what merging in one layer alone changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..core.matching import Batch, Metric
from ..data.load import Source, as_images
from ..methods.atm import ATM
from ..utils.progress import Progress, no_progress
from .measurement import Measured, Measurement
from .reference import Reference

THETAS = (0.80, 0.85, 0.90, 0.95)  # of Fig. 2


@dataclass(frozen=True)
class Impact(Measured):
    """Merging in one layer only, with one threshold."""

    layer: int  # from 1
    theta: float
    merged: float  # pairs, mean over the images
    measurement: Measurement

    def row(self) -> dict[str, Any]:
        return {"layer": self.layer, "theta": self.theta, "merged": self.merged, "distance": self.distance}


def analyze(
    model: nn.Module,
    images: Source,
    *,
    thetas: Sequence[float] = THETAS,
    metric: Metric = "keys",
    batch: Batch = "mean",
    sample: int = 64,
    batch_size: int = 32,
    seed: int = 0,
    progress: Progress = no_progress,
) -> list[Impact]:
    """One row per layer and threshold, with alternate matching in every layer: before any merge all sizes are equal. The
    last layer is left out where its merges have no effect."""
    reference = Reference(model, as_images(images, model).split(sample, seed)[0], batch_size=batch_size)
    rows = []
    for layer in range(1, reference.merging_layers + 1):
        for theta in thetas:
            only = [theta if at == layer else 1.0 for at in range(1, reference.depth + 1)]
            method = ATM(thresholds=only, metric=metric, batch=batch, split_layer=reference.depth)
            measurement = reference.measure(method)
            rows.append(Impact(layer, theta, reference.tokens - measurement.tokens[layer - 1], measurement))
            progress("trials", 1, reference.merging_layers * len(thetas))
    return rows


def impact_figure(rows: Sequence[Impact]) -> Any:
    """One line per threshold, their mean as bars."""
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
