"""Results are written whole or not at all: into a draft beside the file, which then takes its place."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_text(text: str, path: Path) -> None:
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows with the same keys, which become the header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_text(text.getvalue(), path)
