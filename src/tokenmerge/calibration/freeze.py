"""Static r: the same number of merges for every image, for compilers and exports."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from torch import nn

from ..backbones.base import BlockCost
from ..core.schedule import divide_evenly
from ..data.load import Source, as_images
from ..evaluation.measurement import Measured, Measurement
from ..evaluation.reference import MatchingMacs, Reference
from ..methods.atm import ATM
from ..methods.base import Method
from .candidates import pair_matching


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


def freeze(model: nn.Module, images: Source, method: Method, *, layers: int | None = None, batch_size: int = 32) -> Frozen:
    """Fix the number of merges per layer at its mean over the images: shapes no longer depend on the image, as compilers
    and exports need it. `layers`: concentrate the merges in this many layers, at the same cost; less accurate, but faster
    in runtimes with a fixed overhead per merging layer."""
    if not isinstance(method, ATM):
        raise ValueError(f"freeze turns thresholds of ATM into static r; {type(method).__name__} has no thresholds")
    if layers is not None and layers < 1:
        raise ValueError(f"freeze: layers must be 1 or more, not {layers}")
    reference = Reference(model, as_images(images, model), batch_size=batch_size)
    before = reference.measure(method)
    left = [reference.tokens, *(round(n) for n in before.tokens[: reference.merging_layers])]
    counts = [a - b for a, b in pairwise(left)] + [0] * (reference.depth - reference.merging_layers)
    if layers is not None:

        def matching(patches: float, removed: float, cost: BlockCost) -> float:
            return pair_matching(method.metric, patches, cost)

        counts = _concentrate(reference, counts, layers, matching)
    rule = {"alpha": None, "beta": None, "theta_min": None, "thresholds": None, "counts": counts, "batch": "mean"}
    frozen = replace(method, **rule)  # type: ignore[arg-type]
    return Frozen(frozen, reference.measure(frozen), before)


def _concentrate(reference: Reference, counts: Sequence[int], layers: int, matching: MatchingMacs) -> list[int]:
    """Equal numbers in this many layers, at the cost of `counts`: each in the layer where the middle of its part was
    merged."""
    done = list(accumulate(counts))
    chosen = sorted({bisect_left(done, done[-1] * (2 * part + 1) / (2 * layers)) for part in range(layers)})

    def concentrated(total: int) -> list[int]:
        by_layer = dict(zip(chosen, reversed(divide_evenly(total, len(chosen))), strict=True))
        return reference.clip_to_half([by_layer.get(layer, 0) for layer in range(len(counts))])

    def cost(total: int) -> float:
        return reference.expected_ratio(concentrated(total), matching)

    target = reference.expected_ratio(counts, matching)
    most = reference.tokens
    if cost(most) > target:
        raise ValueError(
            f"freeze: merging in {layers} layers cannot go below {cost(most):.1%} of the GMACs (target {target:.1%}); "
            "give more layers"
        )
    return concentrated(bisect_left(range(most), -target, key=lambda total: -cost(total)))
