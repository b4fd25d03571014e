"""What a number of images can certify, said before the work starts."""

from __future__ import annotations

from ..utils import statistics
from ..utils.rounding import percent_down

TRUTHS = (0.995, 0.9975, 0.999)  # for which power is stated


def power_statement(images: int, level: float | None = None, confidence: float = 0.95) -> str:
    """What `images` images can certify, and how many a level needs."""
    best = percent_down(statistics.best_level(images, confidence))
    text = f"{images:,} held-out images without a change certify {best} ({confidence:.0%} confidence)"
    if level is None:
        return text
    allowed = statistics.allowed_failures(images, level, confidence)
    if allowed < 0:
        text += f"; {level_name(level)} need {statistics.trials_needed(level, confidence):,}"
    else:
        text += f"; {level_name(level)} with up to {allowed} changed"
    for truth in TRUTHS:
        wanted = statistics.trials_for_power(level, truth, confidence)
        if wanted is not None:
            now = statistics.power(images, level, truth, confidence) if allowed >= 0 else 0.0
            text += f"; if {level_name(truth)} are unchanged in truth, {now:.0%} power (80 % from {wanted:,} images)"
    return text


def check_power(images: int, level: float, confidence: float) -> None:
    """Raise if the level is out of reach."""
    if statistics.allowed_failures(images, level, confidence) < 0:
        raise ValueError(
            f"{level_name(level)} cannot be certified: {power_statement(images, level, confidence)}. Give more images, ask "
            "for less, or run anyway (--anyway)"
        )


def level_name(fraction: float) -> str:
    """A level as it was asked for: 99.0 %, 99.75 %."""
    tenths = f"{100 * fraction:.1f}"
    return f"{tenths if float(tenths) == round(100 * fraction, 9) else f'{100 * fraction:g}'} %"
