"""`tokenmerge stress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import print_cells


@options.command
def stress(
    model: options.Model,
    images: options.ImagesArgument,
    out: Annotated[Path, typer.Option(help="Folder for the table; a run there resumes.")],
    method: Annotated[list[str] | None, typer.Option(help="Name of a method; repeatable. Default: {compared}.")] = None,
    min_agreement: options.MinAgreement = 0.99,
    tolerance: options.Tolerance = 0.1,
    labels: options.Labels = None,
    class_folders: options.ClassFolders = False,
    crop: options.Crop = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 32,
    as_json: options.Json = False,
) -> None:
    """The least GMACs without loss, per method: Table 1 of the paper.

    With labels, top-1 must not fall (see --tolerance); without, --min-agreement of the predictions must not change."""
    with options.errors():
        from ..calibration.compare import stress as run
        from ..utils.files import write_csv

        network, data = options.load(
            model, images, weights, num_classes, image_size, limit=limit, labels=labels, classes=class_folders, crop=crop
        )
        with options.progress_bars() as progress:
            cells = run(
                network,
                data,
                method,
                min_agreement=0.99 if min_agreement is None else min_agreement,
                tolerance=tolerance,
                sample=1,
                batch_size=batch_size,
                resume=out,
                progress=progress,
            )
        write_csv([cell.row() for cell in cells], out / "stress.csv")
    print_cells(cells, f"{model}, {cells[0].images} images of {data.name}: the least GMACs without loss", as_json)
