"""Labels or embeddings of many images in one Parquet file: in this process, or by Ray over a cluster.

The unit of work is a batch of numbered images, cut the same way by every engine. Ray starts a batch again whose worker died;
rows are written by the driver alone, in the order of the images, and the file appears when it is whole. So every image is in
it once, also one that could not be read: its row says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .checkpoints import load_model
from .extras import need
from .loading import Images, Unreadable, load_images
from .measuring import has_classes, watch_features
from .methods import Method, from_dict
from .surgery import apply, plan_of

Engine = Literal["here", "ray"]


@dataclass(frozen=True)
class Job:
    """What every worker needs to know; it loads the model and opens the source by itself."""

    model: str
    source: str
    method: Mapping[str, Any]  # of a Method's to_dict
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    embeddings: bool = False
    batch_size: int = 32
    limit: int | None = None
    device: str = "cpu"


@dataclass
class Predictor:
    """A worker: one batch in, its rows out."""

    job: Job

    @cached_property
    def model(self) -> nn.Module:
        job = self.job
        method: Method = from_dict(job.method)
        model = load_model(job.model, job.weights, **job.options).to(job.device)
        if not job.embeddings and not has_classes(model):
            raise ValueError(f"{job.model} has no classes to tell; ask for embeddings")
        return apply(model, method)

    @cached_property
    def images(self) -> Images:
        return load_images(self.job.source, self.model, limit=self.job.limit)

    @torch.inference_mode()
    def __call__(self, start: int) -> Any:
        """The batch that begins with this image, as a table of Arrow's."""
        import pyarrow as pa

        images, job = self.images, self.job
        numbers = range(start, min(start + job.batch_size, images.size))
        names = [images.names[number] for number in numbers]
        found: dict[str, tuple[Any, ...]] = {}
        with suppress(Unreadable), warnings.catch_warnings():  # what cannot be read is written into its row
            warnings.simplefilter("ignore")
            for batch in images.take(numbers).batches(job.batch_size):
                found |= dict(zip(batch.names, zip(*self._answers(batch.images), strict=True), strict=True))
        answers = [found.get(name) for name in names]
        rows: dict[str, list[Any]] = {"path": names}
        for i, column in enumerate(self.columns):
            rows[column] = [None if answer is None else answer[i] for answer in answers]
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

    def _answers(self, x: Tensor) -> tuple[list[Any], ...]:
        like = next(self.model.parameters())
        backbone = plan_of(self.model).backbone
        with watch_features(backbone.classifier(self.model)) as seen:
            out = backbone.answer(self.model(x.to(like.device, like.dtype))).float()
        if self.job.embeddings:
            return ((seen[-1].float() if seen else out).flatten(1).tolist(),)
        score, label = out.softmax(1).max(1)
        return label.tolist(), score.tolist()


def predict(
    predictor: Predictor,
    out: Path,
    *,
    engine: Engine = "here",
    workers: int = 1,
    progress: Callable[[int], object] = lambda images: None,
) -> int:
    """Write the rows of all images; their number is returned. `workers`: of Ray, one core or device each."""
    if engine not in ("here", "ray"):
        raise ValueError(f"unknown engine {engine!r}; known: here, ray")
    for package in ("pyarrow", *(["ray"] if engine == "ray" else [])):
        need(package, "predictions")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent}: no such folder to write into")
    starts = range(0, predictor.images.size, predictor.job.batch_size)
    tables = map(predictor, starts) if engine == "here" else _by_ray(predictor, starts, workers)
    return _write(tables, out, predictor, progress)


def _by_ray(predictor: Predictor, starts: range, workers: int) -> Iterator[Any]:
    import ray

    job, images = predictor.job, predictor.images
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    with ray.data.DataContext.current(context):
        batches = ray.data.from_items([{"start": start} for start in starts], override_num_blocks=len(starts))
    done = batches.map_batches(
        Worker,
        fn_constructor_args=(asdict(job), images.identity),
        batch_size=1,
        num_cpus=1,
        num_gpus=0 if job.device == "cpu" else 1,
        compute=ray.data.ActorPoolStrategy(size=workers),  # makes dead workers anew and gives their batches out again
    )
    yield from done.iter_batches(batch_size=None, batch_format="pyarrow")


class Worker:
    """What Ray makes in its processes."""

    def __init__(self, job: dict[str, Any], identity: str) -> None:
        torch.set_num_threads(1)
        self.predictor = Predictor(Job(**job))
        if self.predictor.images.identity != identity:
            raise ValueError(f"{self.predictor.images.name} is not the same for all workers, or has changed since the start")

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        (start,) = batch["start"]
        return self.predictor(int(start))


def _write(tables: Iterator[Any], out: Path, predictor: Predictor, progress: Callable[[int], object]) -> int:
    import pyarrow.parquet as pq

    schema, images = predictor.schema, predictor.images
    draft, count = out.with_name(out.name + ".part"), 0
    try:
        with pq.ParquetWriter(draft, schema) as writer:
            for table in tables:
                writer.write_table(table.cast(schema))
                count += len(table)
                progress(len(table))
        if count != images.size:
            raise RuntimeError(f"{count} rows came back for {images.size} images of {images.name}")
        draft.replace(out)
    except BaseException:  # also an interrupt: what is not whole is not left behind
        draft.unlink(missing_ok=True)
        raise
    return count
