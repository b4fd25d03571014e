"""Results are written whole or not at all: into a draft beside the file, which then takes its place. What long runs find is
kept line by line, so that they go on where they were stopped."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_text(text: str, path: Path) -> None:
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:  # a full disk, say
        draft.unlink(missing_ok=True)
        raise


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows with the same keys, which become the header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_text(text.getvalue(), path)


class Journal:
    """Rows on disk, one a line, behind a first line that says whose they are. A line that was half written when the process
    ended is left out."""

    def __init__(self, path: Path | None, owner: str, what: str) -> None:
        self.path = path
        self.rows: list[Any] = []
        self._whole = False  # whether the file is there, and ends with a whole line
        if path is None or not path.exists():
            self._owner = owner
            return
        self._owner, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        if self._owner != owner:
            raise ValueError(f"{path}: {what} of another model, other images or options; give another place, or remove it")
        for line in lines:
            with suppress(json.JSONDecodeError):
                self.rows.append(json.loads(line))

    def add(self, row: Any) -> None:
        self.rows.append(row)
        if self.path is None:
            return
        if not self._whole:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text("".join(f"{line}\n" for line in (self._owner, *map(_line, self.rows))), self.path)
            self._whole = True
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row) + "\n")


def _line(row: Any) -> str:
    return json.dumps(row)
