"""Calibrated ATM in the time that ToMe takes, at r = 8 and r = 13: how far are the features from the baseline's?

    python benchmarks/equal_time.py deit_tiny_patch16_224 WEIGHTS PHOTOS FOLDER [RUNTIME] [BATCH ...]

For every batch size, ToMe is timed first, and `calibrate(time=…)` gets that time as its goal, with 32 photographs. Then the
baseline, both ToMe and both calibrated configs are timed again, interleaved, on other photographs. The CLS distance is
measured on those, too. FOLDER keeps trials and timings: the same call resumes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import torch

import tokenmerge as tm
from tokenmerge.calibration.clock import Clock
from tokenmerge.deployment.runtimes import EAGER
from tokenmerge.evaluation.bench import Variant, time_variants
from tokenmerge.evaluation.reference import FULL, Reference
from tokenmerge.utils.environment import cpu_features

RATES = (8, 13)
SEEN, UNSEEN, ROUNDS = 32, 168, 21


def describe(method: tm.Method) -> str:
    assert isinstance(method, tm.ATM)
    if method.counts is not None:
        return f"static r in {sum(count > 0 for count in method.counts)} layers"
    return f"thresholds in {sum(threshold < 1 for threshold in method.thresholds or ())} layers"


@torch.inference_mode()
def main(
    name: str, weights: str, photos: str, folder: str, runtime: str = EAGER, batches: tuple[int, ...] = (1, 8, 32)
) -> None:
    model = tm.load_model(name, weights)
    seen, unseen = tm.load_images(photos, model, limit=SEEN + UNSEEN).split(SEEN, 0)
    reference = Reference(model, unseen)
    tomes = {rate: tm.ToMe(rate) for rate in RATES}
    found = {method: reference.measure(method) for method in tomes.values()}
    shared = Clock.on(model, unseen.take(range(64)), 32, runtime=runtime)
    for batch in batches:
        kept = Path(folder) / f"{runtime}-{batch}"
        clock = Clock.on(model, seen, 32, runtime=runtime, batch=batch, folder=kept / "tome")
        configs: dict[int, tm.Method] = {}
        for rate, tome in tomes.items():
            time = clock.time_ratio(tome)
            print(f"{runtime}, batch {batch}: ToMe(r={rate}) takes {time:.3f} of the baseline's time", flush=True)
            path = kept / f"{rate}.json"
            if not path.exists():
                goal = {"time": min(time, 1.0), "runtime": runtime, "batch": batch}
                result = tm.calibrate(model, seen, sample=SEEN, rounds=3, resume=kept, **goal)
                print(f"  {result.sentence}\n  {result.method!r}", flush=True)
                tm.save(result.method, path)
            configs[rate] = tm.load(path)
            found[configs[rate]] = reference.measure(configs[rate])
        clock = shared.at_batch(batch)
        methods = {
            "baseline": None,
            **{f"ToMe {r}": m for r, m in tomes.items()},
            **{f"ATM {r}": m for r, m in configs.items()},
        }
        variants = [Variant(key, method or FULL, clock.prepared(method), runtime) for key, method in methods.items()]
        times = time_variants(variants, clock.chunks, clock.threads, ROUNDS)
        for rate in RATES:
            mine, theirs = found[configs[rate]], found[tomes[rate]]
            speed = {
                key: median(base / own for base, own in zip(times["baseline"], times[key], strict=True))
                for key in (f"ToMe {rate}", f"ATM {rate}")
            }
            print(
                f"| {runtime} | {batch} | ToMe, r = {rate} | {speed[f'ToMe {rate}']:.2f} | {speed[f'ATM {rate}']:.2f} | "
                f"{theirs.distance:.4f} | {mine.distance:.4f} | {mine.distance / theirs.distance:.2f} | "
                f"{describe(configs[rate])}, {mine.ratio:.0%} of the GMACs (ToMe {theirs.ratio:.0%}) |",
                flush=True,
            )
    print(f"CPU: {', '.join(cpu_features())}; {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main(*sys.argv[1:6], tuple(int(arg) for arg in sys.argv[6:]) or (1, 8, 32))
