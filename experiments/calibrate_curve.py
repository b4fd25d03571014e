"""Configs of the embedded model for the budget control of `tokenmerge web`: src/tokenmerge/data/embedded/curve.json.

    python experiments/calibrate_curve.py

64 test images, three rounds for each of six budgets; 10 minutes on two cores.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenmerge as tm

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
OUT = Path(__file__).parent.parent / "src" / "tokenmerge" / "data" / "embedded" / "curve.json"


def main() -> None:
    model, images = tm.load_model("embedded"), tm.load_images("embedded", limit=64)
    rows = []
    for budget in BUDGETS:
        found = tm.calibrate(model, images, gmacs=budget, sample=64, rounds=3)
        rows.append({"ratio": round(found.ratio, 4), "distance": round(found.distance, 6), "method": found.method.to_dict()})
        print(found.sentence, flush=True)
        OUT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
