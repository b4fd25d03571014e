"""Table 2: methods at equal GMACs on all backbones, training-free.

    tokenmerge reproduce table2 --images imagenet/val --class-folders --weights-dir weights --out results

One minute for DeiT-T. Other methods are solved for the fraction of GMACs that the paper gives; ATM has the published
config nearest to it. The paper's numbers are `PAPER` below: (GMACs, top-1) by model and method.
"""

from __future__ import annotations

from ..methods.no_merge import BASELINE
from .paper import Lab
from .plots import bars_figure
from .table import Row, Sheet, paper_vs_here, stand_in_note

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


def run(lab: Lab) -> Sheet:
    benches = lab.benches(tuple(PAPER))
    rows: list[Row] = []
    for bench in benches:
        published = PAPER[bench.paper]
        baseline = bench.rows()[0]
        methods = {
            name: bench.atm(bench.nearest(gmacs)) if name == "ATM" else bench.solve(name, gmacs / baseline.gmacs)
            for name, (gmacs, _) in published.items()
        }
        base, *found = bench.measure(list(methods.values()))
        rows.append(paper_vs_here(bench, {"method": BASELINE, "config": ""}, [base], baseline.gmacs, baseline.top1))
        for (name, method), result in zip(methods.items(), found, strict=True):
            rows.append(paper_vs_here(bench, {"method": name, "config": repr(method)}, [base, result], *published[name]))
    merged = [row for row in rows if row["method"] != BASELINE]
    labels = [f"{row['model']} {row['method']}" for row in merged]
    lost = {"the paper": [row["change_paper"] for row in merged], "here": [row["change_here"] for row in merged]}
    figure = bars_figure(labels, lost, "top-1, points lost or won")
    return Sheet(rows, figure, stand_in_note(benches, "seven backbones"))
