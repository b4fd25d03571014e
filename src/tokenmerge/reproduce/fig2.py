"""Fig. 2: what merging in one layer alone does to the class token.

    tokenmerge reproduce fig2 --data images --weights-dir weights --out results

One minute; needs no labels; 64 images at most. θ = 0.80, 0.85, 0.90, 0.95, and their mean as bars. The paper shows a
figure without numbers: the first layers cost most. (`tokenmerge analyze` draws it for any model.)
"""

from __future__ import annotations

from dataclasses import asdict

from ..analysis import analyze, impact_figure
from .lab import Lab
from .sheets import Sheet, stand_in_note


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    found = analyze(bench.model, bench.images)
    rows = [{"model": bench.label, **asdict(row), "images": min(64, bench.images.size)} for row in found]
    return Sheet(rows, impact_figure(found), stand_in_note([bench], "DeiT-S"))
