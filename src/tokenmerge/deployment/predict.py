"""Labels or embeddings of many images in one Parquet file: in this process, or by Ray on a cluster.

The unit of work is a batch of numbered images, cut the same way by every engine. Ray restarts a batch whose worker died.
Only the driver writes rows, in the order of the images, and the file appears when it is complete. So every image is in it
exactly once, also an unreadable one: its row says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..backbones import ADAPTERS
from ..data import embedded
from ..data.checkpoint import load_model
from ..data.images import Images, Unreadable
from ..data.load import Source, as_images, load_images
from ..engine.features import has_classes, run_model
from ..engine.patch import apply, shared_weights_copy
from ..methods.base import Method
from ..methods.no_merge import NoMerge
from ..methods.serialization import from_dict
from ..utils.files import replacing
from ..utils.optional import require_package
from ..utils.progress import Progress, no_progress
from ..utils.rounding import percent_down
from ..utils.statistics import finite_lower_bound

Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Job:
    """What every worker needs to know; it loads the model and opens the images by itself."""

    model: str
    images: str
    method: Mapping[str, Any]  # of a Method's to_dict
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    embeddings: bool = False
    batch_size: int = 32
    limit: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Audit:
    """How many predictions of a finished job equal the baseline's, from a random subset of its own images."""

    sample: int
    unchanged: int
    images: int  # of the job that could be read
    confidence: float
    bound: float  # at least this fraction of them is unchanged, with this confidence

    @property
    def sentence(self) -> str:
        return (
            f"≥ {percent_down(self.bound)} of these {self.images:,} predictions equal the baseline's ({self.confidence:.0%} "
            f"confidence, {self.sample - self.unchanged} of {self.sample:,} audited differ)"
        )


@dataclass(frozen=True)
class Predicted:
    """What a job wrote."""

    images: int  # rows
    audit: Audit | None = None


@dataclass
class Predictor:
    """A worker: one batch in, its rows out."""

    job: Job
    given_model: nn.Module | None = None  # instead of the job's names: objects of this process
    given_images: Images | None = None

    @cached_property
    def model(self) -> nn.Module:
        job = self.job
        if self.given_model is not None:
            model = shared_weights_copy(self.given_model)
        else:
            model = load_model(job.model, job.weights, **job.options).to(job.device)
        if not job.embeddings and not has_classes(model):
            raise ValueError(f"{job.model} has no classifier; ask for embeddings")
        return apply(model, from_dict(job.method))

    @cached_property
    def images(self) -> Images:
        if self.given_images is not None:
            return self.given_images.take(range(self.given_images.size)[: self.job.limit])
        return load_images(self.job.images, self.model, limit=self.job.limit)

    @torch.inference_mode()
    def __call__(self, start: int) -> Any:
        """The batch that begins with this image, as an Arrow table."""
        import pyarrow as pa

        images = self.images
        job = self.job
        numbers = range(start, min(start + job.batch_size, images.size))
        names = [images.names[images.numbers[number]] for number in numbers]
        predicted: dict[str, tuple[Any, ...]] = {}
        with suppress(Unreadable), warnings.catch_warnings():  # the row of an unreadable image says why
            warnings.simplefilter("ignore")
            for batch in images.take(numbers).batches(job.batch_size):
                predicted |= dict(zip(batch.names, zip(*self._predict(batch.images), strict=True), strict=True))
        predictions = [predicted.get(name) for name in names]
        rows: dict[str, list[Any]] = {"path": names}
        for i, column in enumerate(self.columns):
            rows[column] = [None if prediction is None else prediction[i] for prediction in predictions]
        rows["error"] = [images.skipped.get(name) for name in names]
        return pa.table(rows, schema=self.schema)

    @property
    def schema(self) -> Any:
        import pyarrow as pa

        types = {"label": pa.int32(), "score": pa.float32(), "embedding": pa.list_(pa.float32())}
        return pa.schema([("path", pa.string()), *((c, types[c]) for c in self.columns), ("error", pa.string())])

    @property
    def columns(self) -> tuple[str, ...]:
        return ("embedding",) if self.job.embeddings else ("label", "score")

    @torch.inference_mode()
    def labels(self, x: Tensor) -> list[int]:
        """The predicted classes of a batch."""
        found: list[int] = self._predict(x)[0]
        return found

    def _predict(self, x: Tensor) -> tuple[list[Any], ...]:
        like = next(self.model.parameters())
        out = run_model(self.model, x.to(like.device, like.dtype))
        if self.job.embeddings:
            return (out.features.float().tolist(),)
        score, label = out.logits.float().softmax(1).max(1)
        return label.tolist(), score.tolist()


def predict(
    model: str | nn.Module,
    images: Source,
    method: Method,
    out: str | Path,
    *,
    weights: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    embeddings: bool = False,
    batch_size: int = 32,
    limit: int | None = None,
    device: str = "cpu",
    engine: Engine = "local",
    workers: int = 1,
    audit: int = 0,
    seed: int = 0,
    confidence: float = 0.95,
    progress: Progress = no_progress,
) -> Predicted:
    """Write one row per image into the Parquet file `out`.

    `audit`: this number of the job's own images, drawn with `seed`, also run through the baseline in this process, and the
    result says how many predictions of this job equal the baseline's.

    `engine`: "local" or "ray", with this many `workers`, one core or device each. Ray's workers load everything by
    themselves: `model` and `images` are then names, as for `load_model` and `load_images`. `weights` and `options`
    (num_classes, …) and `device` go with a model's name. `embeddings`: pre-logits features instead of labels."""
    if audit and embeddings:
        raise ValueError("an audit compares classes, and embeddings were asked for; leave one of them out")
    if audit < 0:
        raise ValueError(f"audit is a number of images, not {audit}")
    if engine not in ("local", "ray"):
        raise ValueError(f"unknown engine {engine!r}; known: local, ray")
    for package in ("pyarrow", *(["ray"] if engine == "ray" else [])):
        require_package(package, "predictions")
    out = Path(out)
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent}: no such folder to write into")
    model_name = model if isinstance(model, str) else type(model).__name__
    source = str(images) if isinstance(images, str | Path) else ""
    if isinstance(model, nn.Module) and (weights is not None or options):
        raise ValueError("weights and options go with a model's name; load them into the model that you give")
    if engine == "ray":
        if isinstance(model, nn.Module) or not source:
            raise ValueError("Ray's workers load the model and the images by themselves: give both by name")
        model_name = _absolute_model(model_name)
        source = _absolute_images(source)
    job = Job(
        model_name,
        source,
        method.to_dict(),
        None if weights is None else str(Path(weights).absolute()),
        dict(options or {}),
        embeddings,
        batch_size,
        limit,
        device,
    )
    predictor = Predictor(job)
    if isinstance(model, nn.Module):
        predictor.given_model = model
    if not isinstance(images, str | Path):
        predictor.given_images = as_images(images, predictor.model)
    starts = range(0, predictor.images.size, batch_size)
    tables = map(predictor, starts) if engine == "local" else _by_ray(predictor, starts, workers)
    labels = _write(tables, out, predictor, progress)
    readable = [number for number, label in enumerate(labels) if label is not None]
    found = _audit(predictor, labels, readable, min(audit, len(readable)), seed, confidence, progress) if audit else None
    return Predicted(len(labels), found)


def _audit(
    predictor: Predictor,
    labels: Sequence[int | None],
    readable: Sequence[int],
    sample: int,
    seed: int,
    confidence: float,
    progress: Progress,
) -> Audit:
    """Run the baseline on some of the job's images, drawn without replacement."""
    order = torch.randperm(len(readable), generator=torch.Generator().manual_seed(seed))[:sample].sort().values
    drawn = [readable[i] for i in order.tolist()]
    baseline = Predictor(
        replace(predictor.job, method=NoMerge(last_layer="full").to_dict()), predictor.given_model, predictor.given_images
    )
    unchanged = 0
    for start in range(0, sample, predictor.job.batch_size):
        part = drawn[start : start + predictor.job.batch_size]
        for batch in baseline.images.take(part).batches(len(part)):
            expected = baseline.labels(batch.images)
            unchanged += sum(label == labels[number] for label, number in zip(expected, part, strict=True))
        progress("audited images", len(part), sample)
    bound = finite_lower_bound(unchanged, sample, len(readable), confidence) if sample else 0.0
    return Audit(sample, unchanged, len(readable), confidence, bound)


def _absolute_model(name: str) -> str:
    """Ray's workers may run in other folders: a local path after the prefix of a library becomes absolute."""
    for prefix in (adapter.name_prefix for adapter in ADAPTERS):
        path = Path(name.removeprefix(prefix))
        if prefix and name.startswith(prefix) and path.exists():
            return f"{prefix}{path.absolute()}"
    return name


def _absolute_images(source: str) -> str:
    return str(Path(source).absolute()) if source != embedded.NAME and Path(source).exists() else source


def _by_ray(predictor: Predictor, starts: range, workers: int) -> Iterator[Any]:
    import ray

    job = predictor.job
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    with ray.data.DataContext.current(context):
        batches = ray.data.from_items([{"start": start} for start in starts], override_num_blocks=len(starts))
    done = batches.map_batches(
        Worker,
        fn_constructor_args=(asdict(job), predictor.images.identity),
        batch_size=1,
        num_cpus=1,
        num_gpus=0 if job.device == "cpu" else 1,
        compute=ray.data.ActorPoolStrategy(size=workers),  # restarts dead workers and their batches
    )
    yield from done.iter_batches(batch_size=None, batch_format="pyarrow")


class Worker:
    """What Ray creates in its processes."""

    def __init__(self, job: dict[str, Any], identity: str) -> None:
        torch.set_num_threads(1)
        self.predictor = Predictor(Job(**job))
        if self.predictor.images.identity != identity:
            raise ValueError(f"{self.predictor.images.name} is not the same for all workers, or has changed since the start")

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        (start,) = batch["start"]
        return self.predictor(int(start))


def _write(tables: Iterator[Any], out: Path, predictor: Predictor, progress: Progress) -> list[int | None]:
    """Write the rows; return the labels, None where an image could not be read or embeddings were asked for."""
    import pyarrow.parquet as pq

    schema = predictor.schema
    images = predictor.images
    labels: list[int | None] = []
    with replacing(out) as draft:
        with pq.ParquetWriter(draft, schema) as writer:
            for table in tables:
                writer.write_table(table.cast(schema))
                labels += table["label"].to_pylist() if "label" in table.column_names else [None] * len(table)
                progress("images", len(table), images.size)
        if len(labels) != images.size:
            raise RuntimeError(f"{len(labels)} rows came back for {images.size} images of {images.name}")
    return labels
