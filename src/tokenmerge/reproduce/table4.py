r"""Table 4: DeiT-S after extra training, and methods that need it.

    tokenmerge reproduce table4 --images imagenet/val --class-folders --train-images imagenet/train \
      --weights-dir weights --out results

Every row is trained by its published recipe (docs/evaluation.md); `--epochs` is that of ATM's, 30 in the paper, and scales
the others. All start from the given weights, also those that were trained from scratch. The paper: ATM training-free
3.0 GMACs and 79.7 %, fine-tuned 2.6 and 79.8 %, 11 hours on an RTX A6000; the others are `OTHERS` below. Without any
option: the embedded model and images, in five minutes. Agreement and distance are those to the original model.

Columns: model, method, epochs_paper, epochs_here, hours_paper, hours_here, gmacs_paper, gmacs_here, gmacs_difference,
ratio_paper, ratio_here, top1_paper, top1_here, change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..evaluation.evaluate import Result
from ..methods.avit import AViT
from ..methods.base import Method
from ..methods.bat import BAT
from ..methods.dynamicvit import DynamicViT
from ..methods.evit import EViT
from ..methods.evovit import EvoViT
from ..methods.iared2 import IARED2
from ..methods.mctf import MCTF
from ..methods.no_merge import BASELINE
from ..methods.presets import FINE_TUNED, printed_row
from ..methods.tome import ToMe
from .lab import Lab
from .plots import accuracy_figure
from .table import Sheet, hours, paper_vs_here, printed, printed_baseline, recipe_notes, stand_in_note

OTHERS: tuple[tuple[str, float, float, int, int | None], ...] = (  # method, GMACs, top-1, epochs, hours
    ("DynamicViT", 2.9, 79.3, 30, 43),
    ("IA-RED²", 3.2, 79.1, 90, None),
    ("Evo-ViT", 3.0, 79.4, 300, 126),
    ("EViT", 3.0, 79.5, 300, 95),
    ("A-ViT", 3.6, 78.6, 100, 65),
    ("ToMe", 2.7, 79.4, 300, 87),
    ("BAT", 3.0, 79.6, 300, None),
    ("MCTF", 2.6, 80.1, 30, 39),
)
TRAINING_FREE = (3.0, 79.7)  # GMACs, top-1
FINETUNED = (2.6, 79.8)
# Configs and recipes of the others. A-ViT's β is that for DeiT-S; of a narrower model, that for DeiT-T.
TRAINED: dict[str, tuple[Method, str]] = {
    "DynamicViT": (DynamicViT(0.7), "dynamicvit"),
    "IA-RED²": (IARED2(), "iared2"),
    "Evo-ViT": (EvoViT(), "evovit"),
    "EViT": (EViT(0.7), "evit"),
    "A-ViT": (AViT(), "avit"),
    "ToMe": (ToMe(13), "tome"),
    "BAT": (BAT(0.7), "bat"),
    "MCTF": (MCTF(16), "mctf"),
}
NARROW, NARROW_BETA = 384, 30.0
SCRATCH = (
    "The paper's EViT, Evo-ViT, ToMe and BAT were trained from scratch; here they start from trained weights, and Evo-ViT "
    "keeps the head on the CLS token, where the published model reads the mean of the patches."
)


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    base, found = bench.measure([bench.atm(printed_row(bench.paper, *TRAINING_FREE))])

    def row(name: str, gmacs: float, top1: float, epochs: int | None, hours_paper: int | None, here: Any) -> dict[str, Any]:
        what: dict[str, Any] = {
            "method": name,
            "epochs_paper": epochs,
            "epochs_here": None,
            "hours_paper": hours_paper,
            "hours_here": None,
        }
        result, epochs_here, seconds = here or (None, None, None)
        if result is not None:
            what |= {"epochs_here": epochs_here, "hours_here": None if seconds is None else hours(seconds)}
        return paper_vs_here(bench, what, [base, result], printed(bench, gmacs, top1))

    def trained(method: Method, recipe: str) -> tuple[Result, int, float] | None:
        if isinstance(method, AViT) and bench.width < NARROW:
            method = replace(method, beta=NARROW_BETA)
        if method.last_layer is None and not lab.fair:
            method = replace(method, last_layer="full")
        done = bench.finetuned(method, recipe)
        return None if done is None else (done[0], bench.schedule(recipe).epochs, done[1])

    nothing = {"method": BASELINE, "epochs_paper": None, "epochs_here": None, "hours_paper": None, "hours_here": None}
    rows = [paper_vs_here(bench, nothing, [base], printed_baseline(bench))]
    rows += [row(*published, trained(*TRAINED[published[0]])) for published in OTHERS]
    rows.append(row("ATM, training-free", *TRAINING_FREE, 0, None, (found, 0, None)))
    tuned = trained(bench.atm(printed_row(bench.paper, *FINETUNED, FINE_TUNED)), "atm")
    rows.append(row("ATM", *FINETUNED, 30, 11, tuned))
    notes = stand_in_note([bench], "DeiT-S") + recipe_notes(lab) + ([SCRATCH] if tuned is not None else [])
    return Sheet(rows, accuracy_figure(rows), notes)
