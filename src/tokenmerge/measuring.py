"""What a setting costs and loses against the unmerged model, on images that are kept in memory for many trials."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .backbones import find_backbone
from .backbones.base import BlockShape
from .cost import Convention, count_cost
from .engine import CallRecord, LayerRecord
from .loading import Images
from .methods import Method, NoMerge
from .surgery import apply, is_applied, plan_of, twin
from .tracing import Trace, trace

Compared = Callable[[float, float, BlockShape], float]  # multiply-accumulates of finding what merges


@dataclass(frozen=True)
class Seen:
    """What a model answered to a batch, and what that took."""

    logits: Tensor  # [B,K]
    features: Tensor  # [B,C], what the classifier reads
    trace: Trace


@contextmanager
def watch_features(classifier: nn.Module | None) -> Iterator[list[Tensor]]:
    """Collect what the classifier reads while the model runs: one [B,C] per call."""
    seen: list[Tensor] = []
    if classifier is None:
        yield seen
        return
    handle = classifier.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


def observe(model: nn.Module, method: Method | None, x: Tensor) -> Seen:
    """Run a method, or the host as it is, on a batch; the model is left with it. (The unmerged host is counted as
    NoMerge, which computes the same, bit for bit.)"""
    backbone = plan_of(apply(model, method or NoMerge(last_layer="full"))).backbone
    classifier = backbone.classifier(model)
    with watch_features(classifier) as seen, trace(model, detail=False) as t:
        logits = backbone.answer(model(x))
    return Seen(logits, (seen[-1] if seen else logits).flatten(1), t)


def distances(features: Tensor, reference: Tensor) -> Tensor:
    """Cosine distance of each row, [B] float64."""
    return (1 - F.cosine_similarity(features.double(), reference.double())).clamp(min=0).cpu()


def has_classes(model: nn.Module) -> bool:
    """Whether the host has a classifier; of others, the features are what is asked for."""
    backbone = plan_of(model).backbone if is_applied(model) else find_backbone(model)
    return not isinstance(backbone.classifier(model), nn.Identity | None)


def answers(top: Tensor, features: Tensor, gallery: Tensor, classes: bool) -> Tensor:
    """What a user would read off, [n] int64: the class; of a model without classes, the nearest neighbour of each image
    among the others in the gallery (the unmerged model's features of all images), by cosine."""
    if classes:
        return top.cpu()
    unit, known = F.normalize(features.float(), dim=1), F.normalize(gallery.float(), dim=1)
    found = []
    for start in range(0, len(unit), 1024):
        score = unit[start : start + 1024] @ known.T
        score[torch.arange(len(score)), start + torch.arange(len(score))] = -torch.inf
        found.append(score.argmax(1).cpu())
    return torch.cat(found)


@dataclass(frozen=True)
class Measured:
    """One setting on all images; means over images, or one entry an image."""

    distance: Tensor  # [n] float64
    answers: Tensor  # [n] int64
    same: Tensor  # [n] bool: the answer is the unmerged model's
    ratio: Tensor  # [n] float64: GMACs as a fraction of the unmerged model's
    tokens: tuple[float, ...]  # mean tokens after each layer


def weights_digest(model: nn.Module) -> str:
    """Of the weights, so that what was found for another model is not taken for this one's."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name} {float(value.double().sum())!r}".encode())
    return digest.hexdigest()


class Reference:
    """The unmerged model's answers to a set of images, against which settings are measured. The model is not touched: a
    twin with the same weights runs."""

    def __init__(self, model: nn.Module, images: Images, *, batch_size: int = 32, convention: Convention = "paper") -> None:
        self.model = twin(model)
        like = next(model.parameters())
        read = list(images.batches(batch_size))
        self.batches = [batch.images.to(like.device, like.dtype) for batch in read]
        labels = [batch.labels for batch in read if batch.labels is not None]
        self.labels = torch.cat(labels) if labels else None
        if not self.batches:
            raise ValueError(f"{images.name}: no images")
        self.convention = convention
        self.classes = has_classes(model)
        self._outside: dict[Any, float] = {}
        seen = self._run(None)
        self.features = torch.cat([s.features for s in seen])
        self.answers = answers(torch.cat([s.logits.argmax(1) for s in seen]), self.features, self.features, self.classes)
        costs = [s.trace.cost(convention, self._outside) for s in seen]
        self.gmacs = float(torch.cat([cost.per_image for cost in costs]).mean())
        self.tokens = int(seen[0].trace.tokens_in[0][0])
        self.prefix = seen[0].trace.calls[0].prefix
        plan = plan_of(apply(self.model, NoMerge()))
        self.depth = len(plan.backbone.blocks(self.model))
        self.merging_layers = self.depth - (plan.last_layer(self.model) != "full")  # where a merge has any effect

    def possible(self, pairs: Sequence[int]) -> list[int]:
        """The same, but no layer merges more than half of its patches."""
        found, patches = [], self.tokens - self.prefix
        for wanted in pairs:
            found.append(min(wanted, patches // 2))
            patches -= found[-1]
        return found

    def expected(self, pairs: Sequence[float], compared: Compared | None = None) -> float:
        """GMACs, as a fraction of the unmerged model's, if every image merged so many pairs in each layer. `compared`: what
        finding them costs, by the patches there are and those that go; None: ToMe's matching of keys."""
        plan = plan_of(apply(self.model, NoMerge()))
        shapes = [plan.backbone.shape(block) for block in plan.backbone.blocks(self.model)]
        last = plan.last_layer(self.model)
        call = CallRecord(plan.backbone, self.prefix, tuple(self.batches[0].shape[1:]), "forward", last, detail=False)
        n = float(self.tokens)
        for layer, (shape, merged) in enumerate(zip(shapes, pairs, strict=True), 1):
            ends = layer == len(shapes) and last != "full"
            patches = n - self.prefix
            found = patches**2 / 4 * shape.head if compared is None else compared(patches, merged, shape)
            left = float(self.prefix) if ends else n - merged
            call.layers[layer] = LayerRecord(
                layer,
                torch.tensor([n], dtype=torch.float64),
                torch.tensor([left], dtype=torch.float64),
                "q" if ends and last == "query" else None,
                torch.tensor([found if merged > 0 and not ends else 0.0], dtype=torch.float64),
            )
            n = left
        return count_cost(self.model, [call], self.convention, self._outside).gmacs / self.gmacs

    def fingerprint(self) -> str:
        """Of the weights and the images, so that trials of others are not taken for one's own."""
        digest = hashlib.sha256(b"trials, version 3")
        for batch in self.batches:
            digest.update(repr(tuple(batch.shape)).encode())
            digest.update(batch.cpu().float().numpy().tobytes())
        digest.update(weights_digest(self.model).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.features)

    @torch.inference_mode()
    def _run(self, method: Method | None) -> list[Seen]:
        return [observe(self.model, method, x) for x in self.batches]

    def measure(self, method: Method) -> Measured:
        seen = self._run(method)
        features = torch.cat([s.features for s in seen])
        costs = [s.trace.cost(self.convention, self._outside) for s in seen]
        now = answers(torch.cat([s.logits.argmax(1) for s in seen]), features, self.features, self.classes)
        layers = zip(*(s.trace.tokens for s in seen), strict=True)
        return Measured(
            distance=distances(features, self.features),
            answers=now,
            same=now == self.answers,
            ratio=torch.cat([cost.per_image for cost in costs]) / self.gmacs,
            tokens=tuple(float(torch.cat(layer).double().mean()) for layer in layers),
        )
