"""Checks of the fields of a method, called by `__post_init__`."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Validated:
    """Errors name the method and the field, the allowed values and the value that was given."""

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{type(self).__name__}: {message}")

    def _check_flag(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise self._error(f"{name} must be True or False, not {getattr(self, name)!r}")

    def _check_choice(self, name: str, allowed: Sequence[object]) -> None:
        value = getattr(self, name)
        if value not in allowed or isinstance(value, bool):
            raise self._error(f"{name} must be one of {list(allowed)}, not {value!r}")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self._error(f"{name} must be a number in [{low}, {_bound(high)}], not {value!r}")
        object.__setattr__(self, name, float(value))

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._error(f"{name} must be an integer, 0 or more, not {value!r}")

    def _check_list(self, name: str, low: float, high: float, kind: type) -> None:
        """Turn a list with one entry per layer into a tuple of `kind`."""
        value = getattr(self, name)
        fits = not isinstance(value, str) and isinstance(value, Sequence) and len(value) > 0
        number = int if kind is int else int | float
        if not fits or not all(isinstance(v, number) and not isinstance(v, bool) and low <= v <= high for v in value):
            what = "integers" if kind is int else "numbers"
            raise self._error(f"{name} must be a list of {what} in [{low}, {_bound(high)}], one per layer, not {value!r}")
        object.__setattr__(self, name, tuple(kind(v) for v in value))

    def _check_length(self, name: str, depth: int) -> None:
        value = getattr(self, name)
        if value is not None and len(value) != depth:
            raise self._error(f"{name} has {len(value)} entries, but the model has {depth} blocks; give one per block")


def _bound(high: float) -> str:
    return "∞" if math.isinf(high) else str(high)
