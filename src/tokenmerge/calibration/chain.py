"""A chain of configs from mild to strong, and the strongest of them that is certified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import nn

from ..data.images import Images
from ..deployment.model_file import Config
from ..evaluation.certify import Certificate, certify
from ..utils.progress import Progress
from .calibrate import Calibration

Order = Literal["gmacs", "time"]
BUDGETS = (0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)  # fixed before any image is seen


def certified_config(
    model: nn.Module,
    unseen: Images,
    calibrated: Callable[[dict[str, float]], Calibration],
    shipped: Callable[[Calibration], Config],
    *,
    order: Order,
    level: float,
    confidence: float,
    batch_size: int,
    anyway: bool,
    journal: Any,
    progress: Progress,
) -> tuple[Calibration, Certificate]:
    """Calibrate for one budget after the other, as long as the configs are certified on the unseen images. If not even the
    first is, the config merges nothing. `shipped`: what is tested of a calibration, the config or a file."""
    made: dict[str, Calibration] = {}

    def chain() -> Iterator[Config]:
        for budget in BUDGETS:
            found = calibrated({order: budget})
            if not found.met:  # cheaper ones cannot be reached
                return
            config = shipped(found)
            made[repr(config)] = found
            yield config

    certificate = certify(
        model,
        unseen,
        chain(),
        level=level,
        confidence=confidence,
        batch_size=batch_size,
        anyway=anyway,
        journal=journal,
        progress=progress,
    )
    return made.get(repr(certificate.method)) or calibrated({"gmacs": 1.0}), certificate
