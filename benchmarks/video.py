"""What merging saves in a video model: VideoMAE-B with random weights, one clip of 16 frames, 1,568 tokens.

    python benchmarks/video.py [ROUNDS]

Random weights cost what trained ones do, but say nothing about quality. Prints tokens, GMACs and time for ToMe, which merges
in every layer, and static r in three layers, at 70 and 50 % of the GMACs; interleaved medians.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch
from transformers import VideoMAEConfig, VideoMAEForVideoClassification

import tokenmerge as tm
from tokenmerge.engine.patch import shared_weights_copy
from tokenmerge.evaluation.bench import Variant, time_variants
from tokenmerge.evaluation.reference import FULL
from tokenmerge.utils.bisect import bisect_int
from tokenmerge.utils.environment import cpu_features

LAYERS = (1, 4, 7)  # of static r


def counts(total: int, depth: int) -> list[int]:
    return [total // len(LAYERS) if layer in LAYERS else 0 for layer in range(1, depth + 1)]


@torch.inference_mode()
def main(rounds: int = 7) -> None:
    torch.manual_seed(0)
    model = VideoMAEForVideoClassification(VideoMAEConfig()).eval()
    clip = torch.randn(1, 16, 3, 224, 224)
    depth = model.config.num_hidden_layers

    def traced(method: tm.Method) -> tm.Trace:
        merged = tm.apply(shared_weights_copy(model), method)
        with tm.trace(merged, detail=False) as t:
            merged(clip)
        return t

    def at(ratio: float, make: Callable[[int], tm.Method], most: int) -> tm.Method:
        """The config whose GMACs are nearest to this fraction of the baseline's."""
        low, high = bisect_int(lambda r: traced(make(r)).cost().ratio > ratio, 0, most)
        return min((make(low), make(high)), key=lambda m: abs(traced(m).cost().ratio - ratio))

    methods: dict[str, tm.Method | None] = {"baseline": None}
    for ratio in (0.7, 0.5):
        methods[f"ToMe, {ratio:.0%}"] = at(ratio, tm.ToMe, 120)
        methods[f"static r in 3 layers, {ratio:.0%}"] = at(ratio, lambda r: tm.ATM(counts=counts(r, depth)), 1300)
    variants = []
    for name, method in methods.items():
        copy = shared_weights_copy(model)
        variants.append(Variant(name, method or FULL, copy if method is None else tm.apply(copy, method), "eager"))
    times = time_variants(variants, (clip,), torch.get_num_threads(), rounds)
    print(f"CPU: {', '.join(cpu_features())}; {torch.get_num_threads()} threads; {rounds} rounds")
    for name, method in methods.items():
        t = traced(method or FULL)
        speedup = median(base / own for base, own in zip(times["baseline"], times[name], strict=True))
        tokens = [int(layer[0]) for layer in t.tokens]
        print(
            f"| {name} | {method!r} | {tokens[0]} … {tokens[-1]} | {t.cost().gmacs:.1f} | {1e3 * median(times[name]):.0f} | "
            f"{speedup:.2f} | {speedup * t.cost().ratio:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
