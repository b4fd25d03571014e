"""Files are written whole or not at all: to a temporary file in the same folder, which then replaces the target. Long runs
keep their results line by line, so that they can resume."""

from __future__ import annotations

import csv
import io
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces `path` if the block succeeds and is removed if it fails. Every call has its
    own, so that two runs with the same target do not write into one file: the last to finish wins."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield draft
        draft.replace(path)
    except BaseException:  # also an interrupt: nothing half-written is left behind
        draft.unlink(missing_ok=True)
        raise


def write_text(text: str, path: Path) -> None:
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows with the same keys, which become the header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_text(text.getvalue(), path)


class Journal:
    """Rows on disk, one per line, after a first line that identifies the run (model, images, options). A line that was
    half-written when the process ended is ignored."""

    def __init__(self, path: Path | None, run: str, what: str) -> None:
        self.path = path
        self.rows: list[Any] = []
        self._whole = False  # whether the file exists and ends with a whole line
        self._run = run
        if path is None or not path.exists():
            return
        first, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        if first != run:
            raise ValueError(
                f"{path}: {what} of another model, other images or options, or written by another version of tokenmerge; "
                "choose another folder, or remove the file"
            )
        for line in lines:
            with suppress(json.JSONDecodeError):
                self.rows.append(json.loads(line))

    def add(self, row: Any) -> None:
        self.rows.append(row)
        if self.path is None:
            return
        if self._whole:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        else:
            self.rewrite(self.rows)

    def rewrite(self, rows: Sequence[Any]) -> None:
        """Replace the file by these rows."""
        self.rows = list(rows)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text("".join(f"{line}\n" for line in (self._run, *map(json.dumps, self.rows))), self.path)
            self._whole = True
