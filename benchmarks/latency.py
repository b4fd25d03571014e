"""How well the latency model predicts: random configs that it was not fitted on, timed end to end.

    python benchmarks/latency.py deit_tiny_patch16_224 WEIGHTS PHOTOS [RUNTIME] [CONFIGS] [BATCH ...]

Each config merges a random number of tokens in one to eight random layers. Prints predicted and measured time as fractions
of the baseline's, and the median and the largest error.
"""

from __future__ import annotations

import random
import sys
from statistics import median

import torch

import tokenmerge as tm
from tokenmerge.calibration.candidates import candidates_for_time
from tokenmerge.calibration.clock import Clock
from tokenmerge.engine.patch import shared_weights_copy
from tokenmerge.evaluation.reference import Reference
from tokenmerge.utils.environment import cpu_features


def random_pairs(rng: random.Random, layers: int, depth: int, patches: int) -> list[float]:
    """Pairs per layer: 15 to 75 % of the patches in up to eight layers, at most 45 % of those that are left in each."""
    merging = rng.sample(range(layers), rng.randint(1, min(8, layers)))
    weights = [rng.random() if layer in merging else 0.0 for layer in range(depth)]
    total = rng.uniform(0.15, 0.75) * patches
    left, pairs = float(patches), []
    for weight in weights:
        pairs.append(min(total * weight / sum(weights), 0.45 * left))
        left -= pairs[-1]
    return pairs


@torch.inference_mode()
def main(
    name: str, weights: str, photos: str, runtime: str = "eager", configs: int = 20, batches: tuple[int, ...] = (1, 8)
) -> None:
    model = tm.load_model(name, weights)
    reference = Reference(model, tm.load_images(photos, model, limit=32))
    candidates = candidates_for_time("ATM", reference.depth, adaptive=runtime == "eager")
    shared = Clock(model, torch.cat(reference.batches), runtime=runtime)
    for batch in batches:
        clock = shared.at_batch(batch)
        latency = clock.latency(reference, candidates)
        rng = random.Random(1)
        errors = []
        for number in range(configs):
            candidate = candidates[number % len(candidates)]
            pairs = random_pairs(rng, reference.merging_layers, reference.depth, reference.tokens - reference.prefix)
            _, thresholds = candidate.measure(reference, pairs)
            method = candidate.method(pairs, thresholds, reference.tokens)
            with tm.trace(merged := tm.apply(shared_weights_copy(model), method), detail=False) as t:
                merged(torch.cat(clock.chunks))  # what is timed
            predicted = latency.ratio([float(layer.double().mean()) for layer in t.tokens], repr(candidate))
            measured = clock.time_ratio(method)
            errors.append(predicted / measured - 1)
            print(f"predicted {predicted:.3f}, measured {measured:.3f}, {errors[-1]:+.1%}: {method!r}", flush=True)
        middle, largest = median(map(abs, errors)), max(map(abs, errors))
        print(f"{runtime}, batch {batch}, {configs} configs: median error {middle:.1%}, largest {largest:.1%}", flush=True)
    print(f"CPU: {', '.join(cpu_features())}; {torch.get_num_threads()} threads")


if __name__ == "__main__":
    number, *sizes = [int(arg) for arg in sys.argv[5:]] or [20]
    main(*sys.argv[1:5], configs=number, batches=tuple(sizes) or (1, 8))
