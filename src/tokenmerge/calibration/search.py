"""The search for how many pairs to merge in each layer.

What is searched is not thresholds but how many pairs merge in each layer, on average over the images: one threshold per
layer, common to all images, follows from it in the same forward pass (a quantile), and the cost is known beforehand.

1. `Search.impact`: merge in one layer only, few pairs and many: the loss is about c·r^p, with c and p of the layer (Fig. 2).
2. `Search.initial_allocation`: if losses add up, the best allocation for a budget has the same loss per saving in every
   layer.
3. `refine.refine`: they do not quite add up. So measure what a few more pairs would lose in each layer, with all others in
   place, move pairs from the layers where they lose most per saving to those where they lose least, and repeat.
4. `refine.fewer_layers`: every merging layer has a price of its own in time. So take layers away, one after the other, and
   refine what is left.

What is saved is GMACs or time: a `SearchCost`. The loss is the mean cosine distance of the pre-logits features to the
baseline's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from ..evaluation.measurement import Measured, Measurement
from ..evaluation.reference import Reference
from ..methods.base import Method
from ..utils.bisect import approach, bisect
from ..utils.files import Journal
from ..utils.progress import Progress, no_progress
from .candidates import Candidate
from .costs import GmacsCost, SearchCost

CLOSE = 0.003  # how near to the budget is near enough, as a fraction of the baseline's cost


@dataclass(frozen=True)
class Trial(Measured):
    """One config, measured on the calibration images."""

    candidate: Candidate
    pairs: tuple[float, ...]  # asked for in each layer, on average over the images
    thresholds: tuple[float, ...]  # that gave them, where the candidate has any; 1 where nothing merges
    measurement: Measurement


class TrialStore:
    """Trials on disk, so that an interrupted search resumes. `run` identifies the model, the images and the options."""

    def __init__(self, path: Path | None, run: str, candidates: Sequence[Candidate]) -> None:
        by_name = {repr(candidate): candidate for candidate in candidates}
        key = hashlib.sha256(f"{run} {list(by_name)}".encode()).hexdigest()
        self.journal = Journal(path, f"trials, version 5, {key}", "trials")
        self.trials: dict[tuple[Candidate, tuple[float, ...]], Trial] = {}
        for row in self.journal.rows:
            self._keep(
                Trial(
                    by_name[row["candidate"]],
                    tuple(row["pairs"]),
                    tuple(row["thresholds"]),
                    Measurement.from_dict(row["measurement"]),
                )
            )

    def _keep(self, trial: Trial) -> None:
        self.trials[trial.candidate, trial.pairs] = trial

    def find(self, candidate: Candidate, pairs: tuple[float, ...]) -> Trial | None:
        return self.trials.get((candidate, pairs))

    def add(self, trial: Trial) -> None:
        self._keep(trial)
        self.journal.add(
            {
                "candidate": repr(trial.candidate),
                "pairs": trial.pairs,
                "thresholds": trial.thresholds,
                "measurement": trial.measurement.to_dict(),
            }
        )


class Search:
    """Trials of one candidate."""

    def __init__(
        self,
        reference: Reference,
        candidate: Candidate,
        store: TrialStore,
        cost: SearchCost | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self.reference = reference
        self.candidate = candidate
        self.store = store
        self.budget = cost or GmacsCost(reference)
        self.progress = progress
        self.layers = reference.merging_layers  # the layers whose merges have any effect
        self.depth = reference.depth
        self.patches = reference.tokens - reference.prefix

    def trial(self, pairs: Sequence[float]) -> Trial:
        pairs = tuple(round(p, 3) for p in pairs)
        trial = self.store.find(self.candidate, pairs)
        if trial is None:
            measurement, thresholds = self.candidate.measure(self.reference, pairs)
            trial = Trial(self.candidate, pairs, thresholds, measurement)
            self.store.add(trial)
        self.progress("trials")
        return trial

    def distances(self, trial: Trial) -> Tensor:
        """The distance of each image, [n]; measured again where the trial was read from a file."""
        found = trial.measurement
        if found.per_image is None:
            found, _ = trial.candidate.measure(self.reference, trial.pairs)
        assert found.per_image is not None
        return found.per_image.distance

    def nothing(self) -> Trial:
        """Merge nothing at all."""
        return self.trial([0.0] * self.depth)

    def method(self, trial: Trial) -> Method:
        """The trial as a config to ship."""
        return trial.candidate.method(trial.pairs, trial.thresholds, self.reference.tokens)

    def cost(self, pairs: Sequence[float]) -> float:
        """The expected cost, as a fraction of the baseline's."""
        return self.budget.expected(self.candidate, pairs)

    def measured(self, found: Measured) -> float:
        """The cost of what was measured."""
        return self.budget.measured(self.candidate, found)

    def predicted(self, tokens: Sequence[float]) -> float:
        """The cost of an image with these token counts after each layer."""
        return self.cost([a - b for a, b in pairwise((float(self.reference.tokens), *tokens))])

    def clip_to_valid(self, pairs: Sequence[float]) -> list[float]:
        """No more pairs than a layer has, none where they have no effect, and no matching for less than one."""
        left = float(self.patches)
        clipped = []
        for layer, wanted in enumerate(pairs, 1):
            removed = min(wanted, self.candidate.max_fraction * left) if layer <= self.layers and wanted >= 0.75 else 0.0
            clipped.append(removed)
            left -= removed
        return clipped

    def fit(self, pairs: Sequence[float], ratio: float) -> Trial:
        """Scale the pairs until the measured cost is this one."""

        def attempt(aim: float, turn: int) -> tuple[Trial, float]:
            scaled = self._cheapest_within(lambda scale: self.clip_to_valid([scale * p for p in pairs]), aim)
            trial = self.trial(scaled)
            miss = ratio - self.measured(trial)
            return trial, 0.0 if abs(miss) < CLOSE else miss

        return min(approach(attempt, ratio, turns=4), key=lambda trial: abs(self.measured(trial) - ratio))

    def impact(self) -> list[tuple[float, float]]:
        """Fig. 2, read as a power law: merging r pairs in layer l alone costs c·r^p; (c, p) per layer."""
        impact = []
        for layer in range(self.layers):
            few, many = (
                self.trial([part * self.patches if i == layer else 0.0 for i in range(self.depth)]) for part in (0.1, 0.3)
            )
            low = max(few.distance, 1e-9)
            high = max(many.distance, 1e-9)
            power = min(max(math.log(high / low) / math.log(3), 1.1), 4.0)
            impact.append((high / (0.3 * self.patches) ** power, power))
        return impact

    def initial_allocation(
        self, impact: Sequence[tuple[float, float]], ratio: float, among: Collection[int] | None = None
    ) -> list[float]:
        """The pairs for a budget if losses add up: c·p·r^(p−1) per saving is the same in every layer. `among`: the layers
        that may merge, from 0."""
        savings = [self.saving([0.0] * self.depth, layer, 0.1) for layer in range(self.layers)]

        def at_price(price: float) -> list[float]:
            left = float(self.patches)
            pairs = []
            for layer, (saving, (c, p)) in enumerate(zip(savings, impact, strict=True)):
                if among is not None and layer not in among:
                    pairs.append(0.0)
                    continue
                # r pairs of the remaining tokens are as much as r·patches/left of all
                log = (math.log(price * saving / (c * p)) + p * math.log(left / self.patches)) / (p - 1)
                pairs.append(min(math.exp(min(log, 20.0)), self.candidate.max_fraction * left))
                left -= pairs[-1]
            return self.clip_to_valid([*pairs, *[0.0] * (self.depth - self.layers)])

        return self._cheapest_within(at_price, ratio)

    def expected_loss(self, impact: Sequence[tuple[float, float]], pairs: Sequence[float]) -> float:
        """If losses add up."""
        left = float(self.patches)
        total = 0.0
        for (c, p), merged in zip(impact, pairs, strict=False):
            total += c * (merged * self.patches / left) ** p
            left -= merged
        return total

    def best_layers(self, impact: Sequence[tuple[float, float]], ratio: float) -> list[float]:
        """The pairs for a budget in the layers that lose least if losses add up: layers are taken away one by one, by
        arithmetic alone."""
        among = set(range(self.layers))
        found = []
        while among:
            pairs = self.initial_allocation(impact, ratio, among)
            reached = self.cost(pairs) <= ratio + CLOSE
            found.append((not reached, self.expected_loss(impact, pairs) if reached else self.cost(pairs), pairs))
            without = [among - {layer} for layer in among]
            if len(among) == 1:
                break
            tried = [(self.initial_allocation(impact, ratio, rest), rest) for rest in without]
            among = min(
                tried, key=lambda one: (self.cost(one[0]) > ratio + CLOSE, self.expected_loss(impact, one[0]), min(one[1]))
            )[1]
        return min(found, key=lambda one: one[:2])[2]

    def _cheapest_within(self, pairs_at: Callable[[float], list[float]], ratio: float) -> list[float]:
        """The pairs at the lowest price, on a logarithmic scale, that are within the budget."""
        _, high = bisect(lambda log: self.cost(pairs_at(math.exp(log))) > ratio, -60.0, 60.0, steps=60)
        return pairs_at(math.exp(high))

    def saving(self, pairs: Sequence[float], layer: int, fraction: float) -> float:
        """What one more pair in this layer saves."""
        more = fraction * self.patches
        base = [max(p, 1.0) if i == layer else p for i, p in enumerate(pairs)]  # matching is paid for already
        added = [p + more * (i == layer) for i, p in enumerate(base)]
        return max(self.cost(base) - self.cost(added), 1e-9) / more

    def improve(self, best: Trial, ratio: float, among: Collection[int] | None = None) -> Trial:
        """Move pairs from the layers where a few more would lose most per saving to those where they lose least. `among`:
        the layers that may merge, from 0."""
        step = max(2.0, 0.05 * self.reference.tokens)
        prices: list[float | None] = []
        for layer in range(self.layers):
            if among is not None and layer not in among:
                prices.append(None)
                continue
            more = self.clip_to_valid([p + step * (i == layer) for i, p in enumerate(best.pairs)])
            if more[layer] - best.pairs[layer] < step / 2:  # no room for more: what would fewer save?
                more = self.clip_to_valid([max(p - step * (i == layer), 0.0) for i, p in enumerate(best.pairs)])
            saved = (more[layer] - best.pairs[layer]) * self.saving(best.pairs, layer, step / self.reference.tokens)
            prices.append(max((self.trial(more).distance - best.distance) / saved, 1e-6) if saved else None)
        if not any(prices):
            return best
        known = [(p + 1, math.log(price)) for p, price in zip(best.pairs, prices, strict=False) if price is not None]
        mean = math.exp(sum(w * v for w, v in known) / sum(w for w, _ in known))
        trials = [best]
        for rate in (0.25, 0.5, 1.0):
            factors = [min(max((mean / (price or mean)) ** rate, 0.2), 5.0) for price in prices]
            moved = [
                (p + 0.5) * factor - 0.25 if among is None or layer in among else 0.0
                for layer, (p, factor) in enumerate(zip(best.pairs, factors, strict=False))
            ]
            trials.append(self.fit([*moved, *[0.0] * (self.depth - self.layers)], ratio))
        return min(trials, key=partial(self.rank, ratio))

    def rank(self, ratio: float, trial: Trial) -> tuple[bool, float]:
        """The least loss among the trials within the budget."""
        return self.measured(trial) > ratio + 2 * CLOSE, trial.distance


def solve_for_cost(build: Callable[[float], Method], ratio: float, reference: Reference, steps: int = 14) -> Method:
    """The method that comes nearest to a fraction of the baseline's GMACs; `build` makes one of a strength in [0, 1]."""
    tried: list[tuple[float, Method]] = []

    def too_expensive(strength: float) -> bool:
        method = build(strength)
        cost = reference.ratio(method)
        tried.append((abs(cost - ratio), method))
        return cost > ratio

    too_expensive(0.0)
    bisect(too_expensive, 0.0, 1.0, steps)
    return min(tried, key=lambda entry: entry[0])[1]
