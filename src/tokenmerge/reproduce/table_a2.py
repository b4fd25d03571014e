"""Table A2: all configs of DeiT-T, DeiT-S and DeiT-B, training-free.

    tokenmerge reproduce tableA2 --images imagenet/val --class-folders --weights-dir weights --out results

40 seconds for DeiT-T. The paper: 1.25 GMACs and 72.14 % come down to 0.96 at 72.14 %, 0.71 at 70.94 % (DeiT-T); 4.60
and 79.81 % to 3.26 at 79.80 %, 2.56 at 79.08 % (DeiT-S); 17.57 and 81.79 % to 14.26 at 81.79 %, 9.98 at 80.17 %
(DeiT-B). All rows are in `tokenmerge presets`.

Columns: model, method, alpha, beta, theta_min, gmacs_paper, gmacs_here, gmacs_difference, ratio_paper, ratio_here,
top1_paper, top1_here, change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..methods.no_merge import BASELINE
from ..methods.presets import PaperRow
from .bench import Bench
from .lab import Lab
from .plots import accuracy_figure
from .table import Printed, Row, Sheet, paper_vs_here, stand_in_note

MODELS = ("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224")


def run(lab: Lab) -> Sheet:
    return full_results(lab, MODELS, "the DeiT family")


def full_results(lab: Lab, models: Sequence[str], papers: str) -> Sheet:
    """Every training-free row that the paper has for these models."""
    benches = lab.benches(models)
    rows = [row for bench in benches for row in rows_of(bench)]
    return Sheet(rows, accuracy_figure(rows), stand_in_note(benches, papers))


def rows_of(bench: Bench) -> list[Row]:
    paper = bench.rows()
    base, *found = bench.measure([bench.atm(row) for row in paper[1:]])
    rows = [paper_vs_here(bench, {"method": BASELINE} | config(paper[0]), [base], of_row(bench, paper[0]))]
    for published, result in zip(paper[1:], found, strict=True):
        rows.append(paper_vs_here(bench, {"method": "ATM"} | config(published), [base, result], of_row(bench, published)))
    return rows


def of_row(bench: Bench, row: PaperRow) -> Printed:
    """The numbers of a row of the full results."""
    baseline = bench.rows()[0]
    return Printed(row.gmacs, row.top1, baseline.gmacs, baseline.top1)


def config(row: PaperRow) -> Row:
    return {"alpha": row.alpha, "beta": row.beta, "theta_min": row.theta_min}
