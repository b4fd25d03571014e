"""The trained methods at equal GMACs, on the embedded model: top-1 before and after training, over three seeds.

    python experiments/trained_methods.py OUT [IMAGES] [EPOCHS]        # 25 minutes on two cores

Trains every method by its own recipe, scaled to these images: Fashion-MNIST's training set where Debian's package
dataset-fashion-mnist is installed (IMAGES of its 60,000; 1,500 by default), the 500 embedded ones otherwise. All rows have
the same images, epochs, batches of 15 and CLS-only last layer, no mixup and no drop path, and are evaluated with the moving
average of the weights. The backbone learns at 1e-4 → 1e-5, ATM at half of it, as its recipe has half the rate of EViT's,
the predictors of DynamicViT at 3e-3, interpreters at 4e-5. The cost of IA-RED² and A-ViT follows from their training:
afterwards, `threshold` and `beta` are solved for the budget on training images, which needs no labels. New interpreters of
IA-RED² begin with a probability of ½, so that drawn and greedy decisions keep about as many tokens. Methods that run all
tokens in the first layers cannot reach the second budget. Top-1 on the 2,000 embedded test images. Runs two trainings at a
time, one thread each. OUT keeps what is done: the same call resumes. Writes OUT/trained_methods.csv.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from train_embedded import read_split

import tokenmerge as tm
from tokenmerge.calibration.search import solve_for_cost
from tokenmerge.data import embedded
from tokenmerge.data.load import as_images
from tokenmerge.engine.patch import shared_weights_copy
from tokenmerge.evaluation.reference import Reference
from tokenmerge.training.recipe import RECIPES, Recipe

FASHION = Path("/usr/share/datasets/fashion-mnist")
BUDGETS = (0.38, 0.2)  # of the baseline's GMACs
LATE = ("DynamicViT", "Evo-ViT", "EViT", "BAT")  # all tokens run in the first layers: the second budget cannot be reached
SEEDS = (0, 1, 2)
COMMON: dict[str, Any] = {
    "batch_size": 15, "micro_batch": 15, "lr": 1e-4, "lr_batch": None, "min_lr": 1e-5, "mixup": 0.0, "cutmix": 0.0,
    "drop_path": 0.0, "repeats": 1, "ema": 0.97, "use_ema": True, "save_every": 10_000,
}  # fmt: skip
ROWS: dict[str, tuple[str, dict[str, Any]]] = {  # recipe, and what it changes
    "DynamicViT": ("dynamicvit", {"lr": 1e-2, "min_lr": 1e-3, "module_lr": 0.3}),
    "IA-RED²": ("iared2", {"module_lr": 0.4}),
    "Evo-ViT": ("evovit", {}),
    "EViT": ("evit", {}),
    "A-ViT": ("avit", {}),
    "ToMe": ("tome", {}),
    "BAT": ("bat", {}),
    "MCTF": ("mctf", {}),
    "ATM": ("atm", {"lr": 5e-5, "min_lr": 5e-6}),
    "ATM, without labels": ("atm", {"lr": 5e-5, "min_lr": 5e-6, "labels": False, "consistency": 3.0}),
}


def training_set(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not FASHION.exists():
        (batch,) = embedded.load_images("train").batches(500)
        assert batch.labels is not None
        return batch.images, batch.labels
    pixels, labels = read_split(FASHION, "train")
    drawn = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:count]
    return (pixels[drawn].float() / 255 - embedded.MEAN) / embedded.STD, labels[drawn]


def strength(name: str) -> Callable[[float], tm.Method]:
    """A method by its reduction strength in [0, 1]."""
    return {
        "DynamicViT": lambda s: tm.DynamicViT(1 - s),
        "IA-RED²": lambda s: tm.IARED2(threshold=s, initial_keep=0.5),
        "Evo-ViT": lambda s: tm.EvoViT(1 - s),
        "EViT": lambda s: tm.EViT(1 - s),
        "A-ViT": lambda s: tm.AViT(beta=40 - 140 * s),
        "ToMe": lambda s: tm.ToMe.at_strength(s, 12, 197),
        "BAT": lambda s: tm.BAT(1 - s),
        "MCTF": lambda s: tm.MCTF.at_strength(s, 12, 197),
    }[name]


def rows_at(budget: float) -> list[str]:
    return [name for name in ROWS if budget > min(BUDGETS) or name not in LATE]


def recipe_of(name: str, epochs: int, seed: int) -> Recipe:
    recipe, changes = ROWS[name]
    return replace(replace(RECIPES[recipe], **(COMMON | changes)).scaled(epochs / RECIPES[recipe].epochs), seed=seed)


@torch.inference_mode()
def top1(model: Any, method: tm.Method) -> float:
    """On the test images, in percent."""
    merged = tm.apply(shared_weights_copy(model), method)
    right = [(merged(batch.images).argmax(1) == batch.labels).float() for batch in embedded.load_images("test").batches(100)]
    return 100 * float(torch.cat(right).mean())


def run(job: tuple[str, str, float, int, int, int]) -> dict[str, Any]:
    """One training; its row is kept."""
    out, name, budget, seed, images, epochs = job
    torch.set_num_threads(1)
    folder = Path(out) / f"{name} {budget} {seed} {images} {epochs}"
    path = folder / "row.json"
    if path.exists():
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    x, labels = training_set(images)
    model = embedded.load_model()
    seen = as_images([(x[:64], labels[:64])], model)
    few = Reference(model, seen)  # to solve for the budget, and to calibrate: no label is read
    if name.startswith("ATM"):
        kept = Path(out) / f"calibrated {budget}.json"
        if not kept.exists():
            tm.save(tm.calibrate(model, seen, gmacs=budget, sample=64).method, kept)
        method = tm.load(kept)
    else:
        method = solve_for_cost(strength(name), budget, few)
    start = Path(out) / f"{name.partition(',')[0]} {budget} before.json"
    if not start.exists():
        start.write_text(json.dumps(top1(model, method)))
    trained = tm.finetune(model, [(x, labels)], method, folder, recipe_of(name, epochs, seed), cpu=True)
    losses = [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()[1:]]
    tm.remove(model.eval())
    if name in ("IA-RED²", "A-ViT"):
        free = Reference(model, seen)
        weights = {"weights": trained.weights} if name == "IA-RED²" else {}  # type: ignore[attr-defined]
        trained = solve_for_cost(lambda s: replace(strength(name)(s), **weights), budget, free)
    ratio = Reference(model, seen).ratio(trained)
    part = max(len(losses) // 5, 1)
    row = {
        "method": name, "budget": budget, "seed": seed, "gmacs": ratio,
        "before": json.loads(start.read_text()), "after": top1(model, trained),
        "first_loss": mean(losses[:part]), "last_loss": mean(losses[-part:]),
        "config": re.sub(r"weights='[^']*'(, )?", "", repr(trained)),
    }  # fmt: skip
    path.write_text(json.dumps(row))
    print(row, flush=True)
    return row


def main(out: str, images: int = 1500, epochs: int = 2) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    print(f"baseline: {top1(embedded.load_model(), tm.NoMerge()):.2f}", flush=True)
    jobs = [(out, name, budget, seed, images, epochs) for seed in SEEDS for budget in BUDGETS for name in rows_at(budget)]
    first = [job for job in jobs if job[1] == "ATM" and job[3] == 0]  # calibrate once
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        rows = [*pool.map(run, first), *pool.map(run, [job for job in jobs if job not in first])]
    with (Path(out) / "trained_methods.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (-row["budget"], [*ROWS].index(row["method"]), row["seed"])))
    for budget in BUDGETS:
        for name in rows_at(budget):
            own = [row for row in rows if (row["method"], row["budget"]) == (name, budget)]
            after = [row["after"] for row in own]
            print(
                f"| {name} | {mean(row['gmacs'] for row in own):.1%} | {own[0]['before']:.2f} | {mean(after):.2f} ± "
                f"{stdev(after):.2f} | {mean(r['first_loss'] for r in own):.3f} → {mean(r['last_loss'] for r in own):.3f} |"
            )


if __name__ == "__main__":
    main(sys.argv[1], *(int(arg) for arg in sys.argv[2:]))
