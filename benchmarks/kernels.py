"""The price of a merging layer: fused kernels against PyTorch, inside a model.

    python benchmarks/kernels.py [ROUNDS]

Random weights of three widths (the work does not depend on the values); static r in five layers, and ToMe in all. Prints
milliseconds per merging layer, interleaved medians, and the time of the first call.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import timm
import torch

import tokenmerge as tm
from tokenmerge.core.fused import use_fused
from tokenmerge.engine.forward import Run
from tokenmerge.engine.patch import shared_weights_copy
from tokenmerge.utils.environment import cpu_features

MODELS = {192: "deit_tiny_patch16_224", 384: "deit_small_patch16_224", 768: "deit_base_patch16_224"}
METHODS = {
    "static r, token metric, both weights": tm.ATM(
        counts=[0, 0, 20, 0, 30, 0, 30, 0, 20, 10, 0, 0], metric="tokens", size_weight=0.5, attention_weight=0.5
    ),
    "ToMe(r=8)": tm.ToMe(8),
}


@torch.inference_mode()
def main(rounds: int = 20) -> None:
    seconds: list[float] = []
    decide = Run._decide

    def timed(self: Run, *args: Any) -> Any:
        began = time.perf_counter()
        result = decide(self, *args)
        seconds.append(time.perf_counter() - began)
        return result

    Run._decide = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    model: Any = timm.create_model(MODELS[192]).eval()
    created = time.perf_counter()
    tm.apply(shared_weights_copy(model), METHODS["ToMe(r=8)"])(torch.randn(1, 3, 224, 224))
    print(f"first call of a merged model: {time.perf_counter() - created:.1f} s (the model itself: {created - began:.1f} s)")
    for width, name in MODELS.items():
        model = timm.create_model(name).eval()
        for label, method in METHODS.items():
            merged = tm.apply(shared_weights_copy(model), method)
            for batch in (1, 8, 32):
                x = torch.randn(batch, 3, 224, 224)
                found: dict[bool, list[float]] = {True: [], False: []}
                for turn in range((rounds if batch < 32 else rounds // 2) + 1):
                    for fused in (True, False):
                        seconds.clear()
                        with use_fused(fused):
                            merged(x)
                        if turn:
                            found[fused].append(sum(seconds) / len(seconds))
                fast, slow = (1e3 * median(found[fused]) for fused in (True, False))
                print(f"width {width}, batch {batch:2}, {label}: fused {fast:.2f} ms, PyTorch {slow:.2f} ms", flush=True)
    print(f"{rounds} rounds, {', '.join(cpu_features())}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main(*(int(arg) for arg in sys.argv[1:]))
