"""`tokenmerge stress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    BatchSize,
    ImagesArgument,
    ImageSize,
    Json,
    Labels,
    Limit,
    MinAgreement,
    Model,
    NumClasses,
    Weights,
    command,
    errors,
    load,
    progress_bars,
)
from .output import print_cells


@command
def stress(
    model: Model,
    images: ImagesArgument,
    out: Annotated[Path, typer.Option(help="Folder for the table; a run there resumes.")],
    method: Annotated[list[str] | None, typer.Option(help="Name of a method; repeatable. Default: {compared}.")] = None,
    min_agreement: MinAgreement = 0.99,
    labels: Labels = None,
    weights: Weights = None,
    num_classes: NumClasses = None,
    image_size: ImageSize = None,
    limit: Limit = None,
    batch_size: BatchSize = 32,
    as_json: Json = False,
) -> None:
    """The least GMACs without loss, per method: Table 1 of the paper.

    With labels, top-1 must not fall; without, --min-agreement of the predictions must not change."""
    with errors():
        from ..calibration.compare import stress as run
        from ..utils.files import write_csv

        network, data = load(model, images, weights, num_classes, image_size, limit=limit, labels=labels)
        with progress_bars() as progress:
            cells = run(
                network,
                data,
                method,
                min_agreement=0.99 if min_agreement is None else min_agreement,
                sample=1,
                batch_size=batch_size,
                resume=out,
                progress=progress,
            )
        write_csv([cell.row() for cell in cells], out / "stress.csv")
    print_cells(cells, f"{model}, {cells[0].images} images of {data.name}: the least GMACs without loss", as_json)
