"""The whole job: calibrate, validate on other images, compare with ToMe at the same cost and time, write everything down."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..core.schedule import divide_evenly
from ..data.load import Source, as_images
from ..deployment.runtimes import EAGER, check_runtime
from ..evaluation.prove import Proof, prove
from ..evaluation.reference import Reference
from ..methods.base import Method
from ..methods.no_merge import BASELINE_CLS_ONLY, NoMerge
from ..methods.serialization import save
from ..methods.tome import ToMe
from ..utils.bisect import bisect_int
from ..utils.files import write_csv, write_text
from ..utils.optional import require_package
from ..utils.progress import Progress, no_progress
from .calibrate import Calibration, calibrate
from .clock import Clock
from .freeze import Frozen, freeze
from .goal import Goal
from .report import STATIC, TOME, TOME_IN_TIME, optimization_report

TIMING_ROUNDS = 5  # to find ToMe at the same time


@dataclass(frozen=True)
class Outcome:
    """What was found, with its evidence, and the files that were written."""

    calibration: Calibration
    frozen: Frozen
    proof: Proof
    files: tuple[Path, ...]
    skipped: dict[str, str]  # images that could not be read, and why


def optimize(
    model: nn.Module,
    images: Source,
    out: str | Path,
    *,
    name: str = "model",
    sample: int = 64,
    rounds: int = 6,
    batch_size: int = 32,
    seed: int = 0,
    runtime: str = EAGER,
    batch: int = 32,
    progress: Progress = no_progress,
    **goal: float | None,
) -> Outcome:
    """Calibrate on `sample` images (at most half of them), validate on the others, and write into the folder `out`:
    reduction.json (read it with `tokenmerge.load`), frozen.json (the same with static r), results.csv, proof.json, usage.py
    and report.html. Trials are kept in trials.jsonl, timings in timings.jsonl: the same call resumes an interrupted one.
    `goal`: one of those of `calibrate`; `runtime` and `batch`: where a goal in time is measured. For other goals, ToMe is
    brought to the same time in eager PyTorch, in batches of `batch`."""
    require_package("matplotlib", "reports")
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: a file is in the way; give a folder")
    Goal(**goal)
    check_runtime(runtime)
    images = as_images(images, model).readable()
    if images.size < 6:
        raise ValueError(
            f"{images.name}: {images.size} images could be read; at least 6 are needed, half of them to validate"
        )
    out.mkdir(parents=True, exist_ok=True)
    seen, unseen = images.split(min(sample, images.size // 2), seed)
    calibration = calibrate(
        model,
        seen,
        **goal,  # type: ignore[arg-type]
        sample=seen.size,
        rounds=rounds,
        batch_size=batch_size,
        seed=seed,
        runtime=runtime,
        batch=batch,
        resume=out,
        progress=progress,
    )
    frozen = freeze(model, seen, calibration.method, batch_size=batch_size)
    one = Reference(model, seen.take(range(1)), batch_size=1)
    others: dict[str, Method] = {
        TOME: tome_at(one, calibration.ratio),
        STATIC: frozen.method,
        BASELINE_CLS_ONLY: NoMerge(),
    }
    where = EAGER if calibration.time is None else runtime
    timed = seen.split(seen.size, seed)[0]
    clock = Clock.on(model, timed, batch_size, runtime=where, batch=batch, rounds=TIMING_ROUNDS, folder=out)
    others[TOME_IN_TIME] = clock.solve(ToMe, clock.time_ratio(calibration.method), one.depth, one.tokens)
    proof = prove(model, unseen, calibration.method, others=others, batch_size=batch_size, progress=progress)
    report = optimization_report(model, unseen, name, calibration, frozen, proof, batch_size)
    summary = {"calibration": _to_dict(calibration), "proof": proof.to_dict()}
    save(calibration.method, out / "reduction.json")
    save(frozen.method, out / "frozen.json")
    write_csv([result.row() for result in proof.results], out / "results.csv")
    write_text(json.dumps(summary, indent=2) + "\n", out / "proof.json")
    write_text(USAGE, out / "usage.py")
    write_text(str(report), out / "report.html")
    names = ("reduction.json", "frozen.json", "results.csv", "proof.json", "usage.py", "report.html")
    return Outcome(calibration, frozen, proof, tuple(out / file for file in names), dict(images.skipped))


USAGE = """from pathlib import Path

import tokenmerge


def reduce(model):
    \"\"\"Apply the calibrated config; tokenmerge.remove(model) undoes it.\"\"\"
    return tokenmerge.apply(model, tokenmerge.load(Path(__file__).with_name("reduction.json")))
"""


def _to_dict(calibration: Calibration) -> dict[str, Any]:
    return {
        "goal": calibration.goal,
        "met": calibration.met,
        **calibration.measurement.to_dict(),
        "time": calibration.time,
        "time_p95": calibration.time_p95,
        "note": calibration.note,
        "pairs": calibration.pairs,
        "impact": calibration.impact,
        "method": calibration.method.to_dict(),
        "trials": len(calibration.trials),
    }


def tome_at(reference: Reference, ratio: float) -> ToMe:
    """ToMe at a given cost: the same r in every layer, and one more in the first few, to come as near as possible."""
    depth = reference.depth

    def cost(total: int) -> float:
        return reference.expected_ratio(reference.clip_to_half(divide_evenly(total, depth)))

    around = bisect_int(lambda total: cost(total) > ratio, 0, depth * reference.tokens // 2)
    return ToMe(divide_evenly(min(around, key=lambda total: abs(cost(total) - ratio)), depth))
