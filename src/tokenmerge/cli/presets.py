"""`tokenmerge presets`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from . import options
from .output import print_json, stdout


@options.command
def presets(
    model: Annotated[str | None, typer.Argument(help="A model of the paper. Default: all of them.")] = None,
    as_json: options.Json = False,
) -> None:
    """The configs that the paper published, with its GMACs and top-1."""
    with options.errors():
        from ..methods.presets import paper_rows, rows_of

        rows: list[dict[str, Any]] = [asdict(row) for row in (rows_of(model) if model else paper_rows())]
    if as_json:
        print_json(rows)
        return
    table = Table()
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("table", "model") else "right")
    for row in rows:
        table.add_row(*("–" if value is None else str(value) for value in row.values()))
    stdout.print(table)
