"""What patching alone costs: a model with NoMerge against the same model unpatched.

    python benchmarks/overhead.py deit_tiny_patch16_224 WEIGHTS PHOTOS [TURNS]      # a quarter of the turns at batch 32

Interleaved in random order; the median over the turns of the ratio within a turn, and its quartiles. The second unpatched
copy shows the noise of the machine.
"""

from __future__ import annotations

import random
import sys
import time
from statistics import median, quantiles

import torch

import tokenmerge as tm
from tokenmerge.engine.patch import shared_weights_copy
from tokenmerge.utils.environment import cpu_features, describe_hardware


@torch.inference_mode()
def main(name: str, weights: str, photos: str, turns: int = 200) -> None:
    model = tm.load_model(name, weights)
    variants = {
        "unpatched": shared_weights_copy(model),
        "unpatched again": shared_weights_copy(model),
        "NoMerge(last_layer='full')": tm.apply(shared_weights_copy(model), tm.NoMerge(last_layer="full")),
        "NoMerge()": tm.apply(shared_weights_copy(model), tm.NoMerge()),
    }
    print(f"{name}, {describe_hardware()} ({', '.join(cpu_features())}), {torch.get_num_threads()} threads")
    for batch, times_each in ((1, turns), (8, turns), (32, turns // 4)):
        x = next(tm.load_images(photos, model, limit=batch).batches(batch)).images
        times: dict[str, list[float]] = {key: [] for key in variants}
        for turn in range(times_each + 5):
            for key in random.Random(turn).sample(list(variants), len(variants)):
                start = time.perf_counter()
                variants[key](x)
                if turn >= 5:
                    times[key].append(time.perf_counter() - start)
        for key in variants:
            ratios = [own / base for own, base in zip(times[key], times["unpatched"], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            milliseconds = 1e3 * median(times[key])
            print(
                f"batch {batch:2}  {key:28} {milliseconds:8.2f} ms   time ratio {median(ratios):.3f} [{low:.3f}, {high:.3f}]"
            )


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
