"""Merged, int8, and both: what they change and how fast they are, on photographs that nobody calibrated on.

    python experiments/int8_photos.py deit_tiny_patch16_224 WEIGHTS PHOTOS OUT [RUNTIME] [GMACS] [KEEP]      # 15 minutes

64 photographs calibrate: first the config (in a simulation of int8), then static r, then the ranges of int8. The files are
validated on the other photographs, and on the four quadrants of each of them, which double the resolution of what is
seen. KEEP (0.98): a fifth file, where layers go back to float until that fraction of the calibration images keeps its
prediction. With "dinov2" as the name: features of DINOv2 ViT-S/14 at 224 pixels. Times are interleaved, 15 rounds, relative
to the float file's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import torch
from dense_restore import dinov2
from PIL import Image

import tokenmerge as tm
from tokenmerge.deployment.int8 import Int8
from tokenmerge.deployment.model_file import ModelFile
from tokenmerge.deployment.runtimes import target_of
from tokenmerge.evaluation.bench import Variant, time_variants
from tokenmerge.evaluation.reference import FULL
from tokenmerge.utils.environment import cpu_features
from tokenmerge.utils.rounding import percent_down

SEEN, ROUNDS = 64, 15


def quadrants(unseen: tm.Images, photos: str, folder: Path) -> Path:
    """Files with a quarter of each photograph."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in unseen.numbers:
        path = Path(photos) / unseen.names[number]
        with Image.open(path) as photo:
            width, height = photo.size[0] // 2, photo.size[1] // 2
            for i in range(4):
                x, y = i % 2 * width, i // 2 * height
                target = folder / f"{path.stem}_{i}.png"
                if not target.exists():
                    photo.convert("RGB").crop((x, y, x + width, y + height)).save(target)
    return folder


@torch.inference_mode()
def main(
    name: str,
    weights: str,
    photos: str,
    out: str,
    runtime: str = "openvino",
    gmacs: float = 0.7,
    keep: float = 0.98,
) -> None:
    model = dinov2(weights) if name == "dinov2" else tm.load_model(name, weights)
    seen, unseen = tm.load_images(photos, model, size=224).split(SEEN, 0)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{gmacs}.json"
    if not config.exists():
        found = tm.calibrate(model, seen, gmacs=gmacs, sample=SEEN, int8=True, resume=folder).method
        tm.save(tm.freeze(model, seen, found).method, config)
    merged = tm.load(config)
    print(f"{runtime}: {merged!r}", flush=True)
    images = torch.cat([batch.images for batch in seen.batches(SEEN)])
    target = target_of(runtime)
    files: dict[str, ModelFile] = {}
    for label, method, int8 in (
        ("float", FULL, False),
        ("merged", merged, False),
        ("int8", FULL, Int8()),
        ("merged + int8", merged, Int8()),
        (f"merged + int8, keep {keep:g}", merged, Int8(keep=keep)),
    ):
        path = folder / f"{label.replace(' ', '')}{target.suffix}"
        try:
            made = tm.export(model, method, images, path, to=target.name, int8=int8)
        except ValueError as error:
            print(f"{label}: {error}", flush=True)
            continue
        files[label] = ModelFile(path)
        if made.int8 is not None:
            print(f"{label}: {made.int8.sentence}; given back: {', '.join(made.int8.given_back) or 'none'}", flush=True)
    more = tm.load_images(quadrants(unseen, photos, folder / "quadrants"), model, size=224)
    runs = {label: target.open_fixed(file.path, torch.get_num_threads()) for label, file in files.items()}
    pool = torch.cat([batch.images for batch in unseen.take(range(64)).batches(64)])
    speed: dict[str, list[str]] = {label: [] for label in files}
    for size in (1, 8, 32):
        chunks = [chunk for chunk in pool.split(size)[: max(2, 8 // size)] if len(chunk) == size]
        times = time_variants([Variant(key, FULL, run, runtime) for key, run in runs.items()], chunks, 2, ROUNDS)
        for label in files:
            speed[label].append(f"{median(a / b for a, b in zip(times['float'], times[label], strict=True)):.2f}")
    for kind, data in (("photographs", unseen), ("quadrants", more)):
        first, *others = files
        proof = tm.prove(model, data, files[first], others={label: files[label] for label in others})
        names = {"this config": first}
        for row in proof.results[1:]:
            label = names.get(row.name, row.name)
            assert row.agreement is not None
            print(
                f"| {runtime} | {row.images} {kind} | {label} | {row.ratio:.1%} | {row.file_mb:.1f} | {row.agreement:.1%} | "
                f"{percent_down(proof.bounds[row.name])} | {row.distance:.4f} | {' / '.join(speed[label])} |",
                flush=True,
            )
    print(f"CPU: {', '.join(cpu_features())}; {torch.get_num_threads()} threads, {ROUNDS} rounds")


if __name__ == "__main__":
    main(*sys.argv[1:6], *map(float, sys.argv[6:]))
