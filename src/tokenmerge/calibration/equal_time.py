"""Methods at the same measured time, in one runtime at one batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..deployment.runtimes import EAGER
from .cell import Cell, Request, solvable_method
from .clock import Clock

if TYPE_CHECKING:
    from .compare import Comparison

CLOSE_TIME = 0.02  # near enough, as a fraction of the baseline's time


@dataclass
class EqualTime:
    """Solves the methods of a comparison for time. Configs are solved and timed on the images that calibrate."""

    comparison: Comparison
    runtime: str = EAGER
    batch: int = 32

    def __post_init__(self) -> None:
        folder = self.comparison.resume
        self.clock = Clock.on(
            self.comparison.model,
            self.comparison.seen,
            self.comparison.batch_size,
            runtime=self.runtime,
            batch=self.batch,
            folder=None if folder is None else folder / f"{self.runtime}-{self.batch}",
            progress=self.comparison.progress,
        )

    def at(self, request: Request, time: float) -> Cell:
        """A method at a fraction of the baseline's time, measured on the images of the comparison."""
        name, comparison = request.name, self.comparison

        def make() -> Cell:
            comparison.progress(f"{name} at {time:.0%} of the time", 0)
            if request.calibrate is not None:
                folder = f"calibrated_{request.calibrate}-{self.runtime}-{self.batch}"
                goal = {"time": time, "runtime": self.runtime, "batch": self.batch}
                method = comparison.calibrated(request.calibrate, folder, **goal)
            else:
                reference = comparison.reference
                cls = request.solve or solvable_method(name)
                method = self.clock.solve(cls, time, reference.depth, reference.tokens)
            met = abs(self.clock.time_ratio(method) - time) <= CLOSE_TIME
            return Cell(name, time, method, comparison.reference.measure(method), met, budget_in="time")

        rounds = f" rounds {comparison.rounds}" if request.calibrate is not None else ""
        return comparison.cell(f"{name} time {time:g} {self.runtime} batch {self.batch}{rounds}", make)
