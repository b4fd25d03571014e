"""`tokenmerge tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .output import print_json, say


@options.command
def tune(
    model: options.Model,
    images: options.ImagesArgument,
    out: Annotated[Path, typer.Option(help="Folder for the CSV and the plot; the study is kept there, too.")],
    trials: Annotated[int, typer.Option(min=1, help="Finished trials that the study shall have.")] = 100,
    quality: Annotated[str | None, typer.Option(help="What to trade against GMACs: {qualities}.")] = None,
    labels: options.Labels = None,
    class_folders: options.ClassFolders = False,
    crop: options.Crop = None,
    split_layer: Annotated[bool, typer.Option("--split-layer", help="Search the splitting layer, too.")] = False,
    batch: Annotated[str, typer.Option(help="'mean', the paper's rule, or 'each', per image.")] = "mean",
    storage: Annotated[str | None, typer.Option(help="URL of a database that several machines share.")] = None,
    study: Annotated[str, typer.Option(help="Name of the study in the database.")] = "tokenmerge",
    log: options.Log = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    limit: options.Limit = None,
    sample: Annotated[int | None, typer.Option(min=2, help="Use only N images, drawn at random.")] = None,
    batch_size: options.BatchSize = 32,
    as_json: options.Json = False,
) -> None:
    """The paper's sweep over α, β and θ_min. The same command resumes; several machines may share one --storage."""
    with options.errors():
        from ..calibration.tune import tune as run
        from ..calibration.tune import tuning_figure
        from ..utils.files import write_csv
        from ..utils.logging import make_logger, no_log
        from ..utils.optional import require_package
        from ..visualization.merge_maps import save_figure

        require_package("matplotlib", "plots")
        logger = no_log if log is None else make_logger(log)
        network, data = options.load(
            model, images, weights, num_classes, image_size, limit=limit, labels=labels, classes=class_folders, crop=crop
        )
        out.mkdir(parents=True, exist_ok=True)
        with options.progress_bars() as progress:
            rows = run(
                network,
                data,
                trials=trials,
                quality=quality,  # type: ignore[arg-type]
                split_layer=split_layer,
                batch=batch,  # type: ignore[arg-type]
                storage=storage or f"sqlite:///{out / 'study.db'}",
                study=study,
                sample=sample,
                batch_size=batch_size,
                log=logger,
                progress=progress,
            )
        write_csv([row.row() for row in rows], out / "tuned.csv")
        shown: Any = quality or ("agreement" if rows[0].accuracy is None else "accuracy")
        save_figure(tuning_figure(rows, shown), out / "tuned.png")
    if as_json:
        print_json([row.row() for row in rows])
        return
    best = [row for row in rows if row.pareto]
    say(f"{len(rows)} trials, {len(best)} on the Pareto front; wrote {out}/tuned.csv, {out}/tuned.png")
    for row in best:
        say(
            f"ATM({row.alpha}, {row.beta}, {row.theta_min}, split_layer={row.split_layer}): {row.ratio:.1%} of the GMACs, "
            f"agreement {row.agreement or 0:.2%}, distance {row.distance:.4f}"
        )
