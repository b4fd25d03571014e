"""`tokenmerge demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import print_outcome


@options.command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the config, the report and the table.")] = Path("demo_out"),
    images: Annotated[int, typer.Option(min=4, max=1936, help="Number of embedded test images to validate on.")] = 1000,
    as_json: options.Json = False,
) -> None:
    """Run `optimize` on the embedded model and images, for 40 % of the GMACs. Needs no network."""
    with options.errors():
        from ..calibration.optimize import optimize
        from ..data.checkpoint import load_model
        from ..data.load import load_images

        data = load_images("embedded", limit=images + min(64, images))
        with options.progress_bars() as progress:
            outcome = optimize(
                load_model("embedded"), data, out, name="embedded", gmacs=0.4, batch_size=50, progress=progress
            )
    print_outcome(outcome, as_json)
