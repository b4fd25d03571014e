r"""Table 3: DeiT-S after extra training, and methods that need it.

    tokenmerge reproduce table3 --images imagenet/val --class-folders --train-images imagenet/train \
      --weights-dir weights --out results

ATM is run, training-free and after 30 epochs (the paper: 11 hours on an RTX A6000); the others are the paper's
numbers, `OTHERS` below. With `--epochs 1 --sample 70`, half a minute. The paper: ATM training-free 3.0 GMACs and 79.7
%, fine-tuned 2.6 and 79.8 %.
"""

from __future__ import annotations

from typing import Any

from ..methods.no_merge import BASELINE
from .paper import Lab
from .plots import accuracy_figure
from .table import Sheet, paper_vs_here, stand_in_note
from .table_a2 import recipe_notes

OTHERS = (  # method, GMACs, top-1, epochs, hours
    ("DynamicViT", 2.9, 79.3, 30, 43),
    ("IA-RED²", 3.2, 79.1, 90, None),
    ("Evo-ViT", 3.0, 79.4, 300, 126),
    ("EViT", 3.0, 79.5, 300, 95),
    ("A-ViT", 3.6, 78.6, 100, 65),
    ("ToMe", 2.7, 79.4, 300, 87),
    ("BAT", 3.0, 79.6, 300, None),
    ("MCTF", 2.6, 80.1, 30, 39),
)


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    training_free = bench.nearest(3.04)
    tuned = bench.nearest(2.63, "A2")
    base, found = bench.measure([bench.atm(training_free)])

    def what(method: str, epochs: int | None, hours: int | None) -> dict[str, Any]:
        return {"method": method, "epochs_paper": epochs, "hours_paper": hours}

    rows = [paper_vs_here(bench, what(BASELINE, None, None), [base], 4.6, 79.8)]
    rows += [paper_vs_here(bench, what(name, *time), [base, None], gmacs, top1) for name, gmacs, top1, *time in OTHERS]
    rows.append(paper_vs_here(bench, what("ATM, training-free", 0, None), [base, found], 3.0, 79.7))
    rows.append(paper_vs_here(bench, what("ATM", 30, 11), [base, bench.finetuned(bench.atm(tuned))], 2.6, 79.8))
    return Sheet(rows, accuracy_figure(rows), stand_in_note([bench], "DeiT-S") + recipe_notes(lab))
