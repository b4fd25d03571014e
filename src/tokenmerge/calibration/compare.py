"""Every method at the same cost, on the same images: one table, one plot. And the paper's stress test: the least GMACs
without loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data.images import Images
from ..data.load import Source, as_images
from ..deployment.runtimes import EAGER, check_runtime
from ..evaluation.bench import bench
from ..evaluation.measurement import Measurement, without_loss
from ..evaluation.reference import FULL, Reference
from ..methods.base import Method, compared_methods
from ..methods.no_merge import BASELINE, BASELINE_CLS_ONLY, NoMerge
from ..methods.presets import PRINTED
from ..utils.bisect import approach, bisect
from ..utils.files import Journal
from ..utils.progress import Progress, no_progress
from .calibrate import calibrate
from .cell import BASELINES, BUDGETS, Cell, Request, default_requests, solvable_method
from .equal_time import EqualTime
from .search import CLOSE, solve_for_cost


class Comparison:
    """Methods on the images that were not used to calibrate."""

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
        resume: str | Path | None = None,
        progress: Progress = no_progress,
    ) -> None:
        """`sample` images, at most half of them, are for methods that calibrate, with this many `rounds` of refinement; all
        methods are measured on the others, or on `measure` of them. `resume`: a folder that keeps finished cells and
        trials."""
        images = as_images(images, model).readable()
        if images.size < 2:
            raise ValueError(f"{images.name}: {images.size} images could be read; at least 2 are needed, one to measure")
        self.model = model
        self.batch_size = batch_size
        self.rounds = rounds
        self.seed = seed
        self.resume = None if resume is None else Path(resume)
        self.progress = progress
        self.seen, self.unseen = images.split(min(sample, images.size // 2), seed)
        if measure is not None:
            self.unseen, _ = self.unseen.split(measure, seed)
        self.reference = Reference(model, self.unseen, batch_size=batch_size)
        # The cost of a config is needed often: a few images give a first estimate.
        self.few = Reference(model, self.unseen.take(range(min(8, self.unseen.size))), batch_size=8)
        run = f"cells, version 3, {self.reference.fingerprint()} {_digest(self.reference.labels)}"
        self.journal = Journal(None if self.resume is None else self.resume / "cells.jsonl", run, "cells")
        self.cells = {key: Cell.from_dict(row) for key, row in self.journal.rows}

    def cell(self, key: str, make: Callable[[], Cell]) -> Cell:
        """The cell of this key, computed if it is not known yet."""
        if key not in self.cells:
            self.cells[key] = make()
            self.journal.add((key, self.cells[key].to_dict()))
        return self.cells[key]

    def baseline(self) -> Cell:
        return self.fixed(BASELINE, FULL)

    def baseline_cls_only(self) -> Cell:
        """The baseline with the exact saving in the last layer."""
        return self.fixed(BASELINE_CLS_ONLY, NoMerge())

    def at(self, request: Request | str, budget: float) -> Cell:
        """A method at a fraction of the baseline's GMACs."""
        request = Request.parse(request) if isinstance(request, str) else request
        name = request.name

        def make() -> Cell:
            self.progress(f"{name} at {budget:.0%}", 0)
            if request.calibrate is not None:
                method, measurement = self._calibrate(request.calibrate, budget)
            else:
                method, measurement = self._solve(request.solve or solvable_method(name), budget)
            return Cell(name, budget, method, measurement, met=abs(measurement.ratio - budget) <= 0.01)

        rounds = f" rounds {self.rounds}" if request.calibrate is not None else ""
        return self.cell(f"{name} {budget:g}{rounds}", make)

    def fixed(self, name: str, method: Method) -> Cell:
        """A config as it is, whatever it costs."""

        def make() -> Cell:
            self.progress(name, 0)
            return Cell(name, None, method, self.reference.measure(method))

        return self.cell(f"{name} {method!r}", make)

    def stress(self, name: str, min_agreement: float, tolerance: float) -> Cell:
        """The cheapest config without loss; see `without_loss`. By bisection over the method's reduction strength."""
        cls = solvable_method(name)

        def make() -> Cell:
            self.progress(f"{name} without loss", 0)
            best: Cell | None = None
            baseline = self.baseline()

            def lossless(strength: float) -> bool:
                nonlocal best
                method = self._build(cls, strength)
                cell = Cell(name, None, method, self.reference.measure(method))
                keeps = without_loss(cell, baseline, tolerance, min_agreement)
                best = cell if keeps else best
                return keeps

            bisect(lossless, 0.0, 1.0, steps=10)
            if best is not None:
                return best
            method = self._build(cls, 0.0)  # no config of it is without loss
            cell = Cell(name, None, method, self.reference.measure(method))
            return replace(cell, met=without_loss(cell, baseline, tolerance, min_agreement))

        criterion = f"agreement {min_agreement:g}" if self.reference.labels is None else f"top-1 within {tolerance:g}"
        return self.cell(f"{name} without loss, {criterion}", make)

    def timed(self, cells: Sequence[Cell], rounds: int, runtime: str = EAGER, batch: int | None = None) -> list[Cell]:
        """The same cells with their speed: all configs interleaved in one process."""
        if not rounds:
            return list(cells)
        self.progress("timing", 0)
        configs = list(dict.fromkeys(cell.method for cell in cells if cell.method != FULL))
        size = batch or min(self.batch_size, self.unseen.size)
        timings = {
            timing.method: timing
            for timing in bench(
                self.model,
                self.unseen,
                configs,
                batch_sizes=[size],
                rounds=rounds,
                runtimes=[runtime],
                progress=self.progress,
            )
        }
        # The baseline is the unpatched model, and its speed-up 1 by construction.
        by_cell = [(cell, timings[BASELINE if cell.method == FULL else repr(cell.method)]) for cell in cells]
        return [replace(cell, speedup=t.speedup, images_per_second=t.images_per_second) for cell, t in by_cell]

    def _build(self, cls: type[Method], strength: float) -> Method:
        return cls.at_strength(strength, self.reference.depth, self.reference.tokens)

    def calibrated(self, family: str, folder: str, **goal: Any) -> Method:
        """A config from the images that are reserved for it. `goal`: that of `calibrate`. Trials are kept in `folder`."""
        found = calibrate(
            self.model,
            self.seen,
            **goal,
            sample=self.seen.size,
            rounds=self.rounds,
            batch_size=self.batch_size,
            seed=self.seed,
            method=family,
            resume=None if self.resume is None else self.resume / folder,
            progress=self.progress,
        )
        return found.method

    def _calibrate(self, family: str, budget: float) -> tuple[Method, Measurement]:
        """The budget is met on the measured images, as it is for the other methods."""

        def attempt(aim: float, turn: int) -> tuple[tuple[float, Method, Measurement], float]:
            config = self.calibrated(family, f"calibrated_{family}", gmacs=aim)
            measurement = self.reference.measure(config)
            miss = measurement.ratio - budget
            done = abs(miss) < 2 * CLOSE or not 0 < aim - miss <= 1
            return (abs(miss), config, measurement), 0.0 if done else -miss

        _, method, measurement = min(approach(attempt, budget, turns=2), key=lambda tried: tried[0])
        return method, measurement

    def _solve(self, cls: type[Method], budget: float) -> tuple[Method, Measurement]:
        """The strength at which the cost is the budget: on a few images first, then corrected on all. Where a few are not
        representative, on all from the start."""

        def attempt(aim: float, turn: int) -> tuple[tuple[float, Method, Measurement], float]:
            target, reference = (aim, self.few) if turn < 3 else (budget, self.reference)
            method = solve_for_cost(partial(self._build, cls), target, reference)
            measurement = self.reference.measure(method)
            miss = measurement.ratio - budget
            return (abs(miss), method, measurement), 0.0 if abs(miss) < CLOSE else -miss

        _, method, measurement = min(approach(attempt, budget, turns=4), key=lambda tried: tried[0])
        return method, measurement


def _digest(labels: Tensor | None) -> str:
    return "unlabelled" if labels is None else hashlib.sha256(labels.cpu().numpy().tobytes()).hexdigest()


def compare(
    model: nn.Module,
    images: Source,
    methods: Sequence[str] | None = None,
    budgets: Sequence[float] | None = None,
    *,
    times: Sequence[float] = (),
    runtime: str = EAGER,
    batch: int | None = None,
    timing_rounds: int = 0,
    **options: Any,
) -> list[Cell]:
    """Every method at every budget on the same images; the baseline first.

    `methods`: names of methods, "calibrated ATM", or configs with a name, "mine=ATM(0.98, 0.035, 0.84)"; all methods by
    default. `budgets`: fractions of the baseline's GMACs. `times`: fractions of its time, which methods are solved for by
    measurement, in batches of `batch` images (by default, of `batch_size`) in `runtime`. Without either, `BUDGETS`.
    `timing_rounds`: time every config in this many rounds, there. `options`: those of `Comparison`."""
    requests = [Request.parse(text) for text in (default_requests() if methods is None else methods)]
    if budgets is None:
        budgets = () if times else BUDGETS
    for budget in (*budgets, *times):
        if not 0 < budget <= 1:
            raise ValueError(f"budgets are fractions of the baseline's GMACs or time, in (0, 1], not {budget!r}")
    check_runtime(runtime)
    comparison = Comparison(model, images, **options)
    cells = [comparison.baseline(), comparison.baseline_cls_only()]
    solved = [request for request in requests if request.config is None]
    cells += [comparison.at(request, budget) for budget in budgets for request in solved]
    if times:
        clock = EqualTime(comparison, runtime, batch or comparison.batch_size)
        cells += [clock.at(request, time) for time in times for request in solved]
    cells += [comparison.fixed(request.name, request.config) for request in requests if request.config is not None]
    return comparison.timed(cells, timing_rounds, runtime, batch)


def stress(
    model: nn.Module,
    images: Source,
    methods: Sequence[str] | None = None,
    *,
    min_agreement: float = 0.99,
    tolerance: float = PRINTED,
    **options: Any,
) -> list[Cell]:
    """The paper's Table 1: the least GMACs without loss, one row per method. With labels, top-1 must not fall when it is
    rounded to multiples of `tolerance` points (the default is the precision of the paper's table; 0 compares exactly);
    without, at least `min_agreement` of the predictions must be the baseline's."""
    names = compared_methods() if methods is None else methods
    for name in names:
        solvable_method(name)
    comparison = Comparison(model, images, **options)
    return [comparison.baseline(), *(comparison.stress(name, min_agreement, tolerance) for name in names)]


def at_equal_cost(model: nn.Module, images: Images, names: Sequence[str], gmacs: float) -> dict[str, Method]:
    """Methods by name, each at this fraction of the baseline's GMACs on average over the images; methods that can decide
    per image do."""
    comparison = Comparison(model, images, sample=1)
    return {name: comparison.at(name, gmacs).method.with_batch("each") for name in names}


def comparison_figure(cells: Sequence[Cell]) -> Any:
    """Loss over cost, one line per method: distance, and the fraction of changed predictions."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    names = dict.fromkeys(cell.name for cell in cells if cell.name not in BASELINES)
    for number, name in enumerate(names):
        own = sorted((cell for cell in cells if cell.name == name), key=lambda cell: cell.ratio)
        style: dict[str, Any] = {"marker": "o" if number < 10 else "s", "markersize": 4}
        style["linestyle"] = "-" if number < 10 else "--"
        style |= {"linewidth": 2.2, "zorder": 3} if name.endswith("ATM") else {"linewidth": 1.0}
        for axis, values in zip(axes, _losses(own), strict=True):
            axis.plot([cell.ratio for cell in own], values, label=name, **style)
    for axis, what in zip(axes, ("mean cosine distance", "fraction of changed predictions"), strict=True):
        axis.set_xlabel("GMACs, as a fraction of the baseline's")
        axis.set_ylabel(what)
        axis.set_yscale("symlog", linthresh=1e-3)
    axes[1].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return figure


def _losses(cells: Sequence[Cell]) -> Iterator[list[float]]:
    yield [cell.distance for cell in cells]
    yield [1 - (cell.agreement or 0.0) for cell in cells]
