"""Fig. 4: accuracy against GMACs on DeiT, training-free: ATM, EViT, ToMe, MCTF and Zero-TPrune.

    tokenmerge reproduce fig4 --images imagenet/val --class-folders --weights-dir weights --out results

5 minutes for DeiT-T. The paper prints no numbers but those of Table A1, which ATM's points are; the other methods are
solved here for six costs, and have the CLS-only last layer, too.
"""

from __future__ import annotations

from ..methods.no_merge import BASELINE
from .paper import Bench, Lab
from .plots import accuracy_figure
from .table import Row, Sheet, paper_vs_here, stand_in_note
from .table_a1 import MODELS

OTHERS = ("EViT", "ToMe", "MCTF", "ZeroTPrune")
RATIOS = (0.93, 0.88, 0.83, 0.77, 0.7, 0.62)  # of the baseline's GMACs


def run(lab: Lab) -> Sheet:
    benches = lab.benches(MODELS)
    rows = [row for bench in benches for row in points(bench)]
    return Sheet(rows, accuracy_figure(rows), stand_in_note(benches, "the DeiT family"))


def points(bench: Bench) -> list[Row]:
    """The baseline, ATM's published configs, and the other methods."""
    paper = bench.rows()[1:]
    others = [(name, bench.solve(name, ratio)) for name in OTHERS for ratio in RATIOS]
    atm = [bench.atm(row) for row in paper]
    base, *found = bench.measure([*atm, *(method for _, method in others)])
    rows = [paper_vs_here(bench, {"method": BASELINE, "config": ""}, [base], bench.rows()[0].gmacs, bench.rows()[0].top1)]
    for published, ours, result in zip(paper, atm, found[: len(atm)], strict=True):
        rows.append(
            paper_vs_here(bench, {"method": "ATM", "config": repr(ours)}, [base, result], published.gmacs, published.top1)
        )
    for (name, method), result in zip(others, found[len(atm) :], strict=True):
        rows.append(paper_vs_here(bench, {"method": name, "config": repr(method)}, [base, result], None))
    return rows
