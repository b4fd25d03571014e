"""What the commands print on a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..utils.rounding import percent_down

if TYPE_CHECKING:
    from ..calibration.cell import Cell
    from ..calibration.optimize import Outcome
    from ..evaluation.bench import Timing
    from ..evaluation.evaluate import Result
    from ..evaluation.prove import Proof

stdout = Console()


def say(text: str, style: str | None = None) -> None:
    """Print a line as it is, without wrapping and highlighting."""
    stdout.print(Text(text, style or ""), soft_wrap=True, highlight=False)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def number(value: float | None, style: str) -> str:
    """A number in this format; a dash where there is none."""
    return "–" if value is None else format(value, style)


def figures_table(title: str | None, columns: Sequence[str], first: str = "method", **options: Any) -> Table:
    """A table of figures. `options`: those of the first column."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, **options)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def print_results(results: Sequence[Result], title: str, as_json: bool) -> None:
    if as_json:
        print_json([result.row() for result in results])
        return
    files = any(result.file_mb is not None for result in results)
    columns = ("top-1", "top-5", "agree", "distance", "GMACs", "ratio", "im/s", *(["MB"] if files else []))
    table = figures_table(title, columns, min_width=16, overflow="fold")
    for r in results:
        table.add_row(
            r.name,
            number(r.top1, ".2%"),
            number(r.top5, ".2%"),
            number(r.agreement, ".2%"),
            f"{r.distance:.4f}",
            f"{r.gmacs:.3f}",
            f"{r.ratio:.1%}",
            f"{r.images_per_second:.0f}",
            *([number(r.file_mb, ".1f")] if files else []),
        )
    stdout.print(table)
    legend = (
        "agree: top-1 agreement; distance: cosine distance of the pre-logits features; ratio of GMACs: all to the baseline"
    )
    stdout.print(legend, style="dim")


def print_proof(proof: Proof, title: str, as_json: bool) -> None:
    if as_json:
        print_json(proof.to_dict())
        return
    print_results(proof.results, title, False)
    say(proof.sentence, "bold")
    for name, bound in proof.bounds.items():
        say(f"{name}: ≥ {percent_down(bound)} unchanged" + (", together with the others" if len(proof.bounds) > 1 else ""))
    say(proof.distance_sentence)
    say(proof.power)


def timm_row(result: Result, name: str, model: Any, crop: float | None) -> dict[str, Any]:
    """A row with the columns of timm's results files (in per cent), followed by ours."""
    config = getattr(model, "pretrained_cfg", {}) or {}

    def percent(fraction: float | None, error: bool = False) -> float | None:
        return None if fraction is None else round(100 * (1 - fraction if error else fraction), 3)

    return {
        "model": name,
        "top1": percent(result.top1),
        "top1_err": percent(result.top1, error=True),
        "top5": percent(result.top5),
        "top5_err": percent(result.top5, error=True),
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        "img_size": (config.get("input_size") or (None,))[-1],
        "crop_pct": crop or config.get("crop_pct"),
        "interpolation": config.get("interpolation"),
    } | {key: value for key, value in result.row().items() if key not in ("top1", "top5")}


def print_outcome(outcome: Outcome, as_json: bool, counted: str = "") -> None:
    calibration = outcome.calibration
    proof = outcome.proof
    if as_json:
        summary = {"goal": calibration.goal, "met": calibration.met, "skipped": outcome.skipped}
        certificate = None if outcome.certificate is None else outcome.certificate.to_dict()
        more: dict[str, Any] = {
            "calibration": summary,
            "verdict": outcome.verdict,
            "power": outcome.power,
            "certificate": certificate,
        }
        print_json(proof.to_dict() | more)
        return
    print_results(proof.results, f"{proof.images} images that calibration did not see{counted}", False)
    say(calibration.sentence)
    claim, *others = outcome.claims
    say(claim, "bold")
    for sentence in (*others, outcome.power):
        say(sentence)
    if outcome.skipped:
        say(f"skipped {len(outcome.skipped)} unreadable images: {', '.join(outcome.skipped)}", "yellow")
    say(f"wrote {', '.join(str(path) for path in outcome.files)}")


def print_timings(timings: Sequence[Timing], title: str) -> None:
    """One table per runtime."""
    columns = ("batch", "px", "images/s", "speed-up", "MACs", "eff.", "match", "MB")
    for runtime in dict.fromkeys(t.runtime for t in timings):
        table = figures_table(f"{title}, {runtime}", columns, min_width=16, overflow="fold")
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
                    number(t.matching_share, ".1%"),
                    number(t.peak_mb, ".0f"),
                )
        stdout.print(table)
    legend = (
        "medians; MACs: MAC reduction, baseline/merged; eff.: efficiency, speed-up/MACs; match: fraction of the time spent "
        "on matching and merging; MB: peak memory"
    )
    stdout.print(legend, style="dim")


def print_cells(cells: Sequence[Cell], title: str, as_json: bool) -> None:
    if as_json:
        print_json([cell.row() for cell in cells])
        return
    columns = ("budget", "ratio", "GMACs", "top-1", "agree", "distance", "im/s", "speed-up")
    table = figures_table(title, columns, min_width=12)
    for c in cells:
        table.add_row(
            c.name,
            number(c.budget, ".0%") + (" time" if c.budget_in == "time" else "") + ("" if c.met else " not met"),
            f"{c.ratio:.1%}",
            f"{c.gmacs:.3f}",
            number(c.top1, ".2%"),
            number(c.agreement, ".2%"),
            f"{c.distance:.5f}",
            number(c.images_per_second, ".1f"),
            number(c.speedup, ".2f"),
        )
    stdout.print(table)
    legend = "ratio of GMACs, top-1 agreement, cosine distance of the pre-logits features, and speed-up: all to the baseline"
    stdout.print(legend, style="dim")
