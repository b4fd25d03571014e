"""The configs that the paper published: every row of its full-result tables (Tables A1–A4 of the appendix)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class PaperRow:
    """One published result. The baseline of a model has no parameters."""

    table: str  # A1, A3, A4: training-free; A2: after 30 epochs of fine-tuning
    model: str  # timm's name, or a name of `tokenmerge.models`
    alpha: float | None
    beta: float | None
    theta_min: float | None
    gmacs: float  # in the paper's convention, see docs/macs.md
    top1: float  # per cent, ImageNet-1k

    @property
    def is_baseline(self) -> bool:
        return self.alpha is None


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    """All rows, in the order of the paper."""
    text = files(__package__).joinpath("paper_rows.csv").read_text(encoding="utf-8")

    def number(cell: str) -> float | None:
        return float(cell) if cell else None

    return tuple(
        PaperRow(
            row["table"],
            row["model"],
            number(row["alpha"]),
            number(row["beta"]),
            number(row["theta_min"]),
            float(row["gmacs"]),
            float(row["top1"]),
        )
        for row in csv.DictReader(text.splitlines())
    )


def rows_of(model: str, table: str | None = None) -> list[PaperRow]:
    """The training-free rows of a model (or those of one table), baseline first. A pretrained tag may be left on."""
    known = list(dict.fromkeys(row.model for row in paper_rows()))
    name = model if model in known else model.partition(".")[0]
    if name not in known:
        raise ValueError(f"the paper has no rows for {model!r}; it has rows for {', '.join(known)}")
    return [r for r in paper_rows() if r.model == name and (r.table == table if table else r.table != "A2")]


def find_preset(model: str, *, gmacs: float | None = None, lossless: bool = False) -> PaperRow:
    """The row nearest to `gmacs` from below, or the cheapest one whose top-1 is not under the baseline's."""
    if (gmacs is None) == (not lossless):
        raise ValueError("give either gmacs=… or lossless=True")
    baseline, *rows = rows_of(model)
    if lossless:
        fitting = [row for row in rows if row.top1 >= baseline.top1]
        if not fitting:
            best = max(rows, key=lambda row: row.top1)
            raise ValueError(
                f"no row of {model!r} keeps the baseline's {baseline.top1} %; the nearest is {best.top1} % "
                f"at {best.gmacs} GMACs: use gmacs={best.gmacs}"
            )
        return min(fitting, key=lambda row: row.gmacs)
    fitting = [row for row in rows if row.gmacs <= gmacs]  # type: ignore[operator]
    if not fitting:
        low = min(row.gmacs for row in rows)
        raise ValueError(f"no row of {model!r} is at or below {gmacs} GMACs; the lowest has {low}")
    return max(fitting, key=lambda row: row.gmacs)
