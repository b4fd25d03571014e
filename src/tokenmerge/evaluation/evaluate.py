"""Compare methods with the baseline on the same images, in one run: in one process or in many, resumable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from ..data.checkpoint import weights_digest
from ..data.images import ImageBatch, Images, Unreadable
from ..data.load import Source, as_images
from ..deployment.model_file import Config, ModelFile, method_of
from ..engine.cost import Convention
from ..engine.features import Outputs, cosine_distances, has_classes
from ..engine.patch import apply, shared_weights_copy
from ..engine.trace import Trace
from ..methods.base import Method
from ..methods.no_merge import BASELINE
from ..utils.distributed import ProcessGroup
from ..utils.files import Journal
from ..utils.progress import Progress, no_progress
from ..utils.timing import elapsed
from .measurement import Measured, Measurement
from .reference import FULL, observe


@dataclass(frozen=True)
class Result(Measured):
    """One row of the table."""

    name: str
    method: Method
    measurement: Measurement
    images_per_second: float  # median over batches, the methods interleaved on each
    file_mb: float | None = None  # of an exported file

    @property
    def gmacs_ratio(self) -> float:
        return self.ratio

    @property
    def gmacs_range(self) -> tuple[float, float]:
        """GMACs of the cheapest and of the most expensive image."""
        assert self.per_image is not None
        return float(self.per_image.gmacs.min()), float(self.per_image.gmacs.max())

    def row(self) -> dict[str, Any]:
        low, high = self.gmacs_range
        return {
            "name": self.name,
            "method": repr(self.method),
            "images": self.images,
            "top1": self.top1,
            "top5": self.top5,
            "agreement": self.agreement,
            "distance": self.distance,
            "gmacs": self.gmacs,
            "gmacs_min": low,
            "gmacs_max": high,
            "gmacs_ratio": self.ratio,
            "images_per_second": self.images_per_second,
            "file_mb": self.file_mb,
            "tokens": " ".join(f"{n:.1f}" for n in self.tokens),
        }


def evaluate(
    model: nn.Module,
    images: Source,
    methods: Sequence[Config] | Mapping[str, Config],
    *,
    batch_size: int = 32,
    convention: Convention = "paper",
    amp: torch.dtype | None = None,
    baseline: nn.Module | None = None,
    timed_batches: int = 8,
    resume: str | Path | None = None,
    group: ProcessGroup | None = None,
    baseline_outputs: BaselineOutputs | None = None,
    progress: Progress = no_progress,
) -> list[Result]:
    """Run the baseline and each method or exported file, by name if names are given, on every batch. The model is not
    changed. Of a file, the distance is that of its outputs, for lack of pre-logits features.

    `amp`: autocast to this type. `baseline`: another model to compare with, such as the same one before fine-tuning; by
    default, the model itself without merging. `timed_batches`: how many batches run once more, without a trace, to measure
    the time. `resume`: a folder that keeps finished batches; the same call resumes from it.
    `group`: batch i is processed by rank i modulo the group's size; batches are cut as in one process, so that the result
    is the same, in every process. `baseline_outputs`: a dict that several calls with the same model, images and batch size
    share, so that the baseline runs once."""
    images = as_images(images, model)
    group = group or ProcessGroup()
    if isinstance(methods, Mapping) and BASELINE in methods:
        raise ValueError(f"{BASELINE!r} is the name of the unmodified model, which is always measured; choose another")
    named = dict(methods) if isinstance(methods, Mapping) else {repr(method): method for method in methods}
    known = {} if baseline_outputs is None else baseline_outputs
    runner = _Runner(model, model if baseline is None else baseline, named, convention, amp, timed_batches, known)
    finished: dict[int, _Batch] = {}
    journal: Journal | None = None
    if resume is not None:
        folder = Path(resume)
        digest = "" if baseline is None else weights_digest(baseline)
        run = _run_line(model, images, named, f"{batch_size} {convention} {amp}{digest}")
        own = folder / f"batches-{group.rank}.jsonl"
        journals = {path: Journal(path, run, "batches") for path in sorted({*folder.glob("batches-*.jsonl"), own})}
        journal = journals[own]
        finished = {row["batch"]: row for row in chain.from_iterable(other.rows for other in journals.values())}
    already = batch_size * len(finished)  # images of an earlier run
    for number, batch in images.parts(batch_size, lambda i: i % group.size == group.rank and i not in finished):
        finished[number] = runner.run(number, batch)
        if journal is not None:
            journal.add(finished[number])
        progress("images", len(batch.names), -(-max(images.size - already, 1) // group.size))
    gathered = {row["batch"]: row for row in group.gather(list(finished.values()))}
    rows = [gathered[number] for number in sorted(gathered)]
    if not rows:
        raise Unreadable(f"{images.name}: none of its {images.size} images could be read")
    reference = _measurement(BASELINE, rows, runner.has_classes, None)
    results = []
    for name, method in {BASELINE: FULL, **named}.items():
        measurement = reference if name == BASELINE else _measurement(name, rows, runner.has_classes, reference)
        speeds = [len(row["names"]) / seen["seconds"] for row in rows if "seconds" in (seen := row["seen"][name])]
        speed = median(speeds) if speeds else float("nan")
        size = method.megabytes if isinstance(method, ModelFile) else None
        results.append(Result(name, method_of(method), measurement, speed, size))
    return results


class _Seen(TypedDict):
    """What one method did on one batch, as JSON keeps it."""

    top: list[list[int]]  # [B,k]
    distance: list[float]
    gmacs: list[float]
    tokens: list[list[int]]  # [L,B]
    features: NotRequired[list[list[float]]]  # of models without classes
    seconds: NotRequired[float]  # of the batch, where it was timed


class _Batch(TypedDict):
    batch: int
    names: list[str]
    labels: list[int] | None
    seen: dict[str, _Seen]  # by method


BaselineOutputs = dict[int, tuple[_Seen, Outputs]]  # by batch: what the baseline did and returned


@dataclass
class _Runner:
    """The baseline and every method, each in a copy of the model with shared weights, and every file in its runtime."""

    model: nn.Module
    baseline: nn.Module
    methods: dict[str, Config]
    convention: Convention
    amp: torch.dtype | None
    timed: int  # batches still to be timed
    known: BaselineOutputs
    memo: dict[Any, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.has_classes = has_classes(self.model)
        self.unpatched = shared_weights_copy(self.baseline)

    @cached_property
    def merged(self) -> dict[str, nn.Module]:
        return {name: apply(shared_weights_copy(self.model), method_of(config)) for name, config in self.methods.items()}

    @cached_property
    def files(self) -> dict[str, Callable[[Tensor], Tensor]]:
        return {name: config.open() for name, config in self.methods.items() if isinstance(config, ModelFile)}

    @cached_property
    def traceable(self) -> nn.Module:
        return apply(shared_weights_copy(self.baseline), FULL)

    @torch.inference_mode()
    def run(self, number: int, batch: ImageBatch) -> _Batch:
        like = next(self.model.parameters())
        x = batch.images.to(like.device, like.dtype)
        with nullcontext() if self.amp is None else torch.autocast(x.device.type, self.amp):
            if number not in self.known:
                out, t = observe(self.traceable, x)
                self._check_labels(batch, out.logits.shape[1])
                self.known[number] = self._seen(out, t, out.features), out
            baseline, expected = self.known[number]
            seen = {BASELINE: baseline.copy()}
            for name, model in self.merged.items():
                out, t = observe(model, x)
                if name in self.files:
                    found = self.files[name](x.cpu().float())
                    theirs = expected.logits if self.has_classes else expected.features
                    seen[name] = self._seen(Outputs(found, found.flatten(1)), t, theirs.cpu())
                else:
                    seen[name] = self._seen(out, t, expected.features)
            if self.timed > 0:
                self.timed -= 1
                runs: dict[str, Callable[[Tensor], Any]] = {BASELINE: self.unpatched, **self.merged, **self.files}
                for name, run in runs.items():
                    seen[name]["seconds"] = elapsed(run, [x])
        labels = None if batch.labels is None else batch.labels.tolist()
        return {"batch": number, "names": list(batch.names), "labels": labels, "seen": seen}

    def _seen(self, out: Outputs, t: Trace, baseline: Tensor) -> _Seen:
        logits = out.logits.float()
        seen: _Seen = {
            "top": logits.topk(min(5, logits.shape[1])).indices.tolist(),
            "distance": cosine_distances(out.features, baseline).tolist(),
            "gmacs": t.cost(self.convention, self.memo).per_image.tolist(),
            "tokens": [layer.tolist() for layer in t.tokens],
        }
        if not self.has_classes:
            seen["features"] = out.features.float().tolist()
        return seen

    def _check_labels(self, batch: ImageBatch, classes: int) -> None:
        if batch.labels is None or not self.has_classes:
            return
        for label, name in zip(batch.labels.tolist(), batch.names, strict=True):
            if not 0 <= label < classes:
                raise ValueError(f"label {label} of {name} does not fit a model with {classes} classes")


def _run_line(model: nn.Module, images: Images, methods: Mapping[str, Config], options: str) -> str:
    known = {name: config.identity if isinstance(config, ModelFile) else config for name, config in methods.items()}
    key = f"{weights_digest(model)} {images.identity} {known} {options}"
    return f"batches, version 2, {hashlib.sha256(key.encode()).hexdigest()}"


def _measurement(name: str, rows: Sequence[_Batch], has_classes: bool, baseline: Measurement | None) -> Measurement:
    def column(key: str, of: str = name) -> Tensor:
        values = chain.from_iterable(row["seen"][of][key] for row in rows)  # type: ignore[literal-required]
        return torch.tensor(list(values), dtype=torch.float64 if key in ("distance", "gmacs") else None)

    labels = None
    if has_classes and all(row["labels"] is not None for row in rows):
        labels = torch.tensor(list(chain.from_iterable(row["labels"] or () for row in rows)))
    layers = zip(*(row["seen"][name]["tokens"] for row in rows), strict=True)
    return Measurement.of(
        names=tuple(chain.from_iterable(row["names"] for row in rows)),
        top=column("top"),
        features=None if has_classes else column("features"),
        gallery=None if has_classes else column("features", BASELINE),
        baseline=None if baseline is None or baseline.per_image is None else baseline.per_image.prediction,
        distance=column("distance"),
        gmacs=column("gmacs"),
        baseline_gmacs=None if baseline is None else baseline.gmacs,
        tokens=[torch.tensor(list(chain.from_iterable(layer))) for layer in layers],
        labels=labels,
    )
