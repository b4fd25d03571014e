"""The configs that the paper published: every row of its full-result tables (Tables A2–A5 of the appendix)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..utils.rounding import not_below, round_half_up

FINE_TUNED = "A3"  # the table of the fine-tuned models
PRINTED = 0.1  # points: the precision of top-1 in Table 1, where "no accuracy drop" means no change at one decimal
# Our names of models whose rows have timm's.
SAME_WEIGHTS = {"mae_vit_base_patch16": "vit_base_patch16_224.mae"}


@dataclass(frozen=True)
class PaperRow:
    """One published result. The baseline of a model has no parameters."""

    table: str  # A2, A4, A5: training-free; A3: after 30 epochs of fine-tuning
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
    name = SAME_WEIGHTS.get(model, model if model in known else model.partition(".")[0])
    if name not in known:
        raise ValueError(f"the paper has no rows for {model!r}; it has rows for {', '.join((*known, *SAME_WEIGHTS))}")
    return [r for r in paper_rows() if r.model == name and (r.table == table if table else r.table != FINE_TUNED)]


def printed_row(model: str, gmacs: float, top1: float, table: str | None = None) -> PaperRow:
    """The row that rounds to both numbers, as the paper prints them with one decimal in its other tables."""
    wanted = (round_half_up(gmacs, 0.1), round_half_up(top1, 0.1))
    rows = rows_of(model, table)[1:]
    fitting = [row for row in rows if (round_half_up(row.gmacs, 0.1), round_half_up(row.top1, 0.1)) == wanted]
    if len(fitting) != 1:
        raise ValueError(f"{len(fitting)} rows of {model} round to {gmacs} GMACs and {top1} %; one is expected")
    return fitting[0]


def find_preset(model: str, *, gmacs: float | None = None, lossless: bool = False, tolerance: float = PRINTED) -> PaperRow:
    """The row nearest to `gmacs` from below, or the cheapest one without loss: top-1, rounded to multiples of `tolerance`
    points, is not below the baseline's. The default is the precision that the paper prints; 0 compares exactly."""
    if (gmacs is None) == (not lossless):
        raise ValueError("give either gmacs=… or lossless=True")
    baseline, *rows = rows_of(model)
    if lossless:
        fitting = [row for row in rows if not_below(row.top1, baseline.top1, tolerance)]
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
