"""No merging: the host as it is, traced and costed like the others, with or without the free last layer."""

from __future__ import annotations

from dataclasses import dataclass

from ..tokens import Move
from .base import Method, View


@dataclass(frozen=True, repr=False)
class NoMerge(Method):
    """Leaves every token alone."""

    def __call__(self, view: View) -> Move | None:
        return None
