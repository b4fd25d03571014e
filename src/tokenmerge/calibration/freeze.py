"""Static r: the same number of merges for every image, for compilers and exports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from torch import nn

from ..backbones.base import BlockCost
from ..data.load import Source, as_images
from ..evaluation.measurement import Measured, Measurement
from ..evaluation.reference import Reference
from ..methods.atm import ATM
from ..methods.base import Method
from ..utils.progress import Progress, no_progress
from .candidates import pair_matching, whole_counts
from .refine import fewer_layers, merging_layers
from .search import CLOSE, Search, TrialStore


@dataclass(frozen=True)
class Frozen(Measured):
    """A config with static r, measured before and after."""

    method: Method
    measurement: Measurement
    before: Measurement

    @property
    def distance_before(self) -> float:
        return self.before.distance

    @property
    def ratio_before(self) -> float:
        return self.before.ratio


@dataclass(frozen=True)
class StaticCandidate:
    """A config of ATM with other counts."""

    max_fraction: ClassVar[float] = 0.5
    config: ATM

    def matching_macs(self, patches: float, removed: float, cost: BlockCost) -> float:
        return pair_matching(self.config.metric, patches, cost)

    def measure(self, reference: Reference, pairs: Sequence[float]) -> tuple[Measurement, tuple[float, ...]]:
        return reference.measure(self.method(pairs, (), reference.tokens)), ()

    def method(self, pairs: Sequence[float], thresholds: Sequence[float], tokens: int) -> ATM:
        return replace(
            self.config, alpha=None, beta=None, theta_min=None, thresholds=None, counts=whole_counts(pairs), batch="mean"
        )


def freeze(
    model: nn.Module,
    images: Source,
    method: Method,
    *,
    layers: int | None = None,
    batch_size: int = 32,
    progress: Progress = no_progress,
) -> Frozen:
    """Fix the number of merges per layer at its mean over the images: shapes no longer depend on the image, as compilers
    and exports need it. `layers`: merge in this many layers only, at the same cost; which ones, and how many tokens in each,
    is searched on the images. Fewer layers are faster in runtimes with a fixed overhead per merging layer."""
    if not isinstance(method, ATM):
        raise ValueError(f"freeze turns thresholds of ATM into static r; {type(method).__name__} has no thresholds")
    if layers is not None and layers < 1:
        raise ValueError(f"freeze: layers must be 1 or more, not {layers}")
    reference = Reference(model, as_images(images, model), batch_size=batch_size)
    before = reference.measure(method)
    left = [reference.tokens, *(round(n) for n in before.tokens[: reference.merging_layers])]
    counts = [float(a - b) for a, b in pairwise(left)] + [0.0] * (reference.depth - reference.merging_layers)
    candidate = StaticCandidate(method)
    if layers is not None and layers < sum(count > 0 for count in counts):
        search = Search(reference, candidate, TrialStore(None, "", [candidate]), progress=progress)
        first = search.fit(counts, before.ratio)
        *_, found = fewer_layers(search, first, before.ratio, rounds=2, least=layers, limit=math.inf)
        if found.ratio > before.ratio + 5 * CLOSE or len(merging_layers(found)) > layers:
            raise ValueError(
                f"freeze: merging in {layers} layers cannot go below {found.ratio:.1%} of the GMACs (target "
                f"{before.ratio:.1%}); give more layers"
            )
        counts = list(found.pairs)
    frozen = candidate.method(counts, (), reference.tokens)
    return Frozen(frozen, reference.measure(frozen), before)
