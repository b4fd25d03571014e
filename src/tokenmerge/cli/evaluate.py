"""`tokenmerge evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import print_results, timm_row


@options.command
def evaluate(
    model: options.Model = "embedded",
    images: options.ImagesArgument = "embedded",
    method: options.Methods = None,
    preset: Annotated[
        list[float] | None,
        typer.Option(help="The paper's ATM config at or below this many GMACs for this model; repeatable."),
    ] = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    zero_shot: options.ZeroShot = None,
    labels: options.Labels = None,
    class_folders: options.ClassFolders = False,
    split: Annotated[str, typer.Option(help="Split of an hfds/ data set.")] = "validation",
    batch_size: options.BatchSize = 32,
    crop: options.Crop = None,
    head: options.Head = None,
    limit: options.Limit = None,
    convention: Annotated[str, typer.Option(help="How to count MACs: {conventions}.")] = "paper",
    device: options.Device = "cpu",
    amp: Annotated[str | None, typer.Option(help="Autocast to 'bfloat16' or 'float16'.")] = None,
    workers: options.Workers = 0,
    resume: Annotated[Path | None, typer.Option(help="Folder for finished batches: the same command resumes.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write a CSV file, with the columns of timm's results.")] = None,
    as_json: options.Json = False,
) -> None:
    """Compare methods with the baseline on the same images. For several processes: `accelerate launch -m tokenmerge evaluate
    …`, or torchrun."""
    with options.errors():
        import torch

        from ..engine.features import counted_part
        from ..evaluation.evaluate import evaluate as run
        from ..methods import load_or_parse
        from ..methods.atm import ATM
        from ..utils.distributed import current_process_group
        from ..utils.files import write_csv

        methods = [load_or_parse(text) for text in method or ([] if preset else ["NoMerge()"])]
        methods += [ATM.preset(model, gmacs=gmacs) for gmacs in preset or ()]
        options.check_folder(out)
        types = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if amp not in types:
            raise ValueError(f"--amp takes 'bfloat16' or 'float16', not {amp!r}")
        network, data = options.load(
            model, images, weights, num_classes, image_size, head, zero_shot,
            labels=labels, classes=class_folders, split=split, crop=crop, limit=limit, workers=workers,
        )  # fmt: skip
        group = current_process_group()
        with options.progress_bars(hidden=not group.is_main) as progress:
            results = run(
                network.to(device),
                data,
                methods,
                batch_size=batch_size,
                convention=convention,  # type: ignore[arg-type]
                amp=types[amp],
                resume=resume,
                group=group,
                progress=progress,
            )
        if not group.is_main:
            return
        title = f"{model}, {results[0].images} images of {data.name}, batches of {batch_size}{counted_part(network)}"
        print_results(results, title, as_json)
        if out is not None:
            write_csv([timm_row(result, model, network, crop) for result in results], out)
