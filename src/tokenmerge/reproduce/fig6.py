"""Fig. 6: tokens merged in each layer at 33 % fewer GMACs, with a constant and with a layer-dependent θ.

    tokenmerge reproduce fig6 --images images --weights-dir weights --out results

35 seconds; needs no labels. Both are solved for 67 % of the baseline's GMACs on these images, with alternate matching. The
paper shows a figure without numbers: a constant θ merges most in the first and in the last layers.

Columns: model, schedule, layer, theta, merged, ratio, distance, images.
"""

from __future__ import annotations

from ..methods.atm import ATM
from ..methods.constant_threshold import ConstantThreshold
from .lab import Lab
from .plots import merges_figure
from .table import Row, Sheet, stand_in_note

RATIO = 0.67  # of the baseline's GMACs: "33 % reduction in FLOPs"


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    depth = bench.reference.depth
    row = bench.nearest(RATIO * bench.rows()[0].gmacs)
    falling = bench.solve("ATM", RATIO, row, split_layer=depth)
    constant = bench.solve("ConstantThreshold", RATIO)
    assert isinstance(constant, ConstantThreshold)
    _, *results = bench.measure([constant, falling])
    rows: list[Row] = []
    for name, method, result in zip(("constant θ", "layer-dependent θ"), (constant, falling), results, strict=True):
        before = [float(bench.reference.tokens), *result.tokens]
        for layer in range(1, bench.reference.merging_layers + 1):
            theta = method.threshold(layer) if isinstance(method, ATM) else constant.theta
            rows.append(
                {
                    "model": bench.label,
                    "schedule": name,
                    "layer": layer,
                    "theta": round(theta, 4),
                    "merged": round(before[layer - 1] - before[layer], 2),
                    "ratio": round(result.gmacs_ratio, 4),
                    "distance": round(result.distance, 5),
                    "images": result.images,
                }
            )
    return Sheet(rows, merges_figure(rows), stand_in_note([bench], "DeiT-S"))
