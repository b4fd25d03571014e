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
from typer.core import TyperCommand

from ..utils.progress import Progress as ProgressProtocol

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Cheaper Vision Transformers, without retraining.")
stderr = Console(stderr=True)


def _methods() -> str:
    from ..methods import METHODS

    return ", ".join(METHODS)


def _compared() -> str:
    from ..methods import compared_methods

    return ", ".join(compared_methods())


def _calibrated() -> str:
    from ..calibration.candidates import CANDIDATES
    from ..calibration.cell import CALIBRATED

    return ", ".join(f"'{CALIBRATED}{name}'" for name in CANDIDATES)


def _models() -> str:
    from ..backbones import model_name_forms

    return ", ".join(model_name_forms())


def _targets() -> str:
    from ..deployment.targets import TARGETS

    return ", ".join(f"{name} ({target.suffix})" for name, target in TARGETS.items())


def _runtimes() -> str:
    from ..deployment.runtimes import runtimes

    return ", ".join(runtimes())


def _conventions() -> str:
    from typing import get_args

    from ..engine.cost import Convention

    return ", ".join(get_args(Convention))


def _qualities() -> str:
    from typing import get_args

    from ..calibration.tune import Quality

    return ", ".join(get_args(Quality))


# Placeholders in help texts. They are filled in when a command prints its help, so that `tokenmerge --help` needs no torch.
_FACTS: dict[str, Callable[[], str]] = {
    "{methods}": _methods,
    "{compared}": _compared,
    "{calibrated}": _calibrated,
    "{models}": _models,
    "{targets}": _targets,
    "{runtimes}": _runtimes,
    "{conventions}": _conventions,
    "{qualities}": _qualities,
}


class Command(TyperCommand):
    """A command whose help names what is registered: methods, model libraries, export targets."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for param in self.params:
            text = getattr(param, "help", None)
            for placeholder, fact in _FACTS.items():
                if text and placeholder in text:
                    text = text.replace(placeholder, fact())
                    param.help = text  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


command = app.command(cls=Command)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Model = Annotated[str, typer.Argument(help="'embedded', or {models}.")]
ImagesArgument = Annotated[str, typer.Argument(help="'embedded', a folder of images, a .tar file, s3://… or hfds/NAME.")]
ImagesOption = Annotated[str, typer.Option(help="'embedded', a folder of images, a .tar file, s3://… or hfds/NAME.")]
Method = Annotated[str, typer.Option(help="A config as in Python, 'ToMe(r=8)', or a saved .json file. Methods: {methods}.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(help="A config as in Python, 'ToMe(r=8)', or a saved .json file; repeatable. Methods: {methods}."),
]
Weights = Annotated[Path | None, typer.Option(help="Local weights. Default: the library's pretrained ones.")]
NumClasses = Annotated[int | None, typer.Option(min=0, help="Classes of the local weights; 0 for features.")]
ImageSize = Annotated[int | None, typer.Option(min=16, help="Input size in pixels. Default: the model's own.")]
ZeroShot = Annotated[
    Path | None,
    typer.Option(
        help="Text embeddings [classes, width], the only tensor of a .safetensors file: predictions are the texts that are "
        "nearest to the image features."
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N images.")]
Sample = Annotated[int, typer.Option(min=2, help="Number of images, drawn at random.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of random draws.")]
Labels = Annotated[Path | None, typer.Option(help="CSV with lines 'path below the folder,class index'.")]
ClassFolders = Annotated[
    bool,
    typer.Option("--class-folders", help="Subfolders are classes: ImageNet's wnids (n01440764 …), or all classes by name."),
]
Crop = Annotated[float | None, typer.Option(min=0.1, max=1.0, help="Centre crop; the paper uses 0.875 for DeiT.")]
Head = Annotated[str | None, typer.Option(help="Of LV-ViT: 'cls', as the paper reads it, or 'cls+aux', the official one.")]
Tolerance = Annotated[
    float,
    typer.Option(
        min=0, help="Points of top-1: it must not fall at multiples of this. 0.1: as the paper prints it; 0: exactly."
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per batch.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps, …")]
Workers = Annotated[int, typer.Option(min=0, help="Processes that decode images.")]
MinAgreement = Annotated[
    float | None,
    typer.Option("--min-agreement", "--keep", min=0, max=1, help="Keep at least this fraction of the predictions."),
]
Confidence = Annotated[float, typer.Option(min=0.5, max=0.9999, help="Of guarantees: 0.95 errs in one of twenty.")]
Int8Mode = Annotated[
    str | None,
    typer.Option(
        "--int8",
        help="Quantise the weights: 'static' (and the inputs, with ranges from the images), 'dynamic', or 'weights' alone.",
    ),
]
Int8Keep = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="With --int8: layers go back to float until this fraction of predictions stays."),
]
Smooth = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="With --int8: SmoothQuant's α, for channels with outliers.")
]
Log = Annotated[str | None, typer.Option(help="Log metrics to tensorboard:FOLDER or wandb:PROJECT.")]
TimingRounds = Annotated[int, typer.Option(min=0, help="Rounds in which every config is timed once; 0: no timing.")]


def advise_kernels() -> None:
    """Say once what makes merging faster on this machine."""
    from ..core.fused import advice

    text = advice()
    if text is not None:
        stderr.print(text, soft_wrap=True, highlight=False, markup=False)


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
def progress_bars(hidden: bool = False) -> Iterator[ProgressProtocol]:
    """One bar per unit that is counted, and one line that says what runs now."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=hidden) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int = 1, total: int | None = None) -> None:
            key = what if done else "message"
            if not done and not hidden and not stderr.is_terminal:  # bars are not shown there
                stderr.print(what, soft_wrap=True, highlight=False, markup=False)
            if key not in tasks:
                tasks[key] = bars.add_task(what, total=total)
            bars.update(tasks[key], description=what, advance=done, total=total)

        yield progress


def load(
    model: str,
    images: str,
    weights: Path | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    head: str | None = None,
    zero_shot: Path | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """The model and its images. `options`: those of `load_images`."""
    from ..data.load import load_images

    network = load_model(model, weights, num_classes, image_size, head)
    if zero_shot is not None:
        from ..backbones.zero_shot import ZeroShotClassifier, read_text_embeddings
        from ..data.checkpoint import read_weights

        network = ZeroShotClassifier(network, read_text_embeddings(read_weights(zero_shot)))
    return network, load_images(images, network, size=image_size, **options)


def load_model(
    model: str,
    weights: Path | None,
    num_classes: int | None = None,
    image_size: int | None = None,
    head: str | None = None,
) -> Any:
    from ..data.checkpoint import load_model

    given = {"num_classes": num_classes, "head": head}
    network = load_model(model, weights, **{name: value for name, value in given.items() if value is not None})
    if image_size is not None:
        resize(network, image_size)
    return network


def resize(network: Any, size: int) -> None:
    """Change the input size of a model, or say why it cannot be changed."""
    from ..engine.patch import adapter_of

    adapter_of(network).resize(network, size)


def int8_options(mode: str | None, keep: float | None, smooth: float | None) -> Any:
    """What --int8 and its companions ask for; False without --int8."""
    from ..deployment.int8 import Int8

    if mode is None:
        if keep is not None or smooth is not None:
            raise ValueError("--int8-keep and --smooth go with --int8")
        return False
    return Int8(mode, keep, smooth)  # type: ignore[arg-type]


def check_folder(path: Path | None) -> None:
    """Before a long run: the file's folder must exist."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder to write into")
