"""Thresholds from the user's own model and images, without labels: the cheapest setting that keeps the answers.

What is searched is not thresholds but how many pairs merge in each layer, on average over the images: one threshold a
layer, common to all images, follows from it in the same forward pass (a quantile), and the cost is known beforehand.

1. *Impact.* Merge in one layer only, few pairs and many: the loss is about c·r^p, with c and p of that layer (Fig. 2).
2. *First guess.* If losses add up, the best distribution for a budget has the same loss per MAC saved in every layer.
3. *Refinement.* They do not quite add up. So measure what a few more pairs would cost in each layer, with all others in
   place, move pairs from the layers where they cost most per MAC to those where they cost least, and repeat.
4. *Freeze* the thresholds, and check the budget with them.

The loss is the mean cosine distance of what the head reads to the unmerged model's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.benchmark import Timer

from .loading import Source, as_images
from .measuring import Compared, Measured, Reference
from .methods import ATM, Method
from .schedule import spread
from .searching import CLOSE, Memory, Search, Trial, refine
from .surgery import apply, twin
from .ways import pairing_macs, ways


@dataclass(frozen=True)
class Calibration:
    """A setting, and how it was found. All figures are of the calibration images: `prove` it on others."""

    method: Method
    goal: str  # what was asked for
    met: bool
    distance: float  # mean cosine distance of what the head reads
    agreement: float  # share of images with the unmerged model's answer
    ratio: float  # GMACs, as a fraction of the unmerged model's
    images: int
    pairs: tuple[float, ...]  # merged in each layer, on average over the images
    impact: tuple[tuple[float, float], ...]  # (c, p) of each layer: merging r pairs there alone costs c·r^p
    trials: tuple[Trial, ...] = field(repr=False)

    @property
    def sentence(self) -> str:
        what = f"{self.ratio:.1%} of the GMACs, {self.agreement:.1%} of the answers kept, distance {self.distance:.4f}"
        where = f"on the {self.images} calibration images"
        return f"{self.goal}: {'reached' if self.met else 'cannot be reached; the nearest that can'} {where}: {what}"


@dataclass(frozen=True)
class Goal:
    """What is asked for: a ratio of GMACs, or a bound that the cheapest setting must keep."""

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

    def shift(self, ratio: float, distance: float, agreement: float, speedup: float, merges: bool) -> float:
        """By how much the ratio of GMACs should change; 0 where the goal is reached."""
        if self.gmacs is not None:
            off = self.gmacs - ratio
            return 0.0 if abs(off) < CLOSE or (off > 0 and not merges) else off
        if self.speedup is not None:
            return 0.0 if speedup >= self.speedup else -0.02
        return 0.0 if self.keeps(distance, agreement) else 0.02

    def keeps(self, distance: float, agreement: float) -> bool:
        """Whether a bound on the quality is kept."""
        if self.max_distance is not None:
            return distance <= self.max_distance
        return self.min_agreement is None or agreement >= self.min_agreement


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
    memory: Path | None = None,
    progress: Callable[[int], object] = lambda trials: None,
) -> Calibration:
    """The cheapest setting for one goal, from unlabelled images; the model is left as it was found.

    `gmacs`: a fraction of the unmerged GMACs to come down to. `min_agreement`, `max_distance`: bounds that the cheapest
    setting must keep on the calibration images. `speedup`: measured here, against the unmerged model.
    `method`: whose setting, "ATM" or "DiffRate". `sample` images are drawn with `seed`. Trials are kept in the file
    `memory`, if given: the same call goes on from it."""
    goal = Goal(gmacs, min_agreement, max_distance, speedup)
    chosen, _ = as_images(images, model).split(sample, seed)
    reference = Reference(model, chosen, batch_size=batch_size)
    tried = ways(method, reference.depth)
    store = Memory(memory, f"{reference.fingerprint()} {method}", tried)
    searches = [Search(reference, how, store, lambda: progress(1)) for how in tried]
    impact = searches[0].impact()

    def speed(method: Method) -> float:
        return _speedup(model, reference, method)

    best, found = _reach(searches, goal, impact, rounds, speed)
    setting, seen, met = _settle(best, found, goal, speed)
    return Calibration(
        method=setting,
        goal=str(goal),
        met=met,
        distance=float(seen.distance.mean()),
        agreement=float(seen.same.double().mean()),
        ratio=float(seen.ratio.mean()),
        images=len(reference),
        pairs=tuple(a - b for a, b in pairwise((float(reference.tokens), *seen.tokens[: best.layers]))),
        impact=tuple(impact),
        trials=tuple(store.trials.values()),
    )


def _reach(
    searches: Sequence[Search],
    goal: Goal,
    impact: Sequence[tuple[float, float]],
    rounds: int,
    speed: Callable[[Method], float],
) -> tuple[Search, Trial]:
    """The best trial for a goal, or the nearest to it."""
    search = first = searches[0]
    free, least = (search.cost(search.legal([pairs] * search.depth)) for pairs in (0.0, math.inf))
    if goal.gmacs is not None:
        if goal.gmacs >= free:
            return search, search.trial([0.0] * search.depth)
        ratio = max(goal.gmacs, least)
        return refine(searches, search.guess(impact, ratio), ratio, rounds)

    def good(trial: Trial) -> bool:
        return goal.keeps(trial.distance, trial.agreement)

    def bisect(at: Callable[[float], Trial], low: float, high: float, steps: int) -> tuple[float, Trial | None]:
        """The edge of what is good enough: the cheapest that keeps a bound, the dearest that is fast enough."""
        edge: Trial | None = None
        for _ in range(steps):
            middle = (low + high) / 2
            trial = at(middle)
            if goal.speedup is None:
                fine, cheaper = good(trial), good(trial)
            else:
                fine = speed(search.method(trial)) >= goal.speedup
                cheaper = not fine
            edge = trial if fine else edge
            low, high = (low, middle) if cheaper else (middle, high)
        return (low + high) / 2, edge

    ratio, edge = bisect(lambda r: search.trial(search.guess(impact, r)), least, free, 5)
    search, shape = refine(searches, search.guess(impact, ratio), ratio, rounds)
    _, refined = bisect(lambda r: search.fit(shape.pairs, r), max(least, ratio - 0.15), min(free, ratio + 0.05), 5)
    if refined is not None:
        return search, refined
    if edge is not None:
        return first, edge
    return first, first.trial(first.legal([0.0 if goal.speedup is None else math.inf] * first.depth))


def _settle(search: Search, trial: Trial, goal: Goal, speed: Callable[[Method], float]) -> tuple[Method, Measured, bool]:
    """Thresholds were found batch by batch; what is frozen is their mean. Hold it against the goal, and correct. The last
    of the three says whether the goal is reached, by the very setting that is returned."""
    ratio, tried = trial.ratio, []
    for turn in range(8):
        method = search.method(trial)
        seen = search.reference.measure(method)
        ratio_now, distance, agreement = (float(v.double().mean()) for v in (seen.ratio, seen.distance, seen.same))
        faster = speed(method) if goal.speedup is not None else 0.0
        shift = goal.shift(ratio_now, distance, agreement, faster, any(trial.pairs))
        tried.append((abs(shift), -turn, method, seen))
        if shift == 0 or (shift > 0 and not any(trial.pairs)):
            break
        ratio += shift
        free = search.cost([0.0] * search.depth)
        trial = search.trial([0.0] * search.depth) if ratio >= free else search.fit(trial.pairs, ratio)
    shift, _, method, seen = min(tried, key=lambda entry: entry[:2])
    return method, seen, shift < (0.01 if goal.gmacs is not None else 1e-9)


@torch.inference_mode()
def _speedup(model: nn.Module, reference: Reference, method: Method) -> float:
    """Against the unmerged model on one batch, the two taking turns: the median of the ratios."""
    x = reference.batches[0]
    merged, plain = apply(twin(model), method), twin(model)

    def seconds(run: nn.Module) -> float:
        return Timer("run(x)", globals={"run": run, "x": x}, num_threads=torch.get_num_threads()).timeit(1).median

    ratios = [seconds(plain) / seconds(merged) for _ in range(6)]
    return median(ratios[1:])


@dataclass(frozen=True)
class Frozen:
    """A setting with the same number of merges for every image, and what became of the loss."""

    method: Method
    distance: float
    distance_before: float
    ratio: float
    ratio_before: float


def freeze(model: nn.Module, images: Source, method: Method, *, layers: int | None = None, batch_size: int = 32) -> Frozen:
    """Fix the number of merges per layer at its mean over the images: shapes no longer depend on the image, which
    compilers and exports want. `layers`: gather the merges in so many layers, at the same cost; less exact, but a runtime
    that spends its time on the small operations of matching spends less."""
    if not isinstance(method, ATM):
        raise ValueError(f"freeze turns thresholds of ATM into numbers; {type(method).__name__} has none")
    if layers is not None and layers < 1:
        raise ValueError(f"freeze: layers must be 1 or more, not {layers}")
    reference = Reference(model, as_images(images, model), batch_size=batch_size)
    seen = reference.measure(method)
    left = [reference.tokens, *(round(n) for n in seen.tokens[: reference.merging_layers])]
    counts = [a - b for a, b in pairwise(left)] + [0] * (reference.depth - reference.merging_layers)
    if layers is not None:
        counts = _gather(reference, counts, layers, partial(pairing_macs, method.metric))
    rule = {"alpha": None, "beta": None, "theta_min": None, "thresholds": None, "counts": counts, "batch": "mean"}
    fixed = replace(method, **rule)  # type: ignore[arg-type]
    after = reference.measure(fixed)
    figures = (float(v.mean()) for v in (after.distance, seen.distance, after.ratio, seen.ratio))
    return Frozen(fixed, *figures)


def _gather(reference: Reference, counts: Sequence[int], layers: int, compared: Compared) -> list[int]:
    """Equal numbers in so many layers, at the cost of `counts`: each where the middle of its part was merged."""
    done = list(accumulate(counts))
    places = sorted({bisect_left(done, done[-1] * (2 * part + 1) / (2 * layers)) for part in range(layers)})

    def gathered(total: int) -> list[int]:
        share = dict(zip(places, reversed(spread(total, len(places))), strict=True))
        return reference.possible([share.get(layer, 0) for layer in range(len(counts))])

    def cost(total: int) -> float:
        return reference.expected(gathered(total), compared)

    target, most = reference.expected(counts, compared), reference.tokens
    if cost(most) > target:
        raise ValueError(
            f"freeze: merging in {layers} layers comes down to {cost(most):.1%} of the GMACs at most, not to {target:.1%}; "
            "give more layers"
        )
    return gathered(bisect_left(range(most), -target, key=lambda total: -cost(total)))
