"""`tokenmerge convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options


@options.command
def convert(
    model: Annotated[str, typer.Argument(help="Base model: a timm name.")],
    checkpoint: Annotated[Path, typer.Argument(help="What the authors released.")],
    method: options.Method,
    out: Annotated[Path, typer.Option(help="Folder for the converted files.")],
    num_classes: options.NumClasses = None,
) -> None:
    """Convert weights that the authors of DynamicViT, Evo-ViT, A-ViT, EViT or MCTF released."""
    with options.errors():
        from ..methods import load_or_parse
        from ..training.released import convert as run

        given = {} if num_classes is None else {"num_classes": num_classes}
        run(checkpoint, model, load_or_parse(method), out, **given)
        options.stderr.print(f"{out / 'model.safetensors'}, {out / 'method.json'}", soft_wrap=True)
