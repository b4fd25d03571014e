"""What the commands show on a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .benchmarking import Timing
    from .comparing import Cell
    from .evaluation import Result
    from .optimizing import Outcome

stdout = Console()


def _table(title: str, columns: Sequence[str], **method: Any) -> Table:
    """Methods, and figures of them. `method`: options of the first column."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("method", **method)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def print_results(results: Sequence[Result], title: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps([result.row() for result in results], indent=2))
        return
    columns = ("top-1", "top-5", "agree", "distance", "GMACs", "ratio", "im/s")
    table = _table(title, columns, min_width=16, overflow="fold")
    for r in results:
        table.add_row(
            r.name,
            "–" if r.top1 is None else f"{r.top1:.2%}",
            "–" if r.top5 is None else f"{r.top5:.2%}",
            "–" if r.agreement is None else f"{r.agreement:.2%}",
            f"{r.distance:.4f}",
            f"{r.gmacs:.3f}",
            f"{r.gmacs_ratio:.1%}",
            f"{r.images_per_second:.0f}",
        )
    stdout.print(table)
    stdout.print("agreement (agree), cosine distance of the class token, ratio of GMACs: to the unmerged model", style="dim")


def as_timm(result: Result, name: str, model: Any, crop: float | None) -> dict[str, Any]:
    """A row with the columns of timm's results files (percent there), and ours behind them."""
    config = getattr(model, "pretrained_cfg", {}) or {}

    def percent(share: float | None, wrong: bool = False) -> float | None:
        return None if share is None else round(100 * (1 - share if wrong else share), 3)

    return {
        "model": name,
        "top1": percent(result.top1),
        "top1_err": percent(result.top1, wrong=True),
        "top5": percent(result.top5),
        "top5_err": percent(result.top5, wrong=True),
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        "img_size": (config.get("input_size") or (None,))[-1],
        "crop_pct": crop or config.get("crop_pct"),
        "interpolation": config.get("interpolation"),
    } | {key: value for key, value in result.row().items() if key not in ("top1", "top5")}


def print_outcome(outcome: Outcome, as_json: bool) -> None:
    calibration, proof = outcome.calibration, outcome.proof
    if as_json:
        found = {"goal": calibration.goal, "met": calibration.met, "skipped": outcome.skipped}
        print(json.dumps(proof.to_dict() | {"calibration": found}, indent=2))
        return
    print_results(proof.results, f"{proof.images} images that calibration did not see", False)
    stdout.print(Text(calibration.sentence))
    stdout.print(Text(proof.sentence, "bold"))
    if outcome.skipped:
        stdout.print(Text(f"skipped {len(outcome.skipped)} unreadable images: {', '.join(outcome.skipped)}", "yellow"))
    stdout.print(Text(f"wrote {', '.join(str(path) for path in outcome.files)}"), soft_wrap=True)


def print_timings(timings: Sequence[Timing], title: str) -> None:
    """A table a runtime."""
    for runtime in dict.fromkeys(t.runtime for t in timings):
        table = _table(
            f"{title}, {runtime}",
            ("batch", "px", "images/s", "speed-up", "MACs", "eff.", "match", "MB"),
            min_width=16,
            overflow="fold",
        )
        for t in timings:
            if t.runtime == runtime:
                table.add_row(
                    t.method,
                    str(t.batch),
                    str(t.image_size),
                    f"{t.images_per_second:.1f}",
                    f"{t.speedup:.2f}",
                    f"{t.macs_ratio:.2f}",
                    f"{t.efficiency:.2f}",
                    "–" if t.matching_share is None else f"{t.matching_share:.1%}",
                    "–" if t.peak_mb is None else f"{t.peak_mb:.0f}",
                )
        stdout.print(table)
    legend = "medians; MACs: ratio unmerged/merged; eff.: speed-up/MACs; match: time share of matching and merging; MB: peak"
    stdout.print(legend, style="dim")


def print_cells(cells: Sequence[Cell], title: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps([cell.row() for cell in cells], indent=2))
        return
    table = _table(title, ("asked", "ratio", "GMACs", "top-1", "agree", "distance", "im/s", "faster"), min_width=12)
    for c in cells:
        table.add_row(
            c.method,
            ("–" if c.budget is None else f"{c.budget:.0%}") + ("" if c.met else " not met"),
            f"{c.ratio:.1%}",
            f"{c.gmacs:.3f}",
            "–" if c.top1 is None else f"{c.top1:.2%}",
            f"{c.agreement:.2%}",
            f"{c.distance:.5f}",
            "–" if c.images_per_second is None else f"{c.images_per_second:.1f}",
            "–" if c.speedup is None else f"{c.speedup:.2f}",
        )
    stdout.print(table)
    legend = "ratio of GMACs, agreement, cosine distance of what the head reads, and how much faster: to the unmerged model"
    stdout.print(legend, style="dim")
