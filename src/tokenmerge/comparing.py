"""Every method at the same cost, on the same images: one table, one plot. And the paper's stress test: how cheap without
loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .benchmarking import bench
from .calibration import calibrate
from .files import Journal
from .loading import Source, as_images
from .measuring import Measured, Reference
from .methods import METHODS, Method, NoMerge, parse
from .searching import CLOSE, STEPS, at_cost
from .ways import ways

CALIBRATED = "calibrated "  # before the name of a method: its setting is searched on the images that calibrate
BASES = ("unmerged", "free last layer")


@dataclass(frozen=True)
class Cell:
    """One method at one cost."""

    method: str  # its family
    budget: float | None  # asked for, as a fraction of the unmerged GMACs; None where none was
    setting: str  # what came of it, `parse` reads it back
    ratio: float  # of the GMACs
    gmacs: float
    distance: float  # mean cosine distance of what the head reads
    agreement: float  # share of images with the unmerged model's answer
    top1: float | None  # where labels are known
    images: int
    met: bool = True  # whether the cost is the budget, or nothing was lost in a stress test
    speedup: float | None = None  # against the unmerged model, where it was timed
    images_per_second: float | None = None

    def row(self) -> dict[str, Any]:
        return asdict(self)


class Comparison:
    """Methods on the images that were left out of calibration."""

    def __init__(
        self,
        model: nn.Module,
        images: Source,
        *,
        sample: int = 64,
        measure: int | None = None,
        rounds: int = 6,
        batch_size: int = 32,
        seed: int = 0,
        folder: Path | None = None,
        options: Mapping[str, Any] | None = None,
        progress: Callable[[str], object] = lambda what: None,
    ) -> None:
        """`sample` images, at most half of them, are there for methods that calibrate; all methods are measured on the
        others, or on `measure` of them. Cells and trials are kept in `folder`, if given. `options`: fields that every
        method has, and that all shall have here."""
        images = as_images(images, model).readable()
        if images.size < 2:
            raise ValueError(f"{images.name}: {images.size} images could be read; at least 2 are needed, one to measure")
        self.model, self.batch_size, self.rounds, self.seed, self.folder = model, batch_size, rounds, seed, folder
        self.seen, self.unseen = images.split(min(sample, images.size // 2), seed)
        if measure is not None:
            self.unseen, _ = self.unseen.split(measure, seed)
        self.reference = Reference(model, self.unseen, batch_size=batch_size)
        # What a setting costs is asked often: a few images answer first.
        self.few = Reference(model, self.unseen.take(range(min(8, self.unseen.size))), batch_size=8)
        owner = f"cells, version 1, {self.reference.fingerprint()} {_digest(self.reference.labels)}"
        self.journal = Journal(None if folder is None else folder / "cells.jsonl", owner, "cells")
        self.cells = {key: Cell(**row) for key, row in self.journal.rows}
        self.options, self.progress = dict(options or {}), progress

    def _cell_of(self, key: str, make: Callable[[], Cell]) -> Cell:
        """The cell of this name, made if it is not known yet."""
        if key not in self.cells:
            self.cells[key] = make()
            self.journal.add((key, self.cells[key].row()))
        return self.cells[key]

    def at(self, name: str, budget: float) -> Cell:
        """A method at a fraction of the unmerged GMACs."""

        def make() -> Cell:
            self.progress(f"{name} at {budget:.0%}")
            searched = name.startswith(CALIBRATED)
            method, found = self._calibrated(name, budget) if searched else self._solve(family(name), budget)
            return self._cell(name, budget, method, found)

        key = f"{name} {budget:g}" + (f" rounds {self.rounds}" if name.startswith(CALIBRATED) else "")
        return self._cell_of(key, make)

    def unmerged(self, free: bool) -> Cell:
        """The model as it is, or with the last layer's free saving."""
        if free:
            return self.fixed(BASES[1], NoMerge())
        return self.fixed(BASES[0], NoMerge(last_layer="full"))

    def fixed(self, name: str, method: Method) -> Cell:
        """A setting as it is, whatever it costs."""

        def make() -> Cell:
            self.progress(name)
            return self._cell(name, None, method, self.reference.measure(method))

        return self._cell_of(f"{name} {method!r}", make)

    def stress(self, name: str, keep: float) -> Cell:
        """The cheapest setting without loss: top-1 not below the unmerged model's where labels are known, else at least
        `keep` of the answers unchanged. By bisection on the method's knob."""

        def make() -> Cell:
            self.progress(f"{name} without loss")
            cls, best = family(name), None
            low, high = 0.0, 1.0
            for _ in range(STEPS - 4):
                middle = (low + high) / 2
                method = self._build(cls, middle)
                found = self.reference.measure(method)
                fine = self._keeps(found, keep)
                low, high = (middle, high) if fine else (low, middle)
                best = (method, found) if fine else best
            if best is None:  # no setting of it is without loss
                best = self._build(cls, 0.0), self.reference.measure(self._build(cls, 0.0))
                return replace(self._cell(name, None, *best), met=self._keeps(best[1], keep))
            return self._cell(name, None, *best)

        criterion = f"keep {keep:g}" if self.reference.labels is None else "top-1"
        return self._cell_of(f"{name} without loss, {criterion}", make)

    def timed(self, cells: Sequence[Cell], rounds: int) -> list[Cell]:
        """The same cells with their speed: all take turns in one process."""
        if not rounds:
            return list(cells)
        self.progress("speed")
        methods = {cell.setting: parse(cell.setting) for cell in cells}
        size = min(self.batch_size, self.unseen.size)
        found = {
            t.method: t for t in bench(self.model, self.unseen, list(methods.values()), batch_sizes=[size], rounds=rounds)
        }
        timed = [(cell, found[repr(methods[cell.setting])]) for cell in cells]
        return [replace(cell, speedup=t.speedup, images_per_second=t.images_per_second) for cell, t in timed]

    def _keeps(self, found: Measured, keep: float) -> bool:
        labels = self.reference.labels
        if labels is None:
            return float(found.same.double().mean()) >= keep
        return bool((found.answers == labels).sum() >= (self.reference.answers == labels).sum())

    def _build(self, cls: type[Method], strength: float) -> Method:
        return replace(cls.at_strength(strength, self.reference.depth, self.reference.tokens), **self.options)

    def _calibrated(self, name: str, budget: float) -> tuple[Method, Measured]:
        whose = name.removeprefix(CALIBRATED)
        memory = None if self.folder is None else self.folder / f"trials_{whose}.jsonl"
        options: dict[str, Any] = {"rounds": self.rounds, "batch_size": self.batch_size, "seed": self.seed}
        options |= {"method": whose, "sample": self.seen.size, "memory": memory}
        aim, tried = budget, []
        for _ in range(2):  # the cost is held on the measured images, as it is for the others
            method = calibrate(self.model, self.seen, gmacs=aim, **options).method
            found = self.reference.measure(method)
            miss = float(found.ratio.mean()) - budget
            tried.append((abs(miss), method, found))
            if abs(miss) < 2 * CLOSE or not 0 < aim - miss <= 1:
                break
            aim -= miss
        _, method, found = min(tried, key=lambda entry: entry[0])
        return method, found

    def _solve(self, cls: type[Method], budget: float) -> tuple[Method, Measured]:
        """The strength at which the cost is the budget: on a few images first, then corrected on all. Where a few do not
        stand for all, on all from the start."""
        off, tried = 0.0, []
        for turn in range(4):
            aim, images = (budget - off, self.few) if turn < 3 else (budget, self.reference)
            method = at_cost(partial(self._build, cls), aim, images)
            found = self.reference.measure(method)
            miss = float(found.ratio.mean()) - budget
            tried.append((abs(miss), method, found))
            if abs(miss) < CLOSE:
                break
            off += miss
        _, method, found = min(tried, key=lambda entry: entry[0])
        return method, found

    def _cell(self, name: str, budget: float | None, method: Method, found: Measured) -> Cell:
        ratio, labels = float(found.ratio.mean()), self.reference.labels
        return Cell(
            method=name,
            budget=budget,
            setting=repr(method),
            ratio=ratio,
            gmacs=ratio * self.reference.gmacs,
            distance=float(found.distance.mean()),
            agreement=float(found.same.double().mean()),
            top1=None if labels is None else float((found.answers == labels).double().mean()),
            images=len(found.distance),
            met=budget is None or abs(ratio - budget) <= 0.01,
        )


def _digest(labels: Tensor | None) -> str:
    return "unlabelled" if labels is None else hashlib.sha256(labels.cpu().numpy().tobytes()).hexdigest()


def family(name: str) -> type[Method]:
    """The class of a method that has a knob."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    METHODS[name].at_strength(0.5, 12, 197)  # refuses early what has none
    return METHODS[name]


def compare(
    model: nn.Module,
    images: Source,
    methods: Sequence[str],
    budgets: Sequence[float],
    *,
    speed_rounds: int = 0,
    **options: Any,
) -> list[Cell]:
    """Every method at every budget, a fraction of the unmerged GMACs, on the same images; the unmerged model first.
    `methods` are names of methods, or "calibrated ATM" and "calibrated DiffRate"; or settings that are taken as they are,
    with a name before: "mine=ATM(0.98, 0.035, 0.84)". `options`: those of `Comparison`."""
    fixed = [(name.partition("=")[0], parse(name.partition("=")[2])) for name in methods if "=" in name.partition("(")[0]]
    methods = [name for name in methods if "=" not in name.partition("(")[0]]
    for name in methods:
        ways(name.removeprefix(CALIBRATED), 12) if name.startswith(CALIBRATED) else family(name)
    for budget in budgets:
        if not 0 < budget <= 1:
            raise ValueError(f"budgets are fractions of the unmerged GMACs, in (0, 1], not {budget!r}")
    comparison = Comparison(model, images, **options)
    cells = [comparison.unmerged(False), comparison.unmerged(True)]
    cells += [comparison.at(name, budget) for budget in budgets for name in methods]
    cells += [comparison.fixed(name, method) for name, method in fixed]
    return comparison.timed(cells, speed_rounds)


def stress(model: nn.Module, images: Source, methods: Sequence[str], *, keep: float = 0.99, **options: Any) -> list[Cell]:
    """The paper's Table 1: the least GMACs without loss, a method a row; see `Comparison.stress`."""
    for name in methods:
        family(name)
    comparison = Comparison(model, images, **options)
    return [comparison.unmerged(False), *(comparison.stress(name, keep) for name in methods)]


def plot_comparison(cells: Sequence[Cell], path: Path) -> None:
    """Loss over cost, a line a method: distance, and the share of answers that changed."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    names = dict.fromkeys(cell.method for cell in cells if cell.method not in BASES)
    for number, name in enumerate(names):
        mine = sorted((cell for cell in cells if cell.method == name), key=lambda cell: cell.ratio)
        ours = name.endswith("ATM")
        style: dict[str, Any] = {"marker": "o" if number < 10 else "s", "markersize": 4}
        style["linestyle"] = "-" if number < 10 else "--"
        style |= {"linewidth": 2.2, "zorder": 3} if ours else {"linewidth": 1.0}
        for axis, values in zip(axes, _losses(mine), strict=True):
            axis.plot([cell.ratio for cell in mine], values, label=name, **style)
    for axis, what in zip(axes, ("mean cosine distance", "answers that changed"), strict=True):
        axis.set_xlabel("GMACs, as a fraction of the unmerged model's")
        axis.set_ylabel(what)
        axis.set_yscale("symlog", linthresh=1e-3)
    axes[1].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _losses(cells: Sequence[Cell]) -> Iterator[list[float]]:
    yield [cell.distance for cell in cells]
    yield [1 - cell.agreement for cell in cells]
