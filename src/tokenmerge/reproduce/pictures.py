"""What Fig. 1, 7 and A1 share: eight images, from simple to complex, merged by ToMe and by ATM at the same mean cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..methods.atm import ATM
from ..methods.tome import ToMe
from ..visualization.figures import Drawn, visualize
from .bench import Bench
from .table import Row

COUNT = 8


def draw(bench: Bench, layers: Sequence[int] | None = None) -> Drawn:
    """ToMe merges as much as the paper's r = 10 in DeiT-S, ATM the same on average, per image."""
    reference = bench.reference
    tome = ToMe(r=max(1, round(10 * 12 / reference.depth * reference.tokens / 197)), **bench.options("ToMe"))
    ratio = reference.measure(tome).ratio
    atm = bench.solve("ATM", ratio, bench.nearest(ratio * bench.rows()[0].gmacs))
    assert isinstance(atm, ATM)
    images, _ = bench.images.split(min(COUNT, bench.images.size), seed=1)
    methods = {"ToMe": replace(tome, last_layer="full"), "ATM": _whole_sequence(atm, reference.depth)}
    return visualize(bench.model, images, methods, layers=layers)


def _whole_sequence(atm: ATM, depth: int) -> ATM:
    """The same decisions, per image. The last layer merges nothing, as in the paper, but keeps all tokens, to be drawn."""
    thresholds = [atm.threshold(layer) for layer in range(1, depth)]
    return ATM(thresholds=[*thresholds, 1.0], batch="each", prop_attn=atm.prop_attn, last_layer="full")


def rows_of(bench: Bench, drawn: Drawn) -> list[Row]:
    return [{"model": bench.label, **row} for row in drawn.rows()]
