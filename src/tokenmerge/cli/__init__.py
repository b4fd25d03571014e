"""The command line: parse, call the verb, print. One file per command; torch is imported inside the commands, so that
`tokenmerge --help` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..utils.registry import import_submodules
from .options import app

__all__ = ["app"]

import_submodules(sys.modules[__name__])  # each module adds its command to the app


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
