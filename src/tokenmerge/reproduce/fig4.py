"""Fig. 4: accuracy against GMACs on DeiT, training-free: ATM, EViT, ToMe, MCTF and Zero-TPrune.

    tokenmerge reproduce fig4 --images imagenet/val --class-folders --weights-dir weights --out results

2 minutes for DeiT-T. The paper prints no numbers but those of Table A2, which ATM's points are; the other methods are
solved here for six costs. As in the paper, only ATM has the CLS-only last layer; `--fair` gives it to all of them.

Columns: model, method, config, gmacs_paper, gmacs_here, gmacs_difference, ratio_paper, ratio_here,
top1_paper, top1_here, change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from ..methods.no_merge import BASELINE
from .bench import Bench
from .lab import Lab
from .plots import accuracy_figure
from .table import Row, Sheet, paper_vs_here, stand_in_note
from .table_a2 import MODELS, of_row

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
    rows = [paper_vs_here(bench, {"method": BASELINE, "config": ""}, [base], of_row(bench, bench.rows()[0]))]
    for published, ours, result in zip(paper, atm, found[: len(atm)], strict=True):
        what = {"method": "ATM", "config": repr(ours)}
        rows.append(paper_vs_here(bench, what, [base, result], of_row(bench, published)))
    for (name, method), result in zip(others, found[len(atm) :], strict=True):
        rows.append(paper_vs_here(bench, {"method": name, "config": repr(method)}, [base, result], None))
    return rows
