"""Fig. 2: what merging in one layer alone does to the CLS token.

    tokenmerge reproduce fig2 --images images --weights-dir weights --out results

50 seconds; needs no labels; 64 images at most. θ = 0.80, 0.85, 0.90, 0.95, and their mean as bars. The paper shows a
figure without numbers: the first layers cost most. (`tokenmerge analyze` draws it for any model.)

Columns: model, layer, theta, merged, distance, images.
"""

from __future__ import annotations

from ..evaluation.analyze import analyze, impact_figure
from .lab import Lab
from .table import Sheet, stand_in_note


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    impacts = analyze(bench.model, bench.images)
    rows = [{"model": bench.label, **impact.row(), "images": min(64, bench.images.size)} for impact in impacts]
    return Sheet(rows, impact_figure(impacts), stand_in_note([bench], "DeiT-S"))
