"""What an experiment writes: a CSV file, a plot, and an HTML page with the paper's numbers next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..evaluation.evaluate import Result
from ..utils.environment import cpu_features, describe_hardware
from ..utils.files import write_csv, write_text
from ..utils.rounding import round_half_up
from ..visualization.html_report import HtmlReport
from ..visualization.merge_maps import save_figure
from .bench import Bench
from .lab import Lab

Row = dict[str, Any]

# How the HTML page formats a number, by the beginning of its column's name.
STYLES = {
    "ratio": ".1%",
    "reduction": "+.0%",
    "agreement": ".1%",
    "gmacs_difference": "+.1%",
    "hours": ".3g",
    "params": ".3g",
    "change": "+.2f",
    "distance": ".4f",
    "alpha": "g",
    "beta": "g",
    "theta": "g",
}


@dataclass
class Sheet:
    """Rows with the same keys."""

    rows: list[Row]
    figure: Any = None  # of matplotlib's
    notes: list[str] = field(default_factory=list)

    def write(self, name: str, title: str, out: Path, missing: Sequence[str]) -> None:
        """NAME.csv, NAME.png and NAME.html."""
        out.mkdir(parents=True, exist_ok=True)
        write_csv(self.rows, out / f"{name}.csv")
        page = HtmlReport(title)
        if self.figure is not None:
            save_figure(self.figure, out / f"{name}.png")
            page.image((out / f"{name}.png").read_bytes(), title)
        page.table(
            [key.replace("_", " ") for key in self.rows[0]], [[shown(*cell) for cell in r.items()] for r in self.rows]
        )
        for note in self.notes:
            page.text(note)
        for line in missing:
            page.text(f"Not run: {line}", "dim")
        page.text(
            f"Measured on {describe_hardware()} ({', '.join(cpu_features())}), {torch.get_num_threads()} threads.", "dim"
        )
        write_text(str(page), out / f"{name}.html")


def shown(key: str, value: Any) -> str:
    """A cell of the HTML page."""
    if value is None or value == "":
        return "–"
    if not isinstance(value, float):
        return str(value)
    return format(value, next((style for begin, style in STYLES.items() if key.startswith(begin)), ".2f"))


class Printed(NamedTuple):
    """What the paper prints of a config and of its baseline."""

    gmacs: float
    top1: float  # per cent
    baseline_gmacs: float
    baseline_top1: float


def printed(bench: Bench, gmacs: float, top1: float, decimals: int = 1) -> Printed:
    """Numbers of a table of the paper, next to the baseline's with as many decimals."""
    return Printed(gmacs, top1, *_baseline(bench, decimals))


def printed_baseline(bench: Bench, decimals: int = 1) -> Printed:
    """The baseline's numbers with this many decimals."""
    baseline = _baseline(bench, decimals)
    return Printed(*baseline, *baseline)


def _baseline(bench: Bench, decimals: int) -> tuple[float, float]:
    row = bench.rows()[0]
    gmacs, top1 = (round(round_half_up(value, 10**-decimals) * 10**-decimals, decimals) for value in (row.gmacs, row.top1))
    return gmacs, top1


def paper_vs_here(bench: Bench, what: Row, results: Sequence[Result | None], paper: Printed | None) -> Row:
    """One row: what was run, the paper's GMACs and top-1 (per cent), and those of results[-1]; results[0] is the baseline.
    Differences are left out where another model stands in for the paper's."""
    base = results[0]
    found = results[-1]
    assert base is not None
    gmacs = None if paper is None else paper.gmacs
    here = None if found is None or found.top1 is None else 100 * found.top1
    change = None if here is None or base.top1 is None else here - 100 * base.top1
    comparable = found is not None and not bench.stands_in
    return {
        "model": bench.label,
        **what,
        "gmacs_paper": gmacs,
        "gmacs_here": None if found is None else round(found.gmacs, 4),
        "gmacs_difference": round(found.gmacs / gmacs - 1, 4) if comparable and gmacs and found else None,
        "ratio_paper": None if paper is None else round(paper.gmacs / paper.baseline_gmacs, 4),
        "ratio_here": None if found is None else round(found.gmacs_ratio, 4),
        "top1_paper": None if paper is None else paper.top1,
        "top1_here": None if here is None else round(here, 2),
        "change_paper": None if paper is None else round(paper.top1 - paper.baseline_top1, 2),
        "change_here": None if change is None else round(change, 2),
        "agreement": None if found is None or found.agreement is None else round(found.agreement, 4),
        "distance": None if found is None else round(found.distance, 5),
        "images": None if found is None else found.images,
    }


def stand_in_note(benches: Sequence[Bench], papers: str) -> list[str]:
    """A note where the paper's model is not available."""
    others = [bench.label for bench in benches if bench.stands_in]
    return [f"The paper ran {papers}; here {', '.join(others)} stands in, with the paper's configs."] if others else []


def hours(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds / 3600, 6)


def recipe_notes(lab: Lab) -> list[str]:
    """What was fine-tuned on."""
    if lab.train_images is None:
        return []
    notes = [
        f"Fine-tuned for {lab.epochs} epochs on {lab.sample or 'all'} images of {lab.train_images}; the paper: 30, ImageNet."
    ]
    if lab.train_images == lab.images and lab.images != "embedded":
        notes.append("These are the images that are measured on: a test of the code, not of the accuracy.")
    return notes
