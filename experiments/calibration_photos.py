r"""Calibrated thresholds, ToMe and the paper's family, on photographs that calibration did not see.

    python experiments/calibration_photos.py deit_tiny_patch16_224 WEIGHTS.safetensors PHOTOS OUT.csv
    python experiments/calibration_photos.py vit_small_patch14_dinov2 WEIGHTS.safetensors PHOTOS OUT.csv \
      --size 224 --features

64 photographs to calibrate, all others to measure; 20, 30 and 40 % fewer GMACs; all with the CLS-only last layer. On two
cores DeiT-T takes about 6 minutes, DINOv2 ViT-S/14 about 25. `--sweep 100` adds 100 trials of the paper's family on the
calibration images, and measures the best of them at or below each budget on the others, too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import tokenmerge as tm
from tokenmerge.calibration.optimize import tome_at
from tokenmerge.evaluation.measurement import Measurement
from tokenmerge.evaluation.reference import Reference
from tokenmerge.utils.files import write_csv

BUDGETS = (0.8, 0.7, 0.6)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "weights", "photos", "out"):
        parser.add_argument(name)
    parser.add_argument("--size", type=int)
    parser.add_argument("--features", action="store_true")
    parser.add_argument("--sweep", type=int, default=0)
    parser.add_argument("--sweep-images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only-sweep", action="store_true")
    args = parser.parse_args()
    model = tm.load_model(args.model, args.weights, **({"num_classes": 0} if args.features else {}))
    if args.size:
        model.set_input_size(img_size=args.size)  # type: ignore[operator]
    seen, unseen = tm.load_images(args.photos, model, size=args.size).split(64, seed=0)
    reference = Reference(model, unseen)
    rows: list[dict[str, object]] = []

    def note(budget: float, name: str, method: tm.Method, found: Measurement, seconds: float | None = None) -> None:
        rows.append(
            {
                "budget": budget,
                "method": name,
                "distance": f"{found.distance:.5f}",
                "agreement": f"{found.agreement:.4f}",
                "ratio": f"{found.ratio:.4f}",
                "images": found.images,
                "seconds": "" if seconds is None else round(seconds),
                "config": repr(method),
            }
        )
        print(*list(rows[-1].values())[:7], flush=True)

    for budget in () if args.only_sweep else BUDGETS:
        start = time.perf_counter()
        resume = Path(args.out).with_suffix("")  # budgets share trials, and the same command resumes
        ours = tm.calibrate(model, seen, gmacs=budget, rounds=args.rounds, resume=resume).method
        seconds = time.perf_counter() - start
        found = reference.measure(ours)
        note(budget, "calibrated", ours, found, seconds)
        tome = tome_at(reference, found.ratio)
        note(budget, "ToMe at the same cost", tome, reference.measure(tome))
        write_csv(rows, Path(args.out))
    if not args.sweep:
        return
    study = f"sqlite:///{Path(args.out).with_suffix('.db')}"  # the same command resumes
    swept = tm.tune(model, seen.take(range(args.sweep_images)), trials=args.sweep, quality="distance", storage=study)
    for budget in BUDGETS:
        near = [row for row in swept if row.ratio <= budget + 0.005]
        if near:
            best = min(near, key=lambda row: row.distance)
            paper = tm.ATM(best.alpha, best.beta, best.theta_min)
            note(budget, "the paper's family", paper, reference.measure(paper))
        else:
            print(f"none of {len(swept)} trials reached {budget:.0%}: {min(row.ratio for row in swept):.1%} at least")
    write_csv(rows, Path(args.out))


if __name__ == "__main__":
    main()
