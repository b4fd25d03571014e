"""What the commands share: the app, options, errors, progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Vision Transformers, cheaper without retraining.")
stderr = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Model = Annotated[str, typer.Argument(help="'embedded', a timm name, torchvision:vit_b_16, or hf:FOLDER.")]
Folder = Annotated[str, typer.Argument(help="'embedded', or a folder of images.")]
Weights = Annotated[Path | None, typer.Option(help="Local weights; without it, the library's pretrained ones.")]
Classes = Annotated[int | None, typer.Option(min=0, help="Classes of the local weights; 0 for features.")]
Size = Annotated[int | None, typer.Option(min=16, help="Other than the model's own, in pixels.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many images.")]
Sample = Annotated[int, typer.Option(min=2, help="How many images, drawn at random.")]
Labels = Annotated[Path | None, typer.Option(help="CSV with lines 'path below the folder,class index'.")]
BatchSize = Annotated[int, typer.Option(min=1)]


@contextmanager
def errors() -> Iterator[None]:
    """Bad input ends with one clear line."""
    from ..backbones.base import Unsupported

    try:
        yield
    except (ValueError, Unsupported, OSError) as error:
        stderr.print(Text.assemble(("error: ", "red"), str(error)), soft_wrap=True)
        raise typer.Exit(2) from None


@contextmanager
def progress_bar(total: int, what: str = "images", hidden: bool = False) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def load(
    model: str,
    images: str,
    weights: Path | None,
    num_classes: int | None,
    image_size: int | None,
    limit: int | None = None,
    labels: Path | None = None,
) -> tuple[Any, Any]:
    from ..checkpoints import load_model
    from ..loading import load_images

    network: Any = load_model(model, weights, **({} if num_classes is None else {"num_classes": num_classes}))
    if image_size is not None:
        if not hasattr(network, "set_input_size"):
            raise ValueError(f"--image-size is for timm's models; this {type(network).__name__} has its own size")
        network.set_input_size(img_size=image_size)
    return network, load_images(images, network, size=image_size, limit=limit, labels=labels)


def setting(text: str) -> Any:
    """A method as people give it: a file that was saved, or its text."""
    from ..methods import load, parse

    return load(text) if text.endswith(".json") else parse(text)


@contextmanager
def two_bars(images: int) -> Iterator[dict[str, Any]]:
    """Trials of the calibration, whose number is not known before, then images of the proof."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        first, second = bar.add_task("trials", total=None), bar.add_task("images", total=images)
        yield {"on_trial": lambda done: bar.advance(first, done), "on_image": lambda done: bar.advance(second, done)}


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """One line that says what is going on."""
    with stderr.status("…") as line:
        yield line.update
