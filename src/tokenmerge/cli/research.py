"""The commands of who compares methods: the paper's tables and figures, and fair ones of our own."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..printing import print_cells, stdout
from .common import (
    BatchSize,
    Classes,
    Folder,
    Json,
    Labels,
    Limit,
    Model,
    Sample,
    Size,
    Weights,
    app,
    errors,
    load,
    progress_bar,
    status,
    stderr,
)

Methods = Annotated[
    list[str] | None,
    typer.Option(
        help="Name of a method, 'calibrated ATM' or 'calibrated DiffRate', or a setting as 'mine=ATM(…)'; repeatable. "
        "All rivals if not given."
    ),
]
RIVALS = ["ATM", "ToMe", "EViT", "MCTF", "ZeroTPrune", "ATS", "ToFu", "PPT", "DiffRate", "PiToMe", "RandomMerge"]


@app.command()
def compare(
    model: Model,
    images: Folder,
    out: Annotated[Path, typer.Option(help="Folder for the table and the plot; finished cells are kept there, too.")],
    method: Methods = None,
    gmacs: Annotated[
        list[float] | None, typer.Option(help="Fractions of the GMACs; repeatable. 0.9, 0.8, 0.7 and 0.6 if not given.")
    ] = None,
    labels: Labels = None,
    weights: Weights = None,
    num_classes: Classes = None,
    image_size: Size = None,
    limit: Limit = None,
    sample: Annotated[int, typer.Option(min=1, help="Images to calibrate with; all are measured on the others.")] = 64,
    rounds: Annotated[int, typer.Option(min=0, help="Of refinement, where a setting is calibrated.")] = 6,
    measure: Annotated[int | None, typer.Option(min=1, help="Measure on so many of the others only.")] = None,
    speed_rounds: Annotated[int, typer.Option(min=0, help="Turns to time each setting in; 0: do not.")] = 5,
    batch_size: BatchSize = 32,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """All methods at the same cost on the same images. Run it again to go on where it was stopped."""
    with errors():
        from ..comparing import compare as run
        from ..comparing import plot_comparison
        from ..extras import need
        from ..files import write_csv

        need("matplotlib", "plots")
        network, data = load(model, images, weights, num_classes, image_size, limit, labels)
        names, budgets = method or [*RIVALS, "calibrated ATM", "calibrated DiffRate"], gmacs or [0.9, 0.8, 0.7, 0.6]
        with status() as say:
            options: dict[str, Any] = {"sample": sample, "measure": measure, "rounds": rounds, "seed": seed}
            options |= {"batch_size": batch_size, "folder": out, "progress": say}
            cells = run(network, data, names, budgets, speed_rounds=speed_rounds, **options)
        write_csv([cell.row() for cell in cells], out / "compared.csv")
        plot_comparison(cells, out / "compared.png")
    print_cells(cells, f"{model}, {cells[0].images} images of {data.name}", as_json)


@app.command()
def stress(
    model: Model,
    images: Folder,
    out: Annotated[Path, typer.Option(help="Folder for the table; finished cells are kept there, too.")],
    method: Annotated[list[str] | None, typer.Option(help="Name of a method; repeatable. All rivals if not given.")] = None,
    keep: Annotated[float, typer.Option(min=0, max=1, help="Answers to keep, where there are no labels.")] = 0.99,
    labels: Labels = None,
    weights: Weights = None,
    num_classes: Classes = None,
    image_size: Size = None,
    limit: Limit = None,
    batch_size: BatchSize = 32,
    as_json: Json = False,
) -> None:
    """The least GMACs without loss, per method: Table 1 of the paper.

    With labels, top-1 must not fall; without, answers must not change."""
    with errors():
        from ..comparing import stress as run
        from ..files import write_csv

        network, data = load(model, images, weights, num_classes, image_size, limit, labels)
        with status() as say:
            options = {"sample": 1, "batch_size": batch_size, "folder": out, "progress": say}
            cells = run(network, data, method or RIVALS, keep=keep, **options)
        write_csv([cell.row() for cell in cells], out / "stress.csv")
    print_cells(cells, f"{model}, {cells[0].images} images of {data.name}: the least GMACs without loss", as_json)


@app.command()
def tune(
    model: Model,
    images: Folder,
    out: Annotated[Path, typer.Option(help="Folder for the CSV and the plot; the study is kept there, too.")],
    trials: Annotated[int, typer.Option(min=1, help="Finished trials that the study shall have.")] = 100,
    quality: Annotated[str | None, typer.Option(help="accuracy, agreement or distance.")] = None,
    labels: Labels = None,
    split_layer: Annotated[bool, typer.Option("--split-layer", help="Search the splitting layer, too.")] = False,
    batch: Annotated[str, typer.Option(help="'mean', the paper's rule, or 'each'.")] = "mean",
    storage: Annotated[str | None, typer.Option(help="URL of a database that several machines share.")] = None,
    study: Annotated[str, typer.Option(help="Name of the study in the database.")] = "tokenmerge",
    log: Annotated[str | None, typer.Option(help="tensorboard:FOLDER or wandb:PROJECT.")] = None,
    weights: Weights = None,
    num_classes: Classes = None,
    image_size: Size = None,
    limit: Limit = None,
    sample: Annotated[int | None, typer.Option(min=2, help="Only so many images, drawn at random.")] = None,
    batch_size: BatchSize = 32,
    as_json: Json = False,
) -> None:
    """The paper's sweep over α, β and θ_min. Run it again to go on; run it on several machines with one --storage."""
    with errors():
        from ..extras import need
        from ..files import write_csv
        from ..following import logger
        from ..tuning import tune as run
        from ..tuning import tuning_figure
        from ..visualization import save_figure

        need("matplotlib", "plots")
        options: dict[str, Any] = {"quality": quality, "batch": batch, "split_layer": split_layer, "study": study}
        options["sample"] = sample
        if log is not None:
            options["log"] = logger(log)
        network, data = load(model, images, weights, num_classes, image_size, limit, labels)
        out.mkdir(parents=True, exist_ok=True)
        storage = storage or f"sqlite:///{out / 'study.db'}"
        with progress_bar(trials, "trials") as progress:
            rows = run(network, data, trials=trials, storage=storage, batch_size=batch_size, progress=progress, **options)
        write_csv([asdict(row) for row in rows], out / "tuned.csv")
        shown: Any = quality or ("agreement" if rows[0].accuracy is None else "accuracy")
        save_figure(tuning_figure(rows, shown), out / "tuned.png")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    best = [row for row in rows if row.pareto]
    stdout.print(f"{len(rows)} trials, {len(best)} of them not beaten by any other; wrote {out}/tuned.csv, {out}/tuned.png")
    for row in best:
        stdout.print(
            f"ATM({row.alpha}, {row.beta}, {row.theta_min}, split_layer={row.split_layer}): {row.ratio:.1%} of the GMACs, "
            f"agreement {row.agreement:.2%}, distance {row.distance:.4f}",
            highlight=False,
            soft_wrap=True,
        )


@app.command()
def analyze(
    model: Model,
    images: Folder,
    out: Annotated[Path | None, typer.Option(help="Folder for the CSV and the plot.")] = None,
    theta: Annotated[list[float] | None, typer.Option(help="Repeatable; 0.80, 0.85, 0.90 and 0.95 if not given.")] = None,
    weights: Weights = None,
    num_classes: Classes = None,
    image_size: Size = None,
    sample: Sample = 64,
    batch_size: BatchSize = 32,
    as_json: Json = False,
) -> None:
    """What merging in one layer alone does to the answer, per layer and threshold: Fig. 2 of the paper."""
    with errors():
        from ..analysis import analyze as run
        from ..analysis import impact_figure
        from ..extras import need
        from ..files import write_csv
        from ..visualization import save_figure

        if out is not None:
            need("matplotlib", "plots")
        network, data = load(model, images, weights, num_classes, image_size)
        thetas = theta or [0.80, 0.85, 0.90, 0.95]
        with progress_bar(len(thetas) * len(network.blocks), "trials") as progress:
            rows = run(network, data, thetas=thetas, sample=sample, batch_size=batch_size, progress=progress)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_csv([asdict(row) for row in rows], out / "impact.csv")
            save_figure(impact_figure(rows), out / "impact.png")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table(title=f"{model}: cosine distance after merging in one layer only", title_justify="left", box=SIMPLE_HEAD)
    for column in ("layer", *(f"θ {value:.2f}" for value in thetas)):
        table.add_column(column, justify="right")
    for layer in sorted({row.layer for row in rows}):
        table.add_row(str(layer), *(f"{row.distance:.5f}" for row in rows if row.layer == layer))
    stdout.print(table)


@app.command()
def reproduce(
    names: Annotated[list[str], typer.Argument(help="table1, fig2, …; 'all'; 'list' says what there is.")],
    out: Annotated[
        Path, typer.Option(help="Folder for CSV, plot and page of each; finished batches are kept there, too.")
    ] = Path("reproduced"),
    data: Annotated[str | None, typer.Option(help="ImageNet's validation images, or others; as for evaluate.")] = None,
    labels: Labels = None,
    class_folders: Annotated[bool, typer.Option("--class-folders", help="Folders below are classes, by name.")] = False,
    weights_dir: Annotated[Path | None, typer.Option(help="Folder with the official weights of the paper's models.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Instead of the paper's models, also 'embedded'; repeatable.")
    ] = None,
    subset: Annotated[int | None, typer.Option(min=4, help="Only so many images, drawn at random.")] = None,
    train_data: Annotated[str | None, typer.Option(help="The training set, for tables 3 and A2.")] = None,
    train_labels: Annotated[Path | None, typer.Option(help="As --labels, of the training set; else class folders.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Of fine-tuning.")] = 30,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Else the paper's: 1024, and 100 for T2T-ViT.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, …")] = "cpu",
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode.")] = 0,
) -> None:
    """A table or figure of the paper, with its numbers and yours side by side."""
    with errors():
        from .. import reproduce as book
        from ..extras import need

        if names == ["list"]:
            for name in book.EXPERIMENTS:
                stdout.print(f"{name:10} {book.title(book.find(name))}", highlight=False, soft_wrap=True)
            return
        wanted = list(book.EXPERIMENTS) if names == ["all"] else names
        for name in wanted:
            book.find(name)
        need("matplotlib", "plots")
        if data is None or (weights_dir is None and not model):
            raise ValueError(
                "name ImageNet's validation images (or others) with --data, and a folder with the official weights with "
                "--weights-dir; '--model embedded --data embedded' shows how it works without either"
            )
        if weights_dir is not None and not weights_dir.is_dir():
            raise ValueError(f"{weights_dir}: no such folder of weights")
        with status() as say:
            lab = book.Lab(
                out, data, labels, class_folders, weights_dir, model or [], subset, train_data, train_labels, epochs,
                batch_size, device, workers, say,
            )  # fmt: skip
            pages = book.reproduce(wanted, lab)
    for page in pages:
        stdout.print(str(page), soft_wrap=True, highlight=False)
    for line in lab.missing.values():
        stderr.print(f"not here: {line}", soft_wrap=True, highlight=False)


@app.command()
def presets(
    model: Annotated[str | None, typer.Argument(help="A model of the paper; without it, all of them.")] = None,
    as_json: Json = False,
) -> None:
    """The settings that the paper published, with its GMACs and top-1."""
    with errors():
        from ..presets import paper_rows, rows_of

        rows: list[dict[str, Any]] = [asdict(row) for row in (rows_of(model) if model else paper_rows())]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table()
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("table", "model") else "right")
    for row in rows:
        table.add_row(*("–" if value is None else str(value) for value in row.values()))
    stdout.print(table)
