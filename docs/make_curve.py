"""The curve of a fine-tuning run, from its steps: CSV and picture.

python docs/make_curve.py RUN/steps.jsonl docs/results/finetune_embedded.csv docs/images/finetune_embedded.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib import pyplot as plt

from tokenmerge.utils.files import write_csv


def main(steps: str, table: str, picture: str) -> None:
    rows = [json.loads(line) for line in Path(steps).read_text().splitlines()[1:]]
    write_csv([{"step": r["step"], "loss": round(r["loss"], 5), "lr": f"{r['lr']:.3e}"} for r in rows], Path(table))
    figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], color="0.6", linewidth=1)
    width = 10  # an epoch
    means = [sum(r["loss"] for r in rows[i : i + width]) / width for i in range(0, len(rows), width)]
    edges = [*range(0, len(rows), width), len(rows)]
    axes.stairs(means, edges, baseline=None, color="black", linewidth=1.5, label="mean of an epoch")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:4])
