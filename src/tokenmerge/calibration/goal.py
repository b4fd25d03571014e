"""What a calibration is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..evaluation.measurement import Measured, Measurement
from .search import CLOSE

SLOWER, FASTER = 0.005, 0.02  # than asked, as a fraction of the baseline's time: near enough


@dataclass(frozen=True)
class Goal:
    """A ratio of GMACs or of time to reach, or a bound that the cheapest config must keep."""

    gmacs: float | None = None
    min_agreement: float | None = None
    max_distance: float | None = None
    speedup: float | None = None
    time: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            names = ", ".join(vars(self))
            raise ValueError(f"give one of {names}, not {given or 'none'}")
        ((name, value),) = given.items()
        low, high = {"speedup": (1.0, math.inf), "max_distance": (0.0, 2.0)}.get(name, (0.0, 1.0))
        if not isinstance(value, int | float) or not low <= value <= high or (name == "time" and value == 0):
            raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], not {value!r}")

    def __str__(self) -> str:
        ((name, value),) = ((name, value) for name, value in vars(self).items() if value is not None)
        return f"{name}={value:g}"

    @property
    def time_ratio(self) -> float | None:
        """Of the baseline's time."""
        return self.time if self.speedup is None else 1 / self.speedup

    @property
    def is_budget(self) -> bool:
        """Whether a cost is to be reached, not a quality kept."""
        return self.gmacs is not None or self.time_ratio is not None

    def correction(self, measured: Measured | Measurement, time_ratio: float | None, merges: bool) -> float:
        """By how much the cost should change; 0 where the goal is reached."""
        if self.gmacs is not None:
            miss = self.gmacs - measured.ratio
            return 0.0 if abs(miss) < CLOSE or (miss > 0 and not merges) else miss
        if self.time_ratio is not None and time_ratio is not None:
            miss = self.time_ratio - time_ratio
            return 0.0 if -SLOWER <= miss <= FASTER or (miss > 0 and not merges) else miss
        return 0.0 if self.keeps(measured) else 0.02

    def met(self, miss: float) -> bool:
        """Whether a config with this correction reaches the goal."""
        if self.gmacs is not None:
            return abs(miss) < 0.01
        return miss > -2 * SLOWER if self.time_ratio is not None else miss == 0

    def keeps(self, measured: Measured | Measurement) -> bool:
        """Whether a bound on the quality is kept."""
        if self.max_distance is not None:
            return measured.distance <= self.max_distance
        return self.min_agreement is None or (measured.agreement or 0.0) >= self.min_agreement
