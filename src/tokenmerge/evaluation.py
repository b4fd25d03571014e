"""Compare methods with the unmerged model on the same images, in one run: in one process or in many, and again from where it
was stopped."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .cost import Convention
from .crew import Crew
from .files import Journal
from .loading import Batch, Images, Source, Unreadable, as_images
from .measuring import answers, distances, has_classes, observe, weights_digest
from .methods import Method, NoMerge
from .surgery import apply, remove, twin

UNMERGED = "unmerged"
TIMED_BATCHES = 8  # how many batches are run once more to measure the time, without a trace


@dataclass(frozen=True)
class Each:
    """One entry an image."""

    names: tuple[str, ...]
    distance: Tensor  # [n] float64
    same: Tensor  # [n] bool: whether the answer is the unmerged model's
    gmacs: Tensor  # [n] float64


@dataclass(frozen=True)
class Result:
    """One line of the table. Agreement and distance are measured against the unmerged model."""

    name: str
    method: str  # evaluates back
    images: int
    top1: float | None  # share, where labels are known
    top5: float | None  # of models with more than five classes
    agreement: float | None  # share with the same answer: top-1 class, or nearest neighbour (None for fewer than 3 images)
    distance: float  # mean cosine distance of what the head reads (the class token, or the pooled tokens)
    gmacs: float  # mean per image
    gmacs_min: float
    gmacs_max: float
    gmacs_ratio: float  # of the unmerged model's
    images_per_second: float  # median over batches, the methods taking turns on each
    tokens: tuple[float, ...] = ()  # mean tokens after each layer
    each: Each | None = field(default=None, repr=False, compare=False)

    def row(self) -> dict[str, Any]:
        row = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "each"}
        row["tokens"] = " ".join(f"{n:.1f}" for n in self.tokens)
        return row


def evaluate(
    model: nn.Module,
    images: Source,
    methods: Sequence[Method] | Mapping[str, Method],
    *,
    batch_size: int = 32,
    convention: Convention = "paper",
    amp: torch.dtype | None = None,
    memory: Path | None = None,
    crew: Crew | None = None,
    progress: Callable[[int], object] = lambda images: None,
) -> list[Result]:
    """Run the unmerged model and each method, by name if names are given, on every batch in turn. The model is left as
    it was found.

    `amp`: autocast to this type. `memory`: a folder that keeps finished batches; the same call goes on from them. `crew`:
    batch i is taken by process i modulo their number; the batches are cut as in one process, so that the result is the
    same, in every one of them."""
    images, crew = as_images(images, model), crew or Crew()
    if isinstance(methods, Mapping) and UNMERGED in methods:
        raise ValueError(f"{UNMERGED!r} is the name of the model as it is, which is always measured; give another")
    named = dict(methods) if isinstance(methods, Mapping) else {repr(method): method for method in methods}
    model = twin(model)
    runner = _Runner(model, {UNMERGED: None, **named}, convention, amp)
    known: dict[int, _Seen] = {}
    journal: Journal | None = None
    if memory is not None:
        owner = _owner(model, images, named, f"{batch_size} {convention} {amp}")
        paths = sorted({*memory.glob("batches-*.jsonl"), memory / f"batches-{crew.rank}.jsonl"})
        journals = {path: Journal(path, owner, "batches") for path in paths}
        journal = journals[memory / f"batches-{crew.rank}.jsonl"]
        known = {row["batch"]: row for row in chain.from_iterable(other.rows for other in journals.values())}
    rank, size = crew.rank, crew.size
    for number, batch in images.parts(batch_size, lambda i: i % size == rank and i not in known):
        row = runner.run(number, batch)
        known[number] = row
        if journal is not None:
            journal.add(row)
        progress(len(batch.names))
    found = {row["batch"]: row for row in crew.gather(list(known.values()))}
    rows = [found[number] for number in sorted(found)]
    if not rows:
        raise Unreadable(f"{images.name}: none of its {images.size} images could be read")
    return [_result(name, method, rows, has_classes(model)) for name, method in runner.methods.items()]


# One batch, as JSON keeps it: its number, names and labels, and by method {"top": [B,k], "distance": [B], "gmacs": [B],
# "tokens": [L,B], "features": [B,C] where there are no classes, "seconds": of the batch, where it was measured}.
_Seen = dict[str, Any]


@dataclass
class _Runner:
    model: nn.Module
    methods: dict[str, Method | None]  # None is the unmerged model
    convention: Convention
    amp: torch.dtype | None
    timed: int = 0
    memo: dict[Any, float] = field(default_factory=dict)

    @torch.inference_mode()
    def run(self, number: int, batch: Batch) -> _Seen:
        like = next(self.model.parameters())
        x = batch.images.to(like.device, like.dtype)
        classes, reference = has_classes(self.model), None
        seen: dict[str, Any] = {}
        with nullcontext() if self.amp is None else torch.autocast(x.device.type, self.amp):
            for name, method in self.methods.items():
                one = observe(self.model, method, x)
                reference = one.features if reference is None else reference
                logits = one.logits.float()
                seen[name] = {
                    "top": logits.topk(min(5, logits.shape[1])).indices.tolist(),
                    "distance": distances(one.features, reference).tolist(),
                    "gmacs": one.trace.cost(self.convention, self.memo).per_image.tolist(),
                    "tokens": [layer.tolist() for layer in one.trace.tokens],
                }
                if not classes:
                    seen[name]["features"] = one.features.float().tolist()
            if self.timed < TIMED_BATCHES:
                self.timed += 1
                for name, method in self.methods.items():
                    seen[name]["seconds"] = _seconds(self.model, method, x)
        labels = None if batch.labels is None else batch.labels.tolist()
        for label, name in zip(labels or (), batch.names, strict=False):
            if classes and not 0 <= label < logits.shape[1]:
                raise ValueError(f"label {label} of {name} does not fit a model with {logits.shape[1]} classes")
        return {"batch": number, "names": list(batch.names), "labels": labels, "seen": seen}


def _owner(model: nn.Module, images: Images, methods: Mapping[str, Method], options: str) -> str:
    whose = f"{weights_digest(model)} {images.identity} {dict(methods)} {options}"
    return f"batches, version 1, {hashlib.sha256(whose.encode()).hexdigest()}"


def _seconds(model: nn.Module, method: Method | None, x: Tensor) -> float:
    remove(model)
    if method is not None:
        apply(model, method)
    if x.device.type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    model(x)
    if x.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _result(name: str, method: Method | None, rows: Sequence[_Seen], classes: bool) -> Result:
    def column(key: str, of: str = name) -> Tensor:
        values = chain.from_iterable(row["seen"][of][key] for row in rows)
        return torch.tensor(list(values), dtype=torch.float64 if key in ("distance", "gmacs") else None)

    def said(of: str) -> Tensor:
        """What a user would read off."""
        if classes:
            return column("top", of)[:, 0]
        return answers(torch.empty(0), column("features", of), column("features", UNMERGED), classes)

    names = tuple(chain.from_iterable(row["names"] for row in rows))
    labels = None
    if classes and all(row["labels"] is not None for row in rows):
        labels = torch.tensor(list(chain.from_iterable(row["labels"] for row in rows)))
    answer, gmacs, top = said(name), column("gmacs"), column("top")
    each = Each(names, column("distance"), answer == said(UNMERGED), gmacs)
    layers = zip(*(row["seen"][name]["tokens"] for row in rows), strict=True)
    speeds = [len(row["names"]) / seen["seconds"] for row in rows if "seconds" in (seen := row["seen"][name])]
    right = None if labels is None else top == labels.unsqueeze(1)
    return Result(
        name=name,
        method=repr(method or NoMerge(last_layer="full")),
        images=len(names),
        top1=None if right is None else float(right[:, 0].double().mean()),
        top5=None if right is None or top.shape[1] < 5 else float(right.any(1).double().mean()),
        agreement=float(each.same.double().mean()) if classes or len(names) > 2 else None,  # of two, each is the other's
        distance=float(each.distance.mean()),
        gmacs=float(gmacs.mean()),
        gmacs_min=float(gmacs.min()),
        gmacs_max=float(gmacs.max()),
        gmacs_ratio=float(gmacs.mean() / column("gmacs", UNMERGED).mean()),
        images_per_second=median(speeds) if speeds else float("nan"),
        tokens=tuple(float(torch.tensor(list(chain.from_iterable(layer))).double().mean()) for layer in layers),
        each=each,
    )
