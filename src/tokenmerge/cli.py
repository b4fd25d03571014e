"""The command line: parse, call the verb, print. Torch is imported inside the commands, so that help answers at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .printing import print_outcome, print_results, print_timings, stdout

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Vision Transformers, cheaper without retraining.")
stderr = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@contextmanager
def _errors() -> Iterator[None]:
    """Bad input ends with one clear line."""
    from .backbones.base import Unsupported

    try:
        yield
    except (ValueError, Unsupported, OSError) as error:
        stderr.print(Text.assemble(("error: ", "red"), str(error)), soft_wrap=True)
        raise typer.Exit(2) from None


@contextmanager
def _progress(total: int, what: str = "images") -> Iterator[Callable[[int], None]]:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the setting, the report and the table.")] = Path("demo_out"),
    images: Annotated[int, typer.Option(min=4, max=1936, help="How many of the embedded test images prove it.")] = 1000,
    as_json: Json = False,
) -> None:
    """`optimize` on the embedded model and images, down to 40 % of the GMACs. Needs no network."""
    with _errors():
        from .loading import load_images, load_model
        from .optimizing import optimize as run

        data = load_images("embedded", limit=images + min(64, images))
        with _two_bars(data.size) as bars:
            outcome = run(load_model("embedded"), data, out, name="embedded", gmacs=0.4, batch_size=50, **bars)
    print_outcome(outcome, as_json)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="'embedded', or a timm model name.")] = "embedded",
    images: Annotated[str, typer.Argument(help="'embedded', or a folder of images.")] = "embedded",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="As in Python, for example 'ATM(0.98, 0.035, 0.84)' or 'ToMe(r=8)', or a saved .json file; repeatable."
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Local weights, .safetensors; without it, timm's pretrained ones.")
    ] = None,
    num_classes: Annotated[int | None, typer.Option(min=0, help="Classes of the local weights; 0 for features.")] = None,
    labels: Annotated[Path | None, typer.Option(help="CSV with lines 'path below the folder,class index'.")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    crop: Annotated[float | None, typer.Option(min=0.1, max=1.0, help="Centre crop share; the paper uses 0.875.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many images.")] = None,
    convention: Annotated[str, typer.Option(help="How to count: 'paper' or 'macs'.")] = "paper",
    out: Annotated[Path | None, typer.Option(help="Also write the table as CSV.")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods with the unmerged model on the same images."""
    with _errors():
        from .evaluation import evaluate as run
        from .files import write_csv
        from .loading import load_images, load_model
        from .methods import load, parse

        methods = [load(text) if text.endswith(".json") else parse(text) for text in method or ["NoMerge()"]]
        if out is not None and not out.parent.is_dir():
            raise ValueError(f"{out.parent}: no such folder to write into")
        network = load_model(model, weights, **({} if num_classes is None else {"num_classes": num_classes}))
        data = load_images(images, network, labels=labels, crop=crop, limit=limit)
        with _progress(data.size) as progress:
            results = run(network, data, methods, batch_size=batch_size, convention=convention, progress=progress)  # type: ignore[arg-type]
        print_results(results, f"{model}, {results[0].images} images of {data.name}, batches of {batch_size}", as_json)
        if out is not None:
            write_csv([result.row() for result in results], out)


Model = Annotated[str, typer.Argument(help="'embedded', or a timm model name.")]
Folder = Annotated[str, typer.Argument(help="'embedded', or a folder of images.")]
Weights = Annotated[Path | None, typer.Option(help="Local weights, .safetensors; without it, timm's pretrained ones.")]
Classes = Annotated[int | None, typer.Option(min=0, help="Classes of the local weights; 0 for features.")]
Size = Annotated[int | None, typer.Option(min=16, help="Other than the model's own, in pixels.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many images.")]
Sample = Annotated[int, typer.Option(min=2, help="How many images, drawn at random.")]


def _load(
    model: str,
    images: str,
    weights: Path | None,
    num_classes: int | None,
    image_size: int | None,
    limit: int | None = None,
    labels: Path | None = None,
) -> tuple[Any, Any]:
    from .loading import load_images, load_model

    network: Any = load_model(model, weights, **({} if num_classes is None else {"num_classes": num_classes}))
    if image_size is not None:
        network.set_input_size(img_size=image_size)
    return network, load_images(images, network, size=image_size, limit=limit, labels=labels)


@contextmanager
def _two_bars(images: int) -> Iterator[dict[str, Any]]:
    """Trials of the calibration, whose number is not known before, then images of the proof."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        first, second = bar.add_task("trials", total=None), bar.add_task("images", total=images)
        yield {"on_trial": lambda done: bar.advance(first, done), "on_image": lambda done: bar.advance(second, done)}


@app.command()
def optimize(
    model: Model,
    images: Folder,
    out: Annotated[Path, typer.Option(help="Folder for the setting, the report and the table.")],
    gmacs: Annotated[float | None, typer.Option(help="Come down to this fraction of the GMACs.")] = None,
    keep: Annotated[float | None, typer.Option(help="As cheap as possible with this share of the answers kept.")] = None,
    max_distance: Annotated[float | None, typer.Option(help="As cheap as possible with this mean distance.")] = None,
    speedup: Annotated[float | None, typer.Option(help="This much faster, measured here.")] = None,
    weights: Weights = None,
    num_classes: Classes = None,
    image_size: Size = None,
    limit: Limit = None,
    sample: Sample = 64,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Find the cheapest setting for a model and images without labels, prove it on other images, write it all down.

    Without a goal: keep 99.5 % of the answers."""
    with _errors():
        from .optimizing import optimize as run

        network, data = _load(model, images, weights, num_classes, image_size, limit)
        if gmacs is keep is max_distance is speedup is None:
            keep = 0.995
        with _two_bars(data.size) as bars:
            outcome = run(
                network,
                data,
                out,
                name=model,
                gmacs=gmacs,
                min_agreement=keep,
                max_distance=max_distance,
                speedup=speedup,
                sample=sample,
                batch_size=batch_size,
                seed=seed,
                **bars,
            )
    print_outcome(outcome, as_json)


@app.command()
def tune(
    model: Model,
    images: Folder,
    out: Annotated[Path, typer.Option(help="Folder for the CSV and the plot; the study is kept there, too.")],
    trials: Annotated[int, typer.Option(min=1, help="Finished trials that the study shall have.")] = 100,
    quality: Annotated[str | None, typer.Option(help="accuracy, agreement or distance.")] = None,
    labels: Annotated[Path | None, typer.Option(help="CSV with lines 'path below the folder,class index'.")] = None,
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
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    as_json: Json = False,
) -> None:
    """The paper's sweep over α, β and θ_min. Run it again to go on; run it on several machines with one --storage."""
    with _errors():
        from .files import write_csv
        from .tuning import logger, tuning_figure
        from .tuning import tune as run
        from .visualization import require_matplotlib, save_figure

        require_matplotlib()
        options: dict[str, Any] = {"quality": quality, "batch": batch, "split_layer": split_layer, "study": study}
        options["sample"] = sample
        if log is not None:
            options["log"] = logger(log)
        network, data = _load(model, images, weights, num_classes, image_size, limit, labels)
        out.mkdir(parents=True, exist_ok=True)
        storage = storage or f"sqlite:///{out / 'study.db'}"
        with _progress(trials, "trials") as progress:
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
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    as_json: Json = False,
) -> None:
    """What merging in one layer alone does to the answer, per layer and threshold: Fig. 2 of the paper."""
    with _errors():
        from .analysis import analyze as run
        from .analysis import impact_figure
        from .files import write_csv
        from .visualization import require_matplotlib, save_figure

        if out is not None:
            require_matplotlib()
        network, data = _load(model, images, weights, num_classes, image_size)
        thetas = theta or [0.80, 0.85, 0.90, 0.95]
        with _progress(len(thetas) * len(network.blocks), "trials") as progress:
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
def bench(
    model: Annotated[str, typer.Argument(help="'embedded', or a timm model name.")] = "embedded",
    images: Annotated[str, typer.Argument(help="'embedded', or a folder of images.")] = "embedded",
    method: Annotated[list[str] | None, typer.Option(help="As for evaluate; repeatable.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Local weights, .safetensors.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable; 1, 8 and 32 if not given.")] = None,
    image_size: Annotated[list[int] | None, typer.Option(min=16, help="Other than the model's own; repeatable.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch's own number if not given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each variant has its turn.")] = 15,
    compiled: Annotated[bool, typer.Option("--compile", help="Also time the unmerged model under torch.compile.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for CSV and plot, named after hardware and versions.")] = None,
    as_json: Json = False,
) -> None:
    """How much faster, and how much of the saved MACs is saved time."""
    with _errors():
        from .benchmarking import bench as run
        from .benchmarking import hardware, plot_timings
        from .files import write_csv
        from .loading import load_images, load_model
        from .methods import load, parse

        methods = [load(text) if text.endswith(".json") else parse(text) for text in method or ["ToMe(r=8)"]]
        network: Any = load_model(model, weights)
        sizes: list[int | None] = [*image_size] if image_size else [None]
        batches = batch_size or [1, 8, 32]
        timings = []
        with _progress(len(sizes) * len(batches) * (rounds + 1), "rounds") as progress:
            for size in sizes:
                if size is not None:
                    network.set_input_size(img_size=size)
                data = load_images(images, network, size=size)
                timings += run(
                    network,
                    data,
                    methods,
                    batch_sizes=batches,
                    threads=threads,
                    rounds=rounds,
                    compiled=compiled,
                    progress=progress,
                )
        rows = [asdict(t) for t in timings]
        if as_json:
            print(json.dumps(rows, indent=2))
        else:
            print_timings(timings, f"{model}, {hardware()}")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            stem = f"bench_{model}_{hardware()}"
            write_csv(rows, out / f"{stem}.csv")
            plot_timings(timings, out / f"{stem}.png")


@app.command()
def presets(
    model: Annotated[str | None, typer.Argument(help="A model of the paper; without it, all of them.")] = None,
    as_json: Json = False,
) -> None:
    """The settings that the paper published, with its GMACs and top-1."""
    with _errors():
        from .presets import paper_rows, rows_of

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


def _version(asked: bool) -> None:
    if asked:
        from . import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    app()
