"""A guarantee chosen beforehand: the strongest config of a chain that keeps it (Learn then Test, Angelopoulos et al., 2022).

Configs are tested one after the other, from mild to strong, on images that calibration did not see. The first that cannot
be shown to keep the level ends the chain, and the one before it is certified. Whatever the length of the chain, a config
that violates the level is certified with probability 1 − confidence at the most: only the first of these matters, and
nothing is certified after it unless its own test errs (fixed-sequence testing).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..data.checkpoint import weights_digest
from ..data.load import Source, as_images
from ..deployment.model_file import Config
from ..engine.features import has_classes
from ..utils import statistics
from ..utils.files import Journal
from ..utils.progress import Progress, no_progress
from .evaluate import BaselineOutputs, Result, evaluate
from .power import check_power, level_name, power_statement
from .prove import NEIGHBOUR, TOP1, per_image, unchanged

JOURNAL = "certificates.jsonl"
_RUN = "certificates, version 1"


@dataclass(frozen=True)
class Tested:
    """One config of the chain."""

    method: Config
    images: int
    changed: int
    p_value: float  # of "less than the level is unchanged"
    certified: bool
    bound: float  # the least level that these images alone would certify for this config
    ratio: float  # GMACs relative to the baseline
    result: Result = field(repr=False, compare=False)

    def row(self) -> dict[str, Any]:
        return {
            "method": repr(self.method),
            "gmacs_ratio": self.ratio,
            "changed": self.changed,
            "images": self.images,
            "p_value": self.p_value,
            "bound": self.bound,
            "certified": self.certified,
            "distance": self.result.distance,
        }


@dataclass(frozen=True)
class Certificate:
    """A guarantee for the images to come, and the tests behind it."""

    level: float
    confidence: float
    kind: str  # of prediction
    images: int
    tested: tuple[Tested, ...]  # in order; all but perhaps the last are certified
    power: str  # what the images could certify
    reused: tuple[str, ...] = ()  # earlier certificates from the same images

    @property
    def certified(self) -> Tested | None:
        """The strongest config that is certified; None: not even the mildest is."""
        return next((one for one in reversed(self.tested) if one.certified), None)

    @property
    def method(self) -> Config | None:
        return None if self.certified is None else self.certified.method

    @property
    def sentence(self) -> str:
        claim = f"≥ {level_name(self.level)} of predictions ({self.kind}) unchanged"
        count = f"{len(self.tested)} config{'s' * (len(self.tested) > 1)} tested in order"
        details = f"({self.confidence:.0%} confidence, {self.images:,} images, {count})"
        if self.certified is not None:
            return f"{claim} {details}"
        return f"not certified: {claim}; {self.tested[0].changed} of {self.images} changed {details}"

    @property
    def warning(self) -> str | None:
        """What to know where the same images certified something before."""
        if not self.reused:
            return None
        together = max(0.0, 1 - (len(self.reused) + 1) * (1 - self.confidence))
        return (
            f"the same images certified before: {'; '.join(self.reused)}. Each statement has its confidence alone; all of "
            f"them together have {together:.0%}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "level": self.level,
            "confidence": self.confidence,
            "kind": self.kind,
            "images": self.images,
            "method": None if self.method is None else self.method.to_dict(),
            "tested": [one.row() for one in self.tested],
            "power": self.power,
            "warning": self.warning,
        }


def certify(
    model: nn.Module,
    images: Source,
    configs: Iterable[Config],
    *,
    level: float = 0.99,
    confidence: float = 0.95,
    batch_size: int = 32,
    anyway: bool = False,
    journal: str | Path | None = None,
    progress: Progress = no_progress,
) -> Certificate:
    """Test configs or exported files in order, from mild to strong, and certify the last one that keeps `level` of the
    predictions. The model is not changed.

    The images must be new to the configs, and the order fixed before they were seen. `configs` may be a generator: what
    comes after the end of the chain is never made. A level that these images cannot certify is refused, unless `anyway`.
    `journal`: a folder that remembers which images certified something; a second certificate from them says so."""
    _check_fraction("level", level)
    _check_fraction("confidence", confidence)
    images = as_images(images, model).readable()
    by_class = has_classes(model)
    count = images.size if by_class else images.size - (images.size + 1) // 2
    if not anyway:
        check_power(count, level, confidence)
    known: BaselineOutputs = {}
    tested: list[Tested] = []
    for method in configs:
        progress(f"test {len(tested) + 1}: {method!r}", 0)
        _, result = evaluate(
            model,
            images,
            {"config": method},
            batch_size=batch_size,
            timed_batches=0,
            baseline_outputs=known,
            progress=progress,
        )
        same = unchanged(per_image(result), by_class)
        changed = len(same) - int(same.sum())
        p = statistics.p_value(changed, len(same), level)
        bound = statistics.lower_bound(len(same) - changed, len(same), confidence)
        tested.append(Tested(method, len(same), changed, p, p <= 1 - confidence, bound, result.ratio, result))
        if not tested[-1].certified:
            break
    if not tested:
        raise ValueError("certify: no configs were given; give a chain from mild to strong")
    reused = _note(journal, model, images.identity, tested, level, confidence)
    power = power_statement(tested[0].images, level, confidence)
    return Certificate(level, confidence, TOP1 if by_class else NEIGHBOUR, tested[0].images, tuple(tested), power, reused)


def _check_fraction(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"{name} must be a number between 0 and 1, not {value!r}")


def _note(
    folder: str | Path | None, model: nn.Module, images: str, tested: list[Tested], level: float, confidence: float
) -> tuple[str, ...]:
    """Remember this certificate; return what the same images certified before."""
    if folder is None:
        return ()
    journal = Journal(Path(folder) / JOURNAL, _RUN, "certificates")
    seen = hashlib.sha256(f"{weights_digest(model)} {images}".encode()).hexdigest()
    row = {"images": seen, "level": level, "confidence": confidence, "configs": [repr(one.method) for one in tested]}
    before = [old for old in journal.rows if old["images"] == seen and old != row]
    if row not in journal.rows:
        journal.add(row)
    return tuple(f"{level_name(old['level'])} with {len(old['configs'])} configs" for old in before)
