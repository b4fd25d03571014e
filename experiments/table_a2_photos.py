"""The DeiT-T rows of Table A2 on photographs: our GMACs and the paper's, our loss and ToMe's at equal cost.

    python experiments/table_a2_photos.py WEIGHTS.safetensors PHOTOS docs/results      # 5 minutes on two cores

One batch (the paper: 1024), resize 256 bicubic, crop 224 (0.875), batch mean; CLS-only last layer for ATM and for ToMe.
Without ImageNet's labels the measures are top-1 agreement with the baseline and CLS cosine distance. ToMe at equal cost is
interpolated between neighbouring r. Writes deit_tiny_photos.csv, and prints the table.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from pathlib import Path

import tokenmerge as tm
from tokenmerge.methods.presets import rows_of
from tokenmerge.utils.files import write_csv

NAME = "deit_tiny_patch16_224"


def at_cost(gmacs: float, results: list[tm.Result], field: str) -> float:
    """Linear interpolation of a field over GMACs."""
    ordered = sorted(results, key=lambda r: r.gmacs)
    i = min(max(bisect_left([r.gmacs for r in ordered], gmacs), 1), len(ordered) - 1)
    low, high = ordered[i - 1], ordered[i]
    weight = (gmacs - low.gmacs) / (high.gmacs - low.gmacs)
    return float(getattr(low, field) + weight * (getattr(high, field) - getattr(low, field)))


def main(weights: str, photos: str, out: str) -> None:
    model = tm.load_model(NAME, weights)
    images = tm.load_images(photos, model, crop=0.875)
    rows = rows_of(NAME)[1:]
    ours = [tm.ATM(row.alpha, row.beta, row.theta_min, last_layer="prefix") for row in rows]
    theirs = [tm.ToMe(r, last_layer="prefix") for r in range(1, 16)]
    _, *results = tm.evaluate(model, images, [*ours, *theirs], batch_size=images.size)
    write_csv([result.row() for result in results], Path(out) / "deit_tiny_photos.csv")
    tome = results[len(rows) :]
    lines = [
        "| α | β | θ_min | GMACs, paper | GMACs, here | difference | agreement | distance | ToMe's at equal GMACs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, result in zip(rows, results, strict=False):
        lines.append(
            f"| {row.alpha} | {row.beta} | {row.theta_min} | {row.gmacs:.2f} | {result.gmacs:.3f} | "
            f"{result.gmacs / row.gmacs - 1:+.1%} | {result.agreement:.1%} | {result.distance:.4f} | "
            f"{at_cost(result.gmacs, tome, 'distance'):.4f} |"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
