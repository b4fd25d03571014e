"""`tokenmerge prove`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .output import print_proof

if TYPE_CHECKING:
    from ..deployment.model_file import Config


@options.command
def prove(
    model: options.Model,
    images: options.ImagesArgument,
    method: options.Methods = None,
    file: Annotated[list[Path] | None, typer.Option(help="A file that `tokenmerge export` wrote; repeatable.")] = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    zero_shot: options.ZeroShot = None,
    labels: options.Labels = None,
    class_folders: options.ClassFolders = False,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 32,
    confidence: options.Confidence = 0.95,
    as_json: options.Json = False,
) -> None:
    """What configs and exported files change on images that they were not calibrated on, with bounds for all such images.

    The first of them has a bound of its own; those of all hold together."""
    with options.errors():
        from ..deployment.model_file import ModelFile
        from ..engine.features import counted_part
        from ..evaluation.prove import prove as run
        from ..methods import load_or_parse

        configs: dict[str, Config] = {text: load_or_parse(text) for text in method or []}
        configs |= {str(path): ModelFile(path) for path in file or []}
        if not configs:
            raise ValueError("give a config (--method) or an exported file (--file) to validate")
        network, data = options.load(
            model, images, weights, num_classes, image_size, zero_shot=zero_shot, limit=limit, labels=labels,
            classes=class_folders,
        )  # fmt: skip
        (_, first), *others = configs.items()
        with options.progress_bars() as progress:
            proof = run(
                network,
                data,
                first,
                others=dict(others),
                batch_size=batch_size,
                confidence=confidence,
                progress=progress,
            )
    print_proof(proof, f"{data.name}, {proof.baseline.images} images{counted_part(network)}", as_json)
