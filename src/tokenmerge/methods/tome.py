"""ToMe and its schedules: a fixed number of merges per layer, alternate matching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ..schedule import RAMPS, by_strength, ramp
from ..tokens import Move
from .base import Counted, Method, Metric, View


@dataclass(frozen=True, repr=False)
class ToMe(Counted):
    """Token Merging: Your ViT But Faster (ICLR 2023): every image merges its r most similar pairs in every layer."""

    metric: Metric = "keys"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("metric", ("keys", "tokens"))

    def __call__(self, view: View) -> Move | None:
        return view.top(self.count(view.layer), self.metric)


@dataclass(frozen=True, repr=False)
class TopR(Method):
    """The top-r schedules of Fig. 5. `ramp`: "constant"; "increasing", r + (l − 1) in layer l; "decreasing",
    r − (l − 1), not below 0; or a list with one number a layer, and then r is left out."""

    r: int | None = None
    ramp: str | Sequence[int] = "constant"
    metric: Metric = "keys"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.ramp, str):
            self._check_choice("ramp", RAMPS)
            self._check_count("r")
        elif self.r is not None:
            raise ValueError(f"TopR: a list of numbers per layer leaves no room for r={self.r!r}; leave r out")
        else:
            self._check_list("ramp", 0, math.inf, int)
        self._check_choice("metric", ("keys", "tokens"))

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(ramp=by_strength(strength, depth, tokens))

    def check_depth(self, depth: int) -> None:
        if not isinstance(self.ramp, str):
            self._check_length("ramp", depth)

    def __call__(self, view: View) -> Move | None:
        return view.top(ramp(self.r or 0, self.ramp, view.depth)[view.layer - 1], self.metric)
