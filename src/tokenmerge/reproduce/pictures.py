"""What Fig. 1, 7 and A1 share: eight images, from simple to complex, merged by ToMe and by ATM at the same mean cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..methods.tome import ToMe
from ..visualization.figures import Drawn, visualize
from .paper import Bench
from .table import Row

COUNT = 8
WHOLE = {"last_layer": "full"}  # so that the last layer merges, too, as in the paper's pictures


def draw(bench: Bench, layers: Sequence[int] | None = None) -> Drawn:
    """ToMe merges as much as the paper's r = 10 in DeiT-S, ATM the same on average, per image."""
    reference = bench.reference
    tome = ToMe(r=max(1, round(10 * 12 / reference.depth * reference.tokens / 197)), **bench.options)
    ratio = reference.measure(tome).ratio
    atm = replace(bench.solve("ATM", ratio), batch="each", **WHOLE)  # type: ignore[call-arg, arg-type]
    images, _ = bench.images.split(min(COUNT, bench.images.size), seed=1)
    return visualize(bench.model, images, {"ToMe": replace(tome, **WHOLE), "ATM": atm}, layers=layers)  # type: ignore[arg-type]


def rows_of(bench: Bench, drawn: Drawn) -> list[Row]:
    return [{"model": bench.label, **row} for row in drawn.rows()]
