"""The baseline's outputs on images that are kept in memory, to measure many configs against."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..backbones import tower_of
from ..backbones.base import BlockCost
from ..data.checkpoint import weights_digest
from ..data.images import Images
from ..engine.cost import Convention, block_macs, outside_macs
from ..engine.features import Outputs, cosine_distances, has_classes, run_model
from ..engine.patch import apply, plan_of, shared_weights_copy
from ..engine.trace import Trace, trace
from ..methods.base import Method
from ..methods.no_merge import NoMerge
from .measurement import Measurement

FULL = NoMerge(last_layer="full")  # the baseline, bit for bit, and it can be traced

# MACs of finding what merges in a layer, by the patches that enter it and those that are removed.
MatchingMacs = Callable[[float, float, BlockCost], float]


def keys_matching(patches: float, removed: float, cost: BlockCost) -> float:
    """ToMe's matching: half of the keys against the other half."""
    return patches**2 / 4 * cost.head_dim


def observe(model: nn.Module, x: Tensor) -> tuple[Outputs, Trace]:
    """Run a merged model on a batch, and trace it."""
    with trace(model, detail=False) as t:
        return run_model(model, x), t


class Reference:
    """Measures configs on a set of images. The model is not changed: a copy with the same weights runs. `baseline`: another
    model to compare with; by default, the model itself."""

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        *,
        batch_size: int = 32,
        convention: Convention = "paper",
        baseline: nn.Module | None = None,
    ) -> None:
        self.model = shared_weights_copy(model)
        like = next(model.parameters())
        read = list(images.batches(batch_size))
        if not read:
            raise ValueError(f"{images.name}: no images")
        self.batches = [batch.images.to(like.device, like.dtype) for batch in read]
        self.names = [name for batch in read for name in batch.names]
        labels = [batch.labels for batch in read if batch.labels is not None]
        self.convention = convention
        self.has_classes = has_classes(model)
        self.labels = torch.cat(labels) if labels and self.has_classes else None
        self._outside: dict[Any, float] = {}
        self._ratios: dict[str, float] = {}
        observed = self._run(apply(self.model if baseline is None else shared_weights_copy(baseline), FULL))
        self.features = torch.cat([out.features for out, _ in observed])
        self._baseline: Measurement | None = None
        self._baseline = self._measure(observed)
        self.gmacs = self._baseline.gmacs
        _, first = observed[0]
        self.tokens = int(first.tokens_in[0][0])
        self.prefix = first.calls[0].prefix
        plan = plan_of(apply(self.model, NoMerge()))
        self.depth = plan.depth
        tower = tower_of(self.model)
        self.last_layer = plan.last_layer(tower)
        self.merging_layers = self.depth - (self.last_layer != "full")  # layers whose merges have any effect
        self._costs = [plan.backbone.cost(block) for block in plan.backbone.blocks(tower)]

    def __len__(self) -> int:
        return len(self.features)

    @property
    def baseline(self) -> Measurement:
        assert self._baseline is not None
        return self._baseline

    def measure(self, method: Method) -> Measurement:
        apply(self.model, method)
        return self._measure(self._run(self.model))

    def ratio(self, method: Method) -> float:
        """GMACs as a fraction of the baseline's, measured once per config."""
        key = repr(method)
        if key not in self._ratios:
            self._ratios[key] = self.measure(method).ratio
        return self._ratios[key]

    @torch.inference_mode()
    def _run(self, model: nn.Module) -> list[tuple[Outputs, Trace]]:
        return [observe(model, x) for x in self.batches]

    def _measure(self, observed: Sequence[tuple[Outputs, Trace]]) -> Measurement:
        features = torch.cat([out.features for out, _ in observed])
        top = torch.cat([out.logits.topk(min(5, out.logits.shape[1])).indices for out, _ in observed])
        costs = [t.cost(self.convention, self._outside) for _, t in observed]
        baseline = None if self._baseline is None else self._baseline.per_image
        return Measurement.of(
            names=self.names,
            top=top,
            features=None if self.has_classes else features,
            gallery=None if self.has_classes else self.features,
            baseline=None if baseline is None else baseline.prediction,
            distance=cosine_distances(features, self.features),
            gmacs=torch.cat([cost.per_image for cost in costs]),
            baseline_gmacs=None if self._baseline is None else self._baseline.gmacs,
            tokens=[torch.cat(layer) for layer in zip(*(t.tokens for _, t in observed), strict=True)],
            labels=self.labels,
        )

    def clip_to_half(self, pairs: Sequence[int]) -> list[int]:
        """The same, but no layer merges more than half of its patches."""
        clipped = []
        patches = self.tokens - self.prefix
        for wanted in pairs:
            clipped.append(min(wanted, patches // 2))
            patches -= clipped[-1]
        return clipped

    def expected_ratio(self, pairs: Sequence[float], matching: MatchingMacs = keys_matching) -> float:
        """GMACs, as a fraction of the baseline's, if every image merged this many pairs in each layer."""
        image = tuple(self.batches[0].shape[1:])
        exit_tokens = None if self.last_layer == "full" else self.prefix
        plan = plan_of(self.model)
        blocks = found = 0.0
        n = float(self.tokens)
        for layer, (cost, merged) in enumerate(zip(self._costs, pairs, strict=True), 1):
            prefix_only = layer == self.depth and self.last_layer != "full"
            left = float(self.prefix) if prefix_only else n - merged
            late = "q" if prefix_only and self.last_layer == "query" else None
            blocks += block_macs(cost, n, left, late, self.convention)  # type: ignore[arg-type]
            if merged > 0 and not prefix_only:
                found += matching(n - self.prefix, merged, cost)
            n = left
        outside = outside_macs(
            tower_of(self.model), plan.backbone, image, "forward", exit_tokens, self.convention, (), self._outside
        )
        return (outside + blocks + found) / 1e9 / self.gmacs

    def fingerprint(self) -> str:
        """Identifies the weights and the images, so that trials of others are not taken for these."""
        digest = hashlib.sha256(b"trials, version 4")
        for batch in self.batches:
            digest.update(repr(tuple(batch.shape)).encode())
            digest.update(batch.cpu().float().numpy().tobytes())
        digest.update(weights_digest(self.model).encode())
        return digest.hexdigest()
