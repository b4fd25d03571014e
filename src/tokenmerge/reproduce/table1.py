"""Table 1: the stress test, how few GMACs without any loss of accuracy, training-free.

    tokenmerge reproduce table1 --images imagenet/val --class-folders --weights-dir weights --out results

2 minutes for DeiT-T. Without loss means that top-1 at one decimal is not below the baseline's, as in print; `--tolerance
0` compares exactly; without labels, no prediction may change. ATM is the cheapest of its published configs without loss;
the other methods are bisected over their reduction strength.

The paper: `PAPER` below, GMACs and reduction as printed. DeiT-T's −31 % is 0.9 of 1.3, two rounded figures; the row of
Table A2 behind it has 0.93 of 1.25 GMACs, −26 % (`reduction_row`).

Columns: model, method, config, params_paper, params_here, gmacs_paper, gmacs_here, gmacs_difference, reduction_paper,
reduction_row, reduction_here, top1_paper, top1_here, change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from ..evaluation.evaluate import Result
from ..methods.no_merge import BASELINE
from ..methods.presets import find_preset
from .bench import Bench
from .lab import Lab
from .plots import bars_figure
from .published import PUBLISHED
from .table import Row, Sheet, paper_vs_here, printed_baseline, stand_in_note
from .table_a2 import MODELS

# GMACs and reduction, as printed.
PAPER = {
    "deit_tiny_patch16_224": {"EViT": (1.2, -0.07), "ToMe": (1.2, -0.07), "MCTF": (1.2, -0.07), "ATM": (0.9, -0.31)},
    "deit_small_patch16_224": {
        "EViT": (4.2, -0.09), "ToMe": (4.2, -0.09), "MCTF": (3.6, -0.22), "ZeroTPrune": (4.0, -0.13), "ATM": (3.2, -0.30),
    },
    "deit_base_patch16_224": {
        "EViT": (15.9, -0.10), "ToMe": (17.0, -0.03), "MCTF": (16.2, -0.08), "ATM": (13.9, -0.21),
    },
}  # fmt: skip
METHODS = ("EViT", "ToMe", "MCTF", "ZeroTPrune", "ATM")
COLUMNS = (
    "model", "method", "config", "params_paper", "params_here", "gmacs_paper", "gmacs_here", "gmacs_difference",
    "reduction_paper", "reduction_row", "reduction_here", "top1_paper", "top1_here", "change_paper", "change_here",
    "agreement", "distance", "images",
)  # fmt: skip


def run(lab: Lab) -> Sheet:
    benches = lab.benches(MODELS)
    rows = [row for bench in benches for row in _rows(bench)]
    merged = [row for row in rows if row["method"] != BASELINE]
    labels = [f"{row['model']} {row['method']}" for row in merged]
    bars = {
        "the paper, as printed": [row["reduction_paper"] for row in merged],
        "here": [row["reduction_here"] for row in merged],
    }
    criterion = "exactly" if lab.tolerance == 0 else f"at multiples of {lab.tolerance:g} points"
    notes = [
        f"Without loss: top-1, compared {criterion}, is not below the baseline's; without labels: no prediction changes."
    ]
    return Sheet(rows, bars_figure(labels, bars, "change of GMACs"), notes + stand_in_note(benches, "the DeiT family"))


def _rows(bench: Bench) -> list[Row]:
    base, *_ = bench.measure([])
    published = PAPER[bench.paper]
    baseline = bench.rows()[0]
    row = find_preset(bench.paper, lossless=True)
    rows = []
    for name in (BASELINE, *METHODS):
        best = base if name == BASELINE else cheapest_atm(bench) if name == "ATM" else bench.stress(name)
        gmacs, reduction = published.get(name, (None, None))
        paper = printed_baseline(bench) if name == BASELINE else None
        if gmacs is not None:
            paper = printed_baseline(bench)._replace(gmacs=gmacs)
        found = paper_vs_here(bench, {"method": name}, [base, base if best is None else best], paper)
        found |= {
            "config": "" if name == BASELINE else "none" if best is None else repr(best.method),
            "params_paper": PUBLISHED[bench.paper].params,
            "params_here": round(bench.params, 2),
            "reduction_paper": reduction,
            "reduction_row": round(row.gmacs / baseline.gmacs - 1, 4) if name == "ATM" else None,
            "reduction_here": round(found["ratio_here"] - 1, 4),
        }
        rows.append({column: found[column] for column in COLUMNS})
    return rows


def cheapest_atm(bench: Bench) -> Result | None:
    """The cheapest of the published configs without loss."""
    base, *found = bench.measure([bench.atm(row) for row in bench.rows()[1:]])
    kept = [result for result in found if bench.keeps(result, base)]
    return min(kept, key=lambda result: result.gmacs) if kept else None
