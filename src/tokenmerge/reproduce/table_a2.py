r"""Table A2: all configs of DeiT-T, DeiT-S and DeiT-B, after 30 epochs of fine-tuning.

    tokenmerge reproduce tableA2 --images imagenet/val --class-folders --train-images imagenet/train \
      --weights-dir weights --out results

30 epochs of ImageNet for each of 42 configs: weeks on one GPU; `--model` takes one model. `--epochs 1 --sample 70`
shows that it runs (4 minutes). The paper: DeiT-T 0.71 GMACs from 70.94 to 71.76 %, DeiT-S 2.52 from 79.08 to 79.58 %,
DeiT-B 9.80 from 80.17 to 81.19 %.
"""

from __future__ import annotations

from .paper import Lab
from .plots import accuracy_figure
from .table import Sheet, paper_vs_here, stand_in_note
from .table_a1 import MODELS


def run(lab: Lab) -> Sheet:
    benches, rows = lab.benches(MODELS), []
    for bench in benches:
        paper = bench.rows("A2")
        methods = [bench.atm(row) for row in paper[1:]]
        base, *before = bench.measure(methods)
        for published, method, free in zip(paper[1:], methods, before, strict=True):
            what = {"alpha": published.alpha, "beta": published.beta, "theta_min": published.theta_min}
            row = paper_vs_here(bench, what, [base, bench.finetuned(method)], published.gmacs, published.top1)
            rows.append(row | {"top1_training_free": None if free.top1 is None else round(100 * free.top1, 2)})
    return Sheet(rows, accuracy_figure(rows), stand_in_note(benches, "the DeiT family") + recipe_notes(lab))


def recipe_notes(lab: Lab) -> list[str]:
    if lab.train_images is None:
        return []
    notes = [
        f"Fine-tuned for {lab.epochs} epochs on {lab.sample or 'all'} images of {lab.train_images}; the paper: 30, ImageNet."
    ]
    if lab.train_images == lab.images and lab.images != "embedded":
        notes.append("These are the images that are measured on: a test of the code, not of the accuracy.")
    return notes
