"""`tokenmerge analyze`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import figures_table, print_json, say, stdout


@options.command
def analyze(
    model: options.Model,
    images: options.ImagesArgument,
    out: Annotated[Path | None, typer.Option(help="Folder for the CSV and the plot.")] = None,
    theta: Annotated[
        list[float] | None, typer.Option(help="Thresholds; repeatable. Default: 0.80, 0.85, 0.90 and 0.95.")
    ] = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    sample: options.Sample = 64,
    batch_size: options.BatchSize = 32,
    as_json: options.Json = False,
) -> None:
    """What merging in one layer alone changes, per layer and threshold: Fig. 2 of the paper."""
    with options.errors():
        from ..evaluation.analyze import THETAS, impact_figure
        from ..evaluation.analyze import analyze as run
        from ..utils.files import write_csv
        from ..utils.optional import require_package
        from ..visualization.merge_maps import save_figure

        if out is not None:
            require_package("matplotlib", "plots")
        network, data = options.load(model, images, weights, num_classes, image_size)
        thetas = theta or THETAS
        with options.progress_bars() as progress:
            impacts = run(network, data, thetas=thetas, sample=sample, batch_size=batch_size, progress=progress)
        rows = [impact.row() for impact in impacts]
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_csv(rows, out / "impact.csv")
            save_figure(impact_figure(impacts), out / "impact.png")
    if as_json:
        print_json(rows)
        return
    say(f"{model}: cosine distance after merging in one layer only")
    table = figures_table(None, [f"θ {value:.2f}" for value in thetas], first="layer", justify="right")
    for layer in sorted({impact.layer for impact in impacts}):
        table.add_row(str(layer), *(f"{impact.distance:.5f}" for impact in impacts if impact.layer == layer))
    stdout.print(table)
