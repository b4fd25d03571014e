"""`tokenmerge reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import say


@options.command
def reproduce(
    names: Annotated[list[str], typer.Argument(help="table1, fig2, …; 'all'; 'list' names all of them.")],
    out: Annotated[Path, typer.Option(help="Folder for the CSV, plot and HTML page of each; a run there resumes.")] = Path(
        "reproduced"
    ),
    images: Annotated[
        str | None,
        typer.Option(
            help="ImageNet's validation images, or others; as for evaluate. Without images and models: the embedded."
        ),
    ] = None,
    labels: options.Labels = None,
    class_folders: options.ClassFolders = False,
    weights_dir: Annotated[Path | None, typer.Option(help="Folder with the official weights of the paper's models.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Instead of the paper's models, also 'embedded'; repeatable.")
    ] = None,
    sample: Annotated[int | None, typer.Option(min=4, help="Use only N images, drawn at random.")] = None,
    train_images: Annotated[str | None, typer.Option(help="The training set, for Tables 4 and A3.")] = None,
    train_labels: Annotated[Path | None, typer.Option(help="As --labels, of the training set; else class folders.")] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of fine-tuning by ATM's recipe. Default: 30; on the embedded images, 1.")
    ] = None,
    head: options.Head = "cls",
    fair: Annotated[
        bool, typer.Option("--fair", help="The CLS-only last layer for every method; in the paper, only ATM has it.")
    ] = False,
    tolerance: options.Tolerance = 0.1,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Default: the paper's, 1024, and 100 for T2T-ViT.")] = None,
    device: options.Device = "cpu",
    workers: options.Workers = 0,
) -> None:
    """A table or figure of the paper, with its numbers next to yours. For several processes: `torchrun --nproc-per-node N
    -m tokenmerge reproduce …`, or accelerate launch."""
    with options.errors():
        from .. import reproduce as experiments
        from ..data import embedded
        from ..utils.distributed import current_process_group
        from ..utils.optional import require_package

        if names == ["list"]:
            for name in experiments.EXPERIMENTS:
                say(f"{name:10} {experiments.title(experiments.find(name))}")
            return
        wanted = list(experiments.EXPERIMENTS) if names == ["all"] else names
        for name in wanted:
            experiments.find(name)
        require_package("matplotlib", "plots")
        if images is None and weights_dir is None and not model:
            images, model, train_images = embedded.NAME, [embedded.NAME], train_images or embedded.NAME
            epochs = epochs or 1
            options.stderr.print("no images and no models were given: the embedded ones show how it works")
        if images is None or (weights_dir is None and not model):
            raise ValueError(
                "give ImageNet's validation images (or others) with --images, and a folder with the official weights with "
                "--weights-dir; without either, the embedded model and images show how it works"
            )
        if weights_dir is not None and not weights_dir.is_dir():
            raise ValueError(f"{weights_dir}: no such folder of weights")
        group = current_process_group()
        with options.progress_bars(hidden=not group.is_main) as progress:
            lab = experiments.Lab(
                out=out,
                images=images,
                labels=labels,
                class_folders=class_folders,
                weights_dir=weights_dir,
                models=model or [],
                sample=sample,
                train_images=train_images,
                train_labels=train_labels,
                epochs=epochs or 30,
                head=head or "cls",
                fair=fair,
                tolerance=tolerance,
                batch_size=batch_size,
                device=device,
                workers=workers,
                group=group,
                progress=progress,
            )
            pages = experiments.reproduce(wanted, lab)
    for page in pages:
        say(str(page))
    for line in lab.missing.values() if group.is_main else ():
        options.stderr.print(f"not available: {line}", soft_wrap=True, highlight=False)
