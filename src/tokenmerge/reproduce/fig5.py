"""Fig. 5: schedules of merging, top-r and thresholds, all with alternate matching.

    tokenmerge reproduce fig5 --images imagenet/val --class-folders --weights-dir weights --out results

30 seconds. Constant, increasing and decreasing top-r, constant θ, layer-dependent θ. The paper shows a figure without
numbers: layer-dependent θ is best, then increasing top-r; constant θ is low. All have the CLS-only last
layer, as parts of ATM; the paper does not say.

Columns: model, method, config, gmacs_paper, gmacs_here, gmacs_difference, ratio_paper, ratio_here,
top1_paper, top1_here, change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from ..methods.base import Method
from ..methods.constant_threshold import ConstantThreshold
from ..methods.tome import TopR
from .bench import Bench
from .lab import Lab
from .plots import accuracy_figure
from .table import Sheet, paper_vs_here, stand_in_note

TOTALS = (0.2, 0.35, 0.5, 0.65, 0.8)  # of the tokens, merged in all layers together
THETAS = (0.94, 0.92, 0.9, 0.88, 0.86, 0.84)


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    named = [(name, method) for name, methods in schedules(bench).items() for method in methods]
    base, *found = bench.measure([method for _, method in named])
    rows = [
        paper_vs_here(bench, {"method": name, "config": repr(method)}, [base, result], None)
        for (name, method), result in zip(named, found, strict=True)
    ]
    return Sheet(rows, accuracy_figure(rows), stand_in_note([bench], "DeiT-S"))


def schedules(bench: Bench) -> dict[str, list[Method]]:
    depth = bench.reference.depth
    tokens = bench.reference.tokens
    even = [round(fraction * tokens / depth) for fraction in TOTALS]
    rising = [[max(r + layer - (depth - 1) // 2, 0) for layer in range(depth)] for r in even]  # one more in every layer
    return {
        "constant top-r": [TopR(r, **bench.options("TopR")) for r in even],
        "increasing top-r": [TopR(ramp=r, **bench.options("TopR")) for r in rising],
        "decreasing top-r": [TopR(ramp=r[::-1], **bench.options("TopR")) for r in rising],
        "constant θ": [ConstantThreshold(theta, **bench.options("ConstantThreshold")) for theta in THETAS],
        "layer-dependent θ": [bench.atm(row, split_layer=depth) for row in bench.rows()[1::2]],
    }
