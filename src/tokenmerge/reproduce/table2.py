"""Table 2: methods at equal GMACs on all backbones, training-free.

    tokenmerge reproduce table2 --images imagenet/val --class-folders --weights-dir weights --out results

30 seconds for DeiT-T. Two blocks. "as printed": ATM has the published config that rounds to both printed numbers, and each
of the other methods is solved for the GMACs that the paper prints for it. "equal GMACs": every method, ATM included, is
solved for the GMACs that the paper prints for ATM, within 1 % as measured; ATM keeps the α and β of its config, and θ_min
is solved for. The paper's numbers are `PAPER` below: (GMACs, top-1) by model and method.

Columns: model, block, method, config, params_paper, params_here, gmacs_paper, gmacs_here, gmacs_difference, ratio_paper,
ratio_here, top1_paper, top1_here, change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..evaluation.evaluate import Result
from ..methods.base import Method
from ..methods.no_merge import BASELINE
from ..methods.presets import printed_row
from .bench import Bench
from .lab import Lab
from .plots import bars_figure
from .published import PUBLISHED
from .table import Printed, Row, Sheet, paper_vs_here, printed, printed_baseline, stand_in_note

PAPER = {
    "deit_tiny_patch16_224": {"EViT": (0.9, 71.0), "ToMe": (0.9, 71.6), "MCTF": (0.9, 71.9), "ATM": (0.9, 72.1)},
    "deit_small_patch16_224": {
        "EViT": (3.0, 78.5), "ToMe": (3.0, 79.1), "MCTF": (3.0, 79.5), "ZeroTPrune": (3.0, 79.4), "ATM": (3.0, 79.7),
    },
    "lvvit_t": {"ToMe": (2.0, 78.4), "ATM": (2.0, 78.6)},
    "lvvit_s": {"EViT": (3.9, 79.8), "ToMe": (3.6, 81.3), "ZeroTPrune": (3.5, 81.5), "ATM": (3.5, 82.1)},
    "t2t_vit_t_14": {"ToMe": (4.1, 81.1), "ATM": (4.1, 81.4)},
    "t2t_vit_t_19": {"ToMe": (4.8, 78.9), "ATM": (4.8, 81.2)},
    "mae_vit_base_patch16": {"EViT": (11.5, 82.0), "ToMe": (11.5, 82.3), "ATM": (11.5, 82.5)},
}  # fmt: skip
AS_PRINTED, EQUAL = "as printed", "equal GMACs"
WITHIN = 0.01  # of the common cost


def run(lab: Lab) -> Sheet:
    benches = lab.benches(tuple(PAPER))
    rows = [row for bench in benches for row in _rows(bench)]
    merged = [row for row in rows if row["method"] != BASELINE]
    labels = [f"{row['model']} {row['method']}" + ("" if row["block"] == AS_PRINTED else ", equal") for row in merged]
    lost = {"the paper": [row["change_paper"] for row in merged], "here": [row["change_here"] for row in merged]}
    figure = bars_figure(labels, lost, "top-1, points lost or won")
    return Sheet(rows, figure, stand_in_note(benches, "seven backbones") + _missed(rows))


def _missed(rows: Sequence[Row]) -> list[str]:
    """A note for each method that no config brings within 1 % of the common cost."""
    notes = []
    for row in rows:
        if row["block"] == EQUAL and abs(row["ratio_here"] / row["wanted"] - 1) > WITHIN:
            notes.append(f"{row['model']}, {row['method']}: no config within 1 % of the common cost was found.")
        del row["wanted"]
    return notes


def _rows(bench: Bench) -> list[Row]:
    published = PAPER[bench.paper]
    baseline = bench.rows()[0]
    row = printed_row(bench.paper, *published["ATM"])

    def ratio(gmacs: float) -> float:
        return gmacs / baseline.gmacs

    cost = published["ATM"][0]
    blocks: list[tuple[str, dict[str, Method]]] = [
        (
            AS_PRINTED,
            {
                name: bench.atm(row) if name == "ATM" else bench.solve(name, ratio(gmacs))
                for name, (gmacs, _) in published.items()
            },
        ),
        (EQUAL, {name: bench.solve(name, ratio(cost), row if name == "ATM" else None) for name in published}),
    ]
    base, *_ = bench.measure([])
    rows = [_row(bench, {"block": "", "method": BASELINE, "config": ""}, [base], printed_baseline(bench))]
    for block, methods in blocks:
        _, *found = bench.measure(list(methods.values()))
        for (name, method), result in zip(methods.items(), found, strict=True):
            what = {"block": block, "method": name, "config": repr(method)}
            paper = printed(bench, *published[name]) if block == AS_PRINTED else None
            rows.append(_row(bench, what, [base, result], paper))
    return [row | {"wanted": ratio(cost)} for row in rows]


def _row(bench: Bench, what: Row, results: Sequence[Result], paper: Printed | None) -> Row:
    params = {"params_paper": PUBLISHED[bench.paper].params, "params_here": round(bench.params, 2)}
    return paper_vs_here(bench, what | params, results, paper)
