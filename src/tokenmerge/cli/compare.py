"""`tokenmerge compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import print_cells


@options.command
def compare(
    model: options.Model,
    images: options.ImagesArgument,
    out: Annotated[Path, typer.Option(help="Folder for the table and the plot; a run there resumes.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a method, {calibrated}, or a config as 'mine=ATM(…)'; repeatable. "
            "Default: {compared}, {calibrated}."
        ),
    ] = None,
    gmacs: Annotated[
        list[float] | None, typer.Option(help="Fractions of the GMACs; repeatable. Default: 0.9, 0.8, 0.7 and 0.6.")
    ] = None,
    time: Annotated[
        list[float] | None, typer.Option(help="Fractions of the time, solved for by measurement; repeatable.")
    ] = None,
    runtime: Annotated[str, typer.Option(help="Where time is measured: {runtimes}.")] = "eager",
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size at which time is measured [--batch-size].")] = None,
    labels: options.Labels = None,
    class_folders: options.ClassFolders = False,
    crop: options.Crop = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    limit: options.Limit = None,
    sample: Annotated[int, typer.Option(min=1, help="Images to calibrate with; all are measured on the others.")] = 64,
    refine_rounds: Annotated[int, typer.Option(min=0, help="Rounds of refinement of a calibrated config.")] = 6,
    measure: Annotated[int | None, typer.Option(min=1, help="Measure on this many of the others only.")] = None,
    timing_rounds: options.TimingRounds = 5,
    batch_size: options.BatchSize = 32,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """All methods at the same cost on the same images. The same command resumes an interrupted run."""
    with options.errors():
        from ..calibration.compare import compare as run
        from ..calibration.compare import comparison_figure
        from ..utils.files import write_csv
        from ..utils.optional import require_package
        from ..visualization.merge_maps import save_figure

        require_package("matplotlib", "plots")
        network, data = options.load(
            model, images, weights, num_classes, image_size, limit=limit, labels=labels, classes=class_folders, crop=crop
        )
        with options.progress_bars() as progress:
            cells = run(
                network,
                data,
                method,
                gmacs,
                times=time or (),
                runtime=runtime,
                batch=batch,
                timing_rounds=timing_rounds,
                sample=sample,
                measure=measure,
                rounds=refine_rounds,
                seed=seed,
                batch_size=batch_size,
                resume=out,
                progress=progress,
            )
        write_csv([cell.row() for cell in cells], out / "compared.csv")
        save_figure(comparison_figure(cells), out / "compared.png")
    print_cells(cells, f"{model}, {cells[0].images} images of {data.name}", as_json)
