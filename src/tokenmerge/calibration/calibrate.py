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
from time import perf_counter

import torch
from torch import nn

from ..data.load import Source, as_images
from ..deployment.int8_simulation import simulate_int8
from ..deployment.runtimes import EAGER, int8_runtime
from ..evaluation.measurement import Measured, Measurement, percent
from ..evaluation.reference import Reference
from ..methods.base import Method
from ..methods.no_merge import NoMerge
from ..utils.bisect import approach, bisect
from ..utils.progress import Progress, no_progress
from .candidates import candidates_for, candidates_for_time
from .clock import Clock
from .costs import GmacsCost, SearchCost, TimeCost
from .goal import Goal
from .refine import fewer_layers, merging_layers, move_layers, refine, same_loss
from .search import Search, Trial, TrialStore

TRIALS = "trials.jsonl"


@dataclass(frozen=True)
class Calibration(Measured):
    """A config, and how it was found. All figures are of the calibration images: validate it on others with `prove`."""

    method: Method
    goal: str  # what was asked for
    met: bool
    measurement: Measurement
    pairs: tuple[float, ...]  # merged in each layer, on average over the images
    time: float | None  # measured, as a fraction of the baseline's; None where the goal is not a time
    time_p95: float | None  # the same that 95 % of the images do not exceed, as predicted; equal to `time` for static r
    note: str  # what else there is to say about the goal
    impact: tuple[tuple[float, float], ...]  # (c, p) of each layer: merging r pairs there alone costs c·r^p
    trials: tuple[Trial, ...] = field(repr=False)
    keep: float | None = None  # the fraction of predictions that was to be kept, where that was the goal

    @property
    def sentence(self) -> str:
        figures = (
            f"{percent(self.ratio)} of the GMACs, top-1 agreement {percent(self.agreement)}, distance {self.distance:.4f}"
        )
        if self.time is not None:
            slow = "" if self.time_p95 == self.time else f" (95 % of the images: at most {percent(self.time_p95)})"
            figures = f"{percent(self.time)} of the time{slow}, {figures}"
        outcome = "reached" if self.met else "cannot be reached; the nearest that can"
        note = f" ({self.note})" if self.note else ""
        return f"{self.goal}: {outcome} on the {self.images} calibration images: {figures}{note}"


def calibrate(
    model: nn.Module,
    images: Source,
    *,
    gmacs: float | None = None,
    min_agreement: float | None = None,
    max_distance: float | None = None,
    speedup: float | None = None,
    time: float | None = None,
    runtime: str = EAGER,
    batch: int = 32,
    int8: bool = False,
    sample: int = 64,
    rounds: int = 6,
    batch_size: int = 32,
    seed: int = 0,
    method: str = "ATM",
    resume: str | Path | None = None,
    progress: Progress = no_progress,
) -> Calibration:
    """The cheapest config for one goal, from unlabelled images. The model is not changed.

    `gmacs`: a fraction of the baseline's GMACs to reach. `time`: a fraction of its time; `speedup`: the same, as a factor.
    Time is that of batches of `batch` images in `runtime` on this machine: a latency model is measured first, and the
    layers that merge and the batch rule (thresholds per image or static r) are part of the search. `min_agreement`,
    `max_distance`: bounds that the cheapest config must keep on the calibration images. `int8`: the config is for an int8
    file: it is calibrated in a simulation of one, against the float baseline, and `runtime` is timed in int8. `method`:
    a key of `CANDIDATES`. `sample` images are drawn with `seed`, and run in batches of `batch_size`. `resume`: a folder that
    keeps trials and timings; the same call resumes from it."""
    goal = Goal(gmacs, min_agreement, max_distance, speedup, time)
    if int8 and goal.time_ratio is not None:
        runtime = int8_runtime(runtime)
    drawn, _ = as_images(images, model).split(sample, seed)
    reference = Reference(model, drawn, batch_size=batch_size)
    if int8:
        reference = Reference(
            simulate_int8(model, torch.cat(reference.batches)), drawn, batch_size=batch_size, baseline=model
        )
    began = perf_counter()
    reference.measure(NoMerge())
    passes = reference.merging_layers * (4 + 2 * rounds)  # a typical number of trials
    progress(f"calibration: about {_duration(passes * (perf_counter() - began))}, {passes} passes over the images", 0)
    clock: Clock | None = None
    cost: SearchCost = GmacsCost(reference)
    if goal.time_ratio is None:
        candidates = candidates_for(method, reference.depth)
    else:
        candidates = candidates_for_time(method, reference.depth, adaptive=runtime == EAGER)
        clock = Clock(model, torch.cat(reference.batches), runtime=runtime, batch=batch, folder=resume, progress=progress)
        cost = TimeCost(clock.latency(reference, candidates))
    path = None if resume is None else Path(resume) / TRIALS
    store = TrialStore(path, f"{reference.fingerprint()} {method}", candidates)
    searches = [Search(reference, candidate, store, cost, progress) for candidate in candidates]
    impact = searches[0].impact()
    if goal.is_budget:
        search, trial = _reach_budget(searches, impact, goal, rounds)
    else:
        search, trial = _reach_bound(searches, impact, goal, rounds)
    config, measurement, seconds, met = _ship(search, trial, goal, clock)
    note = _coarse(goal, len(reference))
    if clock is not None and seconds is not None and seconds >= 1:  # never slower than the baseline
        note = _where_it_pays(clock, search, trial, config)
        config, met = search.method(search.nothing()), False
        measurement, seconds = reference.measure(config), clock.time_ratio(config)
    return Calibration(
        method=config,
        goal=str(goal) if clock is None else f"{goal} ({runtime}, batch {batch})",
        met=met,
        measurement=measurement,
        pairs=tuple(a - b for a, b in pairwise((float(reference.tokens), *measurement.tokens[: search.layers]))),
        time=seconds,
        time_p95=None if seconds is None else seconds * _slowest(search, measurement),
        note=note,
        impact=tuple(impact),
        trials=tuple(store.trials.values()),
        keep=goal.min_agreement,
    )


def _coarse(goal: Goal, images: int) -> str:
    """On few images, many levels of agreement are the same goal."""
    if goal.min_agreement is None or goal.min_agreement <= 1 - 1 / images:
        return ""
    return f"on {images} images, every level above {1 - 1 / images:.1%} means that none may change"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _range(search: Search) -> tuple[float, float]:
    """The least cost that can be reached, and the cost without any merge."""
    nothing, *some = (
        search.cost(search.clip_to_valid([math.inf] * layers + [0.0] * (search.depth - layers)))
        for layers in range(search.depth + 1)
    )
    return min(some), nothing


def _best_at(
    searches: Sequence[Search], pairs: Sequence[float], ratio: float, rounds: int, by_time: bool
) -> tuple[Search, Trial]:
    """The best trial at a cost, with as few merging layers as possible."""
    search, best = refine(searches, pairs, ratio, (rounds + 1) // 2)
    if rounds == 0:
        return search, best
    found = [trial for trial in fewer_layers(search, best, ratio, rounds) if not search.rank(ratio, trial)[0]] or [best]
    best = min(found, key=lambda trial: trial.distance)
    if not by_time:  # a merging layer costs time that GMACs do not show: where nothing is lost, fewer are better
        same = (trial for trial in found if trial is best or same_loss(search.distances(trial), search.distances(best)))
        return search, min(same, key=lambda trial: len(merging_layers(trial)))
    search, other = refine(searches, best.pairs, ratio, 0)  # in fewer layers, another candidate may be better
    if search.candidate != best.candidate:
        best = search.improve(other, ratio, merging_layers(other))
    return search, move_layers(search, best, ratio, min(rounds, 3))


def _reach_budget(
    searches: Sequence[Search], impact: Sequence[tuple[float, float]], goal: Goal, rounds: int
) -> tuple[Search, Trial]:
    """The best trial at a ratio of GMACs or of time."""
    first = searches[0]
    least, most = _range(first)
    budget = goal.gmacs if goal.time_ratio is None else goal.time_ratio
    assert budget is not None
    if budget >= most:
        return first, first.nothing()
    ratio = max(budget, least)
    by_time = goal.time_ratio is not None
    pairs = first.best_layers(impact, ratio) if by_time else first.initial_allocation(impact, ratio)
    return _best_at(searches, pairs, ratio, rounds, by_time)


def _reach_bound(
    searches: Sequence[Search], impact: Sequence[tuple[float, float]], goal: Goal, rounds: int
) -> tuple[Search, Trial]:
    """The cheapest trial that keeps a bound: bisect over the ratio of GMACs with the initial allocation, refine there, and
    bisect again with the refined allocation."""
    first = searches[0]
    least, most = _range(first)

    def edge(trial_at: Callable[[float], Trial], low: float, high: float) -> tuple[float, Trial | None]:
        """Where trials stop to keep the bound, and the last that does."""
        good: Trial | None = None

        def go_up(ratio: float) -> bool:
            nonlocal good
            trial = trial_at(ratio)
            keeps = goal.keeps(trial)
            good = trial if keeps else good
            return not keeps  # else try a cheaper one

        low, high = bisect(go_up, low, high, steps=5)
        return (low + high) / 2, good

    ratio, unrefined = edge(lambda r: first.trial(first.initial_allocation(impact, r)), least, most)
    search, shape = _best_at(searches, first.initial_allocation(impact, ratio), ratio, rounds, by_time=False)
    low = max(least, ratio - 0.15)
    high = min(most, ratio + 0.05)
    _, refined = edge(lambda r: search.fit(shape.pairs, r), low, high)
    if refined is not None:
        return search, refined
    return first, unrefined if unrefined is not None else first.nothing()


def _ship(search: Search, trial: Trial, goal: Goal, clock: Clock | None) -> tuple[Method, Measurement, float | None, bool]:
    """The config, its measurement, its measured time if there is a clock, and whether this very config reaches the goal.
    Thresholds were found batch by batch, and the config has their mean; time was predicted. Measure both, and correct."""
    merges_nothing = search.cost([0.0] * search.depth)
    latest = trial

    def attempt(cost: float, turn: int) -> tuple[tuple[float, int, Method, Measurement, float | None, float], float]:
        nonlocal latest
        if turn > 0:
            latest = search.nothing() if cost >= merges_nothing else search.fit(latest.pairs, cost)
        config = search.method(latest)
        measurement = search.reference.measure(config)
        seconds = None if clock is None else clock.time_ratio(config)
        correction = goal.correction(measurement, seconds, any(latest.pairs))
        stuck = correction > 0 and not any(latest.pairs)
        return (abs(correction), -turn, config, measurement, seconds, correction), 0.0 if stuck else correction

    tried = approach(attempt, search.measured(trial), turns=8 if clock is None else 4)
    _, _, config, measurement, seconds, miss = min(tried, key=lambda entry: entry[:2])
    return config, measurement, seconds, goal.met(miss)


def _slowest(search: Search, measurement: Measurement, fraction: float = 0.95) -> float:
    """The predicted time that this fraction of the images does not exceed, relative to the mean."""
    assert measurement.per_image is not None
    tokens = measurement.per_image.tokens
    if bool((tokens == tokens[0]).all()):
        return 1.0
    times = torch.tensor([search.predicted(row) for row in tokens.tolist()])
    return float(times.quantile(fraction) / times.mean())


def _where_it_pays(clock: Clock, search: Search, trial: Trial, config: Method) -> str:
    """For a config that is slower than the baseline: the batch size or the resolution from which it is faster."""
    slower = f"merging is slower than the baseline at batch {clock.batch}"
    for size in (size for size in (4, 8, 16, 32, 64) if size > clock.batch):
        if clock.at_batch(size).time_ratio(config) < 1:
            return f"{slower}; it pays from batch {size}"
    slower += ", and at larger batches, too"
    pixels = clock.images.shape[-1]
    for scale in (2, 3):
        larger = clock.at_scale(scale)
        if larger is None:
            return f"{slower}; the input size of this model is fixed, so that larger images could not be tried"
        pairs = [scale**2 * pairs for pairs in trial.pairs]
        tokens = search.reference.prefix + scale**2 * search.patches
        if larger.time_ratio(trial.candidate.method(pairs, trial.thresholds, tokens)) < 1:
            return f"{slower}; with images of {scale * pixels} pixels it pays"
    return f"{slower}, up to images of {3 * pixels} pixels"
