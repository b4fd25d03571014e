"""Fig. 4: accuracy against GMACs on DeiT, training-free: ATM beside EViT, ToMe, MCTF and Zero-TPrune.

    tokenmerge reproduce fig4 --data imagenet/val --class-folders --weights-dir weights --out results

5 minutes for DeiT-T. The paper prints no numbers but those of Table A1, which ATM's points are; rivals are solved here
for six costs, and have the free last layer, too.
"""

from __future__ import annotations

from .lab import Bench, Lab
from .plots import accuracy_figure
from .sheets import Row, Sheet, beside, stand_in_note
from .table_a1 import MODELS

RIVALS = ("EViT", "ToMe", "MCTF", "ZeroTPrune")
RATIOS = (0.93, 0.88, 0.83, 0.77, 0.7, 0.62)  # of the unmerged GMACs


def run(lab: Lab) -> Sheet:
    benches = lab.benches(MODELS)
    rows = [row for bench in benches for row in points(bench)]
    return Sheet(rows, accuracy_figure(rows), stand_in_note(benches, "the DeiT family"))


def points(bench: Bench) -> list[Row]:
    """The unmerged model, ATM's published settings, and the rivals."""
    paper = bench.rows()[1:]
    rivals = [(name, bench.solve(name, ratio)) for name in RIVALS for ratio in RATIOS]
    atm = [bench.atm(row) for row in paper]
    base, *found = bench.measure([*atm, *(method for _, method in rivals)])
    rows = [beside(bench, {"method": "unmerged", "setting": ""}, [base], bench.rows()[0].gmacs, bench.rows()[0].top1)]
    for published, ours, result in zip(paper, atm, found[: len(atm)], strict=True):
        rows.append(beside(bench, {"method": "ATM", "setting": repr(ours)}, [base, result], published.gmacs, published.top1))
    for (name, method), result in zip(rivals, found[len(atm) :], strict=True):
        rows.append(beside(bench, {"method": name, "setting": repr(method)}, [base, result], None))
    return rows
