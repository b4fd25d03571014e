"""One protocol for the progress of long runs."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called by long-running functions.

    `what` is a unit that is counted ("images", "trials") or, with `done=0`, a message that says what runs now. `total` is
    given where it is known."""

    def __call__(self, what: str, done: int = 1, total: int | None = None) -> object: ...


def no_progress(what: str, done: int = 1, total: int | None = None) -> None:
    """The default: report nothing."""
