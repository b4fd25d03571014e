"""Table 1: the stress test, how few GMACs without any loss of accuracy, training-free.

    tokenmerge reproduce table1 --images imagenet/val --class-folders --weights-dir weights --out results

The cheapest of Fig. 4's points whose top-1 is not below the baseline's (without labels: with no changed prediction);
it takes as long as that figure, and nothing more after it. The paper, GMACs: DeiT-T 1.3, EViT, ToMe and MCTF 1.2, ATM
0.9; DeiT-S 4.6, EViT and ToMe 4.2, MCTF 3.6, Zero-TP 4.0, ATM 3.2; DeiT-B 17.6, EViT 15.9, ToMe 17.0, MCTF 16.2, ATM
13.9.
"""

from __future__ import annotations

from .fig4 import OTHERS, points
from .paper import Bench, Lab
from .plots import bars_figure
from .table import Row, Sheet, stand_in_note
from .table_a1 import MODELS

PAPER = {
    "deit_tiny_patch16_224": {"EViT": 1.2, "ToMe": 1.2, "MCTF": 1.2, "ATM": 0.9},
    "deit_small_patch16_224": {"EViT": 4.2, "ToMe": 4.2, "MCTF": 3.6, "ZeroTPrune": 4.0, "ATM": 3.2},
    "deit_base_patch16_224": {"EViT": 15.9, "ToMe": 17.0, "MCTF": 16.2, "ATM": 13.9},
}


def run(lab: Lab) -> Sheet:
    benches = lab.benches(MODELS)
    rows = [row for bench in benches for row in _cheapest(bench)]
    labels = [f"{row['model']} {row['method']}" for row in rows]
    figure = bars_figure(
        labels, {"the paper": [row["ratio_paper"] for row in rows], "here": [row["ratio_here"] for row in rows]}
    )
    notes = ["Without loss: top-1 is not below the baseline's; without labels: no prediction changes."]
    return Sheet(rows, figure, notes + stand_in_note(benches, "the DeiT family"))


def _cheapest(bench: Bench) -> list[Row]:
    unmodified, *others = points(bench)
    rows = []
    baseline = bench.rows()[0].gmacs
    for name in (*OTHERS, "ATM"):
        kept = [row for row in others if row["method"] == name and _keeps(row)]
        best = min(kept, key=lambda row: row["gmacs_here"]) if kept else unmodified
        published = PAPER[bench.paper].get(name)
        rows.append(
            best
            | {
                "method": name,
                "config": best["config"] if kept else "none of these",
                "gmacs_paper": published,
                "gmacs_difference": None
                if published is None or bench.stands_in
                else round(best["gmacs_here"] / published - 1, 4),
                "ratio_paper": None if published is None else round(published / baseline, 4),
                "top1_paper": None if published is None else bench.rows()[0].top1,
                "change_paper": None if published is None else 0.0,
            }
        )
    return rows


def _keeps(row: Row) -> bool:
    if row["change_here"] is not None:
        return bool(row["change_here"] >= 0)
    return bool(row["agreement"] == 1)
