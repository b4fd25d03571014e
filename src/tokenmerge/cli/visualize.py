"""`tokenmerge visualize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .output import say

if TYPE_CHECKING:
    from ..methods import Method


@options.command
def visualize(
    model: options.Model,
    images: options.ImagesArgument,
    out: Annotated[Path, typer.Option(help="Folder for the pictures (PNG and SVG) and the table of tokens.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a method ({compared}), which is solved for --gmacs; or a config as in Python, or a saved .json "
            "file; repeatable. Default: ToMe, ATM."
        ),
    ] = None,
    gmacs: Annotated[float, typer.Option(min=0.05, max=1, help="Fraction of the GMACs, on average over the images.")] = 0.65,
    layers: Annotated[str, typer.Option(help="'all', or numbers from 1, separated by commas.")] = "all",
    count: Annotated[int, typer.Option(min=2, help="Number of images, drawn at random.")] = 8,
    seed: options.Seed = 0,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
) -> None:
    """Merge maps: several methods on the same images as in the paper's Fig. 7, and one strip per image with all layers as in
    Fig. A1."""
    with options.errors():
        from ..utils.files import write_csv
        from ..utils.optional import require_package
        from ..visualization.figures import compared_figure, strips_figure
        from ..visualization.figures import visualize as run
        from ..visualization.merge_maps import save_figure

        require_package("matplotlib", "plots")
        numbers = None if layers == "all" else [_layer(text) for text in layers.split(",")]
        network, data = options.load(model, images, weights, num_classes, image_size)
        data = data.readable().split(count, seed)[0]
        methods = _methods(network, data, method or ["ToMe", "ATM"], gmacs)
        drawn = run(network, data, methods, layers=numbers)
        out.mkdir(parents=True, exist_ok=True)
        write_csv(drawn.rows(), out / "tokens.csv")
        for kind in ("png", "svg"):
            save_figure(compared_figure(drawn), out / f"compared.{kind}")
            for i, name in enumerate(drawn.names):
                save_figure(strips_figure(drawn, [i]), out / f"strip_{i}_{Path(name).stem}.{kind}")
    for name, config in methods.items():
        say(f"{name}: {config!r}")
    say(f"{out}/compared.png, and a strip for each of {len(drawn.names)} images")


def _methods(network: Any, data: Any, asked: list[str], gmacs: float) -> dict[str, Method]:
    """Names are solved for the cost, configs are used as they are; in the order in which they were given."""
    from ..calibration.compare import at_equal_cost
    from ..methods import METHODS, load_or_parse

    known = {name.lower(): name for name in METHODS}
    names = [known[text.lower()] for text in asked if text.lower() in known]
    solved = at_equal_cost(network, data, names, gmacs) if names else {}
    methods: dict[str, Method] = {}
    for text in asked:
        config = solved[known[text.lower()]] if text.lower() in known else load_or_parse(text)
        name = type(config).__name__
        methods[f"{name} {len(methods)}" if name in methods else name] = config
    return methods


def _layer(text: str) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"--layers takes 'all' or numbers separated by commas, not {text!r}")
    return int(text)
