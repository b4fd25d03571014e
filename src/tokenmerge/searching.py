"""Trials of how many pairs merge in each layer, and how to get from one to a better one; see calibration.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .files import Journal
from .measuring import Reference
from .methods import Method
from .ways import Way

STEPS = 14  # of a bisection
CLOSE = 0.003  # how near to the budget is near enough, as a fraction of the unmerged GMACs


@dataclass(frozen=True)
class Trial:
    """One setting, measured on the calibration images."""

    how: Way
    pairs: tuple[float, ...]  # asked for in each layer, on average over the images
    thresholds: tuple[float, ...]  # that gave them, where the way has any; 1 where nothing merges
    distance: float
    agreement: float
    ratio: float  # GMACs, as a fraction of the unmerged model's


class Memory:
    """Trials on disk: an interrupted search goes on where it stopped. `owner` says whose they are."""

    def __init__(self, path: Path | None, owner: str, known: Sequence[Way]) -> None:
        self.journal = Journal(path, owner, "trials")
        self.trials: dict[tuple[Way, tuple[float, ...]], Trial] = {}
        names = {repr(way): way for way in known}
        for row in self.journal.rows:
            plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
            trial = Trial(**(plain | {"how": names[row["how"]]}))
            self.trials[trial.how, trial.pairs] = trial

    def find(self, how: Way, pairs: tuple[float, ...]) -> Trial | None:
        return self.trials.get((how, pairs))

    def keep(self, trial: Trial) -> None:
        self.trials[trial.how, trial.pairs] = trial
        self.journal.add(vars(trial) | {"how": repr(trial.how)})


class Search:
    """Trials that find their pairs in one way."""

    def __init__(self, reference: Reference, how: Way, memory: Memory, tick: Callable[[], object]) -> None:
        self.reference, self.how, self.memory, self.tick = reference, how, memory, tick
        self.layers = reference.merging_layers  # the layers whose merges have any effect
        self.depth = reference.depth

    def trial(self, pairs: Sequence[float]) -> Trial:
        pairs = tuple(round(p, 3) for p in pairs)
        trial = self.memory.find(self.how, pairs)
        if trial is None:
            probe = self.how.probe(pairs, self.reference.tokens)
            seen = self.reference.measure(probe)
            trial = Trial(
                self.how,
                pairs,
                self.how.found(probe, self.depth),
                float(seen.distance.mean()),
                float(seen.same.double().mean()),
                float(seen.ratio.mean()),
            )
            self.memory.keep(trial)
        self.tick()
        return trial

    def method(self, trial: Trial) -> Method:
        """The trial as a setting to ship."""
        return trial.how.method(trial.pairs, trial.thresholds, self.reference.tokens)

    def cost(self, pairs: Sequence[float]) -> float:
        return self.reference.expected(pairs, self.how.compared)

    def dearer(self, ratio: float, pairs: Sequence[float]) -> bool:
        return self.cost(pairs) > ratio

    def legal(self, pairs: Sequence[float]) -> list[float]:
        """Not more pairs than a layer has, none where they have no effect, and no comparison for less than one."""
        left, found = float(self.reference.tokens - self.reference.prefix), []
        for layer, wanted in enumerate(pairs, 1):
            taken = min(wanted, self.how.most * left) if layer <= self.layers and wanted >= 0.75 else 0.0
            found.append(taken)
            left -= taken
        return found

    def fit(self, pairs: Sequence[float], ratio: float) -> Trial:
        """Scale the pairs until what was measured is the ratio."""
        off = 0.0
        for _ in range(4):
            aim = ratio - off
            scaled = _solve(lambda scale: self.legal([scale * p for p in pairs]), partial(self.dearer, aim))
            trial = self.trial(scaled)
            if abs(trial.ratio - ratio) < CLOSE:
                break
            off += trial.ratio - ratio
        return trial

    def impact(self) -> list[tuple[float, float]]:
        """Fig. 2, read as a power law: what merging r pairs in layer l alone costs is c·r^p; (c, p) per layer."""
        patches = self.reference.tokens - self.reference.prefix
        found = []
        for layer in range(self.layers):
            few, many = (
                self.trial([share * patches if i == layer else 0.0 for i in range(self.depth)]) for share in (0.1, 0.3)
            )
            low, high = max(few.distance, 1e-9), max(many.distance, 1e-9)
            power = min(max(math.log(high / low) / math.log(3), 1.1), 4.0)
            found.append((high / (0.3 * patches) ** power, power))
        return found

    def guess(self, impact: Sequence[tuple[float, float]], ratio: float) -> list[float]:
        """The pairs for a budget if losses add up: c·p·r^(p−1) per MAC is the same in every layer."""
        gains = [self.gain([0.0] * self.depth, layer, 0.1) for layer in range(self.layers)]

        patches = self.reference.tokens - self.reference.prefix

        def at(price: float) -> list[float]:
            left, pairs = float(patches), []
            for gain, (c, p) in zip(gains, impact, strict=True):
                # r pairs of the tokens that are left are as much as r·patches/left of all
                log = (math.log(price * gain / (c * p)) + p * math.log(left / patches)) / (p - 1)
                pairs.append(min(math.exp(min(log, 20.0)), self.how.most * left))
                left -= pairs[-1]
            return self.legal([*pairs, *[0.0] * (self.depth - self.layers)])

        return _solve(at, partial(self.dearer, ratio))

    def gain(self, pairs: Sequence[float], layer: int, share: float) -> float:
        """The ratio of GMACs that a pair more in this layer saves."""
        more = share * (self.reference.tokens - self.reference.prefix)
        base = [max(p, 1.0) if i == layer else p for i, p in enumerate(pairs)]  # comparing is paid for already
        return max(self.cost(base) - self.cost([p + more * (i == layer) for i, p in enumerate(base)]), 1e-9) / more

    def improve(self, best: Trial, ratio: float) -> Trial:
        """Move pairs from the layers where a few more would cost most per MAC saved to those where they cost least."""
        step = max(2.0, 0.05 * self.reference.tokens)
        prices: list[float | None] = []
        for layer in range(self.layers):
            more = self.legal([p + step * (i == layer) for i, p in enumerate(best.pairs)])
            if more[layer] - best.pairs[layer] < step / 2:  # no room for more: what would fewer spare?
                more = self.legal([max(p - step * (i == layer), 0.0) for i, p in enumerate(best.pairs)])
            saved = (more[layer] - best.pairs[layer]) * self.gain(best.pairs, layer, step / self.reference.tokens)
            prices.append(max((self.trial(more).distance - best.distance) / saved, 1e-6) if saved else None)
        if not any(prices):
            return best
        known = [(p + 1, math.log(price)) for p, price in zip(best.pairs, prices, strict=False) if price is not None]
        mean = math.exp(sum(w * v for w, v in known) / sum(w for w, _ in known))
        trials = [best]
        for speed in (0.25, 0.5, 1.0):
            factors = [min(max((mean / (price or mean)) ** speed, 0.2), 5.0) for price in prices]
            moved = [(p + 0.5) * factor - 0.25 for p, factor in zip(best.pairs, factors, strict=False)]
            trials.append(self.fit([*moved, *[0.0] * (self.depth - self.layers)], ratio))
        return min(trials, key=partial(_rank, ratio))


def at_cost(build: Callable[[float], Method], ratio: float, images: Reference, steps: int = STEPS) -> Method:
    """The method that comes nearest to a fraction of the unmerged GMACs; `build` makes one of a strength in [0, 1]."""

    def cost_of(method: Method) -> float:
        return float(images.measure(method).ratio.mean())

    low, high, nearest = 0.0, 1.0, build(0.0)
    miss = abs(cost_of(nearest) - ratio)
    for _ in range(steps):
        middle = (low + high) / 2
        method = build(middle)
        cost = cost_of(method)
        if abs(cost - ratio) < miss:
            miss, nearest = abs(cost - ratio), method
        low, high = (middle, high) if cost > ratio else (low, middle)
    return nearest


def _rank(ratio: float, trial: Trial) -> tuple[bool, float]:
    """The least loss among those that keep the budget."""
    return trial.ratio > ratio + 2 * CLOSE, trial.distance


def refine(searches: Sequence[Search], pairs: Sequence[float], ratio: float, rounds: int) -> tuple[Search, Trial]:
    """Equalise the loss per MAC saved over the layers; now and then, look whether another way of pairing has become
    better. Stops early when nothing improves."""
    best: Trial | None = None
    for turn in range(rounds + 1):
        if turn % 3 == 0:
            tried = [(search.fit(best.pairs if best else pairs, ratio), search) for search in searches]
            best, search = min(tried, key=lambda pair: _rank(ratio, pair[0]))
        if turn == rounds or best is None:
            break
        better = search.improve(best, ratio)
        if better is best:
            break
        best = better
    assert best is not None
    return search, best


def _solve(at: Callable[[float], list[float]], too_dear: Callable[[list[float]], bool]) -> list[float]:
    """The pairs at the least of the prices, on a logarithmic scale, for which they are not too dear."""
    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if too_dear(at(math.exp(middle))) else (low, middle)
    return at(math.exp(high))
