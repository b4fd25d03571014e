"""Table A1: all configs of DeiT-T, DeiT-S and DeiT-B, training-free.

    tokenmerge reproduce tableA1 --images imagenet/val --class-folders --weights-dir weights --out results

40 seconds for DeiT-T. The paper: 1.25 GMACs and 72.14 % come down to 0.96 at 72.14 %, 0.71 at 70.94 % (DeiT-T); 4.60
and 79.81 % to 3.26 at 79.80 %, 2.56 at 79.08 % (DeiT-S); 17.57 and 81.79 % to 14.26 at 81.79 %, 9.98 at 80.17 %
(DeiT-B). All rows are in `tokenmerge presets`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..methods.no_merge import BASELINE
from .paper import Bench, Lab
from .plots import accuracy_figure
from .table import Row, Sheet, paper_vs_here, stand_in_note

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
    rows = [paper_vs_here(bench, {"method": BASELINE, **_config(None)}, [base], paper[0].gmacs, paper[0].top1)]
    for published, result in zip(paper[1:], found, strict=True):
        config = _config((published.alpha, published.beta, published.theta_min))
        rows.append(paper_vs_here(bench, {"method": "ATM", **config}, [base, result], published.gmacs, published.top1))
    return rows


def _config(values: tuple[float | None, ...] | None) -> Row:
    return dict(zip(("alpha", "beta", "theta_min"), values or (None,) * 3, strict=True))
