r"""Table A3: all configs of DeiT-T, DeiT-S and DeiT-B, after 30 epochs of fine-tuning.

    tokenmerge reproduce tableA3 --images imagenet/val --class-folders --train-images imagenet/train \
      --weights-dir weights --out results

30 epochs of ImageNet for each of 42 configs: weeks on one GPU; `--model` takes one model. `--epochs 1 --sample 70`
shows that it runs (80 seconds). The paper: DeiT-T 0.71 GMACs from 70.94 to 71.76 %, DeiT-S 2.52 from 79.08 to 79.58 %,
DeiT-B 9.80 from 80.17 to 81.19 %. Agreement and distance are those to the original model; `hours_here` is the time that
training took.

Columns: model, method, alpha, beta, theta_min, gmacs_paper, gmacs_here, gmacs_difference, ratio_paper, ratio_here,
top1_paper, top1_here, change_paper, change_here, agreement, distance, images, top1_training_free, hours_here.
"""

from __future__ import annotations

from ..evaluation.evaluate import Result
from ..methods.no_merge import BASELINE
from ..methods.presets import FINE_TUNED, PaperRow
from .bench import Bench
from .lab import Lab
from .plots import accuracy_figure
from .table import Row, Sheet, hours, paper_vs_here, recipe_notes, stand_in_note
from .table_a2 import MODELS, config, of_row


def run(lab: Lab) -> Sheet:
    benches = lab.benches(MODELS)
    rows: list[Row] = []
    for bench in benches:
        paper = bench.rows(FINE_TUNED)
        methods = [bench.atm(row) for row in paper[1:]]
        base, *before = bench.measure(methods)
        rows.append(_row(bench, paper[0], base, base, base, None))
        for published, method, free in zip(paper[1:], methods, before, strict=True):
            tuned, seconds = bench.finetuned(method) or (None, None)
            rows.append(_row(bench, published, base, free, tuned, seconds))
    return Sheet(rows, accuracy_figure(rows), stand_in_note(benches, "the DeiT family") + recipe_notes(lab))


def _row(bench: Bench, published: PaperRow, base: Result, free: Result, tuned: Result | None, seconds: float | None) -> Row:
    what = {"method": BASELINE if published.is_baseline else "ATM"} | config(published)
    row = paper_vs_here(bench, what, [base, tuned], of_row(bench, published))
    return row | {
        "top1_training_free": None if free.top1 is None else round(100 * free.top1, 2),
        "hours_here": hours(seconds),
    }
