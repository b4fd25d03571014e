"""What a comparison asks for, and one cell of its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..evaluation.measurement import Measured, Measurement
from ..methods.base import Method, compared_methods, find_method
from ..methods.no_merge import BASELINE, BASELINE_CLS_ONLY
from ..methods.serialization import from_dict, parse
from .candidates import CANDIDATES, candidates_for

CALIBRATED = "calibrated "  # before the name of a method: its config is calibrated
BASELINES = (BASELINE, BASELINE_CLS_ONLY)
BUDGETS = (0.9, 0.8, 0.7, 0.6)


@dataclass(frozen=True)
class Cell(Measured):
    """One method at one cost."""

    name: str  # of the method, as it was asked for
    budget: float | None  # asked for, as a fraction of the baseline's GMACs or time; None where none was
    method: Method  # the config that was found
    measurement: Measurement
    met: bool = True  # whether the cost is the budget, or nothing was lost in a stress test
    speedup: float | None = None  # over the baseline, where it was timed
    images_per_second: float | None = None
    budget_in: Literal["GMACs", "time"] = "GMACs"

    def row(self) -> dict[str, Any]:
        """As tables show it."""
        return {
            "method": self.name,
            "budget": self.budget,
            "budget_in": None if self.budget is None else self.budget_in,
            "config": repr(self.method),
            "ratio": self.ratio,
            "gmacs": self.gmacs,
            "distance": self.distance,
            "agreement": self.agreement,
            "top1": self.top1,
            "images": self.images,
            "met": self.met,
            "speedup": self.speedup,
            "images_per_second": self.images_per_second,
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {
            "name": self.name,
            "budget": self.budget,
            "method": self.method.to_dict(),
            "measurement": self.measurement.to_dict(),
            "met": self.met,
            "budget_in": self.budget_in,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cell:
        measurement = Measurement.from_dict(data["measurement"])
        config = from_dict(data["method"])
        return cls(data["name"], data["budget"], config, measurement, data["met"], budget_in=data["budget_in"])


@dataclass(frozen=True)
class Request:
    """What a user asked to compare: a method to solve for each budget, one to calibrate, or a config as it is."""

    name: str
    solve: type[Method] | None = None
    calibrate: str | None = None
    config: Method | None = None

    @classmethod
    def parse(cls, text: str) -> Request:
        """ "ToMe", "calibrated ATM", or "mine=ATM(0.98, 0.035, 0.84)"."""
        if "=" in text.partition("(")[0]:
            name, _, config = text.partition("=")
            return cls(name, config=parse(config))
        if text.startswith(CALIBRATED):
            family = text.removeprefix(CALIBRATED)
            candidates_for(family, 12)  # refuses early what cannot be calibrated
            return cls(text, calibrate=family)
        return cls(text, solve=solvable_method(text))


def solvable_method(name: str) -> type[Method]:
    """The class of a method that can be solved for a cost."""
    cls = find_method(name)
    if not cls.has_strength():
        raise ValueError(f"{name} has no reduction strength to vary; comparisons need one, or a config: name={name}(…)")
    return cls


def default_requests() -> list[str]:
    """All methods, and those that can be calibrated once more with a calibrated config."""
    return [*compared_methods(), *(CALIBRATED + name for name in CANDIDATES)]
