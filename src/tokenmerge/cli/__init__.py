"""The command line: parse, call the verb, print. Torch is imported inside the commands, so that help answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from . import looking, research, running, shipping  # noqa: F401 – each puts its commands into the app
from .common import app

__all__ = ["app"]


def _version(asked: bool) -> None:
    if asked:
        from .. import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass
