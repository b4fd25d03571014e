"""The cheapest config for a goal, from the user's own model and unlabelled images.

`calibrate` reads from top to bottom: a goal, the searches (search.py), the best trial for the goal, and the config that is
shipped: the mean of the thresholds over the batches, checked against the goal and corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn

from ..data.load import Source, as_images
from ..deployment.runtimes import EAGER
from ..engine.patch import apply, shared_weights_copy
from ..evaluation.bench import Variant, time_variants
from ..evaluation.measurement import Measured, Measurement, percent
from ..evaluation.reference import FULL, Reference
from ..methods.base import Method
from ..methods.no_merge import BASELINE
from ..utils.bisect import approach, bisect
from ..utils.progress import Progress, no_progress
from .candidates import candidates_for
from .search import CLOSE, Search, Trial, TrialStore, refine

TRIALS = "trials.jsonl"


@dataclass(frozen=True)
class Calibration(Measured):
    """A config, and how it was found. All figures are of the calibration images: validate it on others with `prove`."""

    method: Method
    goal: str  # what was asked for
    met: bool
    measurement: Measurement
    pairs: tuple[float, ...]  # merged in each layer, on average over the images
    impact: tuple[tuple[float, float], ...]  # (c, p) of each layer: merging r pairs there alone costs c·r^p
    trials: tuple[Trial, ...] = field(repr=False)

    @property
    def sentence(self) -> str:
        figures = (
            f"{percent(self.ratio)} of the GMACs, top-1 agreement {percent(self.agreement)}, distance {self.distance:.4f}"
        )
        outcome = "reached" if self.met else "cannot be reached; the nearest that can"
        return f"{self.goal}: {outcome} on the {self.images} calibration images: {figures}"


@dataclass(frozen=True)
class Goal:
    """A ratio of GMACs or a speed-up to reach, or a bound that the cheapest config must keep."""

    gmacs: float | None = None
    min_agreement: float | None = None
    max_distance: float | None = None
    speedup: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"give one of gmacs, min_agreement, max_distance and speedup, not {given or 'none'}")
        ((name, value),) = given.items()
        low, high = {"speedup": (1.0, math.inf), "max_distance": (0.0, 2.0)}.get(name, (0.0, 1.0))
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], not {value!r}")

    def __str__(self) -> str:
        ((name, value),) = ((name, value) for name, value in vars(self).items() if value is not None)
        return f"{name}={value:g}"

    def correction(self, measured: Measured | Measurement, speedup: float, merges: bool) -> float:
        """By how much the ratio of GMACs should change; 0 where the goal is reached."""
        if self.gmacs is not None:
            miss = self.gmacs - measured.ratio
            return 0.0 if abs(miss) < CLOSE or (miss > 0 and not merges) else miss
        if self.speedup is not None:
            return 0.0 if speedup >= self.speedup else -0.02
        return 0.0 if self.keeps(measured) else 0.02

    def keeps(self, measured: Measured | Measurement) -> bool:
        """Whether a bound on the quality is kept."""
        if self.max_distance is not None:
            return measured.distance <= self.max_distance
        return self.min_agreement is None or (measured.agreement or 0.0) >= self.min_agreement


SpeedupOf = Callable[[Method], float]


def calibrate(
    model: nn.Module,
    images: Source,
    *,
    gmacs: float | None = None,
    min_agreement: float | None = None,
    max_distance: float | None = None,
    speedup: float | None = None,
    sample: int = 64,
    rounds: int = 6,
    batch_size: int = 32,
    seed: int = 0,
    method: str = "ATM",
    resume: str | Path | None = None,
    progress: Progress = no_progress,
) -> Calibration:
    """The cheapest config for one goal, from unlabelled images. The model is not changed.

    `gmacs`: a fraction of the baseline's GMACs to reach. `min_agreement`, `max_distance`: bounds that the cheapest config
    must keep on the calibration images. `speedup`: over the baseline, measured on this machine. `method`: a key of
    `CANDIDATES`. `sample` images are drawn with `seed`. `resume`: a folder that keeps the trials; the same call resumes from
    it."""
    goal = Goal(gmacs, min_agreement, max_distance, speedup)
    drawn, _ = as_images(images, model).split(sample, seed)
    reference = Reference(model, drawn, batch_size=batch_size)
    candidates = candidates_for(method, reference.depth)
    path = None if resume is None else Path(resume) / TRIALS
    store = TrialStore(path, f"{reference.fingerprint()} {method}", candidates)
    searches = [Search(reference, candidate, store, progress) for candidate in candidates]
    impact = searches[0].impact()

    def speedup_of(config: Method) -> float:
        return measure_speedup(model, reference.batches[0], config)

    if goal.gmacs is not None:
        search, trial = _reach_budget(searches, impact, goal.gmacs, rounds)
    else:
        search, trial = _reach_bound(searches, impact, goal, rounds, speedup_of)
    config, measurement, met = _ship(search, trial, goal, speedup_of)
    return Calibration(
        method=config,
        goal=str(goal),
        met=met,
        measurement=measurement,
        pairs=tuple(a - b for a, b in pairwise((float(reference.tokens), *measurement.tokens[: search.layers]))),
        impact=tuple(impact),
        trials=tuple(store.trials.values()),
    )


def _range(search: Search) -> tuple[float, float]:
    """The least ratio of GMACs that can be reached, and the ratio without any merge."""
    nothing, everything = (search.cost(search.clip_to_valid([pairs] * search.depth)) for pairs in (0.0, math.inf))
    return everything, nothing


def _reach_budget(
    searches: Sequence[Search], impact: Sequence[tuple[float, float]], budget: float, rounds: int
) -> tuple[Search, Trial]:
    """The best trial at a ratio of GMACs."""
    first = searches[0]
    least, most = _range(first)
    if budget >= most:
        return first, first.nothing()
    ratio = max(budget, least)
    return refine(searches, first.initial_allocation(impact, ratio), ratio, rounds)


def _reach_bound(
    searches: Sequence[Search], impact: Sequence[tuple[float, float]], goal: Goal, rounds: int, speedup_of: SpeedupOf
) -> tuple[Search, Trial]:
    """The cheapest trial that keeps a bound, or the most expensive one that is fast enough: bisect over the ratio with the
    initial allocation, refine there, and bisect again with the refined allocation."""
    first = searches[0]
    least, most = _range(first)

    def edge(search: Search, trial_at: Callable[[float], Trial], low: float, high: float) -> tuple[float, Trial | None]:
        """Where trials stop to be good enough, and the last good one."""
        good: Trial | None = None

        def go_up(ratio: float) -> bool:
            nonlocal good
            trial = trial_at(ratio)
            if goal.speedup is not None:
                fast_enough = speedup_of(search.method(trial)) >= goal.speedup
                good = trial if fast_enough else good
                return fast_enough  # then try a more expensive one
            keeps = goal.keeps(trial)
            good = trial if keeps else good
            return not keeps  # else try a cheaper one

        low, high = bisect(go_up, low, high, steps=5)
        return (low + high) / 2, good

    ratio, unrefined = edge(first, lambda r: first.trial(first.initial_allocation(impact, r)), least, most)
    search, shape = refine(searches, first.initial_allocation(impact, ratio), ratio, rounds)
    low = max(least, ratio - 0.15)
    high = min(most, ratio + 0.05)
    _, refined = edge(search, lambda r: search.fit(shape.pairs, r), low, high)
    if refined is not None:
        return search, refined
    if unrefined is not None:
        return first, unrefined
    if goal.speedup is None:
        return first, first.nothing()
    return first, first.trial(first.clip_to_valid([math.inf] * first.depth))


def _ship(search: Search, trial: Trial, goal: Goal, speedup_of: SpeedupOf) -> tuple[Method, Measurement, bool]:
    """Thresholds were found batch by batch; the config has their mean. Measure it against the goal, and correct. The last
    of the three says whether the very config that is returned reaches the goal."""
    merges_nothing = search.cost([0.0] * search.depth)
    latest = trial

    def attempt(ratio: float, turn: int) -> tuple[tuple[float, int, Method, Measurement], float]:
        nonlocal latest
        if turn > 0:
            latest = search.nothing() if ratio >= merges_nothing else search.fit(latest.pairs, ratio)
        config = search.method(latest)
        measurement = search.reference.measure(config)
        faster = speedup_of(config) if goal.speedup is not None else 0.0
        correction = goal.correction(measurement, faster, any(latest.pairs))
        stuck = correction > 0 and not any(latest.pairs)
        return (abs(correction), -turn, config, measurement), 0.0 if stuck else correction

    tried = approach(attempt, trial.ratio, turns=8)
    miss, _, config, measurement = min(tried, key=lambda entry: entry[:2])
    return config, measurement, miss < (0.01 if goal.gmacs is not None else 1e-9)


def measure_speedup(model: nn.Module, x: torch.Tensor, method: Method, rounds: int = 5) -> float:
    """Over the baseline on one batch, interleaved: the median of the ratios."""
    variants = [
        Variant(BASELINE, FULL, shared_weights_copy(model), EAGER),
        Variant("merged", method, apply(shared_weights_copy(model), method), EAGER),
    ]
    times = time_variants(variants, (x,), torch.get_num_threads(), rounds)
    return median(base / merged for base, merged in zip(times[BASELINE], times["merged"], strict=True))
