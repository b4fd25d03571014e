"""What a fixed batch size is worth in OpenVINO: the same file compiled for any batch, and for the batch that it gets.

    python benchmarks/openvino_shapes.py deit_tiny_patch16_224 WEIGHTS PHOTOS [ROUNDS]

Prints medians of milliseconds per batch for the baseline, ToMe and a static r in three layers, interleaved in one run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

import tokenmerge as tm
from tokenmerge.deployment.graph import ExportWrapper, export_program
from tokenmerge.deployment.targets import find_target
from tokenmerge.engine.patch import shared_weights_copy
from tokenmerge.evaluation.bench import Variant, time_variants
from tokenmerge.evaluation.reference import FULL
from tokenmerge.utils.environment import cpu_features

METHODS = {
    "baseline": None,
    "ToMe(r=8)": tm.ToMe(8),
    "static r in 3 layers": tm.ATM(counts=[0, 0, 0, 30, 0, 40, 0, 30, 0, 0, 0, 0], metric="tokens", size_weight=0.5),
}


@torch.inference_mode()
def main(name: str, weights: str, photos: str, rounds: int = 15) -> None:
    model = tm.load_model(name, weights)
    pool = torch.cat([batch.images for batch in tm.load_images(photos, model, limit=64).batches(32)])
    target, threads = find_target("openvino"), torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        variants = []
        for number, (label, method) in enumerate(METHODS.items()):
            one = shared_weights_copy(model)
            path = Path(folder) / f"{number}.xml"
            target.write(export_program(ExportWrapper(one if method is None else tm.apply(one, method)), pool[:4]), path)
            for batch, opened in (("any", target.open), ("fixed", target.open_fixed)):
                variants.append(Variant(f"{label}, {batch} batch", method or FULL, opened(path, threads), "openvino"))
        for size in (1, 8, 32):
            chunks = [chunk for chunk in pool.split(size)[: max(2, 8 // size)] if len(chunk) == size]
            times = time_variants(variants, chunks, threads, rounds)
            for key, found in times.items():
                print(f"batch {size:2} {key:34} {1e3 * median(found):7.2f} ms", flush=True)
    print(f"{rounds} rounds, {', '.join(cpu_features())}, {threads} threads")


if __name__ == "__main__":
    main(*sys.argv[1:4], *(int(arg) for arg in sys.argv[4:]))
