"""The whole job: calibrate, validate on other images, compare with ToMe at the same cost and time, write everything down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from ..core.schedule import divide_evenly
from ..data.images import Images
from ..data.load import Source, as_images
from ..deployment.export import export
from ..deployment.int8 import Int8
from ..deployment.model_file import Config, ModelFile
from ..deployment.runtimes import EAGER, check_runtime, int8_runtime, target_of
from ..engine.features import has_classes
from ..evaluation.certify import Certificate
from ..evaluation.power import check_power, power_statement
from ..evaluation.prove import Proof, prove
from ..evaluation.reference import FULL, Reference
from ..methods.base import Method
from ..methods.no_merge import BASELINE_CLS_ONLY, NoMerge
from ..methods.serialization import save
from ..methods.tome import ToMe
from ..utils.bisect import bisect_int
from ..utils.files import write_csv, write_text
from ..utils.optional import require_package
from ..utils.progress import Progress, no_progress
from ..visualization.html_report import HtmlReport
from .calibrate import Calibration, calibrate
from .chain import Order, certified_config
from .clock import Clock
from .freeze import Frozen, freeze
from .goal import Goal
from .report import BOTH_FILE, FLOAT_FILE, INT8_FILE, MERGED_FILE, STATIC, TOME, TOME_IN_TIME, optimization_report

TIMING_ROUNDS = 5  # to find ToMe at the same time


@dataclass(frozen=True)
class Outcome:
    """What was found, with its evidence, and the files that were written."""

    calibration: Calibration
    frozen: Frozen
    proof: Proof
    files: tuple[Path, ...]
    skipped: dict[str, str]  # images that could not be read, and why
    certificate: Certificate | None = None  # where a guarantee was asked for
    power: str = ""  # what the held-out images could certify

    @property
    def claims(self) -> tuple[str, ...]:
        """What may be claimed, most important first."""
        if self.certificate is not None:
            warning = self.certificate.warning
            return (self.certificate.sentence, *(() if warning is None else (warning,)))
        return (self.proof.sentence, *(() if self.verdict is None else (self.verdict,)))

    @property
    def verdict(self) -> str | None:
        """Of a goal that keeps a fraction of the predictions: whether it is proven."""
        keep = self.calibration.keep
        if keep is None:
            return None
        found = self.calibration.measurement
        return self.proof.verdict(keep, (round((found.agreement or 0.0) * found.images), found.images))


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
    certify: float | None = None,
    order: Order = "gmacs",
    confidence: float = 0.95,
    anyway: bool = False,
    int8: bool | Int8 = False,
    progress: Progress = no_progress,
    **goal: float | None,
) -> Outcome:
    """Calibrate on `sample` images (at most half of them), validate on the others, and write into the folder `out`:
    reduction.json (read it with `tokenmerge.load`), frozen.json (the same with static r), results.csv, proof.json, usage.py
    and report.html. Trials are kept in trials.jsonl, timings in timings.jsonl: the same call resumes an interrupted one.
    `goal`: one of those of `calibrate`; `runtime` and `batch`: where a goal in time is measured. For other goals, ToMe is
    brought to the same time in eager PyTorch, in batches of `batch`.

    `certify`, instead of a goal: the fraction of the predictions of all such images that must stay, with this `confidence`.
    A chain of configs, by GMACs or by time (`order`), is tested in order on the other images (see `tokenmerge.certify`), and
    certificates.jsonl remembers which images certified something. What these images cannot certify is refused, unless
    `anyway`.

    `int8`: calibrate for int8 files of `runtime`, and write four of them: float, merged, int8, and merged in int8. All are
    validated on the other images; a certificate is then that of the merged file in int8."""
    require_package("matplotlib", "reports")
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: a file is in the way; give a folder")
    if certify is None:
        Goal(**goal)
    elif any(value is not None for value in goal.values()):
        raise ValueError("certify is a goal of its own: leave out the others")
    elif order not in get_args(Order):
        raise ValueError(f"order is one of {', '.join(get_args(Order))}, not {order!r}")
    check_runtime(runtime)
    if int8:
        int8_runtime(runtime)
    images = as_images(images, model).readable()
    if images.size < 6:
        raise ValueError(
            f"{images.name}: {images.size} images could be read; at least 6 are needed, half of them to validate"
        )
    seen, unseen = images.split(min(sample, images.size // 2), seed)
    trials = unseen.size if has_classes(model) else unseen.size // 2
    level = goal.get("min_agreement") if certify is None else certify
    if certify is not None and not anyway:
        check_power(trials, certify, confidence)
    power = power_statement(trials, None if level == 1 else level, confidence)
    progress(power, 0)
    out.mkdir(parents=True, exist_ok=True)

    def calibrated(goal: Mapping[str, float | None]) -> Calibration:
        return calibrate(
            model,
            seen,
            **goal,  # type: ignore[arg-type]
            sample=seen.size,
            rounds=rounds,
            batch_size=batch_size,
            seed=seed,
            runtime=runtime,
            batch=batch,
            int8=bool(int8),
            resume=out,
            progress=progress,
        )

    files = None if not int8 else _Int8Files.of(model, seen, out, runtime, int8, batch_size, progress)

    def shipped(found: Calibration) -> Config:
        if files is None:
            return found.method
        static = freeze(model, seen, found.method, batch_size=batch_size).method
        return files.write(static, f"certified_{round(100 * found.ratio)}", files.options)

    certificate: Certificate | None = None
    if certify is None:
        calibration = calibrated(goal)
    else:
        calibration, certificate = certified_config(
            model,
            unseen,
            calibrated,
            shipped,
            order=order,
            level=certify,
            confidence=confidence,
            batch_size=batch_size,
            anyway=anyway,
            journal=out,
            progress=progress,
        )
    frozen = freeze(model, seen, calibration.method, batch_size=batch_size)
    one = Reference(model, seen.take(range(1)), batch_size=1)
    others: dict[str, Config] = {
        TOME: tome_at(one, calibration.ratio),
        STATIC: frozen.method,
        BASELINE_CLS_ONLY: NoMerge(),
    }
    where = EAGER if calibration.time is None else int8_runtime(runtime) if int8 else runtime
    timed = seen.split(seen.size, seed)[0]
    clock = Clock.on(model, timed, batch_size, runtime=where, batch=batch, rounds=TIMING_ROUNDS, folder=out)
    others[TOME_IN_TIME] = clock.solve(ToMe, clock.time_ratio(calibration.method), one.depth, one.tokens)
    others |= {} if files is None else files.four(frozen.method)
    proof = prove(model, unseen, calibration.method, others=others, batch_size=batch_size, progress=progress)
    names = ("reduction.json", "frozen.json", "results.csv", "proof.json", "usage.py", "report.html")
    written = (*(out / name for name in names), *(one.path for one in others.values() if isinstance(one, ModelFile)))
    outcome = Outcome(calibration, frozen, proof, written, dict(images.skipped), certificate, power)
    _write(out, outcome, _about(name, model, outcome), optimization_report(model, unseen, name, outcome, batch_size))
    return outcome


def _write(out: Path, outcome: Outcome, about: dict[str, Any], report: HtmlReport) -> None:
    certificate = outcome.certificate
    summary = {
        "calibration": _to_dict(outcome.calibration),
        "proof": outcome.proof.to_dict() | {"verdict": outcome.verdict, "power": outcome.power},
        "certificate": None if certificate is None else certificate.to_dict(),
    }
    save(outcome.calibration.method, out / "reduction.json", about)
    save(outcome.frozen.method, out / "frozen.json", about)
    write_csv([result.row() for result in outcome.proof.results], out / "results.csv")
    write_text(json.dumps(summary, indent=2) + "\n", out / "proof.json")
    write_text(USAGE, out / "usage.py")
    write_text(str(report), out / "report.html")


@dataclass(frozen=True)
class _Int8Files:
    """Writes files of a runtime, in float and in int8, with ranges from the calibration images."""

    model: nn.Module
    images: torch.Tensor
    out: Path
    runtime: str
    options: Int8
    progress: Progress

    @classmethod
    def of(
        cls,
        model: nn.Module,
        seen: Images,
        out: Path,
        runtime: str,
        int8: bool | Int8,
        batch_size: int,
        progress: Progress,
    ) -> _Int8Files:
        images = torch.cat([batch.images for batch in seen.batches(batch_size)])
        return cls(model, images, out, runtime, int8 if isinstance(int8, Int8) else Int8(), progress)

    def write(self, method: Method, name: str, int8: Int8 | bool) -> ModelFile:
        target = target_of(self.runtime)
        path = self.out / f"{name}{target.suffix}"
        export(self.model, method, self.images, path, to=target.name, int8=int8, progress=self.progress)
        return ModelFile(path)

    def four(self, method: Method) -> dict[str, Config]:
        return {
            FLOAT_FILE: self.write(FULL, "float", False),
            MERGED_FILE: self.write(method, "merged", False),
            INT8_FILE: self.write(FULL, "int8", self.options),
            BOTH_FILE: self.write(method, "merged_int8", self.options),
        }


def _about(name: str, model: nn.Module, outcome: Outcome) -> dict[str, Any]:
    """Where a config comes from."""
    found = outcome.calibration
    each = found.measurement.per_image
    assert each is not None
    return {
        "model": name,
        "model_class": type(model).__name__,
        "goal": found.goal if outcome.certificate is None else outcome.certificate.sentence,
        "tokenmerge": version("tokenmerge"),
        "gmacs_ratio": found.ratio,
        "validation": outcome.proof.sentence if outcome.certificate is None else outcome.certificate.sentence,
        "tokens_left": [int(n) for n in each.tokens[:, -2]] if each.tokens.shape[1] > 1 else [],
    }


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
