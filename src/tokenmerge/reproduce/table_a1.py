"""Table A1: sensitivity to the batch size, over which the number of merges is averaged.

    tokenmerge reproduce tableA1 --images imagenet/val --class-folders --weights-dir weights --out results

25 seconds. Batches as large as there are images. The paper, DeiT-S with the config of Table 3: `PAPER` below, (top-1,
GMACs) for 1, 2, 4 … 1024: no pattern.

Columns: model, batch_size, gmacs_paper, gmacs_here, gmacs_difference, ratio_paper, ratio_here, top1_paper, top1_here,
change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from ..methods.atm import ATM
from .lab import Lab
from .plots import lines_figure
from .table import Sheet, paper_vs_here, printed, stand_in_note
from .table3 import CONFIG

PAPER = (
    (79.64, 3.27), (79.64, 3.25), (79.69, 3.40), (79.68, 3.32), (79.79, 3.24), (79.64, 3.24), (79.68, 3.23), (79.70, 3.23),
    (79.76, 3.23), (79.67, 3.23), (79.76, 3.23),
)  # fmt: skip


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    rows = []
    for power, (top1, gmacs) in enumerate(PAPER):
        if power and 2 ** (power - 1) >= bench.images.size:
            break  # the batch before had them all
        results = bench.measure([ATM(*CONFIG, **bench.options("ATM"))], batch_size=2**power)
        rows.append(paper_vs_here(bench, {"batch_size": 2**power}, results, printed(bench, gmacs, top1, decimals=2)))
    return Sheet(rows, lines_figure(rows, "batch_size", "batch size", log=True), stand_in_note([bench], "DeiT-S"))
