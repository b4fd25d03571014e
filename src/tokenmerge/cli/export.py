"""`tokenmerge export`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import print_json, say


@options.command
def export(
    model: options.Model,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    method: options.Method,
    to: Annotated[str, typer.Option(help="The target and its file suffix: {targets}.")] = "onnx",
    images: options.ImagesOption = "embedded",
    freeze: Annotated[bool, typer.Option("--freeze", help="Static r: the same number of merges in every image.")] = False,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="With --freeze: merge in this many layers, at the same cost; faster, less accurate."),
    ] = None,
    merge: Annotated[str, typer.Option(help="scatter, or matmul for runtimes whose scatter-add is unsafe.")] = "scatter",
    preprocess: Annotated[
        bool, typer.Option("--preprocess", help="The file takes pixels from 0 to 255 and normalises them.")
    ] = False,
    int8: options.Int8Mode = None,
    int8_keep: options.Int8Keep = None,
    smooth: options.Smooth = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    as_json: options.Json = False,
) -> None:
    """Write a merged model for other runtimes. The file is compared with the eager model on the images before it is kept."""
    with options.errors():
        from ..calibration.freeze import freeze as make_static
        from ..deployment.export import export as run
        from ..methods import load_or_parse

        if merge not in ("scatter", "matmul"):
            raise ValueError(f"--merge takes 'scatter' or 'matmul', not {merge!r}")
        if layers is not None and not freeze:
            raise ValueError("--layers goes with --freeze: thresholds have their own layers")
        quantise = options.int8_options(int8, int8_keep, smooth)
        config = load_or_parse(method)
        network, data = options.load(model, images, weights, num_classes, image_size, limit=64)
        if freeze:
            config = make_static(network, data, config, layers=layers).method
        with options.progress_bars() as progress:
            made = run(
                network,
                config,
                next(data.batches(64 if quantise else 16)).images,
                out,
                to=to,
                merge=merge,  # type: ignore[arg-type]
                normalise=(data.mean, data.std) if preprocess else None,
                int8=quantise,
                progress=progress,
            )
    if as_json:
        print_json(asdict(made))
        return
    stage = "" if made.int8 is None else ", before int8"
    say(f"{out}: {made.method}; differs from the eager model by {made.largest:.1e} at most{stage}")
    if made.int8 is not None:
        say(made.int8.sentence)
