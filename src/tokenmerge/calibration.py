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

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.benchmark import Timer

from .files import write_text
from .loading import Images
from .matching import join_each
from .measuring import Measured, Reference
from .methods import ATM, Method
from .methods.base import Metric, View
from .schedule import default_split_layer
from .surgery import apply, twin
from .tokens import Assignment

MOST = 0.45  # of the patch tokens, merged in one layer: half are sources at most
CLOSE = 0.003  # how near to the budget is near enough, as a fraction of the unmerged GMACs


class How(NamedTuple):
    """How pairs are found: the options of ATM that are chosen once for all layers."""

    metric: Metric
    split_layer: int
    size_weight: float


@dataclass(frozen=True, repr=False)
class Quota(Method):
    """Merges so many pairs in each layer, on average over the batch, by one threshold; writes the thresholds down."""

    pairs: Sequence[float]
    how: How
    found: dict[int, list[float]] = field(default_factory=dict, compare=False)

    def __call__(self, view: View) -> Assignment | None:
        quota = self.pairs[view.layer - 1]
        how = self.how
        pairs = view.pairs(how.metric, view.layer > how.split_layer, how.size_weight) if quota > 0 else None
        if pairs is None:
            return None
        scores = pairs.score[pairs.score > -torch.inf].sort(descending=True).values
        count = min(round(quota * len(pairs.score)), len(scores) - 1)
        if count < 1:
            return None
        least = scores[count - 1]
        below = scores[scores < least]  # ties merge together: strictly above means above all that are lower
        theta = float((least + below[0]) / 2 if len(below) else least - 1e-4)
        theta = min(theta, 1 - 1e-6)  # 1 means never
        self.found.setdefault(view.layer, []).append(theta)
        return join_each(view.tokens, view.prefix, pairs, theta)


@dataclass(frozen=True)
class Trial:
    """One setting, measured on the calibration images."""

    how: How
    pairs: tuple[float, ...]  # asked for in each layer, on average over the images
    thresholds: tuple[float, ...]  # that gave them; 1 where nothing merges
    distance: float
    agreement: float
    ratio: float  # GMACs, as a fraction of the unmerged model's


class Memory:
    """Trials on disk, one a line: an interrupted search goes on where it stopped."""

    def __init__(self, path: Path | None, owner: str) -> None:
        self.path = path
        self.trials: dict[tuple[How, tuple[float, ...]], Trial] = {}
        if path is None:
            return
        if path.exists():
            head, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
            if head != owner:
                raise ValueError(f"{path}: trials of another model or of other images; give another file, or remove it")
            for line in lines:
                try:
                    row: dict[str, Any] = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the line that was being written when the process ended
                row = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
                self.keep(Trial(**(row | {"how": How(*row["how"])})), write=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text("\n".join([owner, *(json.dumps(asdict(trial)) for trial in self.trials.values())]) + "\n", path)

    def find(self, how: How, pairs: tuple[float, ...]) -> Trial | None:
        return self.trials.get((how, pairs))

    def keep(self, trial: Trial, write: bool = True) -> None:
        self.trials[trial.how, trial.pairs] = trial
        if write and self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(trial)) + "\n")


class Search:
    """Trials that find their pairs in one way."""

    def __init__(self, reference: Reference, how: How, memory: Memory, tick: Callable[[], object]) -> None:
        self.reference, self.how, self.memory, self.tick = reference, how, memory, tick
        self.layers = reference.merging_layers  # the layers whose merges have any effect
        self.depth = reference.depth

    def trial(self, pairs: Sequence[float]) -> Trial:
        pairs = tuple(round(p, 3) for p in pairs)
        trial = self.memory.find(self.how, pairs)
        if trial is None:
            quota = Quota(pairs, self.how)
            seen = self.reference.measure(quota)
            thetas = {layer: sum(found) / len(found) for layer, found in quota.found.items()}
            trial = Trial(
                self.how,
                pairs,
                tuple(round(thetas.get(layer, 1.0), 6) for layer in range(1, self.depth + 1)),
                float(seen.distance.mean()),
                float(seen.same.double().mean()),
                float(seen.ratio.mean()),
            )
            self.memory.keep(trial)
        self.tick()
        return trial

    def cost(self, pairs: Sequence[float]) -> float:
        return self.reference.expected(pairs, self.how.metric)

    def dearer(self, ratio: float, pairs: Sequence[float]) -> bool:
        return self.cost(pairs) > ratio

    def legal(self, pairs: Sequence[float]) -> list[float]:
        """Not more pairs than a layer has, none where they have no effect, and no comparison for less than one."""
        left, found = float(self.reference.tokens - self.reference.prefix), []
        for layer, wanted in enumerate(pairs, 1):
            taken = min(wanted, MOST * left) if layer <= self.layers and wanted >= 0.75 else 0.0
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
                pairs.append(min(math.exp(min(log, 20.0)), MOST * left))
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


@dataclass(frozen=True)
class Calibration:
    """A setting, and how it was found. All figures are of the calibration images: `prove` it on others."""

    method: ATM
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
    images: Images,
    *,
    gmacs: float | None = None,
    min_agreement: float | None = None,
    max_distance: float | None = None,
    speedup: float | None = None,
    sample: int = 64,
    rounds: int = 6,
    batch_size: int = 32,
    seed: int = 0,
    memory: Path | None = None,
    progress: Callable[[int], object] = lambda trials: None,
) -> Calibration:
    """The cheapest setting for one goal, from unlabelled images; the model is left as it was found.

    `gmacs`: a fraction of the unmerged GMACs to come down to. `min_agreement`, `max_distance`: bounds that the cheapest
    setting must keep on the calibration images. `speedup`: measured here, against the unmerged model.
    `sample` images are drawn with `seed`. Trials are kept in the file `memory`, if given: the same call goes on from it."""
    goal = Goal(gmacs, min_agreement, max_distance, speedup)
    chosen, _ = images.split(sample, seed)
    reference = Reference(model, chosen, batch_size=batch_size)
    store = Memory(memory, fingerprint(reference))

    quarter, depth = default_split_layer(reference.depth), reference.depth
    ways = [How("keys", quarter, 0.0), How("keys", depth, 0.5), How("tokens", depth, 0.5), How("tokens", quarter, 0.5)]
    searches = [Search(reference, how, store, lambda: progress(1)) for how in ways]
    impact = searches[1].impact()  # alternate matching in all layers; one merge each, so that sizes do not matter yet

    def speed(method: ATM) -> float:
        return _speedup(model, reference, method)

    best, found = _reach(searches, goal, impact, rounds, speed)
    method, seen, met = _settle(best, found, goal, speed)
    return Calibration(
        method=method,
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
    speed: Callable[[ATM], float],
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
                fine = speed(frozen(trial)) >= goal.speedup
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


def frozen(trial: Trial) -> ATM:
    """The trial's thresholds as a method."""
    return ATM(thresholds=trial.thresholds, batch="each", **trial.how._asdict())


def _settle(search: Search, trial: Trial, goal: Goal, speed: Callable[[ATM], float]) -> tuple[ATM, Measured, bool]:
    """Thresholds were found batch by batch; what is frozen is their mean. Hold it against the goal, and correct. The last
    of the three says whether the goal is reached, by the very setting that is returned."""
    ratio, tried = trial.ratio, []
    for turn in range(8):
        method = frozen(trial)
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
def _speedup(model: nn.Module, reference: Reference, method: ATM) -> float:
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

    method: ATM
    distance: float
    distance_before: float
    ratio: float
    ratio_before: float


def freeze(model: nn.Module, images: Images, method: ATM, *, batch_size: int = 32) -> Frozen:
    """Fix the number of merges per layer at its mean over the images: shapes no longer depend on the image, which
    compilers and exports want."""
    reference = Reference(model, images, batch_size=batch_size)
    seen = reference.measure(method)
    left = [reference.tokens, *(round(n) for n in seen.tokens[: reference.merging_layers])]
    counts = [a - b for a, b in pairwise(left)] + [0] * (reference.depth - reference.merging_layers)
    rule = {"alpha": None, "beta": None, "theta_min": None, "thresholds": None, "counts": counts, "batch": "mean"}
    fixed = replace(method, **rule)  # type: ignore[arg-type]
    after = reference.measure(fixed)
    figures = (float(v.mean()) for v in (after.distance, seen.distance, after.ratio, seen.ratio))
    return Frozen(fixed, *figures)


def fingerprint(reference: Reference) -> str:
    """Of the weights and the images, so that trials of others are not taken for one's own."""
    digest = hashlib.sha256(b"trials, version 1")
    for batch in reference.batches:
        digest.update(repr(tuple(batch.shape)).encode())
        digest.update(batch.cpu().float().numpy().tobytes())
    for name, value in reference.model.state_dict().items():
        digest.update(f"{name} {float(value.double().sum())!r}".encode())
    return digest.hexdigest()
