"""The commands of who ships a model: try it, prove it, time it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..printing import as_timm, print_outcome, print_results, print_timings
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
    setting,
    status,
    two_bars,
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the setting, the report and the table.")] = Path("demo_out"),
    images: Annotated[int, typer.Option(min=4, max=1936, help="How many of the embedded test images prove it.")] = 1000,
    as_json: Json = False,
) -> None:
    """`optimize` on the embedded model and images, down to 40 % of the GMACs. Needs no network."""
    with errors():
        from ..checkpoints import load_model
        from ..loading import load_images
        from ..optimizing import optimize as run

        data = load_images("embedded", limit=images + min(64, images))
        with two_bars(data.size) as bars:
            outcome = run(load_model("embedded"), data, out, name="embedded", gmacs=0.4, batch_size=50, **bars)
    print_outcome(outcome, as_json)


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
    batch_size: BatchSize = 32,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Find the cheapest setting for a model and images without labels, prove it on other images, write it all down.

    Without a goal: keep 99.5 % of the answers."""
    with errors():
        from ..optimizing import optimize as run

        network, data = load(model, images, weights, num_classes, image_size, limit)
        if gmacs is keep is max_distance is speedup is None:
            keep = 0.995
        with two_bars(data.size) as bars:
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
def evaluate(
    model: Model = "embedded",
    data: Annotated[
        str, typer.Argument(help="'embedded', a folder of images, a .tar file, s3://… or hfds/NAME.")
    ] = "embedded",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="As in Python, for example 'ATM(0.98, 0.035, 0.84)' or 'ToMe(r=8)', or a saved .json file; repeatable."
        ),
    ] = None,
    weights: Weights = None,
    num_classes: Classes = None,
    labels: Labels = None,
    class_folders: Annotated[bool, typer.Option("--class-folders", help="Folders below are classes, by name.")] = False,
    split: Annotated[str, typer.Option(help="Of hfds/.")] = "validation",
    batch_size: BatchSize = 32,
    crop: Annotated[float | None, typer.Option(min=0.1, max=1.0, help="Centre crop share; the paper uses 0.875.")] = None,
    limit: Limit = None,
    convention: Annotated[str, typer.Option(help="How to count: 'paper', 'macs', 'fvcore' or 'lvvit'.")] = "paper",
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, …")] = "cpu",
    amp: Annotated[str | None, typer.Option(help="Autocast to 'bfloat16' or 'float16'.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode.")] = 0,
    memory: Annotated[
        Path | None, typer.Option(help="Folder for finished batches: the same command goes on from them.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write a CSV file, with the columns of timm's results.")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods with the unmerged model on the same images. Several processes share the work: `accelerate launch -m
    tokenmerge evaluate …`, or torchrun."""
    with errors():
        import torch

        from ..checkpoints import load_model
        from ..crew import crew
        from ..evaluation import evaluate as run
        from ..files import write_csv
        from ..loading import load_images

        methods = [setting(text) for text in method or ["NoMerge()"]]
        if out is not None and not out.parent.is_dir():
            raise ValueError(f"{out.parent}: no such folder to write into")
        types = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if amp not in types:
            raise ValueError(f"--amp takes 'bfloat16' or 'float16', not {amp!r}")
        network = load_model(model, weights, **({} if num_classes is None else {"num_classes": num_classes}))
        images = load_images(
            data, network, labels=labels, classes=class_folders, split=split, crop=crop, limit=limit, workers=workers
        )
        us = crew()
        with progress_bar(-(-images.size // us.size), hidden=us.rank > 0) as progress:
            results = run(
                network.to(device),
                images,
                methods,
                batch_size=batch_size,
                convention=convention,  # type: ignore[arg-type]
                amp=types[amp],
                memory=memory,
                crew=us,
                progress=progress,
            )
        if us.rank > 0:
            return
        print_results(results, f"{model}, {results[0].images} images of {images.name}, batches of {batch_size}", as_json)
        if out is not None:
            write_csv([as_timm(result, model, network, crop) for result in results], out)


@app.command()
def export(
    model: Model,
    out: Annotated[Path, typer.Option(help="The file to write: .pt2, .onnx, or .xml for OpenVINO.")],
    config: Annotated[str, typer.Option(help="A saved setting (reduction.json, frozen.json), or one as for evaluate.")],
    to: Annotated[str, typer.Option(help="pt2, onnx or openvino.")] = "onnx",
    images: Annotated[
        str, typer.Option(help="'embedded', or a folder: what the file is tried on, and --freeze counts on.")
    ] = ("embedded"),
    freeze: Annotated[bool, typer.Option("--freeze", help="The same number of merges in every image.")] = False,
    layers: Annotated[
        int | None, typer.Option(min=1, help="With --freeze: merge in so many layers, at the same cost; faster, less exact.")
    ] = None,
    merge: Annotated[str, typer.Option(help="scatter, or matmul for runtimes whose scatter-add is unsafe.")] = "scatter",
    preprocess: Annotated[
        bool, typer.Option("--preprocess", help="The file takes pixels from 0 to 255 and normalises them.")
    ] = False,
    weights: Weights = None,
    num_classes: Classes = None,
    image_size: Size = None,
    as_json: Json = False,
) -> None:
    """Write a merged model for other runtimes, and run the file against the eager model before it is kept."""
    with errors():
        from ..calibration import freeze as fix
        from ..exporting import export as run

        if merge not in ("scatter", "matmul"):
            raise ValueError(f"--merge takes 'scatter' or 'matmul', not {merge!r}")
        if layers is not None and not freeze:
            raise ValueError("--layers goes with --freeze: thresholds have their own layers")
        chosen = setting(config)
        network, data = load(model, images, weights, num_classes, image_size, 64)
        if freeze:
            chosen = fix(network, data, chosen, layers=layers).method
        with status() as say:
            made = run(
                network,
                chosen,
                next(data.batches(16)).images,
                out,
                to=to,  # type: ignore[arg-type]
                merge=merge,  # type: ignore[arg-type]
                normalise=(data.mean, data.std) if preprocess else None,
                say=say,
            )
    if as_json:
        print(json.dumps(asdict(made), indent=2))
        return
    print(f"{out}: {made.method}; differs from the eager model by {made.largest:.1e} at most")


@app.command()
def bench(
    model: Model = "embedded",
    images: Folder = "embedded",
    method: Annotated[list[str] | None, typer.Option(help="As for evaluate; repeatable.")] = None,
    weights: Weights = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable; 1, 8 and 32 if not given.")] = None,
    image_size: Annotated[list[int] | None, typer.Option(min=16, help="Other than the model's own; repeatable.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch's own number if not given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each variant has its turn.")] = 15,
    runtime: Annotated[
        list[str] | None, typer.Option(help="eager, compile, aot, onnxruntime or openvino; repeatable. Eager if not given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for CSV and plot, named after hardware and versions.")] = None,
    as_json: Json = False,
) -> None:
    """How much faster, and how much of the saved MACs is saved time."""
    with errors():
        from ..benchmarking import bench as run
        from ..benchmarking import hardware, plot_timings
        from ..checkpoints import load_model
        from ..files import write_csv
        from ..loading import load_images

        methods = [setting(text) for text in method or ["ToMe(r=8)"]]
        network: Any = load_model(model, weights)
        sizes: list[int | None] = [*image_size] if image_size else [None]
        batches, runtimes = batch_size or [1, 8, 32], runtime or ["eager"]
        timings = []
        with progress_bar(len(sizes) * len(batches) * len(runtimes) * (rounds + 1), "rounds") as progress:
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
                    runtimes=runtimes,
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
