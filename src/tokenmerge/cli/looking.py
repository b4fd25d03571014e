"""The commands that show what merges."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..printing import stdout
from .common import Classes, Folder, Model, Size, Weights, app, errors, load, setting, status, stderr


@app.command()
def visualize(
    model: Model,
    images: Folder,
    out: Annotated[Path, typer.Option(help="Folder for the pictures (PNG and SVG) and the table of tokens.")],
    methods: Annotated[str, typer.Option(help="Names with commas between, each solved for --gmacs.")] = "ToMe,ATM",
    config: Annotated[
        list[str] | None, typer.Option(help="Instead: a saved .json file, or a setting as for evaluate; repeatable.")
    ] = None,
    gmacs: Annotated[float, typer.Option(min=0.05, max=1, help="Fraction of the GMACs, on average over the images.")] = 0.65,
    layers: Annotated[str, typer.Option(help="'all', or numbers from 1 with commas between.")] = "all",
    count: Annotated[int, typer.Option(min=2, help="Of images, drawn at random.")] = 8,
    seed: int = 0,
    weights: Weights = None,
    num_classes: Classes = None,
    image_size: Size = None,
) -> None:
    """Merge maps: methods side by side as in the paper's Fig. 7, and a strip of layers for each image as in Fig. A1."""
    with errors():
        from ..extras import need
        from ..files import write_csv
        from ..methods import METHODS
        from ..visualization import save_figure
        from ..visualizing import at_equal_cost, compared_figure, strips_figure
        from ..visualizing import visualize as run

        need("matplotlib", "plots")
        network, data = load(model, images, weights, num_classes, image_size)
        data = data.readable().split(count, seed)[0]
        known = {name.lower(): name for name in METHODS}
        if config:
            chosen = [setting(text) for text in config]
            named = {
                f"{type(method).__name__} {i}" if i else type(method).__name__: method for i, method in enumerate(chosen)
            }
        else:
            asked = [name.strip() for name in methods.split(",")]
            named = at_equal_cost(network, data, [known.get(name.lower(), name) for name in asked], gmacs)
        numbers = None if layers == "all" else [_layer(text) for text in layers.split(",")]
        drawn = run(network, data, named, layers=numbers)
        out.mkdir(parents=True, exist_ok=True)
        write_csv(drawn.rows(), out / "tokens.csv")
        for kind in ("png", "svg"):
            save_figure(compared_figure(drawn), out / f"compared.{kind}")
            for i, name in enumerate(drawn.names):
                save_figure(strips_figure(drawn, [i]), out / f"strip_{i}_{Path(name).stem}.{kind}")
    for name, method in named.items():
        stdout.print(f"{name}: {method!r}", soft_wrap=True, highlight=False)
    stdout.print(f"{out}/compared.png, and a strip for each of {len(drawn.names)} images", soft_wrap=True, highlight=False)


def _layer(text: str) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"--layers takes 'all' or numbers with commas between, not {text!r}")
    return int(text)


@app.command()
def web(
    model: Annotated[str, typer.Argument(help="'embedded', a timm name, torchvision:vit_b_16, or hf:FOLDER.")] = "embedded",
    images: Annotated[str, typer.Option(help="To pick from, and to calibrate the budget on: 'embedded', or a folder.")] = (
        "embedded"
    ),
    weights: Weights = None,
    num_classes: Classes = None,
    fit: Annotated[bool, typer.Option("--calibrate", help="Find settings for the budget knob first: minutes.")] = False,
    host: Annotated[
        str, typer.Option(help="Other than loopback lets other machines in; there is no password.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 7860,
) -> None:
    """A page to try merging on: pick or upload an image, turn the knobs, look."""
    with errors():
        from ..web import serve

        network, data = load(model, images, weights, num_classes, None)
        if host not in ("127.0.0.1", "localhost", "::1"):
            stderr.print(f"warning: everybody who reaches {host} can use this page; there is no password", style="yellow")
        with status() as say:
            page = serve(network, data, model, host=host, port=port, fit=fit, say=say)
        print(f"http://{page.host}:{page.port}", flush=True)
        page.wait()
