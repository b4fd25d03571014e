"""How fast is what calibration ships for budgets in GMACs, at batches of 1, 8 and 32?

    python benchmarks/shipped.py deit_tiny_patch16_224 WEIGHTS PHOTOS FOLDER [RUNTIME] [ROUNDS] [SEEN]

Calibrates on SEEN photographs (64) for three budgets (kept in FOLDER), and times every config in one run with the baseline,
ToMe and, in eager, the truncated sequence of ceiling.py, where merging costs nothing. Other runtimes run static r, as
`freeze` makes it. Prints speed-up, efficiency, the fraction of the time spent on matching and merging, and the CLS distance
on 136 other photographs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ceiling import cut

import tokenmerge as tm
from tokenmerge.calibration.freeze import freeze
from tokenmerge.deployment.runtimes import EAGER, prepare
from tokenmerge.engine.patch import shared_weights_copy
from tokenmerge.evaluation.bench import Variant, time_variants
from tokenmerge.evaluation.reference import FULL, Reference
from tokenmerge.utils.environment import cpu_features

BUDGETS = (0.85, 0.7, 0.55)
CEILING = "gmacs=0.7"  # compared with the truncated sequence


def configs(model: Any, seen: Any, folder: Path, static: bool) -> dict[str, tm.Method]:
    """The config for each budget; calibrated once, then read from the folder."""
    found = {}
    for budget in BUDGETS:
        path = folder / f"{budget}{'_static' if static else ''}.json"
        if not path.exists() and static:
            method = tm.load(folder / f"{budget}.json")
            tm.save(freeze(model, seen, method).method, path)
        elif not path.exists():
            tm.save(tm.calibrate(model, seen, gmacs=budget, sample=seen.size, resume=folder).method, path)
        found[f"gmacs={budget}"] = tm.load(path)
        print(f"gmacs={budget}: {found[f'gmacs={budget}']!r}", flush=True)
    return found


@torch.inference_mode()
def main(
    name: str, weights: str, photos: str, folder: str, runtime: str = EAGER, rounds: int = 15, seen_images: int = 64
) -> None:
    model = tm.load_model(name, weights)
    seen, unseen = tm.load_images(photos, model, limit=136 + seen_images).split(seen_images, 0)
    Path(folder).mkdir(parents=True, exist_ok=True)
    methods = configs(model, seen, Path(folder), static=runtime != EAGER)
    methods |= {"ToMe(r=8)": tm.ToMe(8), "ToMe(r=13)": tm.ToMe(13)}
    reference = Reference(model, unseen)
    distances = {key: reference.measure(method).distance for key, method in methods.items()}
    pool = torch.cat([batch.images for batch in unseen.take(range(64)).batches(32)])
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as exports:
        models = {"baseline": shared_weights_copy(model)}
        models |= {key: tm.apply(shared_weights_copy(model), method) for key, method in methods.items()}
        run = {key: prepare(one, runtime, pool[:4], Path(exports), threads) for key, one in models.items()}
        for batch in (1, 8, 32):
            chunks = [chunk for chunk in pool.split(batch)[: max(2, 8 // batch)] if len(chunk) == batch]
            variants = [Variant(key, methods.get(key, FULL), one, runtime) for key, one in run.items()]
            traces = {}
            for key in methods:
                with tm.trace(models[key], detail=False) as traces[key]:
                    for chunk in chunks:
                        models[key](chunk)
                if runtime == EAGER and key == CEILING:
                    kept = [round(float(layer.double().mean())) for layer in traces[key].tokens]
                    variants.append(
                        Variant(f"{key}, at no cost", FULL, lambda x, kept=kept: cut(model, x, kept), runtime)  # type: ignore[misc]
                    )
            times = time_variants(variants, chunks, threads, rounds)
            for key, trace in traces.items():
                ratio = trace.cost("macs").ratio

                def speedup(key: str, times: dict[str, list[float]] = times) -> float:
                    return median(base / own for base, own in zip(times["baseline"], times[key], strict=True))

                line = f"batch {batch:2} {key:12} {ratio:6.1%} of the GMACs, distance {distances[key]:.4f}, "
                line += f"speed-up {speedup(key):.3f}, efficiency {speedup(key) * ratio:.3f}"
                if runtime == EAGER:
                    share = sum(call.seconds for call in trace.calls) / len(chunks) / median(times[key])
                    line += f", merging {share:.1%} of the time"
                if runtime == EAGER and key == CEILING:
                    free = speedup(f"{key}, at no cost")
                    line += f"; at no cost {free:.3f}, {free * ratio:.3f}"
                print(line, flush=True)
    print(f"{runtime}, {rounds} rounds, {', '.join(cpu_features())}, {threads} threads")


if __name__ == "__main__":
    main(*sys.argv[1:6], *(int(arg) for arg in sys.argv[6:]))
