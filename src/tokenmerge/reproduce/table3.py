"""Table 3: sensitivity to the splitting layer l_s, the last layer with alternate matching.

    tokenmerge reproduce table3 --images imagenet/val --class-folders --weights-dir weights --out results

20 seconds. The paper, DeiT-S: `PAPER` below, (top-1, GMACs) for l_s = 0 … 12; best at 9. It prints no parameters; α =
0.985, β = 0.045, θ_min = 0.88 are those of the one row of Table A2 with the same 79.76 % and 3.23 GMACs as l_s = 9.

Columns: model, split_layer, gmacs_paper, gmacs_here, gmacs_difference, ratio_paper, ratio_here, top1_paper, top1_here,
change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from ..methods.atm import ATM
from .lab import Lab
from .plots import lines_figure
from .table import Sheet, paper_vs_here, printed, stand_in_note

PAPER = (
    (79.68, 3.95), (79.74, 3.38), (79.68, 3.32), (79.69, 3.30), (79.70, 3.33), (79.69, 3.31), (79.64, 3.30),
    (79.66, 3.27), (79.70, 3.25), (79.76, 3.23), (79.67, 3.22), (79.65, 3.21), (79.65, 3.21),
)  # fmt: skip
CONFIG = (0.985, 0.045, 0.88)


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    layers = range(bench.reference.depth + 1)
    base, *found = bench.measure([ATM(*CONFIG, split_layer=layer, **bench.options("ATM")) for layer in layers])
    rows = []
    for layer, result in zip(layers, found, strict=True):
        paper = None
        if layer < len(PAPER):
            top1, gmacs = PAPER[layer]
            paper = printed(bench, gmacs, top1, decimals=2)
        rows.append(paper_vs_here(bench, {"split_layer": layer}, [base, result], paper))
    return Sheet(rows, lines_figure(rows, "split_layer", "splitting layer"), stand_in_note([bench], "DeiT-S"))
