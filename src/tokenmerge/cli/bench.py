"""`tokenmerge bench`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import print_json, print_timings, say


@options.command
def bench(
    model: options.Model = "embedded",
    images: options.ImagesArgument = "embedded",
    method: options.Methods = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable. Default: 1, 8 and 32.")] = None,
    image_size: Annotated[
        list[int] | None, typer.Option(min=16, help="Input size in pixels; repeatable. Default: the model's own.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's own number.")] = None,
    timing_rounds: Annotated[int, typer.Option(min=1, help="Rounds in which every config is timed once.")] = 15,
    runtime: Annotated[list[str] | None, typer.Option(help="{runtimes}; repeatable. Default: eager.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for CSV and plot, named after hardware and versions.")] = None,
    as_json: options.Json = False,
) -> None:
    """Measure the speed-up, and the efficiency: the speed-up relative to the MAC reduction."""
    with options.errors():
        from ..data.load import load_images
        from ..evaluation.bench import bench as run
        from ..evaluation.bench import timings_figure
        from ..methods import load_or_parse
        from ..utils.environment import cpu_features, describe_hardware, int8_features
        from ..utils.files import write_csv
        from ..visualization.merge_maps import save_figure

        methods = [load_or_parse(text) for text in method or ["ToMe(r=8)"]]
        network = options.load_model(model, weights, num_classes)
        options.advise_kernels()
        sizes: list[int | None] = [*image_size] if image_size else [None]
        timings = []
        with options.progress_bars() as progress:
            for size in sizes:
                if size is not None:
                    options.resize(network, size)
                timings += run(
                    network,
                    load_images(images, network, size=size),
                    methods,
                    batch_sizes=batch_size or [1, 8, 32],
                    threads=threads,
                    rounds=timing_rounds,
                    runtimes=runtime or ["eager"],
                    progress=progress,
                )
        rows = [asdict(t) for t in timings]
        if as_json:
            print_json(rows)
        else:
            print_timings(timings, f"{model}, {describe_hardware()} ({', '.join(cpu_features())})")
            fast = ", ".join(int8_features())
            say(
                f"int8 products: {fast}" if fast else "int8 products: neither VNNI nor AMX; int8 may be slower than float",
                "dim",
            )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            stem = f"bench_{model}_{describe_hardware()}".replace("/", "-").replace(":", "-")
            write_csv(rows, out / f"{stem}.csv")
            save_figure(timings_figure(timings), out / f"{stem}.png")
