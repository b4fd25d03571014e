"""The paper's kinds of plots, from the rows of a sheet. One quiet style; lines differ in their markers, too."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..methods.no_merge import BASELINE
from .table import Row

MARKERS = "os^Dv<>Px*"
GREYS = ("0.75", "0.25")


def accuracy_figure(rows: Sequence[Row]) -> Any:
    """The loss (points of top-1; without labels, changed predictions) against GMACs, relative to the baseline, so that the
    paper's images and ours fit into one plot: one panel per model, one line per method, the paper's dotted."""
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    labelled = any(row["change_here"] is not None for row in rows)
    methods = len({row.get("method") for row in rows})
    width = 5 if methods < 8 else 7
    figure, axes = plt.subplots(1, len(models), figsize=(width * len(models), 3.8), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        mine = [row for row in rows if row["model"] == model and row.get("method") != BASELINE]
        for number, name in enumerate(dict.fromkeys(row.get("method", "ATM") for row in mine)):
            ours = "ATM" in name or name.startswith("layer")
            style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, "linewidth": 1.8 if ours else 1.0}
            style["color"] = f"C{number % 10}"
            for whose, label, line in (("here", name, "-"), ("paper", f"{name}, the paper", ":")):
                points = [
                    (row[f"ratio_{whose}"], _lost(row, whose, labelled))
                    for row in mine
                    if row.get("method", "ATM") == name and row[f"ratio_{whose}"] is not None
                ]
                points = sorted((ratio, lost) for ratio, lost in points if lost is not None)
                if points:
                    axis.plot(*zip(*points, strict=True), linestyle=line, label=label, **style)
        axis.plot(1, 0, "k+", label=BASELINE)
        axis.set(xlabel="GMACs of baseline", title=model, ylabel="top-1, points" if labelled else "changed predictions, %")
        many = len(axis.lines) > 8  # they would cover the points
        outside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if many else {}
        axis.legend(frameon=False, fontsize=7, **outside)
    figure.tight_layout()
    return figure


def _lost(row: Row, whose: str, labelled: bool) -> float | None:
    if labelled or whose == "paper":
        return row[f"change_{whose}"]
    return None if row["agreement"] is None else 100 * (row["agreement"] - 1)


def bars_figure(labels: Sequence[str], groups: Mapping[str, Sequence[float | None]], what: str = "GMACs of baseline") -> Any:
    """For each label, one bar per group."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(max(5, 0.7 * len(labels)), 3.6))
    width = 0.8 / len(groups)
    for i, (group, colour) in enumerate(zip(groups, itertools.cycle(GREYS), strict=False)):
        at = [n + (i - (len(groups) - 1) / 2) * width for n in range(len(labels))]
        axis.bar(at, [value or 0.0 for value in groups[group]], width, label=group, color=colour)
    axis.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    axis.set_ylabel(what)
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def lines_figure(rows: Sequence[Row], key: str, name: str, log: bool = False) -> Any:
    """GMACs as a fraction of the baseline's, and the change of top-1 (or the distance), over one variable."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    labelled = any(row["change_here"] is not None for row in rows)
    panels = (
        (left, (("ratio_here", "here", "o-"), ("ratio_paper", "the paper", "s:")), "GMACs of baseline"),
        (right, (("change_here", "here", "o-"), ("change_paper", "the paper", "s:")), "top-1, points lost or won")
        if labelled
        else (right, (("distance", "here", "o-"),), "cosine distance"),
    )
    for axis, lines, what in panels:
        for column, label, style in lines:
            points = [(row[key], row[column]) for row in rows if row[column] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, markersize=4, label=label)
        axis.set(xlabel=name, ylabel=what, xscale="log" if log else "linear")
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def merges_figure(rows: Sequence[Row]) -> Any:
    """Tokens merged in each layer as bars, the threshold as a line; one panel per schedule."""
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["schedule"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(4.5 * len(names), 3.2), sharey=True)
    for axis, name in zip(axes, names, strict=True):
        mine = [row for row in rows if row["schedule"] == name]
        layers = [row["layer"] for row in mine]
        axis.bar(layers, [row["merged"] for row in mine], color="lightgrey")
        axis.set(xlabel="layer", ylabel="tokens merged", title=name)
        line = axis.twinx()
        line.plot(layers, [row["theta"] for row in mine], "ko-", markersize=3)
        line.set(ylabel="θ", ylim=(0.75, 1.0))
    figure.tight_layout()
    return figure
